"""Which tilings are the fastest on this GPU? Prints them as they stand in `tuning.py`.

python -m benchmarks.tune                                forward, head_dim 64 and 128
python -m benchmarks.tune --direction backward --head-dim 128
python -m benchmarks.tune --direction decode --save NAME

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
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

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
from labsupport.attention.flash_triton import mode
from labsupport.attention.flash_triton.tuning import Tiling, padded
from labsupport.profiling.graphs import captured
from labsupport.profiling.provenance import provenance
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.timing import measure_interleaved, resolve_device

if TYPE_CHECKING:
    import pandas as pd

PLAN = ["block_q", "block_k", "warps", "stages"]
FIRST_CALL_S, WARM_CALL_MS = 10, 50  # what is aimed at


def measure_plans(
    kernel: str,
    plans: Sequence[Tiling],
    shapes: Sequence[Shape],
    *,
    fixed: Plans | None = None,
    device: torch.device | str | None = None,
    max_seconds: float = 0.15,
) -> pd.DataFrame:
    """Time each plan on each shape, all plans in turns.

    Args:
        kernel: "forward", "keys", "queries" or "decode".
        plans: those that run.
        fixed: tilings of the other kernels of the same pass.
        max_seconds: for the repeats of one plan on one shape (three are made at least).

    Returns:
        a row for each plan and shape: kernel, block_q, block_k, warps, stages, the fields of
        `Shape`, median_ms, and ratio: over the fastest plan's median on this shape.
    """
    import pandas as pd

    where = resolve_device(device)
    rows = []
    for shape in shapes:
        call = make_call(shape, where)
        calls = {
            str(i): captured(with_plans(call, (fixed or {}) | {kernel: plan}), where, warmup=1)[0]
            for i, plan in enumerate(plans)
        }
        timings = measure_interleaved(
            calls, device=where, warmup=1, min_repeats=3, min_seconds=0.0,
            max_seconds=max_seconds * len(calls),
        )  # fmt: skip
        fastest = min(timing.median for timing in timings.values())
        for plan, timing in zip(plans, timings.values(), strict=True):
            row: dict[str, Any] = {"kernel": kernel, **asdict(plan), **asdict(shape)}
            rows.append(row | {"median_ms": timing.median, "ratio": timing.median / fastest})
        del calls, call
    return pd.DataFrame(rows)


def scores(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each plan of one kernel, the best first: score (mean ratio) and worst ratio."""
    import numpy as np
    import pandas as pd

    ratios = table.groupby(PLAN, sort=False).ratio
    means = ratios.apply(lambda x: float(np.exp(np.log(x).mean())))
    return pd.DataFrame({"score": means, "worst": ratios.max()}).sort_values("score").reset_index()


def best_plan(table: pd.DataFrame) -> Tiling:
    """The plan with the lowest score."""
    row = scores(table).iloc[0]
    return Tiling(*(int(row[name]) for name in PLAN))


def tune_kernel(
    kernel: str,
    direction: str,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fixed: Plans | None = None,
    plans: Sequence[Tiling] | None = None,
    shapes: Sequence[Shape] | None = None,
    max_seconds: float = 0.15,
) -> tuple[pd.DataFrame, dict[Tiling, str]]:
    """Reject, compile and time; the rows of `measure_plans`, and why the others were left out."""
    if shapes is None:
        shapes = shapes_for(direction, head_dim, str(dtype).removeprefix("torch."))
    left = list(plans or candidates(kernel, head_dim, dtype))
    out: dict[Tiling, str] = {}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        out = what_does_not_fit(kernel, left, head_dim, dtype, 10 * major + minor)
        left = [plan for plan in left if plan not in out]
        out |= compile_in_parallel(kernel, left, fixed or {}, shapes)
        left = [plan for plan in left if plan not in out]
    if not left:
        raise RuntimeError(f"no tiling of {kernel!r} runs for head_dim {head_dim}: {out}")
    measured = measure_plans(
        kernel, left, shapes, fixed=fixed, device=device, max_seconds=max_seconds
    )
    return measured, out


def format_scores(table: pd.DataFrame, now: Tiling, left_out: dict[Tiling, str], most: int) -> str:
    """The best plans with their times on each shape, the current one marked."""
    ranked = scores(table)
    labels = table.seqlen.astype(str) + table.causal.map({True: " causal", False: ""})
    labels = table.batch.astype(str) + " x " + labels
    times = table.assign(shape=labels).pivot(index=PLAN, columns="shape", values="median_ms")
    shown = ranked.merge(times[list(dict.fromkeys(labels))].reset_index(), on=PLAN)
    plans = [Tiling(*values) for values in shown[PLAN].itertuples(index=False)]
    shown.insert(0, "", ["now" if plan == now else "" for plan in plans])
    shown = shown[(shown.index < most) | (shown[""] == "now")]
    lines = [shown.round(3).to_string(index=False)]
    if left_out:
        lines.append(f"left out, {len(left_out)} of {len(left_out) + len(ranked)}:")
        lines += [f"  {_text(plan)}  {why}" for plan, why in left_out.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune and print."""
    import pandas as pd

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--direction", choices=list(KERNELS), default="forward")
    add("--head-dim", type=lambda text: [int(n) for n in text.split(",")], default=[64, 128])
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--max-seconds", type=float, default=0.15, help="for the repeats of one plan and shape")
    add("--most", type=int, default=8, help="so many plans are printed")
    add("--no-first-calls", action="store_true", help="do not time first calls in new processes")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    if mode.missing() is not None or mode.interpreted():
        parser.error(mode.missing() or "needs a GPU: what is interpreted has no tiling to tune")
    device, dtype = resolve_device("cuda"), getattr(torch, options.dtype)
    record = provenance(device)
    tables, lines = [], []
    for head_dim in options.head_dim:
        chosen: Plans = {}
        for kernel in KERNELS[options.direction]:
            start = time.perf_counter()
            table, left_out = tune_kernel(
                kernel, options.direction, head_dim, dtype, device,
                fixed=chosen, max_seconds=options.max_seconds,
            )  # fmt: skip
            chosen[kernel] = best_plan(table)
            tables.append(table)
            seconds = time.perf_counter() - start
            print(f"\n{kernel}, head_dim {head_dim}, {options.dtype}: {seconds:.0f} s", flush=True)
            now = current(kernel, head_dim, dtype)
            print(format_scores(table, now, left_out, options.most), flush=True)
            lines.append(f"{kernel:>8}  {max(64, padded(head_dim))}: {_text(chosen[kernel])},")
        if not options.no_first_calls:
            shape = shapes_for(options.direction, head_dim, options.dtype)[2]
            print(format_first_calls(shape, chosen), flush=True)
    print("\n" + "\n".join(lines))
    if options.save:
        kept = pd.concat(tables, ignore_index=True)
        kept.attrs["provenance"] = record
        save_if_asked(kept, options)


def format_first_calls(shape: Shape, plans: Plans) -> str:
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


def _text(plan: Tiling) -> str:
    return f"Tiling({plan.block_q}, {plan.block_k}, {plan.warps}, {plan.stages})"


if __name__ == "__main__":
    main()
