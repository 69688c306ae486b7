"""Hostile and broken submissions: no undeserved point, nothing taken from others, no batch stopped.

They are graded in one batch, among honest ones; each test looks at what became of one of them. Of
those that need a kernel, the most telling ones run always, and the others in `make test-all`.
"""

from functools import cache

import pytest

from grader.grade.assemble import assemble
from grader.grade.batch import read_results
from grader.grade.confinement import confinement_here
from grader.grade.pristine import pristine_notebooks
from grader.grade.submissions import find_submissions
from tests.grader.variants import (
    hostile_breaking,
    hostile_cells,
    hostile_detached,
    hostile_files,
    hostile_lies,
    hostile_reaching,
    hostile_serving,
)
from tests.grader.variants.course import write_course
from tests.grader.variants.running import BYSTANDERS, grade_all, settings_for

KINDS = (
    hostile_breaking,
    hostile_cells,
    hostile_detached,
    hostile_files,
    hostile_lies,
    hostile_reaching,
    hostile_serving,
)
VARIANTS = {name: variant for kind in KINDS for name, variant in kind.hostile.items()}
# Broken files cost nothing. Of what has to be run, these run always.
ALWAYS = """
infinite-loop loop-in-c-that-keeps-the-interpreter kills-its-parent kills-itself leaves-at-once
sys-exit-in-the-call memory-bomb fork-bomb giant-output thread-that-keeps-running stops-itself
exit-handler-that-hangs fills-the-disk deletes-its-folder
equal-to-everything number-equal-to-everything lying-tensor-subclass returns-nan returns-huge-views
returns-a-pickle-that-bites hard-coded-answers patched-checks patched-testing silenced-tracebacks
skips-itself raises-check-failed
skip-and-raises-markers check-cells-edited check-cells-deleted check-cells-as-markdown
repeated-check-cells repeated-solution-cells unreadable-source deep-parentheses
calls-sdpa calls-the-labs-own calls-the-labs-own-by-a-detour
reads-the-instructors-notebook writes-results deletes-other-submissions removes-its-home
survives-by-double-fork calls-out modules-replaced local-modules
serve-replaced inputs-changed-in-the-grader sends-garbage sends-a-huge-length half-an-answer
connects-too-early lets-a-child-answer matrix-with-its-traces-removed
matrix-in-a-detached-process whole-rows-in-numpy calls-transformers-own
surrounded-by-traps name-like-an-option name-with-a-command name-of-another-student
""".split()  # noqa: SIM905
BROKEN_FILES = [n for n in hostile_files.hostile if not any(VARIANTS[n].points.values())]
SLOW = sorted(VARIANTS.keys() - {*ALWAYS, *BROKEN_FILES})


def each(names):
    return [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in names]


def of_both_batches(names=(None,)):
    marks = {False: (), True: pytest.mark.slow}
    return [pytest.param(slow, n, marks=m) for slow, m in marks.items() for n in names]


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """What a batch gave: of the slow variants, or of the others."""

    @cache
    def grade(slow):
        chosen = [v for n, v in VARIANTS.items() if (n in SLOW) is slow]
        return grade_all(chosen, tmp_path_factory.mktemp("hostile"))

    return grade


def test_there_are_at_least_forty_of_them():
    assert len(VARIANTS) == sum(len(kind.hostile) for kind in KINDS)
    assert set(ALWAYS) <= VARIANTS.keys()
    assert len(VARIANTS) - len(SLOW) >= 40


@pytest.mark.parametrize("name", each(VARIANTS))
def test_a_hostile_submission_gets_no_point_more_or_less_than_it_deserves(name, batch):
    graded, deserved = batch(name in SLOW), VARIANTS[name].points
    earned = {exercise: graded.points(name).get(exercise, 0) for exercise in deserved}
    assert earned == deserved, graded.story(name)


@pytest.mark.parametrize("name", each(VARIANTS))
def test_it_has_a_result_that_says_what_happened(name, batch):
    results = batch(name in SLOW).results.get(name)
    # A name that cannot be printed is not the student's folder, so the folder's name stands.
    assert results, "there is no result"
    for result in results:
        assert result.reason or result.checks
        for check in result.checks:
            assert check.message or check.status == "passed"
            assert len(check.message) < 10_000


@pytest.mark.parametrize(("slow", "name"), of_both_batches(BYSTANDERS))
def test_honest_work_in_the_same_batch_keeps_all_its_points(slow, name, batch):
    graded = batch(slow)
    assert graded.points(name) == {"attention": 4, "memory": 3, "softmax": 4}, graded.story(name)


@pytest.mark.parametrize(("slow", "_"), of_both_batches())
def test_the_batch_left_everything_else_as_it_was(slow, _, batch):
    graded = batch(slow)
    assert graded.changed == [], "files of the instructor's or of other students"
    assert graded.survivors == [], "processes"
    assert graded.litter == [], "files in temporary folders, or something was unpickled"
    written = {(r.student, r.notebook, r.path): r for r in read_results(graded.out)}
    given = {(r.student, r.notebook, r.path): r for rs in graded.results.values() for r in rs}
    assert written == given, "the results on disk are not those that were returned"


def test_work_with_the_instructors_markers_in_it_is_flagged_for_review(tmp_path):
    course, name = write_course(tmp_path / "course"), "hard-link-to-the-instructor"
    VARIANTS[name].hand_in(tmp_path / "students" / name, course)
    (found,) = find_submissions(tmp_path / "students", notebooks=course)
    flags = assemble(pristine_notebooks(course)[found.notebook], found).flags
    assert [flag.kind for flag in flags] == ["instructor's text"] * 3


@pytest.mark.parametrize(("slow", "_"), of_both_batches())
def test_no_submission_reached_the_network(slow, _, batch):
    graded = batch(slow)
    confinement = confinement_here(settings_for(graded.course))
    if not confinement.namespaces:
        pytest.skip(confinement.missing[0])
    assert graded.connections == 0
