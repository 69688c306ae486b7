"""Several devices: who computes and who waits, and what more devices bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import ScalarFormatter

from labsupport.plotting.drawing import (
    BLUE,
    ORANGE,
    RED,
    SKY,
    STYLES,
    Reference,
    add_legend,
    draw_references,
    log2_axis,
    plain,
)
from labsupport.plotting.figure import Chart

if TYPE_CHECKING:
    import pandas as pd

_SPANS = {"compute": BLUE, "message": ORANGE}
_LINES = ((RED, "s"), (ORANGE, "v"), (SKY, "P"), ("#AA4466", "X"), ("#808080", "*"))
# A ring's kernels by their own names, in the colours that they have elsewhere.
_KNOWN = STYLES | {"native": STYLES["sdpa_flash"], "cudnn": STYLES["sdpa_cudnn"]}


def plot_timeline(table: pd.DataFrame, *, title: str, small_print: str = "") -> Chart:
    """Draw what each rank did when: a panel for each layout, two lines for each rank.

    Args:
        table: columns layout, rank, what ("compute" or "message"), start_ms, end_ms.
        title: the finding, as a sentence.
        small_print: device, sizes, and what a message's beginning and end are.

    >>> import pandas as pd
    >>> rows = [("zigzag", 0, "compute", 0.0, 2.0), ("zigzag", 0, "message", 0.0, 1.0)]
    >>> table = pd.DataFrame(rows, columns=["layout", "rank", "what", "start_ms", "end_ms"])
    >>> chart = plot_timeline(table, title="The message hides behind the compute")
    """
    layouts, ranks = list(dict.fromkeys(table["layout"])), sorted(set(table["rank"]))
    figure = Chart(figsize=(8.6, 1.3 + len(layouts) * (0.45 + 0.55 * len(ranks))))
    panels = figure.subplots(len(layouts), 1, sharex=True, squeeze=False)[:, 0]
    words = []
    for axes, layout in zip(panels, layouts, strict=True):
        rows = table[table["layout"] == layout]
        for rank in ranks:
            for line, (what, colour) in enumerate(_SPANS.items()):
                spans = rows[(rows["rank"] == rank) & (rows["what"] == what)]
                bars = [(s, e - s) for s, e in zip(spans["start_ms"], spans["end_ms"], strict=True)]
                axes.broken_barh(bars, (rank + 0.12 + 0.4 * line, 0.36), facecolors=colour)
            own = rows[(rows["rank"] == rank) & (rows["what"] == "compute")]
            busy = (own["end_ms"] - own["start_ms"]).sum()
            words.append(f"{layout}, rank {rank}: computes for {busy:.0f} ms.")
        axes.set_ylim(len(ranks), 0)
        axes.set_yticks([rank + 0.5 for rank in ranks], [f"rank {rank}" for rank in ranks])
        axes.set_title(f"{layout}: {rows['end_ms'].max():.0f} ms", fontsize=10, loc="left")
        axes.tick_params(axis="y", length=0)
        plain(axes, "x")
        words.append(f"{layout}: done after {rows['end_ms'].max():.0f} ms.")
    panels[-1].set_xlabel("time since the first rank began (ms)")
    panels[-1].set_xlim(left=0)
    figure.legend(
        handles=[
            Patch(facecolor=_SPANS["compute"], label="compute"),
            Patch(facecolor=_SPANS["message"], label="message on its way"),
        ],
        loc="outside right upper", frameon=False, fontsize=9,
    )  # fmt: skip
    figure.say(title, small_print, words)
    return figure


def plot_launches(table: pd.DataFrame, *, title: str, small_print: str = "") -> Chart:
    """Draw when the kernels of recorded calls ran: a panel for each call, a line for each stream.

    Args:
        table: columns call, start_us, duration_us, stream.
        title: the finding, as a sentence.
        small_print: device and sizes.

    >>> import pandas as pd
    >>> rows = [("textbook", 0.0, 3.0, 7), ("textbook", 9.0, 3.0, 7)]
    >>> table = pd.DataFrame(rows, columns=["call", "start_us", "duration_us", "stream"])
    >>> chart = plot_launches(table, title="The GPU waits half of the time")
    """
    calls = list(dict.fromkeys(table["call"]))
    figure = Chart(figsize=(8.6, 1.2 + 0.6 * len(calls)))
    panels = figure.subplots(len(calls), 1, sharex=True, squeeze=False)[:, 0]
    words = []
    for axes, call in zip(panels, calls, strict=True):
        rows = table[table["call"] == call]
        for line, (_, own) in enumerate(rows.groupby("stream")):
            bars = list(zip(own["start_us"], own["duration_us"], strict=True))
            axes.broken_barh(bars, (line, 0.8), facecolors=SKY if line else BLUE)
        end = (rows["start_us"] + rows["duration_us"]).max()
        axes.set_yticks([])
        axes.set_title(f"{call}: {end:,.0f} µs", fontsize=9, loc="left")
        plain(axes, "x")
        words.append(f"{call}: {len(rows)} kernels in {end:,.0f} µs.")
    panels[-1].set_xlabel("time since the first kernel began (µs)")
    panels[-1].set_xlim(left=0)
    figure.say(title, small_print, words)
    return figure


def plot_scaling(
    table: pd.DataFrame,
    *,
    column: str,
    title: str,
    ylabel: str,
    series: str = "series",
    panel: str | None = None,
    references: Sequence[Reference] = (),
    small_print: str = "",
) -> Chart:
    """Plot a quantity against the number of devices, one line a series, from 0 on.

    Args:
        table: columns world, `series`, `panel` if given, and `column`, which is drawn. Where
            `column` is missing (a case that could not run), a line has a gap.
        column: e.g. "efficiency".
        title: the finding, as a sentence.
        ylabel: what is drawn, with its unit.
        series: whose values are the lines. Those that begin with the same implementation, such as
            "native, zigzag" and "native, contiguous", share its colour.
        panel: whose values are the panels.
        references: lines to judge by; y a number, or a function of the number of devices.
        small_print: device, date, sizes.

    Raises:
        ValueError: two rows are the same point.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"world": [1, 2, 4], "series": "native", "efficiency": [1, 0.9, 0.8]})
    >>> chart = plot_scaling(table, column="efficiency", title="It scales", ylabel="efficiency")
    """
    keys = [series, *([panel] if panel else []), "world"]
    if table.duplicated(keys).any():
        raise ValueError(f"several rows have the same {', '.join(keys)}: choose one of each first")
    worlds = sorted(set(table["world"]))
    lines = list(dict.fromkeys(table[series]))
    groups = list(dict.fromkeys(table[panel])) if panel else [None]
    figure = Chart(figsize=(3.4 + 3.4 * len(groups), 4.4))
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        rows = table if group is None else table[table[panel] == group]
        for name, look in zip(lines, _looks(lines), strict=True):
            shown = rows[rows[series] == name].sort_values("world")
            if shown[column].notna().sum() == 0:
                continue
            axes.plot(
                shown["world"], shown[column], markersize=7, linewidth=1.8, label=name, **look
            )
        draw_references(axes, references, worlds)
        log2_axis(axes, worlds, "number of devices")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        if group is not None:
            axes.set_title(str(group), fontsize=10, loc="left")
        plain(axes)
    panels[0].set_ylabel(ylabel)
    heights = [line.get_ydata() for axes in panels for line in axes.get_lines()]
    panels[0].set_ylim(0, 1.05 * float(np.nanmax(np.concatenate(heights))))
    add_legend(figure, panels, 8.5)
    figure.say(title, small_print)
    return figure


def _looks(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return colour, marker and dashes of each line.

    A name may go on after a comma ("native, zigzag"): what stands before it has its colour, and its
    first line is solid.
    """
    first = [str(line).split(",")[0] for line in lines]
    unknown = [name for name in dict.fromkeys(first) if name not in _KNOWN]
    known = _KNOWN | {name: _LINES[n % len(_LINES)] for n, name in enumerate(unknown)}
    looks = []
    for n, name in enumerate(first):
        colour, marker = known[name]
        dashes = ("-", (0, (5, 2)), (0, (1, 1.5)))[min(first[:n].count(name), 2)]
        looks.append({"color": colour, "marker": marker, "linestyle": dashes})
    return looks
