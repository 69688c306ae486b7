"""A small solved notebook of two exercises, and submissions of it."""

import nbformat
import pytest

from grader.grade.results import Settings
from grader.grade.submissions import find_submissions

V4 = nbformat.v4
SOLVED = '''def {}(x):
    """Return {}."""
    ### BEGIN SOLUTION
    return {}
    ### END SOLUTION'''
SQUARE = SOLVED.format("square", "x times x", "x * x")
CUBE = SOLVED.format("cube", "x times x times x", "x * x * x")
GOOD_SQUARE, GOOD_CUBE = "def square(x):\n    return x ** 2", "def cube(x):\n    return x ** 3"
HIDDEN = (
    "assert square(3) == 9\n### BEGIN HIDDEN TESTS\nassert square(-4) == 16\n### END HIDDEN TESTS"
)


def graded(grade_id, **roles):
    roles = {"grade": False, "solution": False, "locked": False, **roles}
    return {"nbgrader": {"schema_version": 3, "grade_id": grade_id, **roles}}


def make_notebook(square, cube, before=(), after=()):
    """The exercises' notebook; None leaves a solution cell out."""
    check = {"grade": True, "locked": True}

    def solution(name, source):
        given = [] if source is None else [source]
        return [V4.new_code_cell(text, metadata=graded(name, solution=True)) for text in given]

    cells = [
        V4.new_code_cell("import math\n\nbase, unused = 2, math.tau"),
        *(V4.new_code_cell(text) for text in before),
        *solution("ex-1-1-square", square),
        V4.new_code_cell(HIDDEN, metadata=graded("ex-1-1-square-signs", points=2, **check)),
        V4.new_code_cell(
            "assert square(5) == 25", metadata=graded("ex-1-1-square-five", points=1, **check)
        ),
        *solution("ex-1-2-cube", cube),
        V4.new_code_cell(
            "assert cube(3) == 27", metadata=graded("ex-1-2-cube-three", points=2, **check)
        ),
        *(V4.new_code_cell(text) for text in after),
    ]
    return V4.new_notebook(cells=cells)


@pytest.fixture
def solved_folder(tmp_path):
    """The folder of the instructor's notebook."""
    folder = tmp_path / "solved"
    folder.mkdir()
    nbformat.write(make_notebook(SQUARE, CUBE), folder / "01-Powers.ipynb")
    return folder


@pytest.fixture
def settings(solved_folder):
    return Settings(
        unconfined=True,  # some machines that test can do no better; the tests say where
        notebooks=solved_folder,
        cell_timeout_s=30,
        notebook_timeout_s=240,
        jobs=1,
    )


@pytest.fixture
def hand_in(tmp_path, solved_folder):
    """Write a student's notebook and read it as a submission."""

    def write(square=GOOD_SQUARE, cube=GOOD_CUBE, *, student="ada", notebook=None, **cells):
        folder = tmp_path / "submissions" / student
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "01-Powers.ipynb"
        nbformat.write(notebook or make_notebook(square, cube, **cells), path)
        found = find_submissions(folder.parent, notebooks=solved_folder)
        return next(one for one in found if one.student == student)

    return write
