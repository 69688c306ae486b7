"""Has a program become slower? A rule that noise seldom fools.

`labsupport bench --save-baseline FILE` keeps how long a call takes, and `--check-baseline FILE`
measures it again. What is kept is not a time but the logarithm of a ratio, of the call's time to
that of a fixed matrix product timed in turns with it, once for each of several fresh processes
(`baseline_worker` says why). A machine that is slower today slows both.

The rule. d is the difference of the two trimmed means (the baseline's processes against those of
now, a fifth of them cut off at each end), e its standard error, from the Winsorized variances
(Yuen, "The two-sample trimmed t for unequal population variances", Biometrika 61, 1974), and m
what became of the machine: by how much the reference's own time differs, as a logarithm, without
its sign.

    slower      d > log(1 + tolerance)     and   d - reach > 0       reach = TRUST * e + m
    unchanged   d <= log(1 + tolerance)    and   d + reach < log(1 + 2 * tolerance)
    otherwise   one more process, up to MOST; then "cannot tell"

The tolerance is thus the border, halfway between an unchanged program and one that is slower by
twice the tolerance: with 5%, the two that are to be told apart are 0% and 10%. (A program slower by
exactly 5% may be called either.) Looking after each process makes errors likelier than one look
would, which is why TRUST is 3 and not the 1.6 of a single test at 5%.

Why m: a disturbance slows two programs alike, but not quite. When the neighbours recorded in
data/runs/noise-cpu-busy left, the reference became 9% faster and a call of 3 ms 16%, with nothing
changed: Python's part of a short call suffers more than arithmetic. The reference shows that the
machine is not what it was, and an answer then needs a difference larger than the machine's own.

How often it errs was measured, not derived: `python -m benchmarks baseline_power` draws
2,000 baselines and checks from recorded noise. On two cores with little else to do
(data/runs/noise-cpu): no false alarm, no slowdown of 10% missed. While others kept those cores busy
(noise-cpu-busy): with a call of 46 ms no false alarm, 2% "cannot tell", 98% of the slowdowns seen;
with one of 3 ms 8% false alarms (27% without m): a baseline of short calls wants a quiet machine.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labsupport.profiling.baseline_worker import Job, Pairs, Reference, in_fresh_process, plan
from labsupport.profiling.cases import Case

TRUST = 3.0  # standard errors
FEWEST, MOST = 5, 15  # processes of a check
FEWEST_SAVED, MOST_SAVED = 10, 20  # processes of a baseline: its error stays in every later check
TRIM = 0.2  # of the processes, at each end
FORMAT = 1  # of the file

Measure = Callable[[Job], Pairs]
Say = Callable[[str], None]


class NotComparableError(ValueError):
    """The baseline was measured elsewhere: no answer is possible."""


@dataclass(frozen=True)
class Baseline:
    """What a file holds.

    log_ratios: natural log of time over reference, one for each process.
    case_ms, reference_ms: each process's median times in ms.
    provenance: as `provenance()` gives it.
    """

    job: Job
    log_ratios: tuple[float, ...]
    case_ms: tuple[float, ...]
    reference_ms: tuple[float, ...]
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What the rule says: "slower", "unchanged" or "cannot tell".

    change: of the time, as a fraction (0.1 is 10% slower); low and high: the rule's reach around
    it. processes: how many were measured for it. machine: by how much the reference's time differs.
    """

    word: str
    change: float
    low: float
    high: float
    processes: int
    machine: float = 0.0

    @property
    def exit_status(self) -> int:
        """0 unchanged (or faster), 1 slower, 3 cannot tell."""
        return {"unchanged": 0, "slower": 1}.get(self.word, 3)

    def __str__(self) -> str:
        return (
            f"{self.word}: {self.change:+.1%} ({self.low:+.1%} to {self.high:+.1%}, "
            f"{self.processes} processes; the machine itself {self.machine:+.1%})"
        )


