"""Whole submissions, each in a kernel of its own; the many variants stand in tests/grader."""

import psutil
import pytest

from grader.grade.batch import grade_one
from grader.grade.submissions import Submission

GOOD = "def square(x):\n    return x * x"


@pytest.fixture
def grade(hand_in, settings):
    def graded(*args, **options):
        result = grade_one(hand_in(*args, **options), settings)
        running = [" ".join(process.cmdline()) for process in psutil.Process().children()]
        assert not any("grader.remote" in command for command in running)
        return result, {check.grade_id: check for check in result.checks}

    return graded


def test_right_solutions_get_all_points(grade):
    result, _ = grade(
        before=["def power(x, n):\n    return x ** n"], cube="cube = lambda x: power(x, 3)"
    )

    assert (result.earned, result.points) == (5, 5)


@pytest.mark.slow
def test_an_error_while_defining_is_told_and_stays_with_its_exercise(grade):
    _, checks = grade("print(never_defined)\n" + GOOD)

    assert "never_defined" in checks["ex-1-1-square-five"].message
    assert checks["ex-1-2-cube-three"].status == "passed"


def test_a_function_in_a_new_cell_counts_though_the_given_one_is_as_it_was(grade):
    stub = "def square(x):\n    # YOUR CODE HERE\n    raise NotImplementedError"
    result, _ = grade(stub, after=[GOOD])

    assert result.earned == 5


def test_a_refused_file_has_all_points_to_lose_and_says_why(settings):
    result = grade_one(Submission("ada", "01-Powers", "ada/x.ipynb", "", "it is empty"), settings)

    assert (result.status, result.earned, result.points) == ("refused", 0, 5)
    assert {check.message for check in result.checks} == {"it is empty"}
