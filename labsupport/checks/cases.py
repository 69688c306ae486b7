"""Stored cases: what an exercise's checks ask, with the right results and each mistake's.

A record holds no solution, and still names mistakes. It does not hold what a check measures beside
results, such as memory, and its inputs are always the same.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.verdict import CheckFailed, Mistake, call, mutant, passed

CLOSE = 1e-3  # of results that are rounded; whole numbers are compared as such


def export_cases(
    checks: Iterable[Callable[..., None]],
    solution: Callable[..., Any],
    mistakes: Iterable[Mistake],
    seed: int = 0,
) -> dict[str, Any]:
    """Record an exercise for `check_cases`; `torch.save` stores the record.

    Args:
        checks: called with a function and a seed.
        solution, mistakes: the reference, and its typical edits.
        seed: draws the inputs.

    Returns:
        asked: arguments and options of each call; right: its results; said: (diagnosis, results) of
        each mistake. A call that raises has None as result.
    """
    asked: list[tuple[Any, Any]] = []

    def student(*args: Any, **options: Any) -> Any:
        with contextlib.suppress(TypeError):  # a generator cannot be stored
            asked.append(copy.deepcopy((args, options)))
        return solution(*args, **options)

    def answers(function: Callable[..., Any]) -> list[Any]:
        found: list[Any] = [None] * len(asked)
        for i, (args, options) in enumerate(copy.deepcopy(asked)):
            with contextlib.suppress(Exception):
                found[i] = function(*args, **options)
        return found

    with contextlib.redirect_stdout(io.StringIO()):
        for check in checks:
            check(student, seed=seed)
    said = [(mistake.say, answers(mutant(solution, mistake.edit))) for mistake in mistakes]
    return {"asked": asked, "right": answers(solution), "said": said}


def check_cases(student: Callable[..., Any], cases: dict[str, Any]) -> None:
    """Judge a student's function by a record of `export_cases` alone.

    Raises:
        CheckFailed: a result is wrong; names the mistake that explains all of them.
    """
    given = [call(student, *args, **options) for args, options in copy.deepcopy(cases["asked"])]
    if all(map(_alike, given, cases["right"])):
        passed(f"{len(given)} stored cases")
        return
    said = (say for say, wrong in cases["said"] if all(map(_alike, given, wrong)))
    first = list(map(_alike, given, cases["right"])).index(False)
    raise CheckFailed(next(said, f"the result of stored case {first} is wrong."))


def _alike(given: Any, stored: Any) -> bool:
    if isinstance(stored, Tensor):
        same = isinstance(given, Tensor) and given.shape == stored.shape
        pair = (given.double(), stored.double()) if same else ()
        return same and torch.allclose(*pair, rtol=CLOSE, atol=CLOSE / 10, equal_nan=True)
    if isinstance(stored, Sequence) and not isinstance(stored, str):
        same = isinstance(given, Sequence) and len(given) == len(stored)
        return same and all(map(_alike, given, stored))
    if isinstance(stored, Real) and isinstance(given, Real):
        return math.isclose(given, stored, rel_tol=1e-9 if isinstance(stored, int) else CLOSE)
    return bool(given == stored)
