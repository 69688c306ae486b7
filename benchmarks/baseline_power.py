"""Error rates of a baseline's rule, on recorded noise and on a program really slowed.

    python -m benchmarks baseline_power                     simulated, about a minute
    python -m benchmarks baseline_power --real 10           measured, about half an hour

Simulated: a baseline and a check are drawn from a recorded run of an unchanged program
(`baseline_noise`), each from a window of its own, the two windows apart in time, so that slow drift
lies between them as it does in life. Within a window processes are drawn in blocks of neighbours,
and within a process samples in blocks, so that what hangs together stays together (moving-block
bootstrap: Kuensch, "The jackknife and the bootstrap for general stationary observations", Annals of
Statistics 17, 1989). For the slower program all its times are multiplied.

Real: a baseline, then checks in turns of the unchanged program and of one that computes some of its
queries twice; how many is calibrated until the time is up by 10%.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.baseline_noise import CASES
from benchmarks.runner import Case, not_measured, run
from labsupport.profiling.baseline import (
    Verdict,
    check_baseline,
    decide,
    gather,
    make_baseline,
)
from labsupport.profiling.baseline_worker import Job, Pairs, Reference, in_fresh_process
from labsupport.profiling.runs import load_run
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd

NEIGHBOURS = 4  # processes, or samples, that are drawn together
WINDOW = 0.25  # of the recorded processes
_ANY_JOB = Job(CASES["short"], "cpu", Reference(512, 1), 11)  # the rule does not look at it
WORDS = ("unchanged", "slower", "cannot tell")


@dataclass(frozen=True)
class Rates:
    """How many of `trials` checks ended with which word, and how many processes each took."""

    trials: int
    words: dict[str, int]
    processes: float

    def share(self, word: str) -> tuple[float, float, float]:
        """The share of a word, and the ends of its 95% interval."""
        return (self.words[word] / self.trials, *interval(self.words[word], self.trials))


def interval(count: int, trials: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    share = count / trials
    middle = share + z * z / (2 * trials)
    reach = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def processes_of(table: pd.DataFrame, case: str) -> list[Pairs]:
    """The recorded processes of a case, in their order in time."""
    rows = table[table["case"] == case].dropna(subset="case_ms")
    if rows.empty:
        raise ValueError(f"no {case!r} in this run; it has {', '.join(sorted(set(table['case'])))}")
    return [
        Pairs(tuple(one["case_ms"]), tuple(one["reference_ms"]))
        for _, one in rows.groupby("process", sort=True)
    ]


def simulate(
    recorded: Sequence[Pairs],
    *,
    slowdown: float = 0.0,
    trials: int = 2000,
    tolerance: float = 0.05,
    seed: int = 0,
) -> Rates:
    """Draw baselines and checks of a program that is slower by `slowdown`, and apply the rule.

    Raises:
        ValueError: fewer than 16 processes.
    """
    if len(recorded) < 16:
        raise ValueError(f"{len(recorded)} recorded processes are too few to draw from")
    draw = random.Random(seed)
    width = max(2 * NEIGHBOURS, round(WINDOW * len(recorded)))
    verdicts = [_trial(recorded, width, slowdown, tolerance, draw) for _ in range(trials)]
    return _rates(verdicts)


def _trial(
    recorded: Sequence[Pairs], width: int, slowdown: float, tolerance: float, draw: random.Random
) -> Verdict:
    before, now = _windows(len(recorded), width, draw)
    earlier = _processes(recorded[before : before + width], draw)
    later = _processes(recorded[now : now + width], draw)
    baseline = gather(_ANY_JOB, lambda: next(earlier), tolerance, {})
    return decide(baseline, lambda: _slowed(next(later), slowdown), tolerance)


def _slowed(pairs: Pairs, slowdown: float) -> Pairs:
    return replace(pairs, case_ms=tuple((1 + slowdown) * ms for ms in pairs.case_ms))


def _windows(count: int, width: int, draw: random.Random) -> tuple[int, int]:
    """The starts of two windows that share no process."""
    while True:
        starts = draw.randint(0, count - width), draw.randint(0, count - width)
        if abs(starts[0] - starts[1]) >= width:
            return starts


def _processes(window: Sequence[Pairs], draw: random.Random) -> Iterator[Pairs]:
    while True:
        for process in _block(range(len(window)), draw):
            yield _redrawn(window[process], draw)


def _redrawn(pairs: Pairs, draw: random.Random) -> Pairs:
    count, order = len(pairs.case_ms), []
    while len(order) < count:
        order += _block(range(count), draw)
    chosen = order[:count]
    return Pairs(
        tuple(pairs.case_ms[i] for i in chosen), tuple(pairs.reference_ms[i] for i in chosen)
    )


def _block(indices: range, draw: random.Random) -> list[int]:
    start = draw.randint(0, max(0, len(indices) - NEIGHBOURS))
    return list(indices[start : start + NEIGHBOURS])


def _rates(verdicts: Sequence[Verdict]) -> Rates:
    words = {word: sum(v.word == word for v in verdicts) for word in WORDS}
    return Rates(len(verdicts), words, statistics.fmean(v.processes for v in verdicts))


def calibrated(job: Job, slowdown: float = 0.10, tries: int = 3) -> tuple[Job, float]:
    """The job, slowed by computing some queries twice, and by how much it really is.

    Processes of both take turns; the share of queries is corrected between two rounds.
    """
    slowed, share, found = job, slowdown, 0.0
    for _ in range(tries):
        slowed = replace(job, extra=share)
        differences = [
            in_fresh_process(slowed).log_ratio - in_fresh_process(job).log_ratio for _ in range(5)
        ]
        found = math.expm1(statistics.median(differences))
        if abs(found - slowdown) < 0.01 or found <= 0:
            break
        share *= slowdown / found
    return slowed, found


def real(case: str, checks: int, device: str | None) -> list[dict[str, Any]]:
    """One baseline; `checks` checks of the unchanged program and as many of the slowed one."""
    baseline = make_baseline(CASES[case], device)
    slowed, found = calibrated(baseline.job)
    programs = [(0.0, baseline), (found, replace(baseline, job=slowed))]
    rounds = [[check_baseline(program) for _, program in programs] for _ in range(checks)]
    return [
        {"slowdown": slowdown, **_row(_rates(verdicts))}
        for (slowdown, _), verdicts in zip(programs, zip(*rounds, strict=True), strict=True)
    ]


def _row(rates: Rates) -> dict[str, Any]:
    return {**rates.words, "trials": rates.trials, "processes": rates.processes}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run", default="noise-cpu", help="a run that baseline_noise recorded")
    add("--trials", type=int, default=2000)
    add("--tolerance", type=float, default=0.05)
    add("--seed", type=int, default=0)
    add("--real", type=int, metavar="N", help="measure instead: N checks of each program")
    add("--case", choices=sorted(CASES), help="default: all; with --real, short")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Simulate, or measure.

    Returns:
        A row for each case and slowdown: how many of the trials ended with each word, and how many
        processes a check took.
    """
    device = resolve_device(options.device)
    if options.real:
        case = options.case or "short"
        return run(
            [Case({"case": case}, partial(real, case, options.real, options.device))], device
        )
    table = load_run(options.run)
    setting = {name: getattr(options, name) for name in ("trials", "tolerance", "seed")}

    def rates(case: str, slowdown: float) -> dict[str, Any]:
        return _row(simulate(processes_of(table, case), slowdown=slowdown, **setting))

    cases = [
        Case({"case": case, "slowdown": slowdown}, partial(rates, case, slowdown))
        for case in ([options.case] if options.case else sorted(CASES))
        for slowdown in (0.0, 0.05, 0.10)
    ]
    return run(cases, device, run=options.run, **setting)


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines = not_measured(table, "case")
    for row in table[table.status == "ok"].to_dict("records"):
        found = Rates(int(row["trials"]), {word: row[word] for word in WORDS}, row["processes"])
        shares = ", ".join(
            f"{word} {share:.2%} ({low:.2%} to {high:.2%})"
            for word in WORDS
            for share, low, high in [found.share(word)]
        )
        lines.append(
            f"{row['case']} {row['slowdown']:+.0%}: {shares}; {found.trials} trials, "
            f"{found.processes:.1f} processes a check"
        )
    return "\n".join(lines)
