"""How dtypes and magnitudes flow through the layers of a model.

One column for each call, in the order of execution. Above, a strip of dtypes: input, weights,
output, gradient, one colour for each dtype and several colours where dtypes are mixed. Below, where
ranges were recorded, a bar from the smallest to the largest magnitude, against the ends of float16.
The functions take what `PrecisionTracker.to_dataframe()` returns.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito; what computes no gradient is grey.
DTYPE_COLOURS = {
    "float64": "#000000",
    "float32": "#0072B2",
    "bfloat16": "#E69F00",
    "float16": "#CC79A7",
    "float8": "#009E73",
}
_OTHER = "#BBBBBB"
_STRIPS = ("input", "weights", "output", "gradient")
_BARS = {"forward": ("#444444", "output", -0.17), "backward": ("#56B4E9", "gradient", 0.17)}
_ALARMS = {"forward": "#D55E00", "backward": "#882255"}
# float16: the largest number, the smallest with all its digits, and the smallest.
_FLOAT16 = {"largest": 65504.0, "smallest normal": 2.0**-14, "smallest subnormal": 2.0**-24}
_NEEDED = (
    "order", "pass", "name", "class", "kind", "call", "dtype_in", "dtype_weights", "dtype_out",
    "largest", "smallest", "nan", "inf",
)  # fmt: skip
MOST_LABELS = 26  # with more columns than that, only groups of them are labelled
LABEL_HEIGHT = 0.15  # inches, of one line of the columns' labels


def plot_dtype_flow(frame: pd.DataFrame, *, title: str) -> Figure:
    """Draw the dtypes, and the magnitudes where they are there, of each call in a run.

    Of a module that was called several times the first call is drawn.

    Args:
        frame: what `PrecisionTracker.to_dataframe()` returned.
        title: the finding, as a sentence.

    Raises:
        ValueError: a column is missing, or the frame holds no forward call.
    """
    from labsupport.plotting.figure import Chart

    if missing := [name for name in _NEEDED if name not in frame]:
        raise ValueError(
            f"the frame lacks {', '.join(missing)}: "
            "pass what PrecisionTracker.to_dataframe returned"
        )
    shown = frame[(frame["pass"] == "forward") & (frame["kind"] != "block") & (frame["call"] == 0)]
    if shown.empty:
        raise ValueError("no forward call was recorded: call the model inside the with-block")
    columns = [row for _, row in shown.sort_values("order").iterrows()]
    back = frame[(frame["pass"] == "backward") & (frame["call"] == 0)]
    gradients = {_key(row): row for _, row in back.iterrows()}
    measured = bool(frame["largest"].notna().any())

    # Inches. What is beside the columns: names and a scale; the legend, the ends of float16.
    beside = 4.1 if measured else 2.4
    pitch = 0.18 if len(columns) <= MOST_LABELS else 0.11
    width = min(max(6.5, beside + pitch * len(columns)), 15.0)
    pitch = (width - beside) / len(columns)
    labels = _labels(columns, pitch)
    strips = _STRIPS if gradients else _STRIPS[:-1]
    panels = (0.34 * len(strips), 3.6) if measured else (0.34 * len(strips),)
    title_lines = textwrap.wrap(title, int(width * 8))
    longest = max(len(label) for _, label in labels)
    height = sum(panels) + 0.07 * longest + 0.22 * len(title_lines) + 0.7
    figure = Chart(figsize=(width, height), dpi=110, layout="constrained")
    drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=panels)
    strip, ranges = drawn[0, 0], drawn[-1, 0]
    if measured:
        _draw_ranges(ranges, columns, gradients, pitch)
    dtypes = _draw_strip(strip, columns, gradients, strips, pitch)
    ranges.set_xticks([x for x, _ in labels], [text for _, text in labels], rotation=90, fontsize=8)
    ranges.tick_params(axis="x", length=2)
    _mark_groups([strip, ranges] if measured else [strip], columns)
    _add_legend(figure, strip, ranges, dtypes, measured)
    repeated = int((frame["call"] > 0).any())
    small = f"{len(columns)} calls, in the order of execution"
    small += "; of a module called several times, the first call" * repeated
    figure.headline("\n".join(title_lines), small)
    figure.description = _describe(title, columns, gradients, measured)
    return figure


def _key(row: Any) -> tuple[str, str]:
    return str(row["name"]), str(row["class"])


def _split(dtypes: Any) -> list[str]:
    """The dtypes in a cell; whole numbers beside floating ones (positions) are left out."""
    names = [name for name in str(dtypes or "").split(", ") if name]
    return [name for name in names if "float" in name] or names


def _colour(dtype: str) -> str:
    return next((c for name, c in DTYPE_COLOURS.items() if dtype.startswith(name)), _OTHER)


def _draw_strip(
    axes: Axes,
    columns: list[Any],
    gradients: dict[Any, Any],
    strips: tuple[str, ...],
    pitch: float,
) -> list[str]:
    """Draw the cells; return the dtypes that there are, in the order of the palette.

    A column is `pitch` inches wide.
    """
    from matplotlib.patches import Rectangle

    seen: set[str] = set()
    cell_width = 0.92 if pitch > 0.1 else 1.0  # gaps of less than a pixel are drawn unevenly
    for x, row in enumerate(columns):
        gradient = gradients.get(_key(row))
        cells = (
            row["dtype_in"],
            row["dtype_weights"],
            row["dtype_out"],
            "" if gradient is None else gradient["dtype_out"],
        )
        for y, cell in enumerate(cells):
            names = _split(cell)
            seen.update(names)
            for i, dtype in enumerate(names):
                part = 0.84 / len(names)
                corner = x - cell_width / 2, y - 0.42 + i * part
                patch = Rectangle(corner, cell_width, part)
                patch.set(facecolor=_colour(dtype), edgecolor="none", gid=dtype)
                patch.set_antialiased(cell_width < 1)
                axes.add_patch(patch)
    axes.set(xlim=(-0.8, len(columns) - 0.2), ylim=(len(strips) - 0.4, -0.6))
    axes.set_yticks(range(len(strips)), strips, fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    order = list(DTYPE_COLOURS)
    return sorted(seen, key=lambda d: (order.index(d) if d in order else len(order), d))


def _draw_ranges(axes: Axes, columns: list[Any], gradients: dict[Any, Any], pitch: float) -> None:
    """A bar from the smallest to the largest magnitude for each output and its gradient."""
    alarms: dict[tuple[str, str], list[int]] = {}
    for name, rows in (
        ("forward", dict(enumerate(columns))),
        ("backward", {x: gradients[_key(row)] for x, row in enumerate(columns)
                      if _key(row) in gradients}),
    ):  # fmt: skip
        colour, label, shift = _BARS[name]
        drawn = {x: row for x, row in rows.items() if row["largest"] > 0}
        if drawn:
            bars = axes.vlines(
                [x + shift for x in drawn],
                [row["smallest"] for row in drawn.values()],
                [row["largest"] for row in drawn.values()],
                color=colour, linewidth=min(2.4, 0.3 * 72 * pitch), label=label,
            )  # fmt: skip
            bars.set_gid(name)
        for x, row in rows.items():
            for kind in ("nan", "inf"):
                if _alarming(row, kind):
                    alarms.setdefault((name, kind), []).append(x)
    axes.set_yscale("log", base=10)
    low, high = axes.get_ylim()
    low, high = min(low, _FLOAT16["smallest subnormal"] / 4), max(high, _FLOAT16["largest"] * 8)
    axes.set_ylim(low, high * (high / low) ** (0.06 * len(alarms) + 0.02))  # room for the alarms
    for words, y in _FLOAT16.items():
        axes.axhline(y, color="#444444", linestyle=":", linewidth=1.2, zorder=1, gid="reference")
        axes.annotate(
            f"float16: {words}", (1.0, y), xycoords=("axes fraction", "data"), va="center",
            xytext=(4, 0), textcoords="offset points", fontsize=8, color="#444444",
        )  # fmt: skip
    # A line of marks for each alarm: NaN before infinity, the forward pass before the gradients.
    kinds = {"nan": ("x", "NaN"), "inf": ("^", "infinity")}
    lines = [(direction, kind) for direction in _BARS for kind in kinds]
    for level, (direction, kind) in enumerate(line for line in lines if line in alarms):
        where = alarms[direction, kind]
        marker, words = kinds[kind]
        subject = "output" if direction == "forward" else "gradient"
        axes.plot(
            where, [0.97 - 0.05 * level] * len(where), transform=axes.get_xaxis_transform(),
            linestyle="none", marker=marker, color=_ALARMS[direction], markersize=6,
            markeredgewidth=1.8, label=f"{subject} holds {words}", gid=f"{direction} {kind}",
        )  # fmt: skip
    axes.set_ylabel("magnitude (not 0)")
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _alarming(row: Any, kind: str) -> bool:
    """Whether a row holds NaN or infinities, but for the -inf that a log-softmax gives a mask."""
    count = row[kind]
    if kind == "inf" and "softmax" in str(row["class"]).lower():
        count -= row.get("minus_inf", 0)
    return bool(count > 0)


def _group(name: str) -> str:
    """What a module belongs to: its layer (the name up to the first number), or itself."""
    found = re.match(r"(?:.*?\.)??(\w+\.\d+)(?:\.|$)", name)
    return found.group(1) if found else name.rpartition(".")[2]


def _groups(names: list[str]) -> list[tuple[str, int, int]]:
    """(group, first column, last column), in order."""
    found: list[tuple[str, int, int]] = []
    for x, name in enumerate(names):
        group = _group(name)
        if found and found[-1][0] == group:
            found[-1] = (group, found[-1][1], x)
        else:
            found.append((group, x, x))
    return found


def _labels(columns: list[Any], pitch: float) -> list[tuple[float, str]]:
    """(place, words): each column's name, or each layer's where the columns are many.

    Columns are `pitch` inches wide. Single modules side by side share one label, and what still
    has no room is left out.
    """
    if len(columns) <= MOST_LABELS:
        return [(float(x), _label(row)) for x, row in enumerate(columns)]
    merged: list[tuple[str, int, int]] = []
    singles = False
    for group, first, last in _groups([str(row["name"]) for row in columns]):
        if singles and first == last:
            merged[-1] = (f"{merged[-1][0]}, {group}", merged[-1][1], last)
        else:
            merged.append((group, first, last))
        singles = first == last
    kept: list[tuple[float, str]] = []
    for words, first, last in merged:
        place = (first + last) / 2
        if not kept or (place - kept[-1][0]) * pitch >= LABEL_HEIGHT:
            kept.append((place, words))
    return kept


def _label(row: Any) -> str:
    if row["kind"] == "attention call":
        return f"{row['name']}: attention"
    # In an nn.Sequential modules have numbers for names.
    numbered = str(row["name"]).rpartition(".")[2].isdigit()
    return f"{row['name']} ({row['class']})" if numbered else str(row["name"])


def _mark_groups(panels: list[Axes], columns: list[Any]) -> None:
    for _, first, _ in _groups([str(row["name"]) for row in columns])[1:]:
        for axes in panels:
            axes.axvline(first - 0.5, color="#cccccc", linewidth=0.7, zorder=0, gid="group")


def _add_legend(
    figure: Figure, strip: Axes, ranges: Axes, dtypes: list[str], measured: bool
) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=_colour(dtype), label=dtype) for dtype in dtypes]
    if measured:
        handles += ranges.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)


def _describe(title: str, columns: list[Any], gradients: dict[Any, Any], measured: bool) -> str:
    parts = [title.rstrip(".") + "."]
    cells = {"input": "dtype_in", "weights": "dtype_weights", "output": "dtype_out"}
    for words, column in cells.items():
        counts: dict[str, int] = {}
        for row in columns:
            if dtype := ", ".join(_split(row[column])):
                counts[dtype] = counts.get(dtype, 0) + 1
        listing = ", ".join(f"{dtype} {count} times" for dtype, count in counts.items())
        parts.append(f"{words.capitalize()}: {listing or 'none'}.")
    if measured:
        rows = [row for row in columns if row["largest"] > 0]
        if rows:
            low, high = min(r["smallest"] for r in rows), max(r["largest"] for r in rows)
            parts.append(f"Magnitudes of the outputs from {low:.2g} to {high:.2g}.")
        for kind, words in (("nan", "NaN"), ("inf", "Infinity")):
            bad = [str(row["name"]) for row in columns if _alarming(row, kind)]
            bad += [f"gradient of {key[0]}" for key, row in gradients.items() if row[kind] > 0]
            if bad:
                parts.append(f"{words} in {len(bad)} of them, first {bad[0]}.")
    return " ".join(parts)
