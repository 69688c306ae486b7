"""The fastest tilings on this GPU, printed as they stand in `config.py`.

    python -m benchmarks tune                                forward, head_dim 64 and 128
    python -m benchmarks tune --direction backward --head-dim 128 --save NAME

Candidates are timed in turns on a few shapes. A candidate's score is its time over the fastest
one's, as a geometric mean over the shapes. "backward" times the whole backward pass: the tiling of
dK and dV first (kernel "keys"), then that of dQ ("queries").
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.runner import Call, Trial, check_triton, in_turns, numbers, run
from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.autograd import backward, forward
from labsupport.attention.kernels.config import (
    HOPPER,
    KernelConfig,
    override,
    padded,
    tiling,
)
from labsupport.profiling.timing import resolve_device

KERNELS = {"forward": ("forward",), "backward": ("keys", "queries")}
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
}  # fmt: skip
Plans = dict[str, KernelConfig]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--direction", choices=list(KERNELS), default="forward")
    add("--head-dim", type=numbers, default=[64, 128])
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
    device = resolve_device("cuda")
    chosen: dict[int, Plans] = {head_dim: {} for head_dim in options.head_dim}

    def tuned(kernel: str, head_dim: int) -> list[dict[str, Any]]:
        shapes = shapes_for(options.direction, head_dim)
        plans = candidates(kernel, head_dim)
        rows = time_plans(kernel, plans, shapes, device, chosen[head_dim], options.max_seconds)
        if not any("ratio" in row for row in rows):
            raise RuntimeError(f"no tiling runs: {rows[0]['reason']}")
        chosen[head_dim][kernel] = best_plan(rows)
        return rows

    cases = [
        Trial({"kernel": kernel, "head_dim": head_dim}, partial(tuned, kernel, head_dim))
        for head_dim in options.head_dim
        for kernel in KERNELS[options.direction]
    ]
    return run(cases, device)


@dataclass(frozen=True)
class Shape:
    """A call to time: q, k and v (batch, seqlen, heads, head_dim)."""

    direction: str
    head_dim: int
    batch: int
    seqlen: int
    heads: int
    causal: bool
    dtype: str = "bfloat16"


def shapes_for(direction: str, head_dim: int) -> list[Shape]:
    """Representative ones: 16,384 tokens of hidden size 2048."""
    return [
        Shape(direction, head_dim, 16_384 // n, n, 2048 // head_dim, causal)
        for n in (1024, 4096, 16_384)
        for causal in (False, True)
    ]


def current(kernel: str, head_dim: int) -> KernelConfig:
    """The tables' answer of today, on a GPU."""
    here = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    hopper = here and head_dim in HOPPER["forward"]
    return tiling(kernel, head_dim, torch.bfloat16, False, hopper=hopper)


def candidates(kernel: str, head_dim: int) -> list[KernelConfig]:
    """Tilings worth a try: the current one first, then `GRIDS`."""
    wide = 2 if padded(head_dim) > 128 else 1
    plans = [current(kernel, head_dim)]
    for (q, k, warps), stages in itertools.product(*GRIDS[kernel]):
        plans.append(KernelConfig(q, max(16, k // wide), warps, stages))
    return list(dict.fromkeys(plans))


def make_call(shape: Shape, device: torch.device, plans: Plans) -> Call:
    """The call with these tilings, on unit-normal inputs; a backward without its forward."""
    generator = torch.Generator(device).manual_seed(0)
    size = shape.batch, shape.seqlen, shape.heads, shape.head_dim
    options = {"dtype": getattr(torch, shape.dtype), "device": device}
    q, k, v, dout = (torch.randn(size, generator=generator, **options) for _ in range(4))
    attention = AttentionCall(q, k, v, causal=shape.causal)
    call = partial(forward, attention)
    if shape.direction == "backward":
        call = partial(backward, attention, dout, *call())

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
    max_seconds: float,
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
    ratios = table.dropna(subset="ratio").groupby(PLAN, sort=False).ratio
    means = ratios.apply(lambda x: float(np.exp(np.log(x).mean())))
    table = pd.DataFrame({"score": means, "worst": ratios.max()})
    return table[ratios.size() == ratios.size().max()].sort_values("score").reset_index()


def best_plan(rows: pd.DataFrame | list[dict[str, Any]]) -> KernelConfig:
    """The plan with the lowest score."""
    return KernelConfig(*map(int, scores(pd.DataFrame(rows)).iloc[0][PLAN]))


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines, chosen = [], []
    for (head_dim, kernel), rows in table.groupby(["head_dim", "kernel"], sort=False):
        lines.append(f"\n{kernel}, head_dim {head_dim}")
        if "ratio" in rows and rows.ratio.notna().any():
            lines.append(format_scores(rows, current(kernel, head_dim), options.most))
            chosen.append(f"{kernel:>8}  {max(64, padded(head_dim))}: {best_plan(rows)},")
        for row in rows[rows.status != "ok"].itertuples():
            plan = [getattr(row, name) for name in PLAN] if row.status == "left out" else kernel
            lines.append(f"  {row.status}: {plan}  {row.reason}")
    return "\n".join([*lines, "", *chosen])


def format_scores(table: pd.DataFrame, now: KernelConfig, most: int) -> str:
    """The best plans with their scores, and the current one, marked."""
    shown = scores(table)
    plans = [KernelConfig(*values) for values in shown[PLAN].itertuples(index=False)]
    shown.insert(0, "", ["now" if plan == now else "" for plan in plans])
    return shown[(shown.index < most) | (shown[""] == "now")].round(3).to_string(index=False)
