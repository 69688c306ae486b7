"""Noise, recorded: one unchanged program, timed by many fresh processes, sample by sample.

    python -m benchmarks baseline_noise --minutes 15 --save noise-cpu

Chapter 8 reports how the rule of `labsupport bench --check-baseline` does on such runs. Two
calls of different length take turns, so that both meet the same hours.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from functools import partial

import pandas as pd

from benchmarks.runner import Case, Row, run
from labsupport.profiling.baseline import Job, in_fresh_process, plan
from labsupport.profiling.cases import Case as Shape
from labsupport.profiling.timing import resolve_device

CASES = {
    "default": Shape("sdpa_flash", 1024, batch=2, heads=8),
    "short": Shape("sdpa_flash", 512, heads=4, causal=True),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=15.0, help="one round at least")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Time the cases by processes that take turns.

    Returns:
        One row for each pair of samples: case ("default", "short"), process, started_s (since the
        run began), case_ms, reference_ms (of the yardstick).
    """
    jobs = {name: plan(case, options.device) for name, case in CASES.items()}

    def rounds() -> Iterator[Case]:
        start = time.perf_counter()
        for process in itertools.count():
            for name, job in jobs.items():
                began = round(time.perf_counter() - start, 1)
                row = {"case": name, "process": process, "started_s": began}
                yield Case(row, partial(_pairs, job))
            if time.perf_counter() - start >= options.minutes * 60:
                return

    return run(rounds(), resolve_device(options.device), threads_measured=1)


def _pairs(job: Job) -> list[Row]:
    pairs = in_fresh_process(job)
    return [{"case_ms": round(ms, 4), "reference_ms": round(y, 4)} for ms, y in pairs]


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    return "\n".join(
        f"{name}: {rows['process'].nunique()} processes, {len(rows)} pairs"
        for name, rows in table.groupby("case")
    )
