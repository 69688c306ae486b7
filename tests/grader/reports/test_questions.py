"""What was asked, as the instructor's notebook says it."""

import nbformat
import pytest

from grader.grade.pristine import pristine_notebooks
from grader.reports.questions import questions_in, what_a_check_asks
from labsupport import paths
from tests.grader.reports.small_course import ROOT, SQUARE


def test_an_exercise_has_the_title_and_the_line_of_the_card_above_it(notebooks):
    square, root = questions_in(notebooks)["01-Squares"]
    assert (square.exercise, root.exercise) == (SQUARE, ROOT)
    assert square.title == "Exercise 1-1 · Squares & <more>"
    assert square.card == "●○○ · 5 minutes · 3 points"
    assert root.title == "Exercise 1-2 · Roots"


def test_its_checks_have_their_points_in_the_notebooks_order(notebooks):
    square, root = questions_in(notebooks)["01-Squares"]
    assert list(square.points.items()) == [(f"{SQUARE}-values", 2.0), (f"{SQUARE}-signs", 1.0)]
    assert (square.total, root.total) == (3.0, 1.0)


def test_what_a_check_asks_is_the_docstring_of_the_check_without_its_number():
    said = what_a_check_asks("x = 1\nchecks.check_textbook_values(f)\n### BEGIN HIDDEN TESTS")
    assert said == "output and weights without a mask, with leading dimensions."


@pytest.mark.parametrize(
    "source", ["assert f(2) == 4", "checks.check_unknown(f)", "not ( python", "other.check_fit(f)"]
)
def test_a_cell_that_calls_no_known_check_asks_nothing_that_can_be_said(source):
    assert what_a_check_asks(source) == ""


def test_a_folder_without_notebooks_asks_nothing(tmp_path):
    assert questions_in(tmp_path) == {}
    assert questions_in(tmp_path / "absent") == {}


def test_an_answer_in_words_counts_where_the_grader_counts_it(notebooks):
    path = notebooks / "01-Squares.ipynb"
    notebook = nbformat.read(path, as_version=4)
    role = {"grade_id": "ex-1-3-why", "solution": True, "grade": True, "points": 5}
    notebook.cells.append(nbformat.v4.new_markdown_cell("Why?", metadata={"nbgrader": role}))
    nbformat.write(notebook, path)
    pristine = pristine_notebooks(notebooks)["01-Squares"]
    questions = questions_in(notebooks)["01-Squares"]
    assert {check: q.exercise for q in questions for check in q.points} == {
        check: pristine.exercise_of(check) for check in pristine.graded
    }


@pytest.mark.parametrize(
    "source", sorted(paths.notebooks_dir().glob("*.ipynb")), ids=lambda path: path.stem
)
def test_every_exercise_of_the_lab_has_a_card_and_every_check_says_what_it_asks(source):
    cells = nbformat.read(source, as_version=4).cells
    worth = sum(cell.metadata.get("nbgrader", {}).get("points", 0) for cell in cells)
    questions = questions_in(source.parent)[source.stem]
    assert sum(question.total for question in questions) == worth
    for question in questions:
        number = "-".join(question.exercise.split("-")[1:3])
        assert question.title.startswith(f"Exercise {number} · ")
        assert question.card.endswith(f"· {question.total:.0f} points")
        assert all(question.asks.values()), question.asks
