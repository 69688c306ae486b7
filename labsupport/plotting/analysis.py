"""Predictions beside measurements: how long a call would take, device by device."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.plotting.figure import Chart

_PREDICTED, _MEASURED = "#0072B2", "#D55E00"


def plot_predictions(table: pd.DataFrame, *, title: str, small_print: str = "") -> Chart:
    """Predicted times with their intervals, a row for each device, from above to below.

    Args:
        table: columns device, ms, low_ms, high_ms (the interval); measured_ms, bound_ms (the least
            time by the specification) may be there, NaN where there is none.
        title: the finding, as a sentence.
        small_print: the case, and what the predictions rest on.

    Raises:
        ValueError: a column is missing, or there is no row.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from labsupport.plotting.figure import Chart

    needed = ("device", "ms", "low_ms", "high_ms")
    if missing := [name for name in needed if name not in table]:
        raise ValueError(f"the table lacks {', '.join(missing)}: one row a device is needed")
    if table.empty:
        raise ValueError("there is no prediction to draw")
    figure = Chart(figsize=(8.8, 1.9 + 0.36 * len(table)), dpi=110, layout="constrained")
    axes = figure.subplots()
    rows = range(len(table))
    axes.hlines(rows, table["low_ms"], table["high_ms"], color=_PREDICTED, linewidth=5, alpha=0.35,
                label="90% of measurements are expected here")  # fmt: skip
    axes.plot(table["ms"], rows, "o", color=_PREDICTED, label="predicted")
    if "bound_ms" in table:
        axes.plot(table["bound_ms"], rows, "|", color="#444444", markersize=13, gid="reference",
                  label="least time by the specification")  # fmt: skip
    if "measured_ms" in table and table["measured_ms"].notna().any():
        axes.plot(table["measured_ms"], rows, "D", color=_MEASURED, label="measured")
    axes.set_yticks(list(rows), list(table["device"]))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time (ms)")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    figure.headline(textwrap.fill(title, 60), textwrap.fill(small_print, 130))
    figure.description = f"{title.rstrip('.')}. " + "; ".join(map(_words, table.to_dict("records")))
    return figure


def _words(row: dict) -> str:
    text = f"{row['device']}: {row['ms']:.3g} ms, from {row['low_ms']:.3g} to {row['high_ms']:.3g}"
    for column, word in (("bound_ms", "at least"), ("measured_ms", "measured")):
        value = row.get(column)
        if value is not None and value == value:
            text += f", {word} {value:.3g}"
    return text
