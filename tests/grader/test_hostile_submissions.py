"""Hostile and broken submissions: no undeserved point, nothing taken from others, no batch stopped.

They are graded in one batch, among honest ones; each test looks at what became of one of them.
"""

from functools import cache
from pathlib import Path

import pytest

from grader.grade.results import read_results
from grader.grade.sandbox import wall_missing
from tests.grader.variants.course import read_variants
from tests.grader.variants.running import BYSTANDERS, grade_all

HERE = Path(__file__).parent / "variants"
VARIANTS = read_variants(HERE / "hostile.txt", HERE / "attacks.txt")
ALWAYS = ["answers-for-itself", "invalid-json"]
SLOW = sorted(VARIANTS.keys() - set(ALWAYS))
UNDESERVED = {"library call", "given lines changed", "outside PyTorch"}

pytestmark = pytest.mark.skipif(bool(wall_missing()), reason="there is no bubblewrap here")


def each(names):
    return [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in names]


def of_both_batches():
    return pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Results of a batch: of the slow variants, or of the others."""

    @cache
    def grade(slow):
        names, others = (SLOW, BYSTANDERS) if slow else (ALWAYS, BYSTANDERS[:1])
        chosen = [VARIANTS[name] for name in names]
        return grade_all(chosen, tmp_path_factory.mktemp("hostile"), others, jobs=2 if slow else 1)

    return grade


@of_both_batches()
def test_a_batch_is_graded_and_nothing_else_was_harmed(slow, batch):
    graded = batch(slow)
    for name in BYSTANDERS if slow else BYSTANDERS[:1]:
        points = {"attention": 5, "leak": 2, "softmax": 6}
        assert graded.points(name) == points, graded.story(name)
    assert graded.changed == [], "files of the instructor's or of other students"
    assert graded.survivors == [], "processes"
    assert graded.litter == [], "files in temporary folders, or something was unpickled"
    assert graded.connections == 0, "reached the network"
    written = {(r.student, r.notebook, r.path): r for r in read_results(graded.out)}
    given = {(r.student, r.notebook, r.path): r for rs in graded.results.values() for r in rs}
    assert written == given, "the results on disk are not those that were returned"


@pytest.mark.parametrize("name", each(VARIANTS))
def test_a_hostile_submission_gets_what_it_deserves_or_a_flag(name, batch):
    graded, variant = batch(name in SLOW), VARIANTS[name]
    earned = {exercise: graded.points(name).get(exercise, 0) for exercise in variant.points}
    if variant.atmost:
        assert all(earned[e] <= most for e, most in variant.points.items()), graded.story(name)
    else:
        assert earned == variant.points, graded.story(name)
    if variant.flagged:
        assert UNDESERVED & {f.kind for r in graded.results[name] for f in r.flags}
    for result in graded.results[name]:
        assert result.reason or result.checks
        for check in result.checks:
            assert check.message or check.status == "passed"
            assert len(check.message) < 3000
