"""The numbers that a student's function returned: read with care, judged in all cases at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from labsupport.checks.verdict import CheckFailed

Numbers = tuple[float, ...]


def number(value: Any, what: str) -> float:
    """One number, of whatever kind; a tensor or an array with a single number counts as one.

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
    """As many values as there are names, of any kind.

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
    """As many numbers as there are names.

    Raises:
        CheckFailed: another kind of result, or a value that is no number.
    """
    found = values(result, names)
    return tuple(number(value, name) for value, name in zip(found, names, strict=True))


def kind(value: Any) -> str:
    """The type of a value in words, with its shape or its length where it has one."""
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    shape = getattr(value, "shape", None)
    return f"{article} {name}{f' of shape {tuple(shape)}' if shape else ''}"


def same(a: Numbers, b: Numbers, tolerance: float = 1e-9) -> bool:
    """Whether two lists of numbers agree, each to a relative tolerance."""
    return len(a) == len(b) and all(
        math.isclose(x, y, rel_tol=tolerance, abs_tol=1e-12) for x, y in zip(a, b, strict=True)
    )


def first_wrong(
    given: Sequence[Numbers], right: Sequence[Numbers], tolerance: float = 1e-9
) -> int | None:
    """The first case that is wrong; None if all are right."""
    pairs = enumerate(zip(given, right, strict=True))
    return next((i for i, (a, b) in pairs if not same(a, b, tolerance)), None)


def explanation(
    given: Sequence[Numbers],
    mistakes: Mapping[str, str],
    wrong: Callable[[str], Sequence[Numbers]],
    tolerance: float = 1e-9,
) -> str:
    """What to say of the first mistake that explains every case; empty if none does.

    Args:
        mistakes: name -> diagnosis.
        wrong: name -> what a solution with that mistake returns in each case.
    """
    for name, said in mistakes.items():
        if first_wrong(given, wrong(name), tolerance) is None:
            return said
    return ""
