"""Readable benchmark tables: ratios, columns with units, text, lines to judge by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from labsupport.profiling.grids import Case
from labsupport.profiling.units import format_bytes, format_ms, rate_prefix, three_digits

if TYPE_CHECKING:
    import pandas as pd


def speedup(table: pd.DataFrame, over: str = "standard") -> pd.DataFrame:
    """The table with a column `speedup`: the median time of `over` divided by the row's own.

    Rows are compared within the same shape, dtype, mask and direction; NaN where one of the two
    has no time.

    Raises:
        ValueError: `over` is not a backend of the table, or has two rows for one shape.

    >>> table = run_grid(grid(["standard", "sdpa_flash"], [64]), repeats=3, progress=False)
    >>> speedup(table).speedup[0]
    np.float64(1.0)
    """
    if over not in set(table["backend"]):
        raise ValueError(
            f"no row of backend {over!r}; the table has {', '.join(sorted(set(table['backend'])))}"
        )
    key = [field.name for field in fields(Case) if field.name != "backend"]
    base = table.loc[table["backend"] == over, [*key, "median_ms"]]
    if base.duplicated(key).any():
        raise ValueError(f"two rows of {over!r} for one shape: compare one run at a time")
    base = base.rename(columns={"median_ms": "base_ms"})
    merged = table.merge(base, on=key, how="left", validate="many_to_one")
    merged["speedup"] = merged["base_ms"] / merged["median_ms"]
    merged.attrs = dict(table.attrs)
    return merged.drop(columns="base_ms")


READABLE = {
    "backend": "backend",
    "seqlen": "tokens",
    "status": "status",
    "median_ms": "time, ms",
    "tflops": "FLOP/s",  # after the prefix that suits the largest
    "speedup": "speed-up",
    "peak_memory_bytes": "extra memory, MiB",
    "max_error": "max error",
    "relative_error": "relative error",
}


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that a reader looks at, with units in their names; errors as text.

    >>> table = run_grid(grid(["sdpa_flash"], [64]), repeats=3, progress=False)
    >>> "time, ms" in readable(table).columns
    True
    """
    shown = table[[name for name in READABLE if name in table]].copy()
    shown["peak_memory_bytes"] = (shown["peak_memory_bytes"] / 2**20).round(1)
    for name in ("max_error", "relative_error"):
        if name in shown and shown[name].notna().any():
            shown[name] = shown[name].map(lambda x: "" if x != x else f"{x:.1e}")
        else:
            shown = shown.drop(columns=name, errors="ignore")
    digits = {"median_ms": 3, "tflops": 3, "speedup": 2}
    names = dict(READABLE)
    if "tflops" in shown:
        prefix, size = rate_prefix(1e12 * shown["tflops"].max())
        shown["tflops"] *= 1e12 / size
        names["tflops"] = prefix + names["tflops"]
    return shown.round(digits).rename(columns=names)


def format_table(table: pd.DataFrame) -> str:
    """Return the table as aligned text for a terminal: only axes that vary get a column."""
    if table.empty:
        return "nothing was measured"
    if "standard" in set(table["backend"]) and "speedup" not in table:
        table = speedup(table)
    axes = ["batch", "heads", "kv_heads", "kv_seqlen", "head_dim", "dtype", "causal", "direction"]
    varying = [axis for axis in axes if table[axis].nunique() > 1]
    rows, prefix = [], rate_prefix(1e12 * table["tflops"].max())
    for _, row in table.iterrows():
        start = {name: str(row[name]) for name in ("backend", "seqlen", *varying)}
        rows.append(start | _cells(row, *prefix))
    shown = [name for name in rows[0] if any(row[name] != "-" for row in rows)] if rows else []
    fixed = ", ".join(f"{name} {table[name].iloc[0]}" for name in axes if name not in varying)
    device = table.attrs.get("provenance", {}).get("device", "")
    return "\n".join(
        [f"{device}; {fixed}", *aligned([shown, *([row[name] for name in shown] for row in rows)])]
    )


def _cells(row: pd.Series, prefix: str, size: float) -> dict[str, str]:
    """The measured figures of a row by column; "-" where there is none."""

    def figure(name: str, form: Callable[[float], str]) -> str:
        value = row.get(name, math.nan)
        return "-" if value is None or math.isnan(value) else form(value)

    quartiles = [figure(name, format_ms) for name in ("q1_ms", "q3_ms")]
    return {
        "median ms": figure("median_ms", format_ms),
        "IQR": "-" if "-" in quartiles else "-".join(quartiles),
        f"{prefix}FLOP/s": figure("tflops", lambda x: three_digits(1e12 * x / size)),
        "of ceiling": "-" if row.get("verdict") == "-" else figure("of_ceiling", "{:.0%}".format),
        "verdict": row.get("verdict") or "-",
        "extra memory": figure("peak_memory_bytes", format_bytes),
        "max error": figure("max_error", "{:.1e}".format),
        "vs standard": figure("speedup", "{:.2f}x".format),
        "kernel or reason": (
            row["kernel"] if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
        ),
    }


