"""Stored cases: inputs, and what references and their mistakes give, for an edition without them.

A check computes its right results inside of `reference`, and draws inputs (`verdict.draw`) and
applies mistakes (`verdict.results`) there too. With one seed it does so in one order, whatever
function it checks. So a machine that has the solutions can write all of it down (`recording`), and
an edition that lacks them reads it back in that order (`stored`): the check judges and names
mistakes as before, with the same inputs every time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Tape = list[Any]  # the results of one check, in order
FILE = Path(__file__).with_name("cases.safetensors")
EXAM = importlib.util.find_spec("labsupport.left_out") is not None  # answers are left out

# The student's functions by name, in an exam: each has passed a check.
PASSED: dict[str, Callable[..., Any]] = {}

_written: Tape | None = None
_read: Iterator[Any] | None = None


def reference(compute: Callable[[], T]) -> T:
    """Return a reference's result: computed here, or the stored one where there is no reference."""
    global _written
    if _read is not None:
        return next(_read)
    if (tape := _written) is None:
        return compute()
    _written = None  # a reference that calls another one counts once
    result: Any = compute()
    tape.append(list(result) if isinstance(result, Iterator) else result)
    _written = tape
    return tape[-1]


def judging() -> bool:
    """Return whether an exam's check runs, or a submission is graded: nothing may stand in."""
    return _read is not None or not FILE.exists()


def is_recording() -> bool:
    """Return whether results are being recorded; then all of them must be."""
    return _written is not None


@contextlib.contextmanager
def recording() -> Iterator[Tape]:
    """Write down the results of all references that run inside the `with` block."""
    global _written
    _written = tape = []
    try:
        yield tape
    finally:
        _written = None


def stored(check: Callable[..., None]) -> Callable[..., None]:
    """Return a check that reads stored results; a seed makes no difference to it.

    In an exam edition it refuses functions of the package: an exam asks for the student's own.
    """

    @functools.wraps(check)
    def run(*students: Any, seed: int = 0, **options: Any) -> None:
        global _read
        names = [getattr(student, "__name__", "") for student in students]
        for name in names:
            PASSED.pop(name, None)  # an earlier version does not count any more
        for student in students:
            if EXAM and str(getattr(student, "__module__", "")).startswith("labsupport"):
                from labsupport.checks.verdict import CheckFailed

                name = getattr(student, "__name__", "that")
                raise CheckFailed(f"{name} is the lab's own function: write yours.")
        _read = iter(stored_tape(check.__name__))
        try:
            check(*students, **options)
        finally:
            _read = None
        PASSED.update(zip(names, students, strict=True))

    return run


def save_cases(tapes: dict[str, Tape], file: Path) -> None:
    """Store the tapes of checks, by the checks' names."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}  # equal tensors are stored once

    def encoded(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"array": encoded(torch.from_numpy(value))}
        if isinstance(value, Tensor):
            plain = value.detach().contiguous()
            bits = plain.view(-1).view(torch.uint8).numpy().tobytes()
            name = names.setdefault((plain.dtype, plain.shape, bits), str(len(names)))
            tensors.setdefault(name, plain.clone())
            return {"tensor": name}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, tuple):
            return {"tuple": [encoded(one) for one in value]}
        return [encoded(one) for one in value] if isinstance(value, list) else value

    structure = json.dumps({name: encoded(tape) for name, tape in tapes.items()})
    save_file(tensors, file, metadata={"cases": structure})


def stored_tape(check: str) -> Tape:
    """Return the stored results of a check."""
    from safetensors import safe_open

    with safe_open(FILE, framework="pt") as file:

        def decoded(value: Any) -> Any:
            if isinstance(value, list):
                return [decoded(one) for one in value]
            if not isinstance(value, dict):
                return value
            ((kind, content),) = value.items()
            if kind == "tensor":
                return file.get_tensor(content)
            if kind == "array":
                return decoded(content).numpy()
            return getattr(torch, content) if kind == "dtype" else tuple(map(decoded, content))

        return decoded(json.loads(file.metadata()["cases"])[check])
