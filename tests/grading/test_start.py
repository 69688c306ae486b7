"""Working copies: made once, then the student's own."""

import json
import subprocess
import sys

import nbformat
import pytest

from labsupport.grading.start import STATE_FILE, start_work


@pytest.fixture
def work(tmp_path):
    return tmp_path / "work"


def edit(copy):
    """What a student does: write an answer and save."""
    notebook = json.loads(copy.read_text())
    notebook["cells"][2]["source"] = "def square(x):\n    return x**2"
    copy.write_text(json.dumps(notebook))
    return copy.read_bytes()


def test_a_first_start_makes_a_copy_of_every_notebook(folder, work):
    report = start_work(work, folder)
    assert report.created == [work / "01-Squares.ipynb"]
    assert "raise NotImplementedError" in report.created[0].read_text()


def test_a_second_start_keeps_the_copy_as_the_student_left_it(folder, work):
    mine = edit(start_work(work, folder).created[0])
    report = start_work(work, folder)
    assert report.created == []
    assert report.kept == [work / "01-Squares.ipynb"]
    assert report.kept[0].read_bytes() == mine


def test_a_newer_edition_is_put_beside_the_copy_and_announced(folder, work, change):
    copy = start_work(work, folder).created[0]
    mine = edit(copy)
    change(0, "# Squares, revised")
    report = start_work(work, folder)
    newer = report.newer[copy]
    assert copy.read_bytes() == mine
    assert "Squares, revised" in newer.read_text()
    assert any(str(newer) in line for line in report.lines())


def test_a_newer_edition_that_the_student_worked_in_is_not_overwritten_either(folder, work, change):
    copy = start_work(work, folder).created[0]
    change(0, "# Squares, revised")
    newer = start_work(work, folder).newer[copy]
    mine = edit(newer)
    assert start_work(work, folder).newer[copy] == newer
    assert newer.read_bytes() == mine


def test_a_newer_edition_that_the_student_deleted_does_not_come_back(folder, work, change):
    copy = start_work(work, folder).created[0]
    change(0, "# Squares, revised")
    start_work(work, folder).newer[copy].unlink()
    assert start_work(work, folder).newer == {}


def test_a_change_that_students_do_not_see_makes_no_newer_edition(folder, work, change):
    start_work(work, folder)
    source = (folder / "01-Squares.ipynb").read_text()
    (folder / "01-Squares.ipynb").write_text(source.replace("with_itself", "by_itself"))
    assert start_work(work, folder).newer == {}


def test_a_deleted_copy_is_made_anew(folder, work):
    start_work(work, folder).created[0].unlink()
    assert start_work(work, folder).created == [work / "01-Squares.ipynb"]


def test_a_file_of_the_same_name_that_is_not_ours_is_left_alone(folder, work):
    work.mkdir()
    for precious in ("not even json", "[1, 2]", "{}"):
        (work / "01-Squares.ipynb").write_text(precious)
        report = start_work(work, folder)
        assert report.kept == [work / "01-Squares.ipynb"]
        assert report.kept[0].read_text() == precious


@pytest.mark.parametrize("contents", [None, "garbage", "[]"])
def test_losing_the_state_file_loses_no_work(folder, work, change, contents):
    copy = start_work(work, folder).created[0]
    mine = edit(copy)
    if contents is None:
        (work / STATE_FILE).unlink()
    else:
        (work / STATE_FILE).write_text(contents)
    assert start_work(work, folder).newer == {}
    assert copy.read_bytes() == mine


def test_no_half_written_file_stays_behind(folder, work):
    start_work(work, folder)
    assert sorted(path.name for path in work.iterdir()) == [STATE_FILE, "01-Squares.ipynb"]


def test_the_folder_of_the_solutions_is_refused(folder):
    with pytest.raises(ValueError, match="holds the solved notebooks"):
        start_work(folder, folder)


def test_a_file_in_place_of_the_folder_is_refused(folder, work):
    work.write_text("")
    with pytest.raises(ValueError, match="is a file"):
        start_work(work, folder)


def test_a_start_with_nothing_to_do_does_not_import_nbgrader(folder, work, project):
    start_work(work, folder)
    code = (
        "import sys; from pathlib import Path; from labsupport.grading.start import start_work\n"
        f"start_work(Path({str(work)!r}), Path({str(folder)!r}))\n"
        "assert not {'nbgrader', 'nbformat', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=project)


@pytest.fixture
def theory(folder):
    """A theory beside the notebooks, as in the project."""
    pages = folder.parent / "theory"
    pages.mkdir()
    (pages / "01-squares.md").write_text("# Squares\n")
    return pages


def test_the_theory_can_be_opened_from_the_students_folder(folder, work, theory, change):
    change(0, "# Squares\n\nRead [chapter 1](../theory/01-squares.md).")
    start_work(work, folder)
    cells = nbformat.read(work / "01-Squares.ipynb", 4).cells
    assert "[chapter 1](theory/01-squares.md)" in cells[0].source
    assert (work / "theory" / "01-squares.md").read_text() == "# Squares\n"


def test_a_second_start_and_a_folder_named_theory_change_nothing(folder, work, theory):
    (work / "theory").mkdir(parents=True)
    (work / "theory" / "notes.md").write_text("mine")
    start_work(work, folder)
    start_work(work, folder)
    assert [p.name for p in (work / "theory").iterdir()] == ["notes.md"]
