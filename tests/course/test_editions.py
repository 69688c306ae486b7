"""The student edition: what must be gone from it, what must stay, and what is refused."""

import nbformat
import pytest
from nbgrader.utils import compute_checksum

from grader.release import write_project
from labsupport.course.editions import (
    ReleaseError,
    make_edition,
    solved_notebooks,
    student_edition,
)
from labsupport.paths import notebooks_dir, notebooks_in
from tests.course.leaks import leaks, secret_lines


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory):
    """The notebooks that `labsupport release` writes: the student edition of all."""
    course = write_project(tmp_path_factory.mktemp("handed-out"))
    return notebooks_in(course / "notebooks")


@pytest.mark.parametrize("source", notebooks_in(notebooks_dir()), ids=lambda p: p.stem)
def test_no_secret_line_of_any_notebook_is_anywhere_in_what_is_handed_out(handed_out, source):
    # Anywhere: in texts, outputs, metadata, attachments, and in the files of the other notebooks.
    secrets = secret_lines(nbformat.read(source, as_version=4))
    assert len(secrets) > 5
    assert {file.name: leaks(secrets, file) for file in handed_out} == {
        file.name: [] for file in handed_out
    }


def test_what_is_handed_out_holds_nothing_but_texts_and_the_metadata_of_exercises(handed_out):
    known = {"nbgrader", "tags", "deletable", "editable", "slideshow", "jupyter"}
    for file in handed_out:
        notebook = nbformat.read(file, as_version=4)
        assert set(notebook.metadata) == {"kernelspec", "language_info", "labsupport"}
        for cell in notebook.cells:
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None
            assert not cell.get("attachments")
            assert set(cell.metadata) <= known
            assert set(cell.metadata.get("nbgrader", {})) <= {
                *("grade", "grade_id", "locked", "points", "schema_version", "solution"),
                *("task", "cell_type", "checksum"),
            }


def test_solutions_and_hidden_tests_go_and_what_was_given_stays(solved):
    before = nbformat.writes(solved)
    cells = student_edition(solved).cells
    assert nbformat.writes(solved) == before
    assert [cell.source for cell in cells] == [
        "# Squares",
        "print('given')",
        'def square(x):\n    """Return x times x."""\n'
        "    # YOUR CODE HERE\n    raise NotImplementedError",
        "assert square(3) == 9",
        "YOUR ANSWER HERE",
    ]
    # Exercise cells cannot be deleted, and checks cannot be edited.
    assert cells[2].metadata.deletable is False
    assert "editable" not in cells[2].metadata
    assert cells[3].metadata.editable is False
    for cell in cells[2:]:  # nbgrader knows an untouched stub by it
        assert cell.metadata.nbgrader.checksum == compute_checksum(cell)


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (2, {"source": "### BEGIN SOLUTION\nx = 1"}, "BEGIN SOLUTION is never closed"),
        (2, {"source": "x = 1\n### END SOLUTION"}, "line 2: END SOLUTION without BEGIN"),
        (2, {"source": "### BEGIN SOLUTION\n### BEGIN SOLUTION"}, "inside of BEGIN SOLUTION"),
        (2, {"source": "### BEGIN SOLUTION\n### END HIDDEN TESTS"}, "inside of BEGIN SOLUTION"),
        (2, {"solution": False}, 'does not say "solution": true'),
        (3, {"grade": False}, 'does not say "grade": true'),
        (3, {"grade_id": "ex-1-1-square"}, "the same grade_id as cell 2"),
        (3, {"grade_id": "ex 1.1"}, "may hold only letters, digits"),
        (3, {"grade_id": ""}, "may hold only letters, digits"),
        (3, {"points": "two"}, "CheckCellMetadata"),
        (3, {"schema_version": 2}, "CheckCellMetadata"),
    ],
)
def test_a_mistake_of_the_author_is_refused(solved, index, changes, message):
    cell = solved.cells[index]
    cell.source = changes.pop("source", cell.source)
    cell.metadata.setdefault("nbgrader", {}).update(changes)
    with pytest.raises(ReleaseError, match=message):
        student_edition(solved)


def test_what_is_no_folder_of_notebooks_is_refused(tmp_path):
    with pytest.raises(ReleaseError, match="there is no notebook"):
        solved_notebooks(tmp_path)
    (tmp_path / "01-Broken.ipynb").write_text("not json")
    with pytest.raises(ReleaseError, match=r"01-Broken\.ipynb: not a Jupyter notebook"):
        make_edition(tmp_path / "01-Broken.ipynb")


def test_only_the_notebooks_are_written_and_an_edition_is_its_own_edition(folder, tmp_path):
    (folder / "01-Squares.py").write_text("# the twin holds the solutions too")
    written = write_project(tmp_path / "a" / "b", folder) / "notebooks"
    (notebook,) = written.iterdir()
    assert notebook.name == "01-Squares.ipynb"
    assert make_edition(notebook).text == notebook.read_text()
