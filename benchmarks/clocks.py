"""This lab's clock compared with others: five shapes, all clocks in turns, in one run.

    python -m benchmarks clocks

On a GPU with `triton.testing.do_bench` (within 3%), on a CPU with `torch.utils.benchmark`
(within 5%). A round is one median from each clock, and the order changes with each round; what is
compared is the median over rounds of the two medians' ratio, so that drift meets both alike.

The shapes keep a GPU busy for longer than Python needs to start a call. Of shorter ones both clocks
see the start as well, and not the same part of it: with batch 2 and 8 heads, at 1,024 and 2,048
tokens, this lab's showed 0.77 and 0.76 of the other's time (H200, 0.07 ms).
"""

import argparse
import importlib
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch.utils.benchmark import Timer

from benchmarks.runner import Call, Case, not_measured, run
from labsupport.profiling.bench import chosen_backend, dtype_named
from labsupport.profiling.benchmark import call_of, make_inputs
from labsupport.profiling.cases import Case as Shape
from labsupport.profiling.cases import grid
from labsupport.profiling.timing import Ratio, Timing, measure_time, resolve_device

SECONDS = 0.2  # for one median of one clock


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Time five shapes, in the device's usual dtype, by both clocks.

    Returns:
        One row for each shape: backend, seqlen, ours_ms, theirs_ms (medians over rounds), ratio
        (median of the rounds' ratios, ours over theirs), q1, q3 of it, other (the clock's name),
        allowed, ok.
    """
    device = resolve_device(options.device)
    gpu = device.type == "cuda"
    sizes = [1024, 2048, 4096, 8192, 16384] if gpu else [256, 512, 768, 1024, 1536]
    batch, heads = (16, 16) if gpu else (2, 8)
    dtype = dtype_named(None, device)
    backend = chosen_backend(Shape("standard", sizes[0], dtype=dtype), device)
    shapes = grid([backend], sizes, batch=batch, heads=heads, dtype=dtype)
    cases = [
        Case(
            {"backend": shape.backend, "seqlen": shape.seqlen},
            partial(_compare, shape, device, options.rounds),
        )
        for shape in shapes
    ]
    return run(cases, device, rounds=options.rounds)


def _compare(shape: Shape, device: torch.device, rounds: int) -> dict[str, Any]:
    fn = call_of(shape, make_inputs(shape, device, seed=0))
    limits = {"min_seconds": SECONDS, "max_seconds": SECONDS, "max_repeats": 10**6}
    name, theirs = _other_clock(fn, device)
    clocks = {"ours": lambda: measure_time(fn, device=device, **limits).median, "theirs": theirs}
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(rounds):
        for clock in sorted(clocks, reverse=number % 2 == 1):
            times[clock].append(clocks[clock]())
    ratio = Ratio(tuple(a / b for a, b in zip(times["ours"], times["theirs"], strict=True)))
    allowed = 0.03 if device.type == "cuda" else 0.05
    return {
        **{f"{clock}_ms": Timing(tuple(values)).median for clock, values in times.items()},
        "ratio": ratio.median,
        "q1": ratio.q1,
        "q3": ratio.q3,
        "other": name,
        "allowed": allowed,
        "ok": abs(ratio.median - 1) <= allowed,
    }


def _other_clock(fn: Call, device: torch.device) -> tuple[str, Call]:
    """Name of the other clock, and a call that returns its median in milliseconds."""
    if device.type == "cuda":
        do_bench = importlib.import_module("triton.testing").do_bench
        return "triton.testing.do_bench", partial(
            do_bench, fn, rep=SECONDS * 1e3, return_mode="median"
        )
    # Timer sets the number of threads itself: without this it would be one.
    timer = Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    return (
        "torch.utils.benchmark",
        lambda: timer.blocked_autorange(min_run_time=SECONDS).median * 1e3,
    )


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    ran = table[table.status == "ok"].drop(columns=["status", "reason"]).round(3)
    return "\n".join([ran.to_string(index=False), *not_measured(table, "seqlen")])
