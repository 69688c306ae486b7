"""Memory over time: of the processes and, on a GPU, of the device, with its utilisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labsupport.plotting.drawing import BLUE, GREEN, GREY, RED, SKY, plain
from labsupport.plotting.figure import Chart

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# column: (panel, colour, words)
_LINES = {
    "rss_bytes": ("memory", BLUE, "resident memory"),
    "gpu_tree_bytes": ("GPU memory", RED, "GPU memory of these processes"),
    "gpu_used_bytes": ("GPU memory", SKY, "GPU memory of all processes"),
    "gpu_util_percent": ("GPU in use", GREEN, "share of time in which some kernel ran"),
}
_NEAR = 3.0  # a limit is a line in the panel if it is at most this many times the peak
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def plot_monitor(
    samples: pd.DataFrame,
    *,
    title: str,
    limit: tuple[str, float] | None = None,
    gpu_limit: tuple[str, float] | None = None,
    small_print: str = "",
) -> Chart:
    """Memory against time.

    Args:
        samples: columns time_s and rss_bytes, and whichever of gpu_tree_bytes, gpu_used_bytes,
            gpu_util_percent were read.
        title: the finding, as a sentence.
        limit: what the memory is judged by: its name, and bytes. A line if it is near, else words.
        gpu_limit: the same for the GPU's memory.
        small_print: device, date, and how it was sampled.
    """
    panels: dict[str, list[str]] = {}
    for column, (panel, _, _) in _LINES.items():
        if column in samples and samples[column].notna().any():
            panels.setdefault(panel, []).append(column)
    figure = Chart(figsize=(8.6, 1.7 + 3.1 * len(panels)))
    words: list[str] = []
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (panel, columns) in zip(all_axes, panels.items(), strict=True):
        plain(axes)
        axes.set_xlim(left=0)
        if panel == "GPU in use":
            read = samples[samples[columns[0]].notna()]
            _, colour, label = _LINES[columns[0]]
            axes.plot(read["time_s"], read[columns[0]], color=colour, linewidth=1.4)
            axes.set(ylim=(0, 105), ylabel="GPU in use (%)")
            axes.set_title(label, fontsize=8.5, loc="left")
            words.append(f"{label}: {read[columns[0]].mean():.0f}% on average.")
        else:
            most = gpu_limit if panel == "GPU memory" else limit
            words += _draw_memory(axes, samples, panel, columns, most)
    all_axes[-1].set_xlabel("time since the start (s)")
    figure.say(title, small_print, words, wrap=76)
    return figure


def _draw_memory(
    axes: Axes,
    samples: pd.DataFrame,
    panel: str,
    columns: list[str],
    limit: tuple[str, float] | None,
) -> list[str]:
    top = high = max(float(samples[name].max()) for name in columns)
    unit, size = next((u, s) for u, s in _UNITS if top >= s or s == 1)
    words = []
    for name in columns:
        read = samples[samples[name].notna()]
        _, colour, label = _LINES[name]
        peak, when = float(read[name].max()), read["time_s"][read[name].idxmax()]
        label = f"{label}: peak {_readable(peak)} at {when:,.1f} s"
        axes.plot(read["time_s"], read[name] / size, color=colour, linewidth=1.8, label=label)
        axes.plot([when], [peak / size], color=colour, marker="o")
        words.append(f"{label}, {_readable(read[name].iloc[-1])} at the end.")
    if limit is not None and limit[1] > 0:
        label = f"{limit[0]}: {_readable(limit[1])}"
        if limit[1] <= _NEAR * top:
            high, y = max(top, limit[1]), limit[1] / size
            axes.axhline(y, color=GREY, linestyle="--", linewidth=1.2, label=label, gid="reference")
            words.append(f"Reference: {label}.")
        else:
            axes.plot([], [], color="none", label=f"↑ {label}")
            words.append(f"Far above: {label}.")
    axes.set_ylim(0, high * 1.15 / size or 1)  # 1 for a GPU that was not used
    axes.set_ylabel(f"{panel} ({unit})")
    # Above the panel: inside, the curve would run through the words.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8.5)
    return words


def _readable(count: float) -> str:
    unit, size = next((u, s) for u, s in _UNITS if count >= s or s == 1)
    return f"{count / size:,.1f} {unit}"
