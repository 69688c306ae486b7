"""Charts from benchmark tables.

Solid lines are the reader's own run, dashed lines with hollow markers are recorded ones. A case
that ran out of memory is a cross at its length, at the top of the chart. Small print names device
and date. The functions take DataFrames as `labsupport.profiling.benchmark.run_grid` returns them,
one shape family at a time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labsupport.plotting.drawing import (
    Reference,
    add_legend,
    draw_out_of_memory,
    draw_references,
    draw_series,
    finish_axes,
    finish_y_axis,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# What a chart draws along its x axis or as its lines; everything else must be the same throughout.
_SHAPE = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal")


def plot_time(
    table: pd.DataFrame,
    *,
    title: str,
    recorded: pd.DataFrame | None = None,
    references: Sequence[Reference] = (),
) -> Figure:
    """Median time in ms against sequence length, with a band from the first to the third quartile.

    Args:
        table: the run to draw.
        title: the finding, as a sentence.
        recorded: another run, drawn dashed and labelled "recorded".
        references: lines to judge by, in ms.

    Raises:
        ValueError: the table mixes shapes, dtypes or masks, or lacks a column.
    """
    return _plot(table, recorded, "median_ms", "time (ms)", title, references, band=True)


def plot_memory(
    table: pd.DataFrame,
    *,
    title: str,
    recorded: pd.DataFrame | None = None,
    references: Sequence[Reference] = (),
    label: str = "peak extra memory (MiB)",
) -> Figure:
    """Peak extra memory in MiB against sequence length.

    Arguments and errors as `plot_time`; `label` says what is counted, if it is not extra memory.
    """
    scale = 2**-20
    return _plot(table, recorded, "peak_memory_bytes", label, title, references, scale=scale)


def plot_error(
    table: pd.DataFrame,
    *,
    title: str,
    recorded: pd.DataFrame | None = None,
    references: Sequence[Reference] = (),
    column: str = "max_error",
) -> Figure:
    """Error against the float64 oracle; `column` is "max_error" or "relative_error".

    Arguments and errors as `plot_time`.
    """
    labels = {"max_error": "largest absolute error", "relative_error": "relative error (norm)"}
    if column not in labels:
        raise ValueError(f"column must be one of {', '.join(labels)}, not {column!r}")
    return _plot(table, recorded, column, labels[column], title, references)


def plot_speedup(
    table: pd.DataFrame,
    *,
    title: str,
    over: str = "standard",
    recorded: pd.DataFrame | None = None,
    references: Sequence[Reference] = (),
) -> Figure:
    """Speed relative to `over` against sequence length; needs a column `speedup`.

    The table is that of `labsupport.profiling.tables.speedup`.  Other arguments and errors as
    `plot_time`.
    """
    lines = [Reference(f"as fast as {over}", 1.0), *references]
    return _plot(table, recorded, "speedup", f"times as fast as {over}", title, lines)


def _plot(
    table: pd.DataFrame,
    recorded: pd.DataFrame | None,
    column: str,
    ylabel: str,
    title: str,
    references: Sequence[Reference],
    *,
    scale: float = 1.0,
    band: bool = False,
) -> Figure:
    from labsupport.plotting.figure import Chart

    runs = [table] if recorded is None else [table, recorded]
    for run in runs:
        _check(run, column)
    directions = list(dict.fromkeys(d for run in runs for d in run["direction"]))
    figure = Chart(figsize=(2.8 + 5.0 * len(directions), 4.8), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for axes, direction in zip(panels, directions, strict=True):
        lengths: set[float] = set()
        for i, run in enumerate(runs):
            rows = run[run["direction"] == direction]
            lengths |= set(rows["seqlen"])
            is_recorded = i == 1 or _is_recorded(run)
            for backend in dict.fromkeys(rows["backend"]):
                series = rows[rows["backend"] == backend].sort_values("seqlen")
                draw_series(axes, series, backend, column, scale, band, is_recorded)
        draw_references(axes, references, sorted(lengths))
        finish_axes(axes, sorted(lengths), direction if len(directions) > 1 else "")
        for i, run in enumerate(runs):
            rows = run[run["direction"] == direction]
            draw_out_of_memory(axes, rows, i == 1 or _is_recorded(run))
    panels[0].set_ylabel(ylabel)
    finish_y_axis(panels)
    add_legend(figure, panels)
    width = int(figure.get_size_inches()[0] * 9)
    small = "\n".join(textwrap.fill(_small_print(run), int(width * 1.6)) for run in runs)
    figure.headline(textwrap.fill(title, int(width * 0.7)), small)
    return figure


def _check(run: pd.DataFrame, column: str) -> None:
    needed = {"backend", "seqlen", "direction", "status", column}
    if missing := sorted(needed - set(run.columns)):
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


def _is_recorded(run: pd.DataFrame) -> bool:
    return bool(run.attrs.get("provenance", {}).get("recorded"))


def _small_print(run: pd.DataFrame) -> str:
    record = run.attrs.get("provenance", {})
    parts = [f"recorded run {record['run']}" if record.get("run") else ""]
    parts += [str(record.get("device", "device unknown")), str(record.get("date", ""))[:10]]
    if torch_version := record.get("versions", {}).get("torch"):
        parts.append(f"torch {torch_version}")
    words = {"batch": "batch {}", "heads": "{} heads", "head_dim": "head_dim {}", "dtype": "{}"}
    for name, text in words.items():
        if name in run and len(run):
            parts.append(text.format(run[name].iloc[0]))
    if "causal" in run and len(run):
        parts.append("causal" if run["causal"].iloc[0] else "not causal")
    return ", ".join(part for part in parts if part)
