"""Questions in the words of the instructor's notebook."""

import pytest

from grader.grade.submissions import pristine_notebooks
from grader.reports.pages import asked_by, questions_of
from tests.grader.reports.conftest import ROOT, SQUARE


def test_an_exercise_has_its_card_and_the_points_of_its_checks_in_order(notebooks):
    square, root = questions_of(pristine_notebooks(notebooks)["01-Squares"])
    assert (square.exercise, root.exercise) == (SQUARE, ROOT)
    assert square.title == "Exercise 1-1 · Squares & <more>"
    assert square.card == "●○○ · 5 minutes · 3 points"
    assert root.title == "Exercise 1-2 · Roots"
    points = {name: check.points for name, check in square.checks.items()}
    assert list(points.items()) == [(f"{SQUARE}-values", 2.0), (f"{SQUARE}-signs", 1.0)]
    assert (square.total, root.total) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        (
            "x = 1\nchecks.check_textbook_values(f)\n### BEGIN HIDDEN TESTS",
            "output and weights without a mask, with leading dimensions.",
        ),
        ("assert f(2) == 4", ""),
        ("checks.check_unknown(f)", ""),
        ("other.check_fit(f)", ""),
    ],
)
def test_a_check_asks_what_the_docstring_of_its_function_says(source, asks):
    assert asked_by(source) == asks


def test_every_exercise_of_the_lab_has_a_card_and_every_check_says_what_it_asks():
    for notebook in pristine_notebooks().values():
        questions = questions_of(notebook)
        worth = sum(cell.points for cell in notebook.cells)
        assert sum(question.total for question in questions) == worth
        for question in questions:
            number = "-".join(question.exercise.split("-")[1:3])
            assert question.title.startswith(f"Exercise {number} · ")
            optional = "" if question.total else " (optional)"
            points = "bonus points" if notebook.bonus else "points"
            words = f"· {question.total:.0f} {points}{optional}"
            assert question.card.endswith(words if question.total != 1 else words.rstrip("s"))
            assert all(asked_by(check.source) for check in question.checks.values())
