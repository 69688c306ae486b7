"""A small course: the instructor's notebooks, and results."""

import nbformat
import pytest

from grader.grade.results import CheckResult, Flag, SubmissionResult

SQUARE, ROOT = "ex-1-1-square", "ex-1-2-root"


def check(name, status="passed", message="", points=1.0, exercise=SQUARE):
    return CheckResult(f"{exercise}-{name}", exercise, points, status, message)


def result(student, *checks, notebook="01-Squares", **more):
    path = more.pop("path", f"{student}/{notebook}.ipynb")
    return SubmissionResult(student, notebook, path, "d" * 64, checks=checks, **more)


def perfect(student, **more):
    checks = (check("values", points=2.0), check("signs"), check("values", exercise=ROOT))
    return result(student, *checks, **more)


def flag(kind="late", text="Two hours after the end."):
    return Flag("", kind, text)


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
