"""The fastest tilings on this GPU, printed as they stand in `tuning.py`.

    python -m benchmarks tune                                forward, head_dim 64 and 128
    python -m benchmarks tune --direction backward --head-dim 128
    python -m benchmarks tune --direction decode --save NAME

Candidates (`tune_jobs.py`) that do not fit on a multiprocessor or spill many registers are left out
without a run; the others are compiled by several processes at once, and timed in turns on a few
shapes. A candidate's score is its time over the fastest one's, as a geometric mean over the shapes:
1 is the fastest everywhere. "backward" times the whole backward pass: the tiling of dK and dV first
(kernel "keys"), then that of dQ ("queries") beside the winner.

At the end, the first call of a shape in a new process: with an empty cache, and with a warm one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.runner import Case, check_triton, numbers, run
from benchmarks.tune_jobs import (
    KERNELS,
    Plans,
    Shape,
    candidates,
    compile_in_parallel,
    current,
    first_calls,
    make_call,
    shapes_for,
    what_does_not_fit,
    with_plans,
)
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.config import Tiling, padded
from labsupport.profiling.graphs import captured
from labsupport.profiling.timing import measure_interleaved, resolve_device

if TYPE_CHECKING:
    import pandas as pd

PLAN = ["block_q", "block_k", "warps", "stages"]
FIRST_CALL_S, WARM_CALL_MS = 10, 50  # what is aimed at


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--direction", choices=list(KERNELS), default="forward")
    add("--head-dim", type=numbers, default=[64, 128])
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--max-seconds", type=float, default=0.15, help="for the repeats of one plan and shape")
    add("--most", type=int, default=8, help="number of plans to print")
    add("--no-first-calls", action="store_true", help="do not time first calls in new processes")


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
        rows = tune_kernel(kernel, plans, shapes, device, chosen[head_dim], options.max_seconds)
        chosen[head_dim][kernel] = best_plan(rows)
        return rows

    cases = [
        Case({"kernel": kernel, "head_dim": head_dim}, partial(tuned, kernel, head_dim))
        for head_dim in options.head_dim
        for kernel in KERNELS[options.direction]
    ]
    table = run(cases, device)
    if not options.no_first_calls:
        table.attrs["provenance"]["first_calls"] = {
            head_dim: describe_first_calls(
                shapes_for(options.direction, head_dim, options.dtype)[2], plans
            )
            for head_dim, plans in chosen.items()
        }
    return table


def tune_kernel(
    kernel: str,
    plans: Sequence[Tiling],
    shapes: Sequence[Shape],
    device: torch.device,
    fixed: Plans | None = None,
    max_seconds: float = 0.15,
) -> list[dict[str, Any]]:
    """Reject, compile and time plans of one kernel on each shape, all plans in turns.

    Args:
        kernel: "forward", "keys", "queries" or "decode".
        fixed: tilings of the other kernels of the same pass.
        max_seconds: for the repeats of one plan on one shape (three are made at least).

    Raises:
        RuntimeError: no plan runs.
    """
    fixed, out, left = fixed or {}, {}, list(plans)
    if device.type == "cuda":
        out = what_does_not_fit(kernel, left, shapes[0], torch.cuda.get_device_capability(device))
        left = [plan for plan in left if plan not in out]
        out |= compile_in_parallel(kernel, left, fixed, shapes)
        left = [plan for plan in left if plan not in out]
    if not left:
        raise RuntimeError(f"no tiling runs: {out}")
    rows: list[dict[str, Any]] = [
        {**asdict(plan), "status": "left out", "reason": why} for plan, why in out.items()
    ]
    for shape in shapes:
        call = make_call(shape, device)
        calls = {
            str(i): captured(with_plans(call, fixed | {kernel: plan}), device, warmup=1)[0]
            for i, plan in enumerate(left)
        }
        timings = measure_interleaved(
            calls, device=device, warmup=1, min_repeats=3, min_seconds=0.0,
            max_seconds=max_seconds * len(calls),
        )  # fmt: skip
        fastest = min(timing.median for timing in timings.values())
        rows += [
            {
                **asdict(plan),
                **asdict(shape),
                "median_ms": timing.median,
                "ratio": timing.median / fastest,
            }
            for plan, timing in zip(left, timings.values(), strict=True)
        ]
        del calls, call
    return rows


def scores(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each plan of one kernel, the best first: score (mean ratio) and worst ratio."""
    import numpy as np
    import pandas as pd

    ratios = table.dropna(subset="ratio").groupby(PLAN, sort=False).ratio
    means = ratios.apply(lambda x: float(np.exp(np.log(x).mean())))
    return pd.DataFrame({"score": means, "worst": ratios.max()}).sort_values("score").reset_index()


