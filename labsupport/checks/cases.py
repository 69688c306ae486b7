"""Stored cases: the inputs of an exercise's checks, with the right results and each mistake's.

A record holds no solution, and still names mistakes. It does not hold what a check measures beside
results, such as memory, and its inputs are always the same. An exam edition has records in place
of the files in `STORED`.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib
import io
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.verdict import CheckFailed, Mistake, Student, call, mutant, passed

CLOSE = 1e-3  # of results that are rounded; whole numbers are compared as such
STORED = {  # file: check, solution, table of mistakes
    "amdahl": (
        ("check_amdahl", "overall_speedup", "SPEEDUP_MISTAKES"),
        ("check_attention_share", "flop_share", "SHARE_MISTAKES"),
    ),
    "counting": (
        ("check_textbook_traffic", "textbook_traffic", "TEXTBOOK_MISTAKES"),
        ("check_tiled_traffic", "tiled_traffic", "TILED_MISTAKES"),
        ("check_tiled_causal", "tiled_traffic", "CAUSAL_MISTAKES"),
    ),
    "decoding": tuple(
        (f"check_visible_{what}", "visible", "MISTAKES")
        for what in ("positions", "padding", "decoding")
    ),
    "planning": tuple(
        (f"check_kept_{what}", "held_bytes", "MISTAKES")
        for what in ("blocks", "checkpoint", "loss")
    ),
}


def export_cases(
    checks: Iterable[Callable[..., None]],
    solution: Callable[..., Any],
    mistakes: Iterable[Mistake],
    seed: int = 0,
) -> dict[str, Any]:
    """Record checks of a solution for `check_cases`; `torch.save` stores the record.

    Returns:
        calls: arguments and options of each call; right: its results; mistakes: the diagnosis and
        the results of each mistake. A call that raises has None as result.
    """
    calls: list[tuple[Any, Any]] = []

    def student(*args: Any, **options: Any) -> Any:
        with contextlib.suppress(TypeError):  # a generator cannot be stored
            calls.append(copy.deepcopy((args, options)))
        return solution(*args, **options)

    def answers(function: Callable[..., Any]) -> list[Any]:
        found: list[Any] = [None] * len(calls)
        for i, (args, options) in enumerate(copy.deepcopy(calls)):
            with contextlib.suppress(Exception):
                found[i] = function(*args, **options)
        return found

    with contextlib.redirect_stdout(io.StringIO()):
        for check in checks:
            check(student, seed=seed)
    wrong = [(mistake.say, answers(mutant(solution, mistake.edit))) for mistake in mistakes]
    return {"calls": calls, "right": answers(solution), "mistakes": wrong}


def check_cases(student: Student, cases: dict[str, Any]) -> None:
    """Judge a student's function by a record of `export_cases` alone.

    Raises:
        CheckFailed: a result is wrong; names the mistake that explains all of them.
    """
    given = [call(student, *args, **options) for args, options in copy.deepcopy(cases["calls"])]
    if all(map(_alike, given, cases["right"])):
        passed(f"{len(given)} stored cases")
        return
    known = (say for say, wrong in cases["mistakes"] if all(map(_alike, given, wrong)))
    first = list(map(_alike, given, cases["right"])).index(False)
    raise CheckFailed(next(known, f"the result of stored case {first} is wrong."))


def stored_source(name: str) -> str:
    """Return the text of a module that takes the place of a file in `STORED`."""
    module = importlib.import_module(f"labsupport.checks.{name}")
    lines = [
        '"""Stored cases in place of the solution: see labsupport.checks.cases."""\n',
        "from labsupport.checks.cases import stored_check",
        "from labsupport.left_out import LeftOutFunction\n",
    ]
    for check, solution, table in STORED[name]:
        functions = [getattr(module, check)], getattr(module, solution)
        file = io.BytesIO()
        torch.save(export_cases(*functions, getattr(module, table)), file)
        text = base64.b85encode(zlib.compress(file.getvalue(), 9)).decode("ascii")
        lines.append(f"{check} = stored_check({text!r})")
        lines.append(f'{solution} = LeftOutFunction("checks.{solution}", "that it checks")')
    return "\n".join(lines) + "\n"


def stored_check(text: str) -> Callable[..., None]:
    """Return a check by a record of `stored_source`; its inputs are the same for every seed."""

    def check(student: Student, seed: int = 0) -> None:
        file = io.BytesIO(zlib.decompress(base64.b85decode(text)))
        check_cases(student, torch.load(file, weights_only=False))

    return check


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
