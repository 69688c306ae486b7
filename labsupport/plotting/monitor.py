"""Memory over time: what a program, or a block of code, used from its start to its end.

One panel for the memory of the processes; on a GPU two more, for its memory and its utilisation.
`plot_monitor` takes the samples of `labsupport.profiling.monitor` and of `labsupport monitor`.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from labsupport.plotting.figure import Chart

# column: (colour, words).  Colours of Okabe and Ito.
_LINES = {
    "rss_bytes": ("#0072B2", "resident memory"),
    "pss_bytes": ("#E69F00", "shared pages counted once"),
    "gpu_tree_bytes": ("#D55E00", "GPU memory of these processes"),
    "gpu_used_bytes": ("#56B4E9", "GPU memory used by everybody"),
    "gpu_util_percent": ("#009E73", "share of time in which some kernel ran"),
}
_PANELS = (("rss_bytes", "pss_bytes"), ("gpu_tree_bytes", "gpu_used_bytes"), ("gpu_util_percent",))
_NEAR = 3.0  # a limit is a line in the panel if it is at most so many times the peak
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def plot_monitor(
    samples: pd.DataFrame,
    *,
    title: str,
    limit: tuple[str, float] | None = None,
    gpu_limit: tuple[str, float] | None = None,
    start_bytes: float | None = None,
    small_print: str = "",
) -> Chart:
    """Memory against time.

    Args:
        samples: columns time_s and rss_bytes, and whichever of pss_bytes, gpu_tree_bytes,
            gpu_used_bytes, gpu_util_percent were read.
        title: the finding, as a sentence.
        limit: what the memory is judged by: its name, and bytes. A line if it is near, else words.
        gpu_limit: the same for the GPU's memory.
        start_bytes: memory at the start, a line.
        small_print: device, date, and how it was sampled.

    Raises:
        ValueError: a column is missing, or there is no sample.
    """
    from labsupport.plotting.figure import Chart

    if missing := [name for name in ("time_s", "rss_bytes") if name not in samples]:
        raise ValueError(
            f"the samples lack {', '.join(missing)}: pass what monitor's samples() returned"
        )
    if samples.empty:
        raise ValueError("there is no sample to draw")
    read = [[c for c in names if c in samples and samples[c].notna().any()] for names in _PANELS]
    shown = [names for names in read if names]
    heights = [1.0 if names[0] == "gpu_util_percent" else 2.0 for names in shown]
    figure = Chart(figsize=(8.6, 1.7 + 1.55 * sum(heights)), dpi=110, layout="constrained")
    panels = figure.subplots(
        len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    words = [f"{title.rstrip('.')}."]
    for axes, names in zip(panels, shown, strict=True):
        if names[0] == "gpu_util_percent":
            words.append(_draw_share(axes, samples))
            continue
        gpu = names[0].startswith("gpu")
        words += _draw_memory(
            axes, samples, names, gpu_limit if gpu else limit, None if gpu else start_bytes
        )
    for axes in panels:
        axes.grid(True, color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    panels[-1].set_xlabel("time since the start (s)")
    together = re.sub(r"(?<=\d) (?=[KMG]?i?B\b)", "\N{NO-BREAK SPACE}", title)  # 2.8 GiB
    figure.headline(textwrap.fill(together, 76), textwrap.fill(small_print, 130))
    figure.description = " ".join(words)
    return figure


def _draw_memory(
    axes: Axes,
    samples: pd.DataFrame,
    names: list[str],
    limit: tuple[str, float] | None,
    start: float | None,
) -> list[str]:
    top = max(float(samples[name].max()) for name in names)
    unit, size = next(((u, s) for u, s in _UNITS if top >= s), _UNITS[-1])
    words = []
    for name in names:
        read = samples[samples[name].notna()]
        colour, label = _LINES[name]
        peak = read.loc[read[name].idxmax()]
        text = f"{label}: peak {_readable(float(read[name].max()))} at {peak['time_s']:,.1f} s"
        every = len(read) == len(samples)
        axes.plot(
            read["time_s"], read[name] / size, color=colour, linewidth=1.8, label=text,
            marker="" if every else "o", markersize=4,
        )  # fmt: skip
        axes.plot([peak["time_s"]], [peak[name] / size], color=colour, marker="o", markersize=6.5)
        words.append(f"{text}, {_readable(read[name].iloc[-1])} at the end.")
    high = top
    if start is not None:
        _reference(axes, start / size, f"at the start: {_readable(start)}", ":")
        words.append(f"At the start: {_readable(start)}.")
    if limit is not None and limit[1] > 0:
        label, most = limit
        text = f"{label}: {_readable(most)}"
        if most <= _NEAR * top:
            _reference(axes, most / size, text, (0, (6, 2, 1, 2)))
            high = max(top, most)
        else:
            text = f"{text}, {most / top:,.3g} times the peak" if top else text
            axes.plot([], [], color="none", label=f"↑ {text}")
        words.append(f"Reference: {text}.")
    axes.set_ylim(0, high * 1.15 / size or 1)  # 1 for a GPU that was not used
    axes.set_ylabel(f"{'GPU memory' if names[0].startswith('gpu') else 'memory'} ({unit})")
    # Above the panel: inside, the curve would run through the words.
    longest = max(len(label) for label in axes.get_legend_handles_labels()[1])
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2 if longest < 50 else 1,
        frameon=False, fontsize=8.5, borderaxespad=0.2, handlelength=1.6,
    )  # fmt: skip
    return words


def _draw_share(axes: Axes, samples: pd.DataFrame) -> str:
    name = "gpu_util_percent"
    read = samples[samples[name].notna()]
    colour, label = _LINES[name]
    axes.plot(read["time_s"], read[name], color=colour, linewidth=1.4)
    axes.set_ylim(0, 105)
    axes.set_ylabel("GPU in use (%)")
    axes.set_title(label, fontsize=8.5, loc="left")
    return f"{label}: {read[name].mean():.0f}% on average."


def _reference(axes: Axes, y: float, label: str, dashes: object) -> None:
    axes.axhline(y, color="#444444", linestyle=dashes, linewidth=1.2, zorder=1, label=label,
                 gid="reference")  # fmt: skip


def _readable(count: float) -> str:
    unit, size = next(((u, s) for u, s in _UNITS if count >= s), ("B", 1))
    return f"{count / size:,.1f} {unit}"
