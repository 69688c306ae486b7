"""nbgrader itself, on the lab's notebooks: the same points as `labsupport grade`.

A real course in a temporary folder: `nbgrader generate_assignment` makes the student edition from
the solved notebook, and `nbgrader autograde` grades what students made of it.
"""

import nbformat
import pytest

from benchmarks.grading import NAME, Course, solutions_of
from grader.grade.one import grade_one
from grader.grade.settings import Settings
from grader.grade.submissions import read_submission
from labsupport import paths
from labsupport.course.editions import make_edition

# A small notebook: three exercises with quick checks, and what they import.
TEXTBOOK, MEMORY, SOFTMAX = (
    "ex-1-1-textbook-attention",
    "ex-1-2-score-memory",
    "ex-1-3-online-softmax",
)
IMPORTS = "import math\n\nimport torch\n\nfrom labsupport import checks"

NAN_IN_EMPTY_ROWS = '''def textbook_attention(q, k, v, mask=None):
    """Attention with the whole score matrix in memory; returns (output, weights)."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    return weights @ v, weights'''
ONE_OF_TWO = '''def score_bytes(batch, heads, seqlen, bytes_per_element):
    """Bytes of S and P together."""
    return 2 * batch * heads * seqlen**2 * bytes_per_element


def longest_that_fits(memory, batch, heads, bytes_per_element):
    """Longest sequence whose S and P fit into `memory` bytes."""
    # YOUR CODE HERE
    raise NotImplementedError'''
NO_COLON = "def running_max_and_sum(scores, block_size)\n    return scores, block_size"


def role(cell):
    return cell.metadata.get("nbgrader", {})


def points(notebook):
    return {
        role(c).grade_id: c.metadata.nbgrader.points for c in notebook.cells if role(c).get("grade")
    }


class GradedCourse(Course):
    """A course of nbgrader, and what came of it."""

    def released(self):
        path = self.folder / "release" / "lab" / f"{NAME}.ipynb"
        return nbformat.read(path, as_version=4)

    def grades(self):
        """Points of each check, by student."""
        from nbgrader.api import Gradebook

        with Gradebook(f"sqlite:///{self.folder / 'gradebook.db'}") as book:
            return {
                submission.student.id: {
                    g.name: g.score for nb in submission.notebooks for g in nb.grades
                }
                for submission in book.assignment_submissions("lab")
            }


def filled(notebook, answers):
    """A student's copy with some solution cells filled in."""
    for cell in notebook.cells:
        if role(cell).get("grade_id") in answers:
            cell.source = answers[role(cell).grade_id]
    return nbformat.writes(notebook)


@pytest.fixture(scope="module")
def small():
    """Three exercises of notebook 1, as the instructor has them."""
    whole = nbformat.read(paths.notebooks_dir() / f"{NAME}.ipynb", as_version=4)
    kept = [
        c
        for c in whole.cells
        if role(c).get("grade_id", "").startswith((TEXTBOOK, MEMORY, SOFTMAX))
    ]
    whole.cells = [nbformat.v4.new_code_cell(IMPORTS), *kept]
    return whole


@pytest.fixture(scope="module")
def handed_in(small, tmp_path_factory):
    """(nbgrader's course, graded; each student's file; the folder of the solved notebook)."""
    course = GradedCourse(tmp_path_factory.mktemp("course"), nbformat.writes(small))
    solved = course.folder / "source" / "lab"
    ours = nbformat.reads(make_edition(solved / f"{NAME}.ipynb").text, as_version=4)
    partly = {TEXTBOOK: NAN_IN_EMPTY_ROWS, MEMORY: ONE_OF_TWO, SOFTMAX: NO_COLON}
    files = {
        "perfect": course.hand_in("perfect", filled(course.released(), solutions_of(small))),
        # Handed out by `labsupport release`, handed in to nbgrader.
        "partly": course.hand_in("partly", filled(ours, partly)),
        "stub": course.hand_in("stub", filled(course.released(), {})),
    }
    course.run("autograde", "lab")
    return course, files, solved


def test_nbgraders_student_edition_has_the_cells_of_ours(handed_in):
    course, _, solved = handed_in
    ours = nbformat.reads(make_edition(solved / f"{NAME}.ipynb").text, as_version=4)
    theirs = course.released()
    assert [c.source for c in theirs.cells] == [c.source for c in ours.cells]
    assert [role(c).get("checksum") for c in theirs.cells] == [
        role(c).get("checksum") for c in ours.cells
    ]


def test_nbgrader_gives_a_perfect_submission_all_points(handed_in, small):
    assert handed_in[0].grades()["perfect"] == points(small)


def test_nbgrader_gives_a_partly_right_copy_of_our_edition_the_points_of_what_is_right(
    handed_in, small
):
    right = {f"{TEXTBOOK}-values", f"{TEXTBOOK}-mask", f"{MEMORY}-bytes"}
    expected = {name: worth if name in right else 0.0 for name, worth in points(small).items()}
    assert sum(expected.values()) == 5
    assert handed_in[0].grades()["partly"] == expected


def test_nbgrader_gives_untouched_stubs_nothing(handed_in, small):
    assert handed_in[0].grades()["stub"] == dict.fromkeys(points(small), 0.0)


@pytest.mark.parametrize("student", ["perfect", "partly", "stub"])
def test_labsupport_grade_gives_each_check_the_points_that_nbgrader_gives(handed_in, student):
    course, files, solved = handed_in
    submission = read_submission(files[student], student=student, notebooks=solved)
    result = grade_one(
        submission, Settings(notebooks=solved, notebook_timeout_s=600, unconfined=True)
    )
    assert result.status == "graded", result.reason
    assert {check.grade_id: check.earned for check in result.checks} == course.grades()[student]


@pytest.mark.slow
def test_a_whole_notebook_gets_all_points_from_both(tmp_path):
    source = paths.notebooks_dir() / f"{NAME}.ipynb"
    solved = nbformat.read(source, as_version=4)
    course = GradedCourse(tmp_path, nbformat.writes(solved))
    path = course.hand_in("ada", filled(course.released(), solutions_of(solved)))
    course.run("autograde", "lab")
    assert course.grades()["ada"] == points(solved)
    result = grade_one(
        read_submission(path, student="ada"), Settings(notebook_timeout_s=900, unconfined=True)
    )
    assert {check.grade_id: check.earned for check in result.checks} == course.grades()["ada"]
