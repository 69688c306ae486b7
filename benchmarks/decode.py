"""Decoding beside the others: how near to the memory's speed is one query against a long cache?

python -m benchmarks.decode                           on this GPU
python -m benchmarks.decode --keys 32768 --save NAME  a part of it, kept

Decoding reads K and V once and computes little, so the time that memory needs for them is the
least possible one. Bytes per second are compared with the measured speed of a copy, which reads and
writes; what only reads can be a little faster. All implementations are measured in turns, each
recorded as a CUDA graph; `flash_triton` is our forward kernel, which does not share out the keys.

In Triton's interpreter the command compares results, in tiny sizes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    attention,
    oracle_attention,
)
from labsupport.attention.flash_triton import mode
from labsupport.attention.flash_triton.launch_decode import decode
from labsupport.profiling.graphs import captured
from labsupport.profiling.hardware import measured_ceilings
from labsupport.profiling.provenance import provenance
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.timing import measure_interleaved, resolve_device
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

OURS = "decode"
SDPA = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
PEERS = (*SDPA, "flex", "fa2", "fa4", "flash_triton")
# Rounding to bfloat16 costs some thousandths; a wrong kernel is off by about as much as it returns.
LARGEST_RELATIVE_ERROR = 0.05


@dataclass(frozen=True)
class DecodeShape:
    """One query for each sequence: q (batch, 1, heads, head_dim), caches (batch, keys, ...)."""

    batch: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def cache_bytes(self) -> int:
        """K and V, each read once."""
        itemsize = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.keys * self.kv_heads * self.head_dim * itemsize


def measure_decoding(
    shapes: Iterable[DecodeShape],
    names: Sequence[str] = (OURS, *PEERS),
    *,
    device: torch.device | str | None = None,
    max_seconds: float = 0.3,
    seed: int = 0,
) -> pd.DataFrame:
    """Measure each implementation on each shape; a row each, with provenance in `.attrs`.

    Args:
        shapes: what to measure; those that do not fit into memory become rows that say so.
        names: "decode" (ours) and backends of `labsupport.attention.attention`.
        device: by default the current GPU if there is one, else the CPU.
        max_seconds: for the repeats of one implementation on one shape.

    Returns:
        The fields of `DecodeShape`, implementation, status ("ok", "unsupported", "out of memory",
        "wrong", "failed"), reason, in_graph, relative_error (of the first group of heads, against
        the float64 oracle), median_ms, q1_ms, q3_ms, repeats, cache_bytes, gb_s (10^9 bytes of
        cache a second), of_copy (over the measured copy), times_sdpa (how many times as fast as
        the fastest SDPA backend). On a CPU of_copy is missing.
    """
    import pandas as pd

    where = resolve_device(device)
    copy = measured_ceilings(str(where)).copy_gb_s if where.type == "cuda" else math.nan
    record = provenance(where, seed=seed, copy_gb_s=copy, interpreted=mode.interpreted())
    rows = []
    for shape in shapes:
        rows += _measure_shape(shape, names, where, max_seconds, seed)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()
    table = pd.DataFrame(rows, columns=COLUMNS)
    table["gb_s"] = table.cache_bytes / table.median_ms / 1e6
    table["of_copy"] = table.gb_s / copy
    best = table[table.implementation.isin(SDPA)].groupby(["batch", "keys"]).median_ms.min()
    fastest = [best.get((row.batch, row.keys), math.nan) for row in table.itertuples()]
    table["times_sdpa"] = pd.Series(fastest, index=table.index, dtype=float) / table.median_ms
    table.attrs["provenance"] = record
    return table


COLUMNS = [
    *("batch", "keys", "heads", "kv_heads", "head_dim", "dtype"),
    *("implementation", "status", "reason", "in_graph", "relative_error"),
    *("median_ms", "q1_ms", "q3_ms", "repeats", "cache_bytes"),
]


def geometric_means(table: pd.DataFrame) -> pd.DataFrame:
    """Of each implementation, over the shapes that it ran: a row each.

    Returns:
        implementation, shapes, gb_s, of_copy, times_sdpa, and ours: how many times as fast as it
        `decode` is, over the shapes that both ran.
    """
    import numpy as np
    import pandas as pd

    def mean(values: pd.Series) -> float:
        values = values.dropna()
        return float(np.exp(np.log(values).mean())) if len(values) else math.nan

    ran = table[table.status == "ok"]
    times = ran.pivot(index=["batch", "keys"], columns="implementation", values="median_ms")
    rows = []
    for name, group in ran.groupby("implementation", sort=False):
        row: dict[str, Any] = {"implementation": name, "shapes": len(group)}
        row |= {column: mean(group[column]) for column in ("gb_s", "of_copy", "times_sdpa")}
        row["ours"] = mean(times[name] / times[OURS]) if OURS in times else math.nan
        rows.append(row)
    return pd.DataFrame(rows)


def _measure_shape(
    shape: DecodeShape, names: Sequence[str], device: torch.device, max_seconds: float, seed: int
) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {
        name: asdict(shape) | {"implementation": name, "cache_bytes": shape.cache_bytes}
        for name in names
    }
    if reason := _shortage(shape, device):
        return [row | {"status": "out of memory", "reason": reason} for row in rows.values()]
    q, k, v = _inputs(shape, device, seed)
    group = shape.heads // shape.kv_heads
    # Heads that share keys are the queries of one head here.
    exact, _ = oracle_attention(q[0, 0, :group], k[0, :, 0], v[0, :, 0])
    calls = {}
    for name, row in rows.items():
        row |= {"status": "ok", "reason": "", "in_graph": False}
        try:
            call = _implementation(name, q, k, v)
            error = call()[0, 0, :group].double() - exact
            row["relative_error"] = float(error.norm() / exact.norm())
            if not row["relative_error"] <= LARGEST_RELATIVE_ERROR:  # NaN is wrong, too
                row |= {"status": "wrong", "reason": "differs from the float64 oracle"}
                continue
            calls[name], row["in_graph"] = captured(call, device)
        except BackendUnavailableError as problem:
            row |= {
                "status": "unsupported",
                "reason": "; ".join(itertools.chain(*problem.reasons.values())),
            }
        except AttentionInputError as problem:
            row |= {"status": "unsupported", "reason": _one_line(problem)}
        except torch.OutOfMemoryError as problem:
            row |= {"status": "out of memory", "reason": _one_line(problem)}
        except Exception as problem:
            row |= {"status": "failed", "reason": f"{type(problem).__name__}: {_one_line(problem)}"}
    if calls:
        timings = measure_interleaved(
            calls,
            device=device,
            warmup=1,
            min_repeats=3,
            min_seconds=0.0,
            max_seconds=max_seconds * len(calls),
        )
        for name, timing in timings.items():
            rows[name] |= {f"{part}_ms": getattr(timing, part) for part in ("median", "q1", "q3")}
            rows[name]["repeats"] = timing.repeats
    return list(rows.values())


def _implementation(name: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def ours() -> Tensor:
        return decode(q, k, v)

    def theirs() -> Any:
        return attention(q, k, v, backend=name, check_layout=False)

    return ours if name == OURS else theirs


def _inputs(shape: DecodeShape, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unit normal, drawn on the device: a cache of gigabytes would take minutes on a CPU."""
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"dtype": getattr(torch, shape.dtype), "device": device}
    cache = shape.batch, shape.keys, shape.kv_heads, shape.head_dim
    q = torch.randn(shape.batch, 1, shape.heads, shape.head_dim, generator=generator, **options)
    k, v = (torch.randn(cache, generator=generator, **options) for _ in range(2))
    return q, k, v


