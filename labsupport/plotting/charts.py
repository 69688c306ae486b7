"""Charts from benchmark tables, predictions and rooflines.

Solid lines are the reader's own run, dashed lines with hollow markers a recorded one. A case
that ran out of memory is a cross at its length, at the top of the chart. Small print names device
and date. Benchmark tables are DataFrames as `labsupport.profiling.grids.run_grid` returns them,
one shape family at a time.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labsupport.plotting.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    Reference,
    add_legend,
    draw_references,
    log2_axis,
    log10_axis,
    plain,
    style,
)
from labsupport.plotting.figure import Chart

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# What a chart draws along its x axis or as its lines; everything else must be the same throughout.
_SHAPE = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal")
CROSS_SPACING = 0.065  # of the height of a panel, between two lines of crosses


def plot_time(table: pd.DataFrame, *, title: str, references: Sequence[Reference] = ()) -> Chart:
    """Plot the median time in ms against sequence length, with a band between the quartiles.

    Args:
        table: the run to draw.
        title: the finding, as a sentence.
        references: lines to judge by, in ms.

    Raises:
        ValueError: the table mixes shapes, dtypes or masks, or lacks a column.

    >>> from labsupport.profiling import load_run
    >>> run = load_run("attention-h200")
    >>> run = run[run.causal & (run.direction == "forward")]
    >>> chart = plot_time(run, title="On an H200", references=[Reference("1 ms", 1.0)])
    """
    return _plot(table, "median_ms", "time (ms)", title, references, band=True)


def plot_memory(
    table: pd.DataFrame,
    *,
    title: str,
    references: Sequence[Reference] = (),
    label: str = "peak extra memory (MiB)",
) -> Chart:
    """Plot the peak extra memory in MiB against sequence length.

    Arguments and errors as `plot_time`; `label` says what is counted, if it is not extra memory.

    >>> from labsupport.profiling import load_run
    >>> run = load_run("attention-h200")
    >>> chart = plot_memory(run[run.causal & (run.direction == "forward")], title="On an H200")
    """
    return _plot(table, "peak_memory_bytes", label, title, references, scale=2**-20)


def _plot(
    table: pd.DataFrame,
    column: str,
    ylabel: str,
    title: str,
    references: Sequence[Reference],
    *,
    scale: float = 1.0,
    band: bool = False,
) -> Chart:
    _check(table, column)
    recorded = bool(table.attrs.get("provenance", {}).get("recorded"))
    directions = list(dict.fromkeys(table["direction"]))
    figure = Chart(figsize=(2.8 + 5.0 * len(directions), 4.8))
    panels = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for axes, direction in zip(panels, directions, strict=True):
        rows = table[table["direction"] == direction]
        lengths = sorted(set(rows["seqlen"]))
        for backend in dict.fromkeys(rows["backend"]):
            series = rows[rows["backend"] == backend].sort_values("seqlen")
            _draw_series(axes, series, backend, column, scale, band, recorded)
        draw_references(axes, references, lengths)
        log2_axis(axes, lengths, "sequence length (tokens, 1K = 1024)")
        axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        axes.tick_params(axis="x", labelrotation=45 if len(lengths) > 9 else 0)
        plain(axes)
        if len(directions) > 1:
            axes.set_title(direction, fontsize=10, loc="left")
        _draw_out_of_memory(axes, rows, recorded)
    panels[0].set_ylabel(ylabel)
    _finish_y_axis(panels)
    add_legend(figure, panels)
    width = int(figure.get_size_inches()[0] * 9)
    small = textwrap.fill(_small_print(table), int(width * 1.6))
    figure.headline(textwrap.fill(title, int(width * 0.7)), small)
    return figure


def _check(run: pd.DataFrame, column: str) -> None:
    columns = "backend", "direction", column, "seqlen", "status"
    if missing := [name for name in columns if name not in run]:
        raise ValueError(f"the table lacks {', '.join(missing)}: pass what run_grid returned")
    for name in _SHAPE:
        if name in run and run[name].nunique() > 1:
            values = ", ".join(str(value) for value in sorted(set(run[name])))
            raise ValueError(
                f"the table mixes {name} = {values}: draw one at a time, "
                f'for example table[table["{name}"] == ...]'
            )
    if run.duplicated(["backend", "seqlen", "direction"]).any():
        raise ValueError("two rows for one backend, length and direction: draw one run at a time")


def _draw_series(
    axes: Axes,
    series: pd.DataFrame,
    backend: str,
    column: str,
    scale: float,
    band: bool,
    recorded: bool,
) -> None:
    """Draw one implementation's line, with a band between quartiles if asked for."""
    colour, marker = style(backend)
    shown = series[(series["status"] == "ok") & series[column].notna()]
    if shown.empty:
        return
    axes.plot(
        shown["seqlen"], shown[column] * scale, color=colour, marker=marker, markersize=7,
        markerfacecolor="white" if recorded else colour, linestyle="--" if recorded else "-",
        linewidth=1.8, label=f"{backend} (recorded)" if recorded else backend,
    )  # fmt: skip
    if band and {"q1_ms", "q3_ms"} <= set(shown.columns):
        axes.fill_between(
            shown["seqlen"], shown["q1_ms"], shown["q3_ms"], color=colour, alpha=0.18, linewidth=0
        )