def judge(
    before: Sequence[float],
    now: Sequence[float],
    tolerance: float = 0.05,
    machine: float = 0.0,
) -> Verdict:
    """Apply the rule to the log ratios of two sets of processes, at least five in each.

    Args:
        machine: the reference's time now over that before, as a natural logarithm.

    Raises:
        ValueError: too few, or a tolerance that is not positive.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"the tolerance is a fraction such as 0.05, not {tolerance}")
    old, old_variance = trimmed_mean(before)
    new, new_variance = trimmed_mean(now)
    d, reach = new - old, TRUST * math.sqrt(old_variance + new_variance) + abs(machine)
    border, far = math.log1p(tolerance), math.log1p(2 * tolerance)
    if d > border and d - reach > 0:
        word = "slower"
    elif d <= border and d + reach < far:
        word = "unchanged"
    else:
        word = "cannot tell"
    change, low, high = (math.expm1(value) for value in (d, d - reach, d + reach))
    return Verdict(word, change, low, high, len(now), math.expm1(machine))


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean without a fifth of the values at each end, and that mean's variance (Yuen 1974)."""
    n = len(values)
    if n < FEWEST:
        raise ValueError(f"{n} processes are too few: at least {FEWEST} are needed")
    ordered, cut = sorted(values), int(TRIM * n)
    kept = ordered[cut : n - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    spread = statistics.variance(winsorized) * (n - 1)
    return statistics.fmean(kept), spread / (len(kept) * (len(kept) - 1))


def decide(baseline: Baseline, measure: Callable[[], Pairs], tolerance: float = 0.05) -> Verdict:
    """Measure processes one after the other until the rule decides, or there are MOST of them."""
    then = statistics.median(map(math.log, baseline.reference_ms))
    ratios: list[float] = []
    references: list[float] = []
    while True:
        pairs = measure()
        ratios.append(pairs.log_ratio)
        references.append(math.log(statistics.median(pairs.reference_ms)))
        if len(ratios) < FEWEST:
            continue
        machine = statistics.median(references) - then
        verdict = judge(baseline.log_ratios, ratios, tolerance, machine)
        if verdict.word != "cannot tell" or len(ratios) == MOST:
            return verdict


def enough(log_ratios: Sequence[float], tolerance: float = 0.05) -> bool:
    """Whether a baseline is known to a fifth of the tolerance, so that checks depend on the check.

    The standard error counts.
    """
    return math.sqrt(trimmed_mean(log_ratios)[1]) <= tolerance / 5


def make_baseline(
    case: Case,
    device: str | None = None,
    *,
    tolerance: float = 0.05,
    measure: Measure = in_fresh_process,
    say: Say = lambda line: None,
) -> Baseline:
    """Measure FEWEST_SAVED processes, and more, up to MOST_SAVED, until the ratio is known.

    Raises: what the backend raises where it cannot run the case.
    """
    from labsupport.profiling.provenance import provenance

    job = plan(case, device)
    record = provenance(job.device)

    def one() -> Pairs:
        pairs = measure(job)
        say(f"{math.exp(pairs.log_ratio):.3f} times the reference")
        return pairs

    return gather(job, one, tolerance, record)


def gather(
    job: Job, measure: Callable[[], Pairs], tolerance: float, provenance: dict[str, Any]
) -> Baseline:
    """A baseline of as many processes as it takes."""
    found: list[Pairs] = []
    while len(found) < FEWEST_SAVED or (
        len(found) < MOST_SAVED and not enough([pairs.log_ratio for pairs in found], tolerance)
    ):
        found.append(measure())
    return Baseline(
        job,
        tuple(pairs.log_ratio for pairs in found),
        tuple(statistics.median(pairs.case_ms) for pairs in found),
        tuple(statistics.median(pairs.reference_ms) for pairs in found),
        provenance,
    )


def check_baseline(
    baseline: Baseline,
    *,
    tolerance: float = 0.05,
    measure: Measure = in_fresh_process,
    say: Say = lambda line: None,
) -> Verdict:
    """Measure the baseline's case again, by the same job, and judge.

    Raises:
        NotComparableError: this is another device.
    """
    from labsupport.profiling.hardware import detect_device

    try:
        here = detect_device(baseline.job.device).name
    except ValueError as error:
        raise NotComparableError(f"the baseline is of a GPU: {error}") from None
    there = baseline.provenance.get("device", here)
    if here != there:
        raise NotComparableError(
            f"the baseline is of {there}, and this is {here}: save a baseline here first"
        )

    def one() -> Pairs:
        pairs = measure(baseline.job)
        say(f"{math.exp(pairs.log_ratio):.3f} times the reference")
        return pairs

    return decide(baseline, one, tolerance)


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write the file, as JSON."""
    text = json.dumps({"format": FORMAT, **asdict(baseline)}, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def read_baseline(path: Path) -> Baseline:
    """Read what `write_baseline` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no baseline, or of another format.
    """
    if not path.exists():
        raise FileNotFoundError(f"no baseline {path}: make one with --save-baseline {path}")
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']}, not {FORMAT}")
        job = given["job"]
        case, reference = Case(**job.pop("case")), Reference(**job.pop("reference"))
        return Baseline(
            Job(case=case, reference=reference, **job),
            tuple(given["log_ratios"]),
            tuple(given["case_ms"]),
            tuple(given["reference_ms"]),
            given["provenance"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no baseline of this program ({error}): save it anew") from None
