"""The instructor's notebook of the small course."""

import nbformat
import pytest

from tests.grader.reports.small_course import ROOT, SQUARE


@pytest.fixture
def notebooks(tmp_path):
    """The instructor's folder, with the notebook in it."""

    def role(grade_id, **roles):
        return {"nbgrader": {"schema_version": 3, "grade_id": grade_id, **roles}}

    def asks(name, source, points):
        return new.new_code_cell(source, metadata=role(name, grade=True, points=points))

    new = nbformat.v4
    notebook = new.new_notebook(
        cells=[
            new.new_markdown_cell("# Squares"),
            new.new_markdown_cell(
                "Text.\n\n### Exercise 1-1 · Squares & <more>\n●○○ · 5 minutes · 3 points\n\nWrite."
            ),
            new.new_code_cell("def square(x): ...", metadata=role(SQUARE, solution=True)),
            asks(f"{SQUARE}-values", "checks.check_textbook_values(square)", 2),
            asks(f"{SQUARE}-signs", "assert square(-1) == 1", 1),
            new.new_markdown_cell("### Exercise 1-2 · Roots\n●●○ · 5 minutes · 1 point"),
            new.new_code_cell("def root(x): ...", metadata=role(ROOT, solution=True)),
            asks(f"{ROOT}-values", "checks.check_textbook_values(root)", 1),
        ]
    )
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(notebook, folder / "01-Squares.ipynb")
    other = [
        new.new_code_cell("def b(): ...", metadata=role("ex-2-1-b", solution=True)),
        asks("ex-2-1-b-a", "assert b()", 0.5),
    ]
    nbformat.write(new.new_notebook(cells=other), folder / "02-B.ipynb")
    return folder
