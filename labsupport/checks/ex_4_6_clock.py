"""Exercise 4-6: a clock that measures too much: name the cause, and repair the program."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from labsupport.checks.causes import judge_cause
from labsupport.checks.errors import CheckFailed, readable
from labsupport.checks.verdict import (
    Student,
    call,
    explain,
    mistakes,
    number,
    passed,
    results,
    values,
)


class VirtualGpu:
    """A GPU by its rules, in virtual milliseconds: work is queued, and the program goes on.

    A launch takes the program 0.01 ms. The first call of a kernel takes it `compile_ms` more, and a
    call whose data are still in the cache (no `launch("refill")` since) runs in half its time.
    """

    def __init__(self, work_ms: float, refill_ms: float, compile_ms: float) -> None:
        self._work_ms, self._refill_ms, self._compile_ms = work_ms, refill_ms, compile_ms
        self._now = self._done = 0.0
        self._cached = self._compiled = False

    def now(self) -> float:
        """Return the program's clock."""
        return self._now

    def launch(self, kernel: str) -> None:
        """Queue "call", or "refill", which empties the cache."""
        self._now += 0.01
        took = self._refill_ms
        if kernel == "call":
            self._now += 0.0 if self._compiled else self._compile_ms
            took, self._compiled = self._work_ms / (1 + self._cached), True
        self._cached = kernel == "call"
        self._done = max(self._done, self._now) + took

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""
        self._now = max(self._now, self._done)


### BEGIN SOLUTION
def median_ms(gpu: VirtualGpu, repeats: int) -> float:
    """Return the median time of a call that finds the cache empty."""
    gpu.launch("call")
    times = []
    for _ in range(repeats):
        gpu.launch("refill")
        gpu.synchronize()
        start = gpu.now()
        gpu.launch("call")
        gpu.synchronize()
        times.append(gpu.now() - start)
    return statistics.median(times)


CLOCK_MISTAKES = mistakes(r"""
The given program measures the same. Wait between the refill and the first reading of the clock.
    gpu.launch("refill")\n        gpu.synchronize() -> gpu.launch("refill")
You wait, but not between the refill and the first reading of the clock.
    gpu.synchronize()\n        start = gpu.now() -> start = gpu.now(); gpu.synchronize()
You wait, but not between the refill and the first reading of the clock.
    gpu.launch("refill")\n        gpu.synchronize() -> gpu.synchronize(); gpu.launch("refill")
The refill's time is subtracted, and the time of a launch with it. Wait for the refill instead,
before the clock starts.
    gpu.now() - start -> gpu.now() - start - 0.01
Nothing waits for the call before the clock is read again: this is the time of a launch.
    gpu.launch("call")\n        gpu.synchronize() -> gpu.launch("call")
The cache is not emptied before each call: the call finds its data there, and is too fast.
    gpu.launch("refill")\n        gpu.synchronize() -> gpu.synchronize()
The cache is not emptied before each call: the call finds its data there, and is too fast.
    gpu.launch("refill")\n        gpu.synchronize() -> pass
The cache is emptied once, but from the second call on its data are there: empty it before each.
    times = [] -> times = []; gpu.launch("refill"); gpu.synchronize()
    gpu.launch("refill")\n        gpu.synchronize() -> pass
The cache is emptied while the clock runs, after the call: empty it before the clock starts.
    gpu.launch("refill")\n        gpu.synchronize() -> pass
    gpu.synchronize()\n        times -> gpu.launch("refill"); gpu.synchronize(); times
The clock starts before the cache is emptied.
    start = gpu.now()\n        gpu.launch -> gpu.launch
    gpu.launch("refill")\n        gpu -> start = gpu.now(); gpu.launch("refill")\n        gpu
The first call is not left out: it compiles.
    gpu.launch("call")\n    times = [] -> times = []
That is a mean, and the first call's compiling is in it: leave it out, and take the median.
    gpu.launch("call")\n    times = [] -> times = []
    statistics.median -> statistics.mean
""")
### END SOLUTION

CLOCK_CAUSES = {
    "a": "If the clock did not wait for the call, each line would show about 0.01 ms, the time of "
    "a launch.",
    "b": "If the first call's compiling were in the median, a longer series would show less.",
    "c": "If the call found its data in the cache, it would be too fast, and not too slow.",
    "d": "If other work that was queued before were in the time, the table would look as it does.",
    "e": "If launches were the reason, the difference would be 0.01 ms for each.",
    "f": "If other programs disturbed, the series would scatter; here each gives the same.",
}


### BEGIN SOLUTION
def clock_cause() -> str:
    """Return the letter of the cause in exercise 4-6."""
    return "d"


### END SOLUTION


def check_clock(student: Student, seed: int = 0) -> None:
    """Exercise 4-6: the cause of wrong times, and the program without it."""
    cases = [(0.5, 2.0, 40.0, 9), (4.0, 0.25, 40.0, 1), (0.03, 1.0 + seed / 100, 7.0, 2)]
    given = [values(call(student, *case), ("cause", "the median")) for case in cases]

    def run(median: Callable[..., float]) -> list[float]:
        return [median(VirtualGpu(*sizes), repeats) for *sizes, repeats in cases]

    times, right = [number(ms, "the median") for _, ms in given], run(median_ms)
    for (work, refill, *_), ms, ours in zip(cases, times, right, strict=True):
        if not math.isclose(ms, ours, abs_tol=1e-6):
            say = explain(times, results(median_ms, CLOCK_MISTAKES, run, pairs=False), _equal_ms)
            raise CheckFailed(
                f"A call of {work} ms, with a refill of {refill} ms before it, was timed as "
                f"{readable(ms)} ms; with its launch it takes {readable(ours)} ms. {say}"
            )
    judge_cause(given[0][0], clock_cause, CLOCK_CAUSES)
    passed("the cause is named, and the clock sees the call alone", seed)


def _equal_ms(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(map(partial(math.isclose, abs_tol=1e-6), some, others))
