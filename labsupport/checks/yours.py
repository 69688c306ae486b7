"""Use a student's own work in a notebook, and compare predictions."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable
from typing import Any


def solution_or_reference(
    yours: Callable[..., Any],
    ours: Callable[..., Any],
    *checks: Callable[[Callable[..., Any]], None],
) -> Callable[..., Any]:
    """Return the student's function if it passes all `checks`, otherwise the lab's; say which.

    With it a notebook goes on after an unsolved exercise, and measures the student's own code as
    soon as it is right.

    >>> from labsupport.attention import standard_attention
    >>> def textbook_attention(q, k, v, mask=None):
    ...     return v, None
    >>> used = solution_or_reference(
    ...     textbook_attention, standard_attention, check_textbook_values
    ... )
    Using the lab's implementation: textbook_attention does not pass its checks yet.
    """
    name = getattr(yours, "__name__", "your function")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for check in checks:
                check(yours)
    except AssertionError:
        print(f"Using the lab's implementation: {name} does not pass its checks yet.")
        return ours
    print(f"Using your {name}.")
    return yours


def compare_prediction(
    what: str,
    predicted: float | str | None,
    measured: float,
    unit: str = "",
    possible: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    """Print a prediction, the measurement and the factor between them.

    Args:
        what: the predicted quantity.
        predicted: the student's number, or a text that begins with it; None for no prediction.
        measured: the measurement, in the same unit.
        unit: e.g. "MiB" or "times".
        possible: least and largest value that can be, (0, 1) for a share; beyond them is noise.

    >>> compare_prediction("memory", 100, 128.0, "MiB")
    memory: you predicted 100 MiB, it is 128 MiB (within a third).
    """
    unit = f" {unit}" if unit else ""
    if isinstance(predicted, str):  # with its unit, perhaps
        number = re.match(r"\s*[-+]?[\d,]*\.?\d+(e[-+]?\d+)?", predicted)
        predicted = float(number[0].replace(",", "")) if number else None
    if not possible[0] <= measured <= possible[1]:
        print(
            f"{what}: {_short(measured)}{unit} was measured, which is impossible: noise. Other "
            "programs disturb this machine; run the cell again when they have ended."
        )
        return
    if predicted is None:
        print(f"{what}: {_short(measured)}{unit}; you made no prediction.")
        return
    if predicted == measured:
        verdict = "exact"
    elif not possible[0] <= predicted <= possible[1]:
        verdict = f"it lies between {possible[0]:g} and {possible[1]:g}"
    elif predicted <= 0 or measured <= 0:
        verdict = f"{_short(abs(predicted - measured))}{unit} off"
    else:
        factor = max(predicted / measured, measured / predicted)
        verdict = f"off by a factor of {factor:.1f}"
        if factor <= 4 / 3:
            verdict = "within a third" if factor > 1.01 else "within 1%"
    guess, result = f"{_short(predicted)}{unit}", f"{_short(measured)}{unit}"
    print(f"{what}: you predicted {guess}, it is {result} ({verdict}).")


def _short(number: float) -> str:
    """Return three digits, without powers of ten for readable numbers."""
    return f"{number:,.0f}" if 1000 <= number < 1e7 else f"{number:.3g}"
