"""Exercises 3-8 and 4-6: find the fault of a short program, name its cause, and repair it.

The student names a cause by its letter, and the program must be right afterwards. A wrong letter is
answered with what would have been seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.checks.verdict import (
    CheckFailed,
    Student,
    call,
    draw,
    explain,
    judge,
    mistakes,
    number,
    passed,
    readable,
    results,
    tensor,
    values,
)

IGNORED = -100

# --- 3-8: gradient accumulation -------------------------------------------------------------------


### BEGIN SOLUTION
def accumulated_gradient(weight: Tensor, hidden: Tensor, labels: Tensor, parts: int) -> Tensor:
    """Return the gradient of the mean loss over all labels that count, one part after another."""
    weight = weight.clone().requires_grad_()
    count = (labels != IGNORED).sum()
    for h, y in zip(hidden.chunk(parts), labels.chunk(parts), strict=True):
        loss = F.cross_entropy(h @ weight.mT, y, ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
    assert weight.grad is not None
    return weight.grad


ACCUMULATION_MISTAKES = mistakes(r"""
The given program computes the same gradient: the fault is still there.
    , reduction="sum") / count -> ) / parts
The parts' means are added up, and nothing divides them.
    , reduction="sum") / count -> )
The losses are added up, and nothing divides their sum.
    / count ->
All tokens are counted. Only labels that are not -100 have a loss.
    (labels != IGNORED).sum() -> labels.numel()
The sum of a part is divided by the number of parts, not by the number of labels.
    / count -> / parts
It is divided by the labels and by the number of parts: each label would count too little.
    / count -> / count / parts
""")
### END SOLUTION

ACCUMULATION_CAUSES = {
    "a": "If gradients of an earlier step were still there, the first step would be right, and an "
    "even distribution of labels would not help. Compare one step alone.",
    "b": "If the last part's tokens were lost, the gradient would change with even counts, too.",
    "c": "If each part weighed the same, the table would look as it does.",
    "d": "If the loss counted tokens without a label, one part alone would be wrong as well.",
    "e": "If the gradients were only added up, the norm would be `parts` times as large, with even "
    "counts, too.",
    "f": "If rounding were to blame, the difference would be 1e-7, and not percents.",
}


### BEGIN SOLUTION
def accumulation_cause() -> str:
    """Return the letter of the cause in exercise 3-8."""
    return "c"


### END SOLUTION


def check_accumulation(student: Student, seed: int = 0) -> None:
    """Exercise 3-8: the cause of a wrong gradient, and the program without it."""
    generator = torch.Generator().manual_seed(seed)
    for parts, ignored in ((4, (0, 5, 1, 3)), (3, (2, 2, 2)), (2, (0, 6))):
        weight, hidden = draw(7, 5, seed=seed + parts), draw(8 * parts, 5, seed=seed + parts + 9)
        labels = torch.randint(7, (8 * parts,), generator=generator).clone()
        for i, n in enumerate(ignored):
            labels[8 * i : 8 * i + n] = IGNORED
        arguments = weight, hidden, labels, parts
        letter, gradient = values(call(student, *arguments), ("cause", "gradient"))
        right = accumulated_gradient(*arguments)
        known = results(accumulated_gradient, ACCUMULATION_MISTAKES, lambda f, a=arguments: f(*a))
        where = f"({parts} parts with {', '.join(str(8 - n) for n in ignored)} labels) "
        gradient = tensor(gradient, "the gradient")
        if not _close(gradient, right) and (say := explain(gradient, known, _close)):
            raise CheckFailed(where + say)
        judge(f"{where}the gradient", gradient, right, allowed=1e-5)
        _judge_cause(letter, accumulation_cause, ACCUMULATION_CAUSES)
    passed("the cause is named, and the gradient is that of one large batch", seed)


# --- 4-6: a clock ---------------------------------------------------------------------------------


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
The refill's time is subtracted, and the time of a launch with it. Wait for the refill instead,
before the clock starts.
    gpu.now() - start -> gpu.now() - start - 0.01
Nothing waits for the call before the clock is read again: this is the time of a launch.
    gpu.launch("call")\n        gpu.synchronize() -> gpu.launch("call")
The cache is not emptied before each call: the call finds its data there, and is too fast.
    gpu.launch("refill")\n        gpu.synchronize() -> gpu.synchronize()
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
    for case in cases:
        *sizes, repeats = case
        letter, ms = values(call(student, *case), ("cause", "the median"))
        right = median_ms(VirtualGpu(*sizes), repeats)
        known = results(
            median_ms, CLOCK_MISTAKES, lambda f, s=sizes, n=repeats: f(VirtualGpu(*s), n)
        )
        ms = number(ms, "the median")
        if not _equal_ms(ms, right):
            say = explain(ms, known, _equal_ms)
            raise CheckFailed(
                f"A call of {sizes[0]} ms, with a refill of {sizes[1]} ms before it, was timed as "
                f"{readable(ms)} ms; with its launch it takes {readable(right)} ms. {say}"
            )
        _judge_cause(letter, clock_cause, CLOCK_CAUSES)
    passed("the cause is named, and the clock sees the call alone", seed)


def letter_and_program(answer: Any) -> tuple[str, Callable[..., Any]]:
    """Return what `find_fault` gave: a letter, and a function.

    Raises:
        CheckFailed: it gave something else.
    """
    match answer:
        case [str(letter), program] if callable(program):
            return letter, program
    raise CheckFailed("find_fault must return the letter and the function, in this order.")


def _judge_cause(letter: Any, cause: Callable[[], str], said: Mapping[str, str]) -> None:
    letter = letter.strip().lower() if isinstance(letter, str) else letter
    if letter not in said:
        raise CheckFailed(f"the cause is one of {', '.join(map(repr, said))}, not {letter!r}.")
    if letter != cause():
        raise CheckFailed(
            f"The program is right now, but {letter!r} was not its fault. {said[letter]}"
        )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def _equal_ms(a: float, b: float) -> bool:
    return abs(a - b) < 1e-6
