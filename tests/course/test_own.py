"""A student's own function, from another notebook."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labsupport.course.own import solution_of


def test_the_last_definition_in_the_saved_notebook_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotImplementedError, match="root of exercise 1-2 is not written yet"):
        solution_of("1-2", "root")(4)
    solution = {"nbgrader": {"solution": True, "grade_id": "ex-1-2-roots"}}
    cells = [
        new_code_cell("def root(x):\n    return 'given'"),  # no solution cell
        new_code_cell("def root(x):\n    return -1", metadata=solution),
        new_code_cell("def root(x):\n    return math.sqrt(x)", metadata=solution),
        new_code_cell("def root(x:\n", metadata=solution),  # does not compile: the last that does
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01-Roots.ipynb")
    assert solution_of("1-2", "root")(4) == 2.0
    (tmp_path / "further").mkdir()
    monkeypatch.chdir(tmp_path / "further")
    assert solution_of("1-2", "root")(4) == 2.0
