"""Noise, recorded: one unchanged program, timed by many fresh processes, sample by sample.

    python -m benchmarks baseline_noise --minutes 15 --save noise-cpu

`baseline_power` draws from such a run to find how often a baseline's rule is wrong. Two calls of
different length take turns, so that both meet the same hours.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.runner import Case, Row, run
from labsupport.profiling.baseline_worker import Job, in_fresh_process, plan
from labsupport.profiling.cases import Case as Shape
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd

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
        run began), case_ms, reference_ms.
    """
    device = resolve_device(options.device)
    jobs = {name: plan(case, options.device) for name, case in CASES.items()}
    note = {name: f"{job.case}, {job.reference}" for name, job in jobs.items()}
    return run(_rounds(jobs, options.minutes * 60), device, threads_measured=1, jobs=note)


def _rounds(jobs: dict[str, Job], seconds: float) -> Iterator[Case]:
    start = time.perf_counter()
    for process in itertools.count():
        for name, job in jobs.items():
            began = round(time.perf_counter() - start, 1)
            row = {"case": name, "process": process, "started_s": began}
            yield Case(row, partial(_pairs, job))
        if time.perf_counter() - start >= seconds:
            return


def _pairs(job: Job) -> list[Row]:
    pairs = in_fresh_process(job)
    return [
        {"case_ms": round(case_ms, 4), "reference_ms": round(reference_ms, 4)}
        for case_ms, reference_ms in zip(pairs.case_ms, pairs.reference_ms, strict=True)
    ]


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    return "\n".join(
        f"{name}: {rows['process'].nunique()} processes, {len(rows)} pairs"
        for name, rows in table.groupby("case")
    )
