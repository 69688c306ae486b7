"""Memory during one call, one curve for each backend."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.plotting.figure import Chart

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def memory_chart(curves: dict[str, pd.DataFrame], *, title: str, small_print: str) -> Chart:
    """Extra memory against the share of the call that has passed.

    Args:
        curves: by backend, the tables that `Trace.memory` returns: time_ms and extra_bytes.
        title: the finding, as a sentence.
        small_print: shape, device and date.
    """
    from labsupport.plotting import Chart, style

    figure = Chart(figsize=(8.6, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    top = max(1.0, *(float(curve["extra_bytes"].max()) for curve in curves.values()))
    unit, size = next(((u, s) for u, s in _UNITS if top >= s), _UNITS[-1])
    words = [f"{title.rstrip('.')}."]
    for name, curve in curves.items():
        colour, marker = style(name)
        lasted = float(curve["time_ms"].iloc[-1]) or 1.0
        peak = float(curve["extra_bytes"].max())
        at = curve.loc[curve["extra_bytes"].idxmax()]
        label = f"{name}: {format_bytes(peak)}"
        axes.step(
            100 * curve["time_ms"] / lasted,
            curve["extra_bytes"] / size,
            where="post",
            color=colour,
            linewidth=1.8,
        )
        axes.plot(
            [100 * at["time_ms"] / lasted],
            [peak / size],
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=1.8,
            label=label,
        )
        kept = format_bytes(float(curve["extra_bytes"].iloc[-1]))
        words.append(f"{label} at the peak, {kept} at the end.")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, top * 1.12 / size)
    axes.set_xlabel("share of the call that has passed (%)")
    axes.set_ylabel(f"memory beyond the inputs ({unit})")
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8.5,
        borderaxespad=0.2, handlelength=1.6,
    )  # fmt: skip
    figure.headline(textwrap.fill(title, 76), textwrap.fill(small_print, 130))
    figure.description = " ".join(words)
    return figure