def _shortage(shape: DecodeShape, device: torch.device) -> str:
    """Why the caches do not fit beside 2 GiB for everything else; empty if they do."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        free = psutil.virtual_memory().available
    needed = shape.cache_bytes + 2 * 2**30
    if needed <= free:
        return ""
    return f"needs {format_bytes(needed)}, {format_bytes(free)} free"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__.split("\n")[0]
    )
    slow = mode.interpreted()
    add = parser.add_argument
    add("--peers", type=_names, default=list(PEERS), help="comma-separated backends")
    add("--keys", type=_ints, default=[200, 512] if slow else [2**n for n in range(15, 20)])
    add("--batch", type=_ints, default=[1, 2] if slow else [1, 8])
    add("--heads", type=int, default=8 if slow else 32)
    add("--kv-heads", type=int, default=2 if slow else 8)
    add("--head-dim", type=int, default=64 if slow else 128)
    add("--dtype", default="float32" if slow else "bfloat16")
    add("--device", help="cpu or cuda; default: the GPU if there is one")
    add("--max-seconds", type=float, default=0.3, help="for the repeats of one row")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    if (reason := mode.missing()) is not None:
        parser.error(reason)
    if slow and options.save:
        parser.error("the kernels are interpreted here: such times are not worth keeping")
    sizes = options.heads, options.kv_heads, options.head_dim, options.dtype
    table = measure_decoding(
        [DecodeShape(b, n, *sizes) for b, n in itertools.product(options.batch, options.keys)],
        [OURS, *(name for name in options.peers if name != OURS)],
        device=options.device,
        max_seconds=options.max_seconds,
    )
    record = table.attrs["provenance"]
    print(
        f"{record['device']}: one query, {options.heads} heads over {options.kv_heads}, caches of"
    )
    print(f"head_dim {options.head_dim} in {options.dtype}; a copy: {record['copy_gb_s']:.0f} GB/s")
    if slow:
        print("The kernels are interpreted: compare the errors; the times mean nothing.")
    print(format_table(table))
    print(geometric_means(table).round(3).to_string(index=False, na_rep="-"))
    save_if_asked(table, options)


def format_table(table: pd.DataFrame) -> str:
    """The rows that ran as a table, and a line for each that did not."""
    ran = table[table.status == "ok"]
    shown = ran[["batch", "keys", "implementation", "median_ms", "q1_ms", "q3_ms"]].copy()
    shown["cache, MiB"] = ran.cache_bytes / 2**20
    shown["GB/s"], shown["of copy"], shown["times SDPA"] = ran.gb_s, ran.of_copy, ran.times_sdpa
    shown["graph"] = ran.in_graph.map({True: "yes", False: "no"})
    shown["rel. error"] = ran.relative_error.map("{:.1e}".format)
    lines = [shown.round(3).to_string(index=False, na_rep="-")]
    others = table[table.status != "ok"].groupby(["implementation", "status", "reason"], sort=False)
    for (name, status, reason), group in others:
        shapes = ", ".join(f"{row.batch} x {row.keys}" for row in group.itertuples())
        lines.append(f"{name}: {status} for {shapes} keys: {reason}")
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ints(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
