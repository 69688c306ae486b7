"""Honest submissions, in every shape that students hand in: each gets the points it should."""

from pathlib import Path

import pytest

from tests.grader.variants.course import EXERCISES, NOTEBOOKS, read_variants
from tests.grader.variants.running import BYSTANDERS, grade_all

VARIANTS = read_variants(Path(__file__).parent / "variants" / "honest.txt")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    return grade_all(VARIANTS.values(), tmp_path_factory.mktemp("honest"))


@pytest.mark.parametrize("name", VARIANTS)
def test_an_honest_submission_gets_exactly_the_points_it_should(name, graded):
    deserved = VARIANTS[name].points
    earned = {exercise: graded.points(name).get(exercise, 0) for exercise in deserved}
    assert earned == deserved, graded.story(name)
    for result in graded.results.get(name, []):
        assert result.status == "graded", result.reason
        expected = {EXERCISES[exercise] for exercise in NOTEBOOKS[result.notebook]}
        assert {check.exercise for check in result.checks} == expected
        assert all(check.message or check.status == "passed" for check in result.checks)


def test_a_missing_library_is_told(graded):
    story = graded.story("a-library-that-is-not-there")
    assert "No module named 'einops_that_is_not_here'" in story


def test_nothing_was_changed_and_perfect_work_among_them_gets_all_points(graded):
    assert (graded.changed, graded.survivors, graded.litter) == ([], [], [])
    for name in BYSTANDERS:
        assert graded.points(name) == {"attention": 5, "leak": 2, "softmax": 6}
