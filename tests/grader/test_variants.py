"""Submissions of every shape: honest ones get the points that they should, hostile and broken ones
no undeserved point; none takes anything from others, or stops the batch.

They are graded in batches, among perfect ones; each test looks at what became of one of them.
"""

from functools import cache
from pathlib import Path

import pytest

from grader.grade.results import read_results
from grader.grade.sandbox import wall_missing
from tests.grader.variants.course import EXERCISES, NOTEBOOKS, read_variants
from tests.grader.variants.running import BYSTANDERS, grade_all

HERE = Path(__file__).parent / "variants"
HONEST = read_variants(HERE / "honest.txt")
VARIANTS = read_variants(HERE / "honest.txt", HERE / "hostile.txt", HERE / "attacks.txt")
QUICK = {"answers-for-itself", "invalid-json"}
BATCHES = {"quick": QUICK, "honest": HONEST.keys(), "hostile": VARIANTS.keys() - HONEST - QUICK}
UNDESERVED = {"library call", "given lines changed", "outside PyTorch"}


def marks(kind):
    walled = pytest.mark.skipif(bool(wall_missing()), reason="there is no bubblewrap here")
    return [pytest.mark.slow] * (kind != "quick") + [walled] * (kind != "honest")


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """Results of a batch."""

    @cache
    def grade(kind):
        quick, chosen = kind == "quick", [VARIANTS[name] for name in sorted(BATCHES[kind])]
        others = BYSTANDERS[:1] if quick else BYSTANDERS
        return grade_all(chosen, tmp_path_factory.mktemp(kind), others, jobs=1 if quick else 2)

    return grade


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks(kind)) for kind in BATCHES])
def test_a_batch_is_graded_and_nothing_else_was_harmed(kind, batch):
    graded = batch(kind)
    for name in BYSTANDERS[:1] if kind == "quick" else BYSTANDERS:
        points = {"attention": 5, "leak": 2, "softmax": 6}
        assert graded.points(name) == points, graded.story(name)
    assert graded.changed == [], "files of the instructor's or of other students"
    assert graded.survivors == [], "processes"
    assert graded.litter == [], "files in temporary folders, or something was unpickled"
    assert graded.connections == 0, "reached the network"
    written = {(r.student, r.notebook, r.path): r for r in read_results(graded.out)}
    given = {(r.student, r.notebook, r.path): r for rs in graded.results.values() for r in rs}
    assert written == given, "the results on disk are not those that were returned"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id=name, marks=marks(kind))
        for kind, names in BATCHES.items()
        for name in sorted(names)
    ],
)
def test_a_submission_gets_what_it_deserves_or_a_flag(kind, name, batch):
    graded, variant = batch(kind), VARIANTS[name]
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
        if kind == "honest":
            assert result.status == "graded", result.reason
            expected = {EXERCISES[exercise] for exercise in NOTEBOOKS[result.notebook]}
            assert {check.exercise for check in result.checks} == expected


@pytest.mark.slow
def test_a_missing_library_is_told(batch):
    story = batch("honest").story("a-library-that-is-not-there")
    assert "No module named 'einops_that_is_not_here'" in story
