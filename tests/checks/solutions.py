"""The notebooks' own solutions, as source text that tests can run, and break in one place."""

import math
from functools import cache

import jupytext
import pytest
import torch

from labsupport import checks
from labsupport.checks.verdict import mutant
from labsupport.paths import notebooks_dir


@cache
def solution_source(notebook: str, grade_id: str) -> str:
    """Source of the solved cell with this grade_id in notebooks/<notebook>*.ipynb."""
    (path,) = notebooks_dir().glob(f"{notebook}*.ipynb")
    for cell in jupytext.read(path).cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == grade_id:
            return cell.source
    raise LookupError(f"{path.name} has no cell {grade_id}")


def function(source: str, name: str, **imported):
    """Run `source`, where `imported` is known, and return the function `name` that it defines."""
    namespace = {"torch": torch, "math": math, **imported}
    exec(source, namespace)
    return namespace[name]


def broken(source: str, name: str, *changes: tuple[str, str], **imported):
    """The function with each (old, new) replaced; fails when an old text is not there."""
    for old, new in changes:
        assert old in source, f"the solution no longer contains {old!r}"
        source = source.replace(old, new)
    return function(source, name, **imported)


def diagnosis(check, *student, **options):
    """What a check that must fail, or the first of several, says of the student's function."""
    with pytest.raises(checks.CheckFailed) as caught:
        for one in check if isinstance(check, tuple | list) else (check,):
            one(*student, **options)
    return str(caught.value)


def each(*tables):
    """Parametrize a test by (check, student, said) for each mistake of (check, solution, table)."""
    return pytest.mark.parametrize(
        ("check", "student", "said"),
        [
            pytest.param(
                check, mutant(solution, m.edit), m.say, id=f"{solution.__name__}: {m.say[:60]}"
            )
            for check, solution, table in tables
            for m in table
        ],
    )
