"""The fastest tilings on this GPU, printed as they stand in `config.py`.

    python -m benchmarks tune                                forward, head_dim 64 and 128
    python -m benchmarks tune --direction backward --head-dim 128
    python -m benchmarks tune --direction decode --save NAME

Candidates are timed in turns on a few shapes. A candidate's score is its time over the fastest
one's, as a geometric mean over the shapes. "backward" times the whole backward pass: the tiling of
dK and dV first (kernel "keys"), then that of dQ ("queries").
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.runner import Case, check_triton, numbers, run
from benchmarks.turns import in_turns
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.autograd import backward, forward
from labsupport.attention.kernels.config import (
    HOPPER,
    Geometry,
    KernelConfig,
    decode_tiling,
    override,
    padded,
    tiling,
)
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd

KERNELS = {"forward": ("forward",), "backward": ("keys", "queries"), "decode": ("decode",)}
PLAN = ["block_q", "block_k", "warps", "stages"]
# Blocks and warps to try, and stages. A Hopper tensor-core instruction takes 64 rows for each group
# of 4 warps. In "keys" five tiles are alive at the same time, so they have to be smaller.
GRIDS: dict[str, tuple[Sequence[tuple[int, int, int]], Sequence[int]]] = {
    "forward": (
        [(q, k, w) for q, w in ((64, 4), (128, 8), (128, 4)) for k in (32, 64, 128)], (2, 3, 4)
    ),
    "keys": (
        [(32, 64, 4), (32, 128, 4), (32, 128, 8), (64, 64, 4), (64, 64, 8), (64, 128, 8),
         (128, 64, 8), (128, 128, 8)], (1, 2, 3)
    ),
    "queries": (
        [(64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 32, 8), (128, 64, 8),
         (128, 128, 8)], (2, 3, 4)
    ),
    "decode": ([(16, k, w) for k in (32, 64, 128) for w in (4, 8)], (2, 3, 4)),
}  # fmt: skip
Plans = dict[str, KernelConfig]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--direction", choices=list(KERNELS), default="forward")
    add("--head-dim", type=numbers, default=[64, 128])
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--max-seconds", type=float, default=0.15, help="for the repeats of one plan and shape")
    add("--most", type=int, default=8, help="number of plans to print")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Tune each kernel of the direction, for each head_dim.

    Returns:
        A row for each plan and shape: kernel, head_dim, block_q, block_k, warps, stages, the fields
        of `Shape`, median_ms, and ratio: over the fastest plan's median on this shape. A row with
        the status "left out" and a reason for each plan that was not timed.
    """
    check_triton(options)
    if mode.interpreted():
        raise SystemExit("needs a GPU: what is interpreted has no tiling to tune")
    device, dtype = resolve_device("cuda"), getattr(torch, options.dtype)
    chosen: dict[int, Plans] = {head_dim: {} for head_dim in options.head_dim}

    def tuned(kernel: str, head_dim: int) -> list[dict[str, Any]]:
        shapes = shapes_for(options.direction, head_dim, options.dtype)
        plans = candidates(kernel, head_dim, dtype)
        rows = time_plans(kernel, plans, shapes, device, chosen[head_dim], options.max_seconds)
        if not any("ratio" in row for row in rows):
            raise RuntimeError(f"no tiling runs: {rows[0]['reason']}")
        chosen[head_dim][kernel] = best_plan(rows)
        return rows

    cases = [
        Case({"kernel": kernel, "head_dim": head_dim}, partial(tuned, kernel, head_dim))
        for head_dim in options.head_dim
        for kernel in KERNELS[options.direction]
    ]
    return run(cases, device)


@dataclass(frozen=True)
class Shape:
    """A call to time: q (batch, seqlen, heads, head_dim), with seqlen 1 for "decode"."""

    direction: str
    head_dim: int
    dtype: str
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    causal: bool


