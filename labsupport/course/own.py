"""A student's own functions, taken from the notebook in which they were written."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labsupport import paths


def solution_of(exercise: str, name: str) -> Callable[..., Any]:
    """Return a function that a student wrote, from the saved notebook that holds its exercise.

    Args:
        exercise: its number, such as "1-4".
        name: the function's; its cell may use `math` and `torch`.

    Returns:
        The function of the exercise's last cell that defines it, in any notebook of the current
        folder (of the one above in `further/`). Where there is none, a function that raises
        NotImplementedError, as an exercise does that is not written yet.
    """
    found: dict[str, Any] = {"math": math, "torch": torch}
    here = Path.cwd()
    for path in paths.notebooks_in(here.parent if here.name == "further" else here):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            about = cell["metadata"].get("nbgrader", {})
            mine = about.get("solution") and about["grade_id"].startswith(f"ex-{exercise}-")
            if mine and f"def {name}(" in source:
                with contextlib.suppress(Exception):
                    exec(compile(source, str(path), "exec"), found)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} of exercise {exercise} is not written yet")

    return found.get(name, missing)
