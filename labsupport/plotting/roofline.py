"""A roofline: speed against arithmetic intensity, under a device's two ceilings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labsupport.plotting.drawing import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#444444"


@dataclass(frozen=True)
class RoofLine:
    """One roof to draw: its name, TFLOP/s and GB/s."""

    label: str
    tflops: float
    gb_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte where the two ceilings meet."""
        return self.tflops * 1e3 / self.gb_s


def plot_roofline(
    table: pd.DataFrame, roofs: Sequence[RoofLine], *, title: str, small_print: str = ""
) -> Figure:
    """TFLOP/s against FLOPs a byte, both logarithmic; a marker a row, roofs as lines.

    Args:
        table: needs backend, intensity (FLOPs a byte) and tflops; rows without a time are left out.
        roofs: at least one; the first is drawn solid (the specified one, say), others dashed.
        title: the finding, as a sentence.

    Raises:
        ValueError: no roof, or a column is missing.
    """
    from labsupport.plotting.figure import Chart

    if missing := sorted({"backend", "intensity", "tflops"} - set(table.columns)):
        raise ValueError(f"the table lacks {', '.join(missing)}: pass what roofline() returned")
    if not roofs:
        raise ValueError("a roofline needs at least one roof")
    figure = Chart(figsize=(8.6, 5.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    measured = table[table["tflops"].notna() & (table["tflops"] > 0)]
    low = min([*measured["intensity"], *(roof.ridge for roof in roofs)]) / 3
    high = max([*measured["intensity"], *(roof.ridge for roof in roofs)]) * 3
    for number, roof in enumerate(roofs):
        _draw_roof(axes, roof, low, high, number)
    for backend in dict.fromkeys(measured["backend"]):
        colour, marker = style(backend)
        rows = measured[measured["backend"] == backend]
        axes.plot(
            rows["intensity"], rows["tflops"], marker, color=colour, label=backend, markersize=7
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_xlabel("arithmetic intensity (FLOPs a byte that must move)")
    axes.set_ylabel("speed (TFLOP/s)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.headline(textwrap.fill(title, 70), small_print)
    return figure


def _draw_roof(axes: Axes, roof: RoofLine, low: float, high: float, number: int) -> None:
    x = [low, roof.ridge, high]
    slope = roof.gb_s / 1e3
    axes.plot(
        x, [min(roof.tflops, slope * i) for i in x], color=GREY, linewidth=1.5, zorder=1,
        linestyle="-" if number == 0 else (0, (5, 2 + number)), gid="reference",
        label=f"{roof.label}: {roof.tflops:,.3g} TFLOP/s,\n{roof.gb_s:,.0f} GB/s",
    )  # fmt: skip
