"""Decoding by several libraries: one query against a long cache, and the speed of the memory.

    python -m benchmarks decode                           on this GPU
    python -m benchmarks decode --keys 32768 --save NAME  a part of it, saved

Decoding reads K and V once and computes little: memory sets the pace, so that bytes per second are
compared with the measured speed of a copy. All implementations are measured in turns, each recorded
as a CUDA graph; `flash_triton` is our forward kernel, which does not split the keys.

In Triton's interpreter the command compares results, in tiny sizes; its times mean nothing.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.runner import Call, Trial, check_triton, in_turns, names, not_measured, numbers, run
from labsupport.attention import attention, oracle_attention
from labsupport.attention.kernels import mode
from labsupport.profiling.grids import refusal
from labsupport.profiling.hardware import measured_ceilings
from labsupport.profiling.timing import resolve_device

OURS = "decode"
SDPA = ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient"]
PEERS = [*SDPA, "flex", "fa2", "fa4", "flash_triton"]
# Rounding to bfloat16 costs some thousandths; a wrong kernel is off by about as much as it returns.
LARGEST_RELATIVE_ERROR = 0.05


@dataclass(frozen=True)
class DecodeShape:
    """One query for each sequence: q (batch, 1, heads, head_dim), caches (batch, keys, ...)."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def cache_bytes(self) -> int:
        """K and V, each read once."""
        itemsize = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.keys * self.kv_heads * self.head_dim * itemsize


def add_options(parser: argparse.ArgumentParser) -> None:
    slow = mode.interpreted()
    add = parser.add_argument
    add("--peers", type=names, default=PEERS, help="comma-separated backends")
    add("--keys", type=numbers, default=[200, 512] if slow else [2**n for n in range(15, 20)])
    add("--batch", type=numbers, default=[1, 2] if slow else [1, 8])
    add("--max-seconds", type=float, default=0.3, help="for the repeats of one row")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Measure each implementation on each shape.

    Returns:
        A row each: the fields of `DecodeShape`, implementation, status (also "wrong"), reason,
        relative_error (of the first group of heads, against the float64 oracle), times as in
        `in_turns`, cache_bytes, gb_s (10^9 bytes of cache a second), of_copy (over a measured copy,
        on a GPU), times_sdpa (how many times as fast as the fastest SDPA backend).
    """
    check_triton(options)
    device = resolve_device(options.device)
    copy = measured_ceilings(str(device)).copy_gb_s if device.type == "cuda" else math.nan
    sizes = (4, 2, 16, "float32") if mode.interpreted() else (32, 8, 128, "bfloat16")
    shapes = [DecodeShape(b, n, *sizes) for b, n in itertools.product(options.batch, options.keys)]
    wanted = [OURS, *(name for name in options.peers if name != OURS)]
    cases = [
        Trial(asdict(shape), partial(_measure_shape, shape, wanted, device, options.max_seconds))
        for shape in shapes
    ]
    table = run(cases, device, seed=0, copy_gb_s=copy, interpreted=mode.interpreted())
    if "median_ms" not in table:
        return table
    table["gb_s"] = table.cache_bytes / table.median_ms / 1e6
    table["of_copy"] = table.gb_s / copy
    sdpa = table.median_ms.where(table.implementation.isin(SDPA))
    fastest = sdpa.groupby([table["batch"], table["keys"]]).transform("min")
    table["times_sdpa"] = fastest / table.median_ms
    return table


def means_of(table: pd.DataFrame) -> pd.DataFrame:
    """Geometric means of each implementation over the shapes that it ran, a row each.

    Column ours: how many times as fast as it `decode` is, over the shapes that both ran.
    """
    ran = table[table.status == "ok"]
    own = ran.median_ms.where(ran.implementation == OURS).groupby([ran["batch"], ran["keys"]])
    ran = ran.assign(ours=ran.median_ms / own.transform("min"))
    logs = ran[["gb_s", "of_copy", "times_sdpa", "ours"]].apply(np.log)
    means = logs.groupby(ran.implementation, sort=False).mean()
    return means.apply(np.exp).reset_index()


def decode(q: Tensor, k: Tensor, v: Tensor) -> Any:
    from labsupport.attention.kernels.decode import decode as kernel  # defines kernels

    return kernel(q, k, v)


def _measure_shape(
    shape: DecodeShape, names: Sequence[str], device: torch.device, max_seconds: float
) -> list[dict[str, Any]]:
    # Unit normal, drawn on the device: a cache of gigabytes would take minutes on a CPU.
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, shape.dtype), "device": device}
    cache = shape.batch, shape.keys, shape.kv_heads, shape.head_dim
    q = torch.randn(shape.batch, 1, shape.heads, shape.head_dim, generator=generator, **options)
    k, v = (torch.randn(cache, generator=generator, **options) for _ in range(2))
    group = shape.heads // shape.kv_heads
    # Heads that share keys are the queries of one head here.
    exact, _ = oracle_attention(q[0, 0, :group], k[0, :, 0], v[0, :, 0])
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name in names:
        rows[name] = {"implementation": name, "cache_bytes": shape.cache_bytes, "in_graph": False}
        call: Call = partial(attention, q, k, v, backend=name, check_layout=False)
        call = partial(decode, q, k, v) if name == OURS else call
        try:
            error = call()[0, 0, :group].double() - exact
        except Exception as problem:
            rows[name] |= refusal(problem)
            continue
        rows[name]["relative_error"] = relative = float(error.norm() / exact.norm())
        if relative <= LARGEST_RELATIVE_ERROR:  # not NaN either
            calls[name] = call
        else:
            rows[name] |= {"status": "wrong", "reason": "differs from the float64 oracle"}
    measured = in_turns(calls, device, max_seconds)
    return [row | measured.get(name, {}) for name, row in rows.items()]


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    record, shape = table.attrs["provenance"], table.iloc[0]
    lines = [
        f"{record['device']}: one query, {shape.heads} heads over {shape.kv_heads}, caches of",
        f"head_dim {shape.head_dim} in {shape['dtype']}; a copy: {record['copy_gb_s']:.0f} GB/s",
    ]
    if mode.interpreted():
        lines.append("The kernels are interpreted: compare the errors; the times mean nothing.")
    ran = table[table.status == "ok"]
    if len(ran):
        columns = ["batch", "keys", "implementation", "median_ms", "q1_ms", "q3_ms", "gb_s"]
        shown = ran[[*columns, "of_copy", "times_sdpa", "in_graph"]].round(3)
        shown["relative_error"] = ran.relative_error.map("{:.1e}".format)
        lines.append(shown.to_string(index=False, na_rep="-"))
        lines.append(means_of(table).round(3).to_string(index=False, na_rep="-"))
    return "\n".join(lines + not_measured(table, "implementation"))
