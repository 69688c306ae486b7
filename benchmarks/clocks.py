"""This lab's clock beside others: five shapes, all clocks in turns, in one run.

    python -m benchmarks clocks
    python -m benchmarks clocks --batch 2 --heads 8

On a GPU beside `triton.testing.do_bench` (within 3%), on a CPU beside `torch.utils.benchmark`
(within 5%). A round is one median from each clock, and the order changes with each round; what is
compared is the median over rounds of the two medians' ratio, so that drift meets both alike.

On a GPU the default shapes keep it busy for longer than Python needs to start a call. Of shorter
ones both clocks see the start as well, and not the same part of it: with the second command, at
1,024 and 2,048 tokens, this lab's showed 0.77 and 0.76 of the other's time (H200, 0.07 ms).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.runner import Case, not_measured, run
from labsupport.profiling.bench import chosen_backend, dtype_named
from labsupport.profiling.benchmark import call_of, make_inputs
from labsupport.profiling.cases import Case as Shape
from labsupport.profiling.cases import grid
from labsupport.profiling.timing import format_ms, measure_time, quantile, resolve_device

if TYPE_CHECKING:
    import pandas as pd

ALLOWED = {"cpu": 0.05, "cuda": 0.03}
SECONDS = 0.2  # for one median of one clock

Clock = Callable[[Callable[[], Any]], float]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, help="default: 2, on a GPU 16")
    parser.add_argument("--heads", type=int, help="default: 8, on a GPU 16")


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
    dtype = dtype_named(None, device)
    shapes = grid(
        [chosen_backend(Shape("standard", sizes[0], dtype=dtype), device)],
        sizes,
        batch=options.batch or (16 if gpu else 2),
        heads=options.heads or (16 if gpu else 8),
        dtype=dtype,
    )
    clock = _other_clock(device)
    cases = [
        Case(
            {"backend": shape.backend, "seqlen": shape.seqlen},
            partial(_compare, shape, device, *clock, options.rounds),
        )
        for shape in shapes
    ]
    return run(cases, device, rounds=options.rounds)


def _compare(
    shape: Shape, device: torch.device, name: str, other: Clock, rounds: int
) -> dict[str, Any]:
    pairs = _rounds(call_of(shape, make_inputs(shape, device, seed=0)), device, other, rounds)
    ratios = tuple(ours / theirs for ours, theirs in pairs)
    ratio, allowed = statistics.median(ratios), ALLOWED[device.type]
    return {
        "ours_ms": statistics.median(ours for ours, _ in pairs),
        "theirs_ms": statistics.median(theirs for _, theirs in pairs),
        "ratio": ratio,
        "q1": quantile(ratios, 0.25),
        "q3": quantile(ratios, 0.75),
        "other": name,
        "allowed": allowed,
        "ok": abs(ratio - 1) <= allowed,
    }


def _rounds(
    fn: Callable[[], Any], device: torch.device, other: Clock, rounds: int
) -> list[tuple[float, float]]:
    def ours(fn: Callable[[], Any]) -> float:
        return measure_time(
            fn, device=device, min_seconds=SECONDS, max_seconds=SECONDS, max_repeats=10**6
        ).median

    pairs = []
    for number in range(rounds):
        if number % 2:
            theirs_ms, ours_ms = other(fn), ours(fn)
        else:
            ours_ms, theirs_ms = ours(fn), other(fn)
        pairs.append((ours_ms, theirs_ms))
    return pairs


def _other_clock(device: torch.device) -> tuple[str, Clock]:
    if device.type == "cuda":
        testing = importlib.import_module("triton.testing")

        def do_bench(fn: Callable[[], Any]) -> float:
            return testing.do_bench(fn, rep=SECONDS * 1e3, return_mode="median")

        return "triton.testing.do_bench", do_bench

    from torch.utils.benchmark import Timer

    # Timer sets the number of threads itself: without this it would be one.
    threads = torch.get_num_threads()

    def blocked(fn: Callable[[], Any]) -> float:
        timer = Timer("fn()", globals={"fn": fn}, num_threads=threads)
        return timer.blocked_autorange(min_run_time=SECONDS).median * 1e3

    return "torch.utils.benchmark", blocked


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines = [
        f"{row['seqlen']:>6} tokens: {format_ms(row['ours_ms'])} ms, {row['other']} "
        f"{format_ms(row['theirs_ms'])} ms, ratio {row['ratio']:.3f} "
        f"({row['q1']:.3f}-{row['q3']:.3f}), {'ok' if row['ok'] else 'too far'}"
        for row in table[table.status == "ok"].to_dict("records")
    ]
    return "\n".join(lines + not_measured(table, "seqlen"))
