"""Errors of the checks, and the words that their messages have for values."""

from __future__ import annotations

import dis
import inspect
import textwrap
from collections.abc import Callable
from numbers import Real
from types import CodeType
from typing import Any

import torch
from torch import Tensor

LINE = 100  # letters: in a window of 1280 pixels JupyterLab shows 105


class _Shown:
    """An error that a notebook shows as its message alone, wrapped to its window."""

    begins = "Check failed: "

    def _render_traceback_(self) -> list[str]:
        return [
            line
            for paragraph in f"{self.begins}{self}".split("\n")
            for line in textwrap.wrap(paragraph, LINE, break_long_words=False) or [""]
        ]


class CheckFailed(_Shown, AssertionError):
    """A check found a mistake; the message names it where possible.

    >>> try:
    ...     check_textbook_values(lambda q, k, v, mask=None: (v, None))
    ... except CheckFailed:
    ...     print("a mistake")
    a mistake

    Attributes:
        diagnosis: the sentence of a table of mistakes, where one explains the whole result.
    """

    def __init__(self, message: str, diagnosis: str = "") -> None:
        self.diagnosis = diagnosis
        super().__init__("\n".join(filter(None, (message, outside_note()))))


class CheckInterrupted(_Shown, KeyboardInterrupt):
    """The reader interrupted a check while the student's function ran."""

    begins = "Check interrupted: "


def not_written(name: str) -> str:
    """Say that an exercise's stub is still there; `labsupport.course.progress` reads it."""
    return f"{name} is not written yet: replace `raise NotImplementedError`."


# --- values in words ------------------------------------------------------------------------------


def described(value: Any) -> str:
    """Return a short text for an argument of a call."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Tensor) and value.ndim:
        return f"{short(value.dtype)} {tuple(value.shape)}"
    text = readable(value)
    return text if len(text) <= LINE else kind(value)


def kind(value: Any) -> str:
    """Return the type of a value in words, with dtype and shape where it has one."""
    name = type(value).__name__
    if isinstance(value, Tensor):
        name = f"{short(value.dtype)} tensor"
    shape = getattr(value, "shape", None)
    article = "an" if name[0] in "aeiouAEIOU" or name == "ndarray" else "a"
    return f"{article} {name}{f' of shape {tuple(shape)}' if shape else ''}"


def short(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def readable(value: Any) -> str:
    """Return a number with thousands separated or with four digits; a tensor in words."""
    if getattr(value, "shape", ()):
        return kind(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return repr(value)
    return f"{value:,.0f}" if value == value // 1 else f"{value:.4g}"


# --- variables of the notebook in the place of arguments ------------------------------------------

_students: list[Callable[..., Any]] = []  # the function that a check called last


def remember(function: Any) -> None:
    """Remember the student's function that is called, for `outside_note`."""
    function = inspect.unwrap(function)
    scope = getattr(function, "__globals__", {"__name__": "labsupport"})
    if not str(scope.get("__name__")).startswith("labsupport"):
        _students[:] = [function]


def outside_note() -> str:
    """Name the notebook's numbers and tensors that the student's function reads, once.

    A constant in capitals is meant to be read there.
    """
    if not _students:
        return ""
    function: Any = _students.pop()
    read = {
        name: function.__globals__.get(name)
        for name in sorted(_names(function.__code__))
        if len(name) == 1 or not name.isupper()
    }
    known = {n: x for n, x in read.items() if isinstance(x, Real | Tensor)}
    if not known:
        return ""
    shown = ", ".join(f"{name} ({described(value)})" for name, value in known.items())
    return (
        f"Note: {function.__name__} reads {shown} from the notebook, not from its arguments. If "
        "you did not intend that, compute it from the arguments."
    )


def _names(code: CodeType) -> set[str]:
    """Return the global names that a function reads, inner functions included."""
    loads = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return loads.union(*inner)
