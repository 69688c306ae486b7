"""A guard against slower calls: `labsupport bench --save-baseline` and `--check-baseline`.

A process compares the call with a yardstick, a fixed number of matrix products, in turns;
`PROCESSES` of them are the baseline and each check. d is the difference of the trimmed means of
their log ratios (Yuen's test; theory, chapter 8):

    slower       d > log(1 + tolerance), and d > 0 is significant
    unchanged    d <= log(1 + tolerance), and d < log(1 + 2 tolerance) is significant
    cannot tell  otherwise, or where the yardstick's own time has changed by more than d

The clock is the CPU time of one thread; on a GPU the call is replayed from a CUDA graph if it can.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from labsupport.profiling.cases import Case

PROCESSES = 10
SECONDS = 1.0  # of pairs in one process
FEWEST_PAIRS, MOST_PAIRS = 11, 41
ALPHA = 0.01
EXIT_STATUS = {"unchanged": 0, "slower": 1, "cannot tell": 3}


@dataclass(frozen=True)
class Job:
    """A case to time in turns with `products` times A @ A, A of `size` x `size`."""

    case: Case
    device: str
    size: int
    products: int
    pairs: int


@dataclass(frozen=True)
class Baseline:
    """For each process: the logarithm of time over yardstick, and the yardstick's median time."""

    job: Job
    log_ratios: list[float]
    yardstick_ms: list[float]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """`word` is "slower", "unchanged" or "cannot tell"; `change` of the time is a fraction."""

    word: str
    change: float
    machine: float

    def __str__(self) -> str:
        return f"{self.word}: {self.change:+.1%} (the yardstick itself {self.machine:+.1%})"


def judge(
    before: Sequence[float], now: Sequence[float], machine: float = 0.0, tolerance: float = 0.05
) -> Verdict:
    """Apply the rule to the log ratios of the processes of then and of now.

    Args:
        machine: by how much the yardstick's own time has changed, as a logarithm.
    """
    from scipy.stats import trim_mean, ttest_ind

    def significant(values: Sequence[float], alternative: str) -> bool:
        found = ttest_ind(now, values, equal_var=False, trim=0.2, alternative=alternative)
        return found.pvalue < ALPHA

    d = trim_mean(now, 0.2) - trim_mean(before, 0.2)
    border, far = math.log1p(tolerance), math.log1p(2 * tolerance)
    word = "cannot tell"
    if d > max(border, abs(machine)) and significant(before, "greater"):
        word = "slower"
    elif d <= border and abs(machine) < far and significant([x + far for x in before], "less"):
        word = "unchanged"
    return Verdict(word, math.expm1(d), math.expm1(machine))


def make_baseline(job: Job, say: Callable[[str], None]) -> Baseline:
    """Measure a job in `PROCESSES` fresh processes, and report each ratio."""
    from labsupport.profiling.provenance import provenance

    record = provenance(job.device)
    log_ratios, yardstick_ms = [], []
    for _ in range(PROCESSES):
        pairs = in_fresh_process(job)
        log_ratios.append(statistics.median(math.log(case / y) for case, y in pairs))
        yardstick_ms.append(statistics.median(y for _, y in pairs))
        say(f"{math.exp(log_ratios[-1]):.3f} times the yardstick")
    return Baseline(job, log_ratios, yardstick_ms, record)


def check_baseline(before: Baseline, tolerance: float, say: Callable[[str], None]) -> Verdict:
    """Measure a baseline's job again, and judge.

    Raises:
        ValueError: the baseline is of another device.
        RuntimeError: scipy is not installed.
    """
    if importlib.util.find_spec("scipy") is None:
        raise RuntimeError("a baseline is checked with scipy: pip install 'labsupport[regression]'")
    from labsupport.profiling.hardware import detect_device

    here, there = detect_device(before.job.device).name, before.provenance["device"]
    if here != there:
        raise ValueError(f"the baseline is of {there}, and this is {here}: save one here first")
    now = make_baseline(before.job, say)
    medians = [statistics.median(one.yardstick_ms) for one in (before, now)]
    machine = math.log(medians[1] / medians[0])
    return judge(before.log_ratios, now.log_ratios, machine, tolerance)


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write the file, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(baseline), indent=1) + "\n", encoding="utf-8")


def read_baseline(path: Path) -> Baseline:
    """Read what `write_baseline` wrote; raise ValueError for another file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        job = Job(**fields["job"] | {"case": Case(**fields["job"]["case"])})
        return Baseline(**fields | {"job": job})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no baseline of this program: save it again") from error


def plan(case: Case, device: str | None = None) -> Job:
    """Choose a yardstick of like duration, and the number of pairs."""
    import torch

    from labsupport.profiling.benchmark import call_of, make_inputs
    from labsupport.profiling.timing import captured, measure_time, resolve_device

    where = resolve_device(device)
    size = 4096 if where.type == "cuda" else 256  # more arithmetic than launch
    calls = call_of(case, make_inputs(case, where)), yardstick(case, size, 1, where)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        case_ms, one_ms = (
            measure_time(captured(call, where)[0], device=where, max_seconds=0.3).min
            for call in calls
        )
    finally:
        torch.set_num_threads(threads)
    products = max(1, round(case_ms / one_ms))
    pairs = round(SECONDS * 1e3 / (case_ms + products * one_ms))
    return Job(case, str(where), size, products, min(MOST_PAIRS, max(FEWEST_PAIRS, pairs)))


def in_fresh_process(job: Job) -> list[tuple[float, float]]:
    """Time a job in a new Python process: (case, yardstick) in ms, pair by pair."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, job).result()


def measure(job: Job) -> list[tuple[float, float]]:
    """Time a job in this process, with one thread."""
    import torch

    from labsupport.profiling.benchmark import call_of, make_inputs
    from labsupport.profiling.timing import captured, measure_interleaved, resolve_device

    torch.set_num_threads(1)
    where = resolve_device(job.device)
    case = call_of(job.case, make_inputs(job.case, where))
    reference = yardstick(job.case, job.size, job.products, where)
    if where.type == "cuda":
        calls = {"case": captured(case, where)[0], "yardstick": captured(reference, where)[0]}
        bounds = {"min_repeats": job.pairs, "max_repeats": job.pairs, "max_seconds": math.inf}
        timings = measure_interleaved(calls, device=where, **bounds)
        return list(zip(timings["case"].samples, timings["yardstick"].samples, strict=True))

    def cpu_ms(call: Callable[[], Any]) -> float:
        start = time.thread_time()
        call()
        return (time.thread_time() - start) * 1e3

    return [(cpu_ms(case), cpu_ms(reference)) for _ in range(job.pairs + 2)][2:]


def yardstick(case: Case, size: int, products: int, device: Any) -> Callable[[], None]:
    """`products` times A @ A for a `size` x `size` matrix A of the case's dtype."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(size, size, generator=generator).to(device, getattr(torch, case.dtype))

    def call() -> None:
        for _ in range(products):
            a @ a

    return call
