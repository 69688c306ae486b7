"""nbgrader itself, on the lab's notebooks: the same points as `labsupport grade`.

A real course in a temporary folder: `nbgrader generate_assignment` makes the student edition from
the solved notebook, and `nbgrader autograde` grades what students made of it.
"""

import ast
import re
import subprocess
import sys

import nbformat
import pytest

from grader.grade.batch import grade_one
from grader.grade.results import Settings
from grader.grade.submissions import find_submissions
from labsupport import paths
from labsupport.course.editions import make_edition
from tests.nbgrader_course import NAME, Course, solutions_of

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


def exercises(number, *names):
    """A solved notebook's imports, solutions and checks; of these exercises, or of all."""
    (path,) = paths.notebooks_dir().glob(f"{number}*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    code = [ast.parse(c.source) for c in notebook.cells if c.cell_type == "code"]
    nodes = [node for tree in code for node in ast.walk(tree)]
    imports = "\n".join(
        ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
    )
    own = [c for c in notebook.cells if c.cell_type == "code" and role(c)]
    own = [c for c in own if role(c).grade_id.startswith(names or "")]
    notebook.cells = [nbformat.v4.new_code_cell(imports), *own]
    return notebook


def untouched(notebook, answers):
    """The notebook that was handed out, untouched."""


def written_below(notebook, answers):
    """The given cells as they were, and the functions in cells of the student's own below them."""
    cells = []
    for cell in notebook.cells:
        answer = answers.get(role(cell).get("grade_id"))
        cells += [cell, nbformat.v4.new_code_cell(answer)] if answer else [cell]
    notebook.cells = cells


def compared(notebook, answers):
    """A comparison with PyTorch's own attention at the end of each solution cell."""
    sdpa = "torch.nn.functional.scaled_dot_product_attention"
    for cell in notebook.cells:
        if answer := answers.get(role(cell).get("grade_id")):
            cell.source = f"{answer}\n\nimport torch\n{sdpa}(*torch.ones(3, 1, 1, 2, 4))"


def partly_solved(notebook, answers):
    """The first exercise is left as it was, and one that isn't Python."""
    answers = answers | {"ex-1-3-online-softmax": NO_COLON}
    for cell in notebook.cells:
        name = role(cell).get("grade_id")
        if name in list(answers)[1:]:
            cell.source = answers[name]


def same_points(solved, folder, *students):
    """Grade students' work by both, compare, and return nbgrader's points."""
    course = GradedCourse(folder, nbformat.writes(solved))
    files = {}
    for write in students:
        copy = course.released()
        write(copy, solutions_of(solved))
        files[write.__name__] = course.hand_in(write.__name__, nbformat.writes(copy))
    course.run("autograde", "lab")
    theirs, notebooks = course.grades(), folder / "source" / "lab"
    settings = Settings(notebooks=notebooks, notebook_timeout_s=600, unconfined=True)
    for student, file in files.items():
        (submission,) = find_submissions(file, notebooks=notebooks)
        ours = {check.grade_id: check.earned for check in grade_one(submission, settings).checks}
        assert ours == theirs[student], student
    return theirs


@pytest.mark.slow
def test_nbgraders_student_edition_has_the_cells_of_ours(tmp_path):
    course = GradedCourse(tmp_path, nbformat.writes(exercises("01", "ex-1-1", "ex-1-4")))
    edition = make_edition(tmp_path / "source" / "lab" / f"{NAME}.ipynb").text
    ours, theirs = nbformat.reads(edition, as_version=4), course.released()
    for own, other in zip(ours.cells, theirs.cells, strict=True):
        assert other.source == own.source
        assert role(other).get("checksum") == role(own).get("checksum")


@pytest.mark.slow
@pytest.mark.parametrize("number", ["01", "02", "03", "04"])
def test_honest_work_gets_the_same_points_from_both(number, tmp_path):
    solved = exercises(number)
    given = same_points(solved, tmp_path, untouched, written_below, compared, partly_solved)
    assert given["compared"] == given["written_below"] == points(solved)
    assert 0 < sum(given["partly_solved"].values()) < sum(points(solved).values())
    assert set(given["untouched"].values()) == {0.0}


@pytest.mark.slow
def test_the_recipe_of_the_guide_works_as_typed(project, tmp_path):
    guide = (project / "GRADING.md").read_text(encoding="utf-8").split("## With nbgrader\n")[1]
    recipe = "".join(re.findall(r"^```bash\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[:2])
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for folder in ("notebooks", "nbgrader/submitted/ada/lab"):
        (tmp_path / folder).mkdir(parents=True)
        nbformat.write(exercises("01", "ex-1-1"), tmp_path / folder / f"{NAME}.ipynb")
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(project), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-ec", recipe], cwd=tmp_path, env=home, capture_output=True)
    assert done.returncode == 0, done.stderr
    grades = (tmp_path / "nbgrader" / "grades.csv").read_text(encoding="utf-8")
    assert "ada" in grades
