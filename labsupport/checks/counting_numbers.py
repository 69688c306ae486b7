"""Judge the numbers that a student's function returns, in all cases together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from labsupport.checks.verdict import CheckFailed, Mistake, explain

Numbers = tuple[float, ...]


def number(value: Any, what: str) -> float:
    """Return one number, of whatever kind; a tensor or array with a single number counts as one.

    Raises:
        CheckFailed: it is no number, or NaN; the message names `what`.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CheckFailed(f"{what} must be a number, not {kind(value)}.")
    if math.isnan(value):
        raise CheckFailed(f"{what} is NaN: did a row without a measurement get in, or 0 / 0?")
    return value if isinstance(value, int) else float(value)


def values(result: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Check that there are as many values as names, of any kind.

    Raises:
        CheckFailed: another kind of result, or another number of values.
    """
    wanted = f"return {len(names)} values ({', '.join(names)})"
    if not isinstance(result, tuple | list):
        raise CheckFailed(f"{wanted}, not {kind(result)}.")
    if len(result) != len(names):
        raise CheckFailed(f"{wanted}, not {len(result)}.")
    return tuple(result)


def numbers(result: Any, names: Sequence[str]) -> Numbers:
    """Check that there are as many numbers as names.

    Raises:
        CheckFailed: another kind of result, or a value that is no number.
    """
    found = values(result, names)
    return tuple(number(value, name) for value, name in zip(found, names, strict=True))


def kind(value: Any) -> str:
    """Return the type of a value in words, with its shape or its length where it has one."""
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    shape = getattr(value, "shape", None)
    return f"{article} {name}{f' of shape {tuple(shape)}' if shape else ''}"


def same(a: Numbers, b: Numbers, tolerance: float = 1e-9) -> bool:
    """Compare two lists of numbers, each to a relative tolerance."""
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=tolerance, abs_tol=1e-12) for x, y in zip(a, b, strict=True)
    )


def first_wrong(
    given: Sequence[Numbers], right: Sequence[Numbers], tolerance: float = 1e-9
) -> int | None:
    """Return the first case that is wrong; None if all are right."""
    pairs = enumerate(zip(given, right, strict=True))
    return next((i for i, (a, b) in pairs if not same(a, b, tolerance)), None)


def compare(
    given: Sequence[Numbers],
    solution: Callable[..., Any],
    mistakes: Iterable[Mistake],
    run: Callable[[Callable[..., Any]], Sequence[Numbers]],
    tolerance: float = 1e-9,
) -> tuple[int, str] | None:
    """Return the first wrong case, and the diagnosis that explains all cases, if one does.

    Args:
        given: the student's numbers in each case.
        solution, mistakes: the reference, and its typical edits.
        run: solution -> its numbers in each case.
    """
    i = first_wrong(given, run(solution), tolerance)
    if i is None:
        return None
    return i, explain(
        given, solution, mistakes, run, lambda a, b: first_wrong(a, b, tolerance) is None
    )
