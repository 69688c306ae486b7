"""Charts of dtypes and magnitudes through the layers of a model.

One column for each call, in the order of execution. Above, a strip of dtypes: input, weights,
output, gradient, one colour for each dtype and several colours where dtypes are mixed. Below, where
ranges were recorded, a bar from the smallest to the largest magnitude, against the ends of float16.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch, Rectangle

from labsupport.plotting.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    plain,
)
from labsupport.plotting.figure import Chart

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

DTYPE_COLOURS = {"float64": BLACK, "float32": BLUE, "bfloat16": ORANGE, "float16": PINK,
                 "float8": GREEN}  # fmt: skip
_CELLS = {"input": "dtype_in", "weights": "dtype_weights", "output": "dtype_out"}
# Of each pass: colour of its bars and of its alarms, what they are of, and how far they are moved.
_BARS = {"forward": (GREY, RED, "output", -0.17), "backward": (SKY, "#882255", "gradient", 0.17)}
_ALARMS = {"nan": ("x", "NaN"), "inf": ("^", "infinity")}
# float16: the largest number, the smallest with all its digits, and the smallest.
_FLOAT16 = {"largest": 65504.0, "smallest normal": 2.0**-14, "smallest subnormal": 2.0**-24}
MOST_LABELS = 26  # with more columns than that, only groups of them are labelled


def plot_dtype_flow(frame: pd.DataFrame, *, title: str) -> Chart:
    """Draw the dtypes, and the magnitudes where they are there, of each call in a run.

    Of a module that was called several times the first call is drawn.

    Args:
        frame: what `PrecisionTracker.to_dataframe()` returned.
        title: the finding, as a sentence.

    Raises:
        ValueError: the frame holds no forward call.

    >>> from labsupport.precision import PrecisionTracker
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> with PrecisionTracker(model) as tracker:
    ...     out = model(torch.randn(2, 4))
    >>> chart = plot_dtype_flow(tracker.to_dataframe(), title="float32 throughout")
    """
    shown = frame[(frame["pass"] == "forward") & (frame["kind"] != "block") & (frame["call"] == 0)]
    if shown.empty:
        raise ValueError("no forward call was recorded: call the model inside the with-block")
    columns = shown.sort_values("order").to_dict("records")
    back = frame[(frame["pass"] == "backward") & (frame["call"] == 0)].to_dict("records")
    by_name = {(row["name"], row["class"]): row for row in back}
    gradients = [by_name.get((row["name"], row["class"])) for row in columns]
    measured = bool(frame["largest"].notna().any())

    # Inches. What is beside the columns: names and a scale; the legend, the ends of float16.
    beside = 4.1 if measured else 2.4
    pitch = 0.18 if len(columns) <= MOST_LABELS else 0.11
    width = min(max(6.5, beside + pitch * len(columns)), 10.0)
    pitch = (width - beside) / len(columns)
    labels = _labels(columns)
    strips = [*_CELLS, "gradient"] if back else list(_CELLS)
    panels = (0.34 * len(strips), 3.6) if measured else (0.34 * len(strips),)
    title_lines = textwrap.wrap(title, int(width * 8))
    longest = max(len(line) for _, label in labels for line in label.split("\n"))
    height = sum(panels) + 0.07 * longest + 0.22 * len(title_lines) + 0.7
    figure = Chart(figsize=(width, height))
    drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=panels)[:, 0]
    strip, bottom = drawn[0], drawn[-1]
    if measured:
        _draw_ranges(bottom, columns, gradients, pitch)
    dtypes = _draw_strip(strip, columns, gradients, strips, pitch)
    places, texts = zip(*labels, strict=True)
    bottom.set_xticks(places, texts, rotation=90, fontsize=8, multialignment="right")
    bottom.tick_params(axis="x", length=2)
    for axes in drawn:
        for _, first, _ in _groups(columns)[1:]:
            axes.axvline(first - 0.5, color="#cccccc", linewidth=0.7, zorder=0, gid="group")
    handles: list[Any] = [Patch(facecolor=_colour(dtype), label=dtype) for dtype in dtypes]
    handles += bottom.get_legend_handles_labels()[0] if measured else []
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    small = f"{len(columns)} calls, in the order of execution"
    small += "; of a module called several times, the first call" * int((frame["call"] > 0).any())
    figure.headline("\n".join(title_lines), small)
    figure.description = _describe(title, columns, back, measured)
    return figure


def _split(dtypes: Any) -> list[str]:
    """Return the dtypes in a cell; whole numbers beside floating ones (positions) are left out."""
    names = [name for name in str(dtypes or "").split(", ") if name]
    return [name for name in names if "float" in name] or names


def _colour(dtype: str) -> str:
    return next((c for name, c in DTYPE_COLOURS.items() if dtype.startswith(name)), "#BBBBBB")


def _draw_strip(
    axes: Axes, columns: list[Any], gradients: list[Any], strips: list[str], pitch: float
) -> list[str]:
    """Draw the cells, `pitch` inches wide; return the dtypes there are, as the palette has them."""
    seen: set[str] = set()
    width = 0.92 if pitch > 0.1 else 1.0  # gaps of less than a pixel are drawn unevenly
    for x, (row, gradient) in enumerate(zip(columns, gradients, strict=True)):
        cells = [row[cell] for cell in _CELLS.values()] + [gradient and gradient["dtype_out"]]
        for y, cell in enumerate(cells):
            names = _split(cell)
            seen.update(names)
            for i, dtype in enumerate(names):
                part = 0.84 / len(names)
                patch = Rectangle((x - width / 2, y - 0.42 + i * part), width, part)
                patch.set(facecolor=_colour(dtype), edgecolor="none", gid=dtype)
                patch.set_antialiased(width < 1)
                axes.add_patch(patch)
    axes.set(xlim=(-0.8, len(columns) - 0.2), ylim=(len(strips) - 0.4, -0.6))
    axes.set_yticks(range(len(strips)), strips, fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    order = list(DTYPE_COLOURS)
    return sorted(seen, key=lambda d: (order.index(d) if d in order else len(order), d))


def _draw_ranges(axes: Axes, columns: list[Any], gradients: list[Any], pitch: float) -> None:
    """Draw a bar from the smallest to the largest magnitude for each output and its gradient."""
    alarms: dict[tuple[str, str], list[int]] = {}
    for name, rows in (("forward", columns), ("backward", gradients)):
        colour, _, label, shift = _BARS[name]
        drawn = [(x + shift, r["smallest"], r["largest"]) for x, r in enumerate(rows)
                 if r and r["largest"] > 0]  # fmt: skip
        if drawn:
            x, low, high = map(list, zip(*drawn, strict=True))
            width = min(2.4, 0.3 * 72 * pitch)
            bars = axes.vlines(x, low, high, color=colour, linewidth=width, label=label)
            bars.set_gid(name)
        for kind in _ALARMS:
            if places := [x for x, row in enumerate(rows) if row and _alarming(row, kind)]:
                alarms[name, kind] = places
    axes.set_yscale("log", base=10)
    low, high = axes.get_ylim()
    low, high = min(low, _FLOAT16["smallest subnormal"] / 4), max(high, _FLOAT16["largest"] * 8)
    axes.set_ylim(low, high * (high / low) ** (0.06 * len(alarms) + 0.02))  # room for the alarms
    for words, y in _FLOAT16.items():
        axes.axhline(y, color=GREY, linestyle=":", linewidth=1.2, zorder=1, gid="reference")
        axes.annotate(
            f"float16: {words}", (1.0, y), xycoords=("axes fraction", "data"), va="center",
            xytext=(4, 0), textcoords="offset points", fontsize=8, color=GREY,
        )  # fmt: skip
    # A line of marks for each alarm: NaN before infinity, the forward pass before the gradients.
    for level, ((name, kind), places) in enumerate(alarms.items()):
        marker, words = _ALARMS[kind]
        axes.plot(
            places, [0.97 - 0.05 * level] * len(places), transform=axes.get_xaxis_transform(),
            linestyle="none", marker=marker, color=_BARS[name][1], markersize=min(6, 50 * pitch),
            markeredgewidth=min(1.8, 16 * pitch), label=f"{_BARS[name][2]} holds {words}",
            gid=f"{name} {kind}",
        )  # fmt: skip
    axes.set_ylabel("magnitude (not 0)")
    plain(axes, "y")


def _alarming(row: Any, kind: str) -> bool:
    """True if a row holds NaN or infinities, but for the -inf that a log-softmax gives a mask."""
    count = row[kind]
    if kind == "inf" and "softmax" in str(row["class"]).lower():
        count -= row.get("minus_inf", 0)
    return bool(count > 0)


def _groups(columns: list[Any]) -> list[tuple[str, int, int]]:
    """Return (group, first column, last column), in order.

    A module belongs to its layer (the name up to the first number), or to itself.
    """

    def group(place: int) -> str:
        name = str(columns[place]["name"])
        found = re.match(r"(?:.*?\.)??(\w+\.\d+)(?:\.|$)", name)
        return found.group(1) if found else name.rpartition(".")[2]

    runs = [(name, list(places)) for name, places in groupby(range(len(columns)), group)]
    return [(name, places[0], places[-1]) for name, places in runs]


def _labels(columns: list[Any]) -> list[tuple[float, str]]:
    """Return (place, words): each column's name, or each layer's where the columns are many."""
    if len(columns) <= MOST_LABELS:
        return [(float(x), _label(row)) for x, row in enumerate(columns)]
    labels: list[tuple[float, str]] = []
    for words, first, last in _groups(columns):
        place = (first + last) / 2
        if labels and place - labels[-1][0] < 2:  # too near for its own label: a second line
            before, others = labels.pop()
            place, words = (before + place) / 2, f"{others}\n{words}"
        labels.append((place, words))
    return labels


def _label(row: Any) -> str:
    if row["kind"] == "attention call":
        return f"{row['name']}: attention"
    # In an nn.Sequential modules have numbers for names.
    numbered = str(row["name"]).rpartition(".")[2].isdigit()
    return f"{row['name']} ({row['class']})" if numbered else str(row["name"])


def _describe(title: str, columns: list[Any], back: list[Any], measured: bool) -> str:
    parts = [title.rstrip(".") + "."]
    for words, cell in _CELLS.items():
        counts = Counter(", ".join(_split(row[cell])) for row in columns if _split(row[cell]))
        listing = ", ".join(f"{dtype} {count} times" for dtype, count in counts.items())
        parts.append(f"{words.capitalize()}: {listing or 'none'}.")
    if measured:
        rows = [row for row in columns if row["largest"] > 0]
        if rows:
            low, high = min(r["smallest"] for r in rows), max(r["largest"] for r in rows)
            parts.append(f"Magnitudes of the outputs from {low:.2g} to {high:.2g}.")
        for kind, words in (("nan", "NaN"), ("inf", "Infinity")):
            bad = [str(row["name"]) for row in columns if _alarming(row, kind)]
            bad += [f"gradient of {row['name']}" for row in back if row[kind] > 0]
            if bad:
                parts.append(f"{words} in {len(bad)} of them, first {bad[0]}.")
    return " ".join(parts)