def best_plan(rows: pd.DataFrame | list[dict[str, Any]]) -> Tiling:
    """The plan with the lowest score."""
    import pandas as pd

    best = scores(pd.DataFrame(rows)).iloc[0]
    return Tiling(*(int(best[name]) for name in PLAN))


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines, chosen = [], []
    first = table.attrs["provenance"].get("first_calls", {})
    for (head_dim, kernel), rows in table.groupby(["head_dim", "kernel"], sort=False):
        lines.append(f"\n{kernel}, head_dim {head_dim}, {options.dtype}")
        if "ratio" not in rows or rows.ratio.isna().all():
            lines += [f"{row.status}: {row.reason}" for row in rows.itertuples()]
            continue
        now = current(kernel, head_dim, getattr(torch, options.dtype))
        lines.append(format_scores(rows, now, options.most))
        chosen.append(f"{kernel:>8}  {max(64, padded(head_dim))}: {_text(best_plan(rows))},")
    lines += ["", *(f"head_dim {head_dim}: {text}" for head_dim, text in first.items())]
    return "\n".join([*lines, "", *chosen])


def format_scores(table: pd.DataFrame, now: Tiling, most: int) -> str:
    """The best plans with their times on each shape, the current one marked, and those left out."""
    ranked, ran = scores(table), table[table.status == "ok"]
    labels = ran.seqlen.astype(int).astype(str) + ran.causal.map({True: " causal", False: ""})
    labels = ran.batch.astype(int).astype(str) + " x " + labels
    times = ran.assign(shape=labels).pivot(index=PLAN, columns="shape", values="median_ms")
    shown = ranked.merge(times[list(dict.fromkeys(labels))].reset_index(), on=PLAN)
    plans = [Tiling(*values) for values in shown[PLAN].itertuples(index=False)]
    shown.insert(0, "", ["now" if plan == now else "" for plan in plans])
    shown = shown[(shown.index < most) | (shown[""] == "now")]
    left_out = table[table.status == "left out"]
    lines = [shown.round(3).to_string(index=False)]
    if len(left_out):
        lines.append(f"left out, {len(left_out)} of {len(left_out) + len(ranked)}:")
        lines += [f"  {_text(row)}  {row.reason}" for row in left_out.itertuples()]
    return "\n".join(lines)


def describe_first_calls(shape: Shape, plans: Plans) -> str:
    """First calls with an empty and with a warm cache, beside what is aimed at."""
    with tempfile.TemporaryDirectory() as cache:
        empty, warm = (first_calls(shape, plans, cache) for _ in range(2))
    if isinstance(empty, str) or isinstance(warm, str):
        return f"first calls: {empty if isinstance(empty, str) else warm}"
    return (
        f"first call of a process: {empty['first'] / 1e3:.1f} s with an empty cache, another "
        f"length {empty['other_length'] / 1e3:.1f} s (aim: {FIRST_CALL_S} s); with a warm cache "
        f"{warm['first']:.0f} and {warm['other_length']:.0f} ms (aim: {WARM_CALL_MS} ms); "
        f"once it has run: {warm['again']:.1f} ms"
    )


def _text(plan: Any) -> str:
    return f"Tiling({plan.block_q}, {plan.block_k}, {plan.warps}, {plan.stages})"
