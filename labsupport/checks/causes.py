"""Answers of the exercises that ask for a fault: 1-8, 2-8, 3-8 and 4-6.

The student names a cause by its letter. A wrong letter is answered with what it would have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from labsupport.checks.errors import CheckFailed


def chosen_letter(value: Any) -> str:
    """Check that a student returned a letter from A to F; raise CheckFailed otherwise."""
    letter = value.strip().upper() if isinstance(value, str) else ""
    if letter not in tuple("ABCDEF"):
        raise CheckFailed("name the cause by its letter, a text from A to F.")
    return letter


def letter_and_program(answer: Any) -> tuple[str, Callable[..., Any]]:
    """Return what `find_fault` gave: a letter, and a function.

    Raises:
        CheckFailed: it gave something else.
    """
    match answer:
        case [str(letter), program] if callable(program):
            return letter, program
    raise CheckFailed("find_fault must return the letter and the function, in this order.")


def judge_cause(letter: Any, cause: Callable[[], str], said: Mapping[str, str]) -> None:
    """Compare a letter with the cause; raise CheckFailed with what is `said` of a wrong one."""
    letter = letter.strip().lower() if isinstance(letter, str) else letter
    if letter not in said:
        raise CheckFailed(f"the cause is one of {', '.join(map(repr, said))}, not {letter!r}.")
    if letter != cause():
        raise CheckFailed(
            f"The program is right now, but {letter!r} was not its fault. {said[letter]}"
        )
