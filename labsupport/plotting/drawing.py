"""The parts of a chart: lines, crosses for lost cases, reference lines, axes, legend."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES: dict[str, tuple[str, str]] = {
    "standard": ("#000000", "o"),
    "flash_torch": ("#D55E00", "s"),
    "flash_triton": ("#CC79A7", "D"),
    "sdpa_flash": ("#0072B2", "^"),
    "sdpa_efficient": ("#56B4E9", "v"),
    "sdpa_cudnn": ("#009E73", "P"),
    "sdpa_math": ("#808080", "X"),
    "flex": ("#E69F00", "*"),
    "fa2": ("#882255", "<"),
    "fa4": ("#332288", ">"),
    "xformers": ("#999933", "h"),
}
# Inside of a model: Transformers' textbook, and whichever IO-aware backend runs.
IN_MODELS = {"eager": STYLES["standard"], "flash": STYLES["sdpa_flash"]}
CROSS_SPACING = 0.065  # of the height of a panel, between two lines of crosses
_SPARE = ("#117733", "#661100", "#6699CC", "#AA4466")


@dataclass(frozen=True)
class Reference:
    """A line to judge the measurements by: a physical limit, or what a formula predicts.

    y: a number, or a function of the sequence length; in the unit of the chart's y axis.
    """

    label: str
    y: float | Callable[[float], float]


def style(backend: str) -> tuple[str, str]:
    """(colour, marker) of an implementation, the same everywhere."""
    known = STYLES | IN_MODELS
    if backend in known:
        return known[backend]
    return _SPARE[zlib.crc32(backend.encode()) % len(_SPARE)], "p"


def draw_series(
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
        shown["seqlen"],
        shown[column] * scale,
        color=colour,
        marker=marker,
        markersize=7,
        markerfacecolor="white" if recorded else colour,
        linestyle="--" if recorded else "-",
        linewidth=1.8,
        label=f"{backend} (recorded)" if recorded else backend,
    )
    if band and {"q1_ms", "q3_ms"} <= set(shown.columns):
        axes.fill_between(
            shown["seqlen"], shown["q1_ms"], shown["q3_ms"], color=colour, alpha=0.18, linewidth=0
        )


def draw_out_of_memory(axes: Axes, rows: pd.DataFrame, recorded: bool) -> None:
    """A cross for each lost case at its length, one line of crosses per implementation."""
    lost = rows[rows["status"] == "out of memory"]
    # Crosses of another run may be there already: go below them.
    level = len(_crosses(axes))
    left, right = axes.get_xlim()
    for backend in dict.fromkeys(lost["backend"]):
        lengths = sorted(lost.loc[lost["backend"] == backend, "seqlen"])
        height = 0.96 - CROSS_SPACING * level
        level += 1
        colour, _ = style(backend)
        label = f"{backend}{' (recorded)' if recorded else ''}: out of memory"
        axes.plot(
            lengths,
            [height] * len(lengths),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker="x",
            markersize=9,
            markeredgewidth=2.2,
            color=colour,
            label=label,
            gid="out of memory",
            clip_on=False,
        )
        # The words stand on the side that has more room.
        at_left = lengths[0] ** 2 > left * right
        axes.annotate(
            label,
            (lengths[0] if at_left else lengths[-1], height),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-9 if at_left else 9, 0),
            textcoords="offset points",
            ha="right" if at_left else "left",
            va="center",
            fontsize=8.5,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )


def _crosses(axes: Axes) -> list[Any]:
    return [line for line in axes.get_lines() if line.get_gid() == "out of memory"]


def draw_references(axes: Axes, references: Sequence[Reference], lengths: list[float]) -> None:
    """Draw the lines to judge by."""
    if not lengths:
        return
    for reference, dashes in zip(references, _reference_dashes(), strict=False):
        y = [reference.y(n) if callable(reference.y) else reference.y for n in lengths]
        ends = (lengths, y) if len(lengths) > 1 else ([lengths[0] / 2, lengths[0] * 2], y * 2)
        axes.plot(
            *ends, color="#444444", linestyle=dashes, linewidth=1.2, zorder=1,
            label=reference.label, gid="reference",
        )  # fmt: skip


def _reference_dashes() -> Iterable[Any]:
    while True:
        yield from (":", (0, (6, 2, 1, 2)), (0, (1, 3)))


def finish_axes(axes: Axes, lengths: list[float], panel: str) -> None:
    """Give a panel its logarithmic x axis, ticks at the measured lengths, grid and title."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    if lengths:
        axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _format_length(n)))
    axes.tick_params(axis="x", labelrotation=45 if len(lengths) > 9 else 0)
    axes.set_xlabel("sequence length (tokens, 1K = 1024)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel:
        axes.set_title(panel, fontsize=10, loc="left")


def finish_y_axis(panels: Sequence[Axes]) -> None:
    """A logarithmic axis, shared by the panels, with room above the lines for the crosses."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    first = panels[0]
    if all(len(axes.get_lines()) == len(_crosses(axes)) for axes in panels):
        first.set_yticks([])  # nothing was measured: the height means nothing
        return
    first.set_yscale("log")
    low, high = first.get_ylim()
    share = CROSS_SPACING * max(len(_crosses(axes)) for axes in panels)
    if share:
        high *= (high / low) ** min((share + 0.04) / (1 - share), 1.0)
    first.set_ylim(low, high)
    # Ten labels at most, and three at least.
    steps = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    first.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _format_value(y)))
    for axes in panels:
        axes.yaxis.set_minor_formatter(NullFormatter())


def _format_length(n: float) -> str:
    return f"{n / 1024:.0f}K" if n >= 1024 and n % 1024 == 0 else f"{n:.0f}"


def _format_value(y: float) -> str:
    return f"{y:,.0f}" if y >= 1000 else f"{y:g}"


def add_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Collect the lines of all panels into one legend."""
    entries = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if handle.get_gid() != "out of memory":  # crosses carry their words themselves
                entries.setdefault(label, handle)
    if entries:
        figure.legend(
            entries.values(), entries.keys(), loc="outside right upper", frameon=False, fontsize=9
        )