def shapes_for(direction: str, head_dim: int, dtype: str) -> list[Shape]:
    """Representative ones: 16,384 tokens of hidden size 2048; caches of 0.25 to 2 GiB."""
    if direction == "decode":
        sizes = [(1, 65_536), (1, 262_144), (8, 32_768), (64, 4096)]
        return [Shape(direction, head_dim, dtype, b, n, 32, 8, False) for b, n in sizes]
    heads = 2048 // head_dim
    return [
        Shape(direction, head_dim, dtype, 16_384 // n, n, heads, heads, causal)
        for n in (1024, 4096, 16_384)
        for causal in (False, True)
    ]


def current(kernel: str, head_dim: int, dtype: torch.dtype) -> KernelConfig:
    """The tables' answer of today, on a GPU."""
    if kernel == "decode":
        return decode_tiling(4, head_dim, dtype)
    here = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    hopper = here and dtype != torch.float32 and head_dim in HOPPER["forward"]
    return tiling(kernel, head_dim, dtype, False, hopper=hopper)


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> list[KernelConfig]:
    """Tilings worth a try: the current one first, then `GRIDS`, halved for float32."""
    wide = 2 if max(64, padded(head_dim)) > 128 else 1
    plans = [current(kernel, head_dim, dtype)]
    for (q, k, warps), stages in itertools.product(*GRIDS[kernel]):
        if dtype == torch.float32:  # twice the room, and no tensor cores
            q, k, stages = max(16, q // 2), max(16, k // 2), max(1, stages - 1)
        plans.append(KernelConfig(q, max(16, k // wide), warps, stages))
    return list(dict.fromkeys(plans))


def make_call(shape: Shape, device: torch.device, plans: Plans) -> Callable[[], Any]:
    """The call with these tilings, on unit-normal inputs; a backward without its forward."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(seqlen: int, heads: int) -> torch.Tensor:
        size = shape.batch, seqlen, heads, shape.head_dim
        dtype = getattr(torch, shape.dtype)
        return torch.randn(size, generator=generator, dtype=dtype, device=device)

    q = draw(1 if shape.direction == "decode" else shape.seqlen, shape.heads)
    k, v = draw(shape.seqlen, shape.kv_heads), draw(shape.seqlen, shape.kv_heads)
    geometry = Geometry(shape.head_dim**-0.5, right=0 if shape.causal else -1)
    if shape.direction == "decode":
        from labsupport.attention.kernels.decode import decode

        call = partial(decode, q, k, v)
    elif shape.direction == "forward":
        call = partial(forward, q, k, v, geometry)
    else:
        dout = draw(shape.seqlen, shape.heads)
        call = partial(backward, dout, q, k, v, *forward(q, k, v, geometry), geometry)

    def planned() -> Any:
        with override(**plans):
            return call()

    return planned


def time_plans(
    kernel: str,
    plans: Sequence[KernelConfig],
    shapes: Sequence[Shape],
    device: torch.device,
    fixed: Plans,
    max_seconds: float = 0.15,
) -> list[dict[str, Any]]:
    """Time plans of one kernel; `fixed` are those of the other kernels."""
    rows = []
    for shape in shapes:
        calls = {plan: make_call(shape, device, fixed | {kernel: plan}) for plan in plans}
        times = in_turns(calls, device, max_seconds)
        fastest = min((row["median_ms"] for row in times.values() if "median_ms" in row), default=0)
        for plan, row in times.items():
            if "median_ms" in row:
                ms = {"median_ms": row["median_ms"], "ratio": row["median_ms"] / fastest}
            else:
                ms = {"status": "left out", "reason": row["reason"]}
            rows.append(asdict(plan) | asdict(shape) | ms)
    return rows


def scores(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each plan that ran every shape, the best first: score (mean ratio), worst ratio."""
    import numpy as np
    import pandas as pd

    ratios = table.dropna(subset="ratio").groupby(PLAN, sort=False).ratio
    means = ratios.apply(lambda x: float(np.exp(np.log(x).mean())))
    table = pd.DataFrame({"score": means, "worst": ratios.max()})
    return table[ratios.size() == ratios.size().max()].sort_values("score").reset_index()


def best_plan(rows: pd.DataFrame | list[dict[str, Any]]) -> KernelConfig:
    """The plan with the lowest score."""
    import pandas as pd

    return KernelConfig(*map(int, scores(pd.DataFrame(rows)).iloc[0][PLAN]))


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines, chosen = [], []
    for (head_dim, kernel), rows in table.groupby(["head_dim", "kernel"], sort=False):
        lines.append(f"\n{kernel}, head_dim {head_dim}, {options.dtype}")
        if "ratio" in rows and rows.ratio.notna().any():
            now = current(kernel, head_dim, getattr(torch, options.dtype))
            lines.append(format_scores(rows, now, options.most))
            chosen.append(f"{kernel:>8}  {max(64, padded(head_dim))}: {_text(best_plan(rows))},")
        for row in rows[rows.status != "ok"].itertuples():
            plan = _text(row) if row.status == "left out" else kernel
            lines.append(f"  {row.status}: {plan}  {row.reason}")
    return "\n".join([*lines, "", *chosen])


def format_scores(table: pd.DataFrame, now: KernelConfig, most: int) -> str:
    """The best plans with their times on each shape, and the current one, marked."""
    ranked, ran = scores(table), table[table.status == "ok"]
    labels = ran.seqlen.astype(int).astype(str) + ran.causal.map({True: " causal", False: ""})
    labels = ran.batch.astype(int).astype(str) + " x " + labels
    times = ran.assign(shape=labels).pivot(index=PLAN, columns="shape", values="median_ms")
    shown = ranked.merge(times[list(dict.fromkeys(labels))].reset_index(), on=PLAN)
    plans = [KernelConfig(*values) for values in shown[PLAN].itertuples(index=False)]
    shown.insert(0, "", ["now" if plan == now else "" for plan in plans])
    return shown[(shown.index < most) | (shown[""] == "now")].round(3).to_string(index=False)


def _text(plan: Any) -> str:
    return f"KernelConfig({plan.block_q:g}, {plan.block_k:g}, {plan.warps:g}, {plan.stages:g})"
