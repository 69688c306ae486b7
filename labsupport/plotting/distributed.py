"""Several devices: who computes and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Patch

from labsupport.plotting.drawing import (
    BLUE,
    ORANGE,
    SKY,
    plain,
)
from labsupport.plotting.figure import Chart

if TYPE_CHECKING:
    import pandas as pd

_SPANS = {"compute": BLUE, "message": ORANGE}


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
