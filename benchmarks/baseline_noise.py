"""Noise, recorded: one unchanged program, timed by many fresh processes, sample by sample.

    python -m benchmarks.baseline_noise --minutes 15 --save noise-cpu

`benchmarks.baseline_power` draws from such a run to find how often a baseline's rule is
wrong. Two calls of different length take turns, so that both meet the same hours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labsupport.profiling.baseline_worker import Pairs, in_fresh_process, plan
from labsupport.profiling.cases import Case
from labsupport.profiling.runs import add_save_options, save_if_asked

if TYPE_CHECKING:
    import pandas as pd

CASES = {
    "default": Case("sdpa_flash", 1024, batch=2, heads=8),
    "short": Case("sdpa_flash", 512, heads=4, causal=True),
}


def record(minutes: float, device: str | None = None, *, progress: bool = True) -> pd.DataFrame:
    """Time the cases by processes that take turns, for so many minutes (one round at least).

    Returns:
        One row for each pair of samples: case ("default", "short"), process, started_s (since the
        run began), case_ms, reference_ms. Provenance in `.attrs`, with `interrupted: true` after a
        Control-C.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    from labsupport.profiling.provenance import provenance

    jobs = {name: plan(case, device) for name, case in CASES.items()}
    first = next(iter(jobs.values()))
    note = {name: f"{job.case}, {job.reference}" for name, job in jobs.items()}
    attrs = provenance(first.device, threads_measured=1, jobs=note)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    process = 0
    try:
        with tqdm(total=round(minutes * 60), unit="s", disable=not progress, leave=False) as bar:
            while process == 0 or time.perf_counter() - start < minutes * 60:
                for name, job in jobs.items():
                    began = time.perf_counter() - start
                    rows += _rows(name, process, began, in_fresh_process(job))
                process += 1
                bar.update(round(time.perf_counter() - start) - bar.n)
    except KeyboardInterrupt:
        attrs["interrupted"] = True
    table = pd.DataFrame(rows, columns=["case", "process", "started_s", "case_ms", "reference_ms"])
    table.attrs["provenance"] = attrs
    return table


def _rows(name: str, process: int, began: float, pairs: Pairs) -> list[dict[str, Any]]:
    return [
        {
            "case": name,
            "process": process,
            "started_s": round(began, 1),
            "case_ms": round(case_ms, 4),
            "reference_ms": round(reference_ms, 4),
        }
        for case_ms, reference_ms in zip(pairs.case_ms, pairs.reference_ms, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, say how much, and save when asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.baseline_noise",
        description="Record how the time of an unchanged program varies on this machine.",
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    table = record(options.minutes, options.device)
    for name, rows in table.groupby("case"):
        print(f"{name}: {rows['process'].nunique()} processes, {len(rows)} pairs")
    save_if_asked(table, options)


if __name__ == "__main__":
    main()
