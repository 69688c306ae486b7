"""A student's own functions, taken from the notebook in which they were written."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def solution_of(number: str, name: str) -> Callable[..., Any]:
    """Return a function from a saved notebook beside the one that runs.

    Args:
        number: the notebook's, "01" to "04".
        name: the function's; its cell may use `math` and `torch`.

    Returns:
        The function of the last solution cell that defines it. Where there is none, a function
        that raises NotImplementedError, as an exercise does that is not written yet.
    """
    found: dict[str, Any] = {"math": math, "torch": torch}
    for path in sorted(Path.cwd().glob(f"{number}-*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["metadata"].get("nbgrader", {}).get("solution") and f"def {name}(" in source:
                with contextlib.suppress(Exception):
                    exec(compile(source, str(path), "exec"), found)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"there is no {name} in a notebook {number} beside this one")

    return found.get(name, missing)