def aligned(lines: list[list[str]]) -> list[str]:
    """Rows of cells as lines with straight columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


PEER_SHAPE = ["head_dim", "causal", "seqlen"]


def compare_with_peers(
    table: pd.DataFrame, ours: str, *, column: str = "median_ms"
) -> pd.DataFrame:
    """The speed of `ours` over that of each other implementation, by shape.

    Args:
        table: a run of `python -m benchmarks peers`.
        ours: the backend in question.
        column: "median_ms", the kernels' time, or "call_ms", that of calls from Python.

    Returns:
        head_dim, causal, seqlen, pass ("forward" or "backward": forward+backward less forward), our
        TFLOP/s, and a column for each peer; NaN where one of the two did not run.
    """
    import pandas as pd

    rows = []
    for shape, group in table.groupby(PEER_SHAPE):
        ran = group[group.status == "ok"]
        times = ran.pivot(index="backend", columns="direction", values=column)
        times = times.reindex(columns=["forward", "forward+backward"])
        # The same for all implementations: from any forward row.
        flops = (ran.tflops * ran.median_ms * 1e9)[ran.direction == "forward"].mean()
        passes = {
            "forward": (times["forward"], flops),
            "backward": (times["forward+backward"] - times["forward"], 2.5 * flops),
        }
        for name, (taken, work) in passes.items():
            own = taken.get(ours, math.nan)
            row = dict(zip(PEER_SHAPE, shape, strict=True)) | {"pass": name}
            row["TFLOP/s"] = work / own / 1e9
            rows.append(row | {peer: t / own for peer, t in taken.items() if peer != ours})
    return pd.DataFrame(rows)


def geometric_means(ratios: pd.DataFrame) -> pd.DataFrame:
    """The mean ratio over all shapes, and the smallest one: a row for each pass and peer."""
    import numpy as np
    import pandas as pd

    rows = []
    for name, group in ratios.groupby("pass", sort=False):
        for peer in ratios.columns.difference([*PEER_SHAPE, "pass", "TFLOP/s"], sort=False):
            values = group[peer].dropna().to_numpy()
            if len(values):
                mean = float(np.exp(np.log(values).mean()))
                rows.append({"pass": name, "peer": peer, "mean": mean, "smallest": values.min()})
    return pd.DataFrame(rows)


def arithmetic_bound_ms(table: pd.DataFrame, tflops: float) -> Callable[[float], float]:
    """The least time, in ms, of a table's cases by length: their FLOPs at a rate in TFLOP/s.

    For `plotting.Reference`. The table holds one shape and one direction.

    Raises:
        ValueError: several shapes, or a rate that is not above 0.

    >>> table = run_grid(grid(["sdpa_flash"], [64]), repeats=3, progress=False)
    >>> arithmetic_bound_ms(table, tflops=10)(8192)  # 10 TFLOP/s
    6.871947...
    """
    if not tflops > 0:
        raise ValueError(f"tflops is {tflops}, and must be above 0")
    first = _one_shape(table)
    return lambda seqlen: replace(first, seqlen=int(seqlen), kv_seqlen=0).flops() / tflops / 1e9


def score_mib(table: pd.DataFrame) -> Callable[[float], float]:
    """The memory, in MiB, of S and P of a table's cases by length, in their dtype.

    >>> table = run_grid(grid(["sdpa_flash"], [64]), repeats=3, progress=False)
    >>> score_mib(table)(1024)  # 4 heads, float32
    32.0
    """
    first = _one_shape(table)
    entry = 2 * first.batch * first.heads * getattr(torch, first.dtype).itemsize
    return lambda seqlen: entry * seqlen**2 / 2**20


def _one_shape(table: pd.DataFrame) -> Case:
    names = [field.name for field in fields(Case)]
    fixed = [name for name in names if name not in ("backend", "seqlen", "kv_seqlen")]
    mixed = [name for name in fixed if table[name].nunique() != 1]
    if mixed:
        raise ValueError(f"the table mixes {', '.join(mixed)}: choose one shape")
    row = table.iloc[0]
    return Case(**{name: getattr(row[name], "item", lambda v=row[name]: v)() for name in names})
