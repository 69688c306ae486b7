"""What a reader wants from a benchmark's table: ratios, readable columns, lines to judge by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from labsupport.profiling.cases import Case

if TYPE_CHECKING:
    import pandas as pd


def speedup(table: pd.DataFrame, over: str = "standard") -> pd.DataFrame:
    """The table with a column `speedup`: the median time of `over` divided by the row's own.

    Rows are compared within the same shape, dtype, mask and direction; NaN where one of the two
    has no time.

    Raises:
        ValueError: `over` is not a backend of the table, or has two rows for one shape.
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
    "tflops": "TFLOP/s",
    "speedup": "speed-up",
    "peak_memory_bytes": "extra memory, MiB",
    "max_error": "max error",
    "relative_error": "relative error",
}


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that a reader looks at, with units in their names; errors as text."""
    shown = table[[name for name in READABLE if name in table]].copy()
    shown["peak_memory_bytes"] = (shown["peak_memory_bytes"] / 2**20).round(1)
    for name in ("max_error", "relative_error"):
        if name in shown and shown[name].notna().any():
            shown[name] = shown[name].map(lambda x: "" if x != x else f"{x:.1e}")
        else:
            shown = shown.drop(columns=name, errors="ignore")
    digits = {"median_ms": 3, "tflops": 2, "speedup": 2}
    return shown.round(digits).rename(columns=READABLE)


def arithmetic_bound_ms(table: pd.DataFrame, tflops: float) -> Callable[[float], float]:
    """The least time, in ms, of a table's cases by length: their FLOPs at a rate in TFLOP/s.

    For `plotting.Reference`. The table holds one shape and one direction.
    """
    first = _one_shape(table)
    return lambda seqlen: replace(first, seqlen=int(seqlen), kv_seqlen=0).flops() / tflops / 1e9


def score_mib(table: pd.DataFrame) -> Callable[[float], float]:
    """The memory, in MiB, of S and P of a table's cases by length, in their dtype."""
    first = _one_shape(table)
    entry = 2 * first.batch * first.heads * getattr(torch, first.dtype).itemsize
    return lambda seqlen: entry * seqlen**2 / 2**20


def _one_shape(table: pd.DataFrame) -> Case:
    names = [field.name for field in fields(Case)]
    fixed = [name for name in names if name not in ("backend", "seqlen", "kv_seqlen")]
    mixed = [name for name in fixed if table[name].nunique() != 1]
    if mixed:
        raise ValueError(f"the table mixes {', '.join(mixed)}: take one shape at a time")
    row = table.iloc[0]
    return Case(**{name: getattr(row[name], "item", lambda v=row[name]: v)() for name in names})
