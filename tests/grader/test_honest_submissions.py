"""Honest submissions, in every shape that students hand in: each gets the points it should."""

import contextlib
import io
import warnings

import nbformat
import pytest

from tests.grader.variants import honest_files, honest_work
from tests.grader.variants.course import EXERCISES, IMPORTS, NOTEBOOKS, grade_id, write_course
from tests.grader.variants.running import BYSTANDERS, NAMES, grade_all

VARIANTS = {**honest_work.honest, **honest_files.honest}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    return grade_all(VARIANTS.values(), tmp_path_factory.mktemp("honest"))


def test_there_are_at_least_forty_of_them():
    assert len(VARIANTS) >= 40


@pytest.mark.parametrize("name", VARIANTS)
def test_an_honest_submission_gets_exactly_the_points_it_should(name, graded):
    deserved = VARIANTS[name].points
    earned = {exercise: graded.points(name).get(exercise, 0) for exercise in deserved}
    assert earned == deserved, graded.story(name)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"nothing-handed-in"}))
def test_it_has_one_result_with_every_check_of_the_instructors(name, graded):
    (result,) = graded.results[name]
    assert result.status == "graded", result.reason
    expected = {EXERCISES[exercise] for exercise in NOTEBOOKS[result.notebook]}
    assert {check.exercise for check in result.checks} == expected
    assert all(check.message or check.status == "passed" for check in result.checks)


def test_nothing_handed_in_is_no_failure(graded):
    assert graded.points("nothing-handed-in") == {}


def test_neither_the_notebooks_nor_the_submissions_were_changed(graded):
    assert graded.changed == []
    assert graded.survivors == []
    assert graded.litter == []


@pytest.mark.parametrize("name", BYSTANDERS)
def test_perfect_work_among_them_gets_all_points(name, graded):
    assert graded.points(name) == {"attention": 4, "memory": 3, "softmax": 4}


def run_here(submitted, solved):
    """Points by exercise when the cells are simply executed, as a student and nbgrader do."""
    sources = {grade_id(cell): cell.source for cell in submitted.cells}
    namespace, points = {"__name__": "notebook"}, {}
    exec(IMPORTS, namespace)
    for cell in solved.cells:
        role = cell.metadata.get("nbgrader", {})
        if not role:
            continue
        source = cell.source if role["grade"] else sources[role["grade_id"]]
        try:
            exec(source, namespace)
        except Exception:
            continue
        if role["grade"]:
            (exercise,) = (e for e in NAMES if role["grade_id"].startswith(e))
            points[NAMES[exercise]] = points.get(NAMES[exercise], 0) + role["points"]
    return points


@pytest.mark.parametrize("name", honest_work.honest)
def test_the_points_are_those_of_running_the_notebook_itself(name, tmp_path):
    variant, course = VARIANTS[name], write_course(tmp_path / "course")
    variant.hand_in(tmp_path / name, course)
    (path,) = (tmp_path / name).glob("*.ipynb")
    solved = nbformat.read(course / path.name, as_version=4)
    silence = io.StringIO()
    with (
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        points = run_here(nbformat.read(path, as_version=4), solved)
    assert {exercise: points.get(exercise, 0) for exercise in variant.points} == variant.points
