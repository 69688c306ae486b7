"""The Gluon kernel built in four steps, and when its groups of warps compute.

    python -m benchmarks gluon_steps               TFLOP/s of each step, of Triton and of cuDNN
    python -m benchmarks gluon_steps --timeline    clock reads of one multiprocessor instead

Each step is a set of constants of one kernel, `labsupport.attention.kernels.forward_gluon`. Times
are of CUDA graphs; chapter 5 shows both tables.
"""

import argparse
from functools import partial
from typing import Any

import pandas as pd
import torch

from benchmarks.runner import Trial, check_triton, in_turns, not_measured, numbers, run
from labsupport.attention.backends import attention
from labsupport.attention.call import AttentionCall
from labsupport.profiling.grids import Case, make_inputs
from labsupport.profiling.timing import resolve_device

STEPS = {
    "1 a producer": {"CONSUMERS": 1, "TOGETHER": False, "PINGPONG": False},
    "2 two consumers": {"CONSUMERS": 2, "TOGETHER": False, "PINGPONG": False},
    "3 products together": {"CONSUMERS": 2, "TOGETHER": True, "PINGPONG": False},
    "4 ping-pong": {"CONSUMERS": 2, "TOGETHER": True, "PINGPONG": True},
}
EVENTS = ("ready", "turn", "scores", "softmax")
TILES = 48  # one and a half blocks of 4,096 keys


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seqlen", type=numbers, default=[4096, 16_384])
    add("--head-dim", type=int, default=128)
    add("--tokens", type=int, default=16_384, help="per call")
    add("--timeline", action="store_true", help="clock reads, without a mask, first length only")
    add("--seconds", type=float, default=1.0, help="of kernels, for one row")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Measure the steps.

    Returns:
        A row for each length, mask and step with median_ms, its quartiles and tflops. With
        --timeline, a row for each step, consumer and tile: the clock in cycles, from the first mark
        on, when the consumer was `ready` for its products, when it was its `turn` to start them,
        when the `scores` were there, and when the `softmax` was done.
    """
    check_triton(options)
    device = resolve_device(options.device)
    shapes = [
        Case(
            "flash_gluon", seqlen, batch=max(1, options.tokens // seqlen),
            heads=2048 // options.head_dim, head_dim=options.head_dim, dtype="bfloat16",
            causal=causal,
        )
        for seqlen in options.seqlen for causal in (False, True)
    ]  # fmt: skip
    if options.timeline:
        cases = [
            Trial({"step": step}, partial(_timeline, shapes[0], device, config))
            for step, config in STEPS.items()
        ]
        return run(cases, device, seqlen=shapes[0].seqlen, head_dim=options.head_dim)
    cases = [
        Trial(
            {"seqlen": shape.seqlen, "head_dim": shape.head_dim, "causal": shape.causal},
            partial(_steps, shape, device, options.seconds),
        )
        for shape in shapes
    ]
    return run(cases, device)


def _launcher(
    shape: Case, device: torch.device, config: dict[str, int], clock: torch.Tensor | None = None
) -> Any:
    from labsupport.attention.kernels.forward_gluon import launch

    q, k, v, _ = (x.detach() for x in make_inputs(shape, device, seed=0))
    out, lse = torch.empty_like(q), q.new_empty(len(q), q.shape[2], q.shape[1]).float()
    call = AttentionCall(q, k, v, causal=shape.causal)
    return lambda: launch(call, out, lse, clock=clock, **config)


def _steps(shape: Case, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    q, k, v, _ = (x.detach() for x in make_inputs(shape, device, seed=0))
    calls: dict[str, Any] = {
        name: partial(attention, q, k, v, causal=shape.causal, backend=name)
        for name in ("flash_triton", "sdpa_cudnn")
    }
    calls |= {step: _launcher(shape, device, config) for step, config in STEPS.items()}
    rows = in_turns(calls, device, seconds, min_seconds=seconds)
    for row in rows.values():
        if "median_ms" in row:
            row["tflops"] = shape.flops() / row["median_ms"] / 1e9
    return [{"step": name} | row for name, row in rows.items()]


def _timeline(shape: Case, device: torch.device, config: dict[str, int]) -> list[dict[str, Any]]:
    clock = torch.zeros(config["CONSUMERS"], TILES, len(EVENTS), dtype=torch.int64, device=device)
    launch = _launcher(shape, device, config, clock=clock)
    for _ in range(20):  # the last one counts: by then the clock rate has settled
        launch()
    cycles = (clock - clock.min()).tolist()
    return [
        {"consumer": consumer, "tile": tile, **dict(zip(EVENTS, marks, strict=True))}
        for consumer, tiles in enumerate(cycles)
        for tile, marks in enumerate(tiles)
    ]


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    if not options.timeline:
        wide = table[table.status == "ok"].pivot_table(
            index="step", columns=["causal", "seqlen"], values="tflops", sort=False
        )
        return "\n".join([wide.round(0).to_string(), *not_measured(table, "step")])
    spans = table[table.status == "ok"].copy()
    spans["waiting"] = spans.turn - spans.ready
    spans["products"] = spans.scores - spans.turn
    spans["in softmax"] = spans.softmax - spans.scores
    means = spans[spans.tile.between(2, 30)].groupby("step").mean(numeric_only=True)
    shown = means[["waiting", "products", "in softmax"]].round(0).to_string()
    return "\n".join([f"cycles a step:\n{shown}", *not_measured(table, "step")])