def _draw_out_of_memory(axes: Axes, rows: pd.DataFrame, recorded: bool) -> None:
    """Draw a cross for each lost case at its length, one line of crosses per implementation."""
    lost = rows[rows["status"] == "out of memory"]
    left, right = axes.get_xlim()
    for level, backend in enumerate(dict.fromkeys(lost["backend"])):
        lengths = sorted(lost.loc[lost["backend"] == backend, "seqlen"])
        height, colour = 0.96 - CROSS_SPACING * level, style(backend)[0]
        label = f"{backend}{' (recorded)' if recorded else ''}: out of memory"
        axes.plot(
            lengths, [height] * len(lengths), transform=axes.get_xaxis_transform(),
            linestyle="none", marker="x", markersize=9, markeredgewidth=2.2, color=colour,
            label=label, gid="out of memory", clip_on=False,
        )  # fmt: skip
        # The words stand on the side that has more room.
        at_left = lengths[0] ** 2 > left * right
        axes.annotate(
            label, (lengths[0] if at_left else lengths[-1], height),
            xycoords=axes.get_xaxis_transform(), xytext=(-9 if at_left else 9, 0),
            textcoords="offset points", ha="right" if at_left else "left", va="center",
            fontsize=8.5, color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


def _crosses(axes: Axes) -> int:
    return sum(line.get_gid() == "out of memory" for line in axes.get_lines())


def _finish_y_axis(panels: Sequence[Axes]) -> None:
    """Make the shared axis logarithmic, with room above the lines for the crosses."""
    first = panels[0]
    if all(len(axes.get_lines()) == _crosses(axes) for axes in panels):
        first.set_yticks([])  # nothing was measured: the height means nothing
        return
    first.set_yscale("log")
    low, high = first.get_ylim()
    share = CROSS_SPACING * max(map(_crosses, panels))
    if share:
        high *= (high / low) ** min((share + 0.04) / (1 - share), 1.0)
    first.set_ylim(low, high)
    # Ten labels at most, and three at least.
    for axes in panels:
        log10_axis(axes, "y", (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,))


def _small_print(run: pd.DataFrame) -> str:
    record = run.attrs.get("provenance", {})
    parts = [f"recorded run {record['run']}" if record.get("run") else ""]
    parts += [str(record.get("device", "device unknown")), str(record.get("date", ""))[:10]]
    if torch_version := record.get("versions", {}).get("torch"):
        parts.append(f"torch {torch_version}")
    words = {"batch": "batch {}", "heads": "{} heads", "head_dim": "head_dim {}", "dtype": "{}"}
    parts += [words[name].format(run[name].iloc[0]) for name in words if name in run and len(run)]
    if "causal" in run and len(run):
        parts.append("causal" if run["causal"].iloc[0] else "not causal")
    return ", ".join(part for part in parts if part)


# --- predictions and rooflines --------------------------------------------------------------------


def plot_predictions(table: pd.DataFrame, *, title: str, small_print: str = "") -> Chart:
    """Plot predicted times with their intervals, a row for each device, from above to below.

    Args:
        table: columns device, ms, low_ms, high_ms (the interval); measured_ms, bound_ms (the least
            time by the specification) may be there, NaN where there is none.
        title: the finding, as a sentence.
        small_print: the case, and what the predictions rest on.

    >>> import pandas as pd
    >>> table = pd.DataFrame([{"device": "H200", "ms": 1.0, "low_ms": 0.8, "high_ms": 1.3}])
    >>> chart = plot_predictions(table, title="About a millisecond")
    """
    figure = Chart(figsize=(8.8, 1.9 + 0.36 * len(table)))
    axes, rows = figure.subplots(), range(len(table))
    axes.hlines(rows, table["low_ms"], table["high_ms"], color=BLUE, linewidth=5, alpha=0.35,
                label="90% interval")  # fmt: skip
    axes.plot(table["ms"], rows, "o", color=BLUE, label="predicted")
    if "bound_ms" in table:
        axes.plot(table["bound_ms"], rows, "|", color=GREY, markersize=13, gid="reference",
                  label="least time by the specification")  # fmt: skip
    if "measured_ms" in table and table["measured_ms"].notna().any():
        axes.plot(table["measured_ms"], rows, "D", color=RED, label="measured")
    axes.set_yticks(list(rows), list(table["device"]))
    axes.invert_yaxis()
    log10_axis(axes, "x")
    axes.set_xlabel("time (ms)")
    plain(axes, "x", ("top", "right", "left"))
    axes.tick_params(axis="y", length=0)
    add_legend(figure, [axes], 8.5)
    words = "; ".join(map(_prediction, table.to_dict("records")))
    figure.say(title, small_print, [words], wrap=60)
    return figure


def _prediction(row: dict[Any, Any]) -> str:
    text = f"{row['device']}: {row['ms']:.3g} ms, from {row['low_ms']:.3g} to {row['high_ms']:.3g}"
    for column, word in (("bound_ms", "at least"), ("measured_ms", "measured")):
        value = row.get(column)
        if value is not None and value == value:
            text += f", {word} {value:.3g}"
    return text


def plot_growth(table: pd.DataFrame, *, title: str, small_print: str = "") -> Chart:
    """Plot how many times as long a call takes against how many times the work it does.

    Args:
        table: columns what (the line's name), work and time (both 1 at the line's smallest case).
        title: the finding, as a sentence.
        small_print: device, date, and the smallest case.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"what": "more heads", "work": [1, 4, 16], "time": [1, 1.1, 4]})
    >>> chart = plot_growth(table, title="16 times the heads take 4 times as long")
    """
    figure = Chart(figsize=(8.6, 4.6))
    axes = figure.subplots()
    most = table["work"].max()
    axes.plot([1, most], [1, most], color=GREY, linestyle=":", label="in proportion",
              gid="reference")  # fmt: skip
    looks = itertools.cycle(zip((BLUE, GREEN, ORANGE, PINK, RED), "os^Dv", strict=True))
    for name, rows in table.groupby("what", sort=False):
        colour, marker = next(looks)
        axes.plot(rows["work"], rows["time"], marker=marker, color=colour, label=str(name))
    log2_axis(axes, sorted(set(table["work"])), "times the work of the smallest case")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_ylabel("times as long as the smallest case")
    plain(axes)
    add_legend(figure, [axes])
    figure.say(title, small_print, wrap=62)
    return figure


@dataclass(frozen=True)
class RoofLine:
    """One roof to draw: its name, TFLOP/s and GB/s.

    >>> RoofLine("H200", tflops=989, gb_s=4800).ridge
    206.04...
    """

    label: str
    tflops: float
    gb_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte where the two ceilings meet."""
        return self.tflops * 1e3 / self.gb_s


def plot_roofline(
    table: pd.DataFrame, roofs: Sequence[RoofLine], *, title: str, small_print: str = ""
) -> Chart:
    """Plot speed against FLOPs a byte, both logarithmic; a marker a row, roofs as lines.

    The unit is GFLOP/s if all roofs are below 1 TFLOP/s.

    Args:
        table: needs backend, intensity (FLOPs a byte) and tflops; rows without a time are left out.
        roofs: at least one; the first is drawn solid (the specified one, say), others dashed.
        title: the finding, as a sentence.
        small_print: device, date, sizes.

    >>> import pandas as pd
    >>> table = pd.DataFrame([{"backend": "sdpa_flash", "intensity": 500.0, "tflops": 300.0}])
    >>> chart = plot_roofline(table, [RoofLine("H200", 989, 4800)], title="Below the roof")
    """
    figure = Chart(figsize=(8.6, 5.2))
    axes = figure.subplots()
    measured = table[table["tflops"].notna() & (table["tflops"] > 0)]
    places = [*measured["intensity"], *(roof.ridge for roof in roofs)]
    low, high = min(places) / 3, max(places) * 3
    # A CPU's speeds would all be fractions of a TFLOP/s.
    unit, scale = ("TFLOP/s", 1) if max(roof.tflops for roof in roofs) >= 1 else ("GFLOP/s", 1e3)
    for number, roof in enumerate(roofs):
        x = [low, roof.ridge, high]
        y = [scale * min(roof.tflops, roof.gb_s / 1e3 * i) for i in x]
        axes.plot(
            x, y, color=GREY, linewidth=1.5,
            zorder=1, linestyle="-" if number == 0 else (0, (5, 2 + number)), gid="reference",
            label=f"{roof.label}: {scale * roof.tflops:,.3g} {unit},\n{roof.gb_s:,.0f} GB/s",
        )  # fmt: skip
    for backend in dict.fromkeys(measured["backend"]):
        colour, marker = style(backend)
        rows = measured[measured["backend"] == backend]
        axes.plot(
            rows["intensity"], scale * rows["tflops"], marker, color=colour, label=backend,
            markersize=7,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    log10_axis(axes, "x", (1.0,))
    log10_axis(axes, "y", (1.0, 2.0, 5.0) if scale > 1 else (1.0,))
    axes.set_xlabel("arithmetic intensity (FLOPs for each byte moved)")
    axes.set_ylabel(f"speed ({unit})")
    plain(axes)
    add_legend(figure, [axes])
    figure.headline(textwrap.fill(title, 60), small_print)
    return figure


def plot_samples(table: pd.DataFrame, *, title: str, small_print: str = "") -> Chart:
    """Plot memory against time, from the first sample to the last; a panel for the GPU's.

    Args:
        table: columns time_s, used_mib and free_mib; on a GPU also gpu_used_mib and gpu_free_mib.
        title: the finding.
        small_print: device, date, and how it was sampled.
    """
    used = [column for column in ("used_mib", "gpu_used_mib") if column in table]
    figure = Chart(figsize=(8.6, 1.7 + 2.6 * len(used)))
    all_axes = figure.subplots(len(used), 1, sharex=True, squeeze=False)[:, 0]
    for axes, column in zip(all_axes, used, strict=True):
        free = table[column.replace("used", "free")].iloc[0]
        plain(axes)
        axes.plot(table["time_s"], table[column], color=BLUE, linewidth=1.8, label="used")
        axes.set(xlim=(0, None), ylim=(0, None))
        name = "GPU memory" if column.startswith("gpu") else "memory"
        axes.set_ylabel(f"{name} (MiB)")
        if table[column].max() > free / 4:  # else the limit would flatten the curve
            axes.axhline(free, color=GREY, linestyle="--", label="free at the start")
            axes.legend(loc="lower right", frameon=False)
    all_axes[-1].set_xlabel("time since the start (s)")
    figure.headline(textwrap.fill(title, 76), small_print)
    return figure
