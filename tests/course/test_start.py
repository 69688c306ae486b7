"""Working copies: made once, then the student's own."""

import json
import subprocess
import sys

import nbformat
import pytest

from labsupport.course.start import STATE_FILE, start_work


@pytest.fixture
def work(tmp_path):
    return tmp_path / "work"


def edit(copy):
    """Write an answer and save, as a student does."""
    notebook = json.loads(copy.read_text())
    notebook["cells"][2]["source"] = "def square(x):\n    return x**2"
    copy.write_text(json.dumps(notebook))
    return copy.read_bytes()


def test_a_first_start_makes_copies_and_later_ones_keep_them_even_without_the_state_file(
    folder, work
):
    (copy,) = start_work(work, folder).created
    assert copy.name == "01-Squares.ipynb"
    assert "raise NotImplementedError" in copy.read_text()
    mine = edit(copy)
    for state in (None, "garbage", "[]"):
        report = start_work(work, folder)
        assert (report.created, report.kept, report.upgraded) == ([], [copy], [])
        assert copy.read_bytes() == mine
        (work / STATE_FILE).unlink()
        if state is not None:
            (work / STATE_FILE).write_text(state)


def test_a_newer_edition_is_merged_into_the_copy_which_is_saved_as_it_was(folder, work, change):
    copy = start_work(work, folder).created[0]
    mine = edit(copy)
    change(0, "# Squares, revised")
    report = start_work(work, folder)
    (upgrade,) = report.upgraded
    assert upgrade.before.read_bytes() == mine
    assert upgrade.before.name.startswith("01-Squares.older-edition-")
    assert upgrade.before.name > copy.name, "a file browser lists it below the copy"
    cells = nbformat.read(copy, 4).cells
    assert cells[0].source == "# Squares, revised"
    assert cells[2].source == "def square(x):\n    return x**2"
    assert any(str(upgrade.before) in line for line in report.lines())
    copy.write_bytes(mine + b"\n")  # the old file again, put back by hand
    (again,) = start_work(work, folder).upgraded
    assert (upgrade.before.read_bytes(), again.before.read_bytes()) == (mine, mine + b"\n")


@pytest.mark.parametrize("other", [b"not json", b"\xff\xfe", b"[" * 100_000, b"[1, 2]", b"{}"])
def test_a_file_that_is_not_ours_or_cannot_be_read_is_left_alone(folder, work, other):
    work.mkdir()
    copy = work / "01-Squares.ipynb"
    copy.write_bytes(other)
    report = start_work(work, folder)
    assert copy.read_bytes() == other
    assert report.kept == [copy] * (other in (b"[1, 2]", b"{}"))  # another's notebook
    assert report.kept or "cannot be read" in report.left_alone[copy]
    assert any(str(copy) in line for line in report.lines())


def test_a_folder_that_cannot_be_the_students_is_refused(folder, work):
    work.write_text("")
    for wrong, said in ((folder, "holds the solved notebooks"), (work, "is a file")):
        with pytest.raises(ValueError, match=said):
            start_work(wrong, folder)


def test_a_start_with_nothing_to_do_does_not_import_nbgrader(folder, work, project):
    start_work(work, folder)
    code = (
        "import sys; from pathlib import Path; from labsupport.course.start import start_work\n"
        f"start_work(Path({str(work)!r}), Path({str(folder)!r}))\n"
        "assert not {'nbgrader', 'nbformat', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=project)


# --- the theory and the checklist beside the notebooks, as in the project -------------------------


@pytest.fixture
def page(folder):
    """The lab's checklist, with a page of theory beside it."""
    pages = folder.parent / "theory"
    pages.mkdir()
    (pages / "01-squares.md").write_text("# Squares\n")
    page = pages / "checklists.md"
    page.write_text("- [ ] **T1-1** Square. [Chapter 1](01-squares.md)\n- [ ] **P1-1** Do it.\n")
    return page


def test_links_lead_on_from_the_students_folder(folder, work, page, change):
    change(0, "# Squares\n\nRead [chapter 1](../theory/01-squares.md).")
    report = start_work(work, folder)
    assert work / "Checklist.md" in report.created
    cells = nbformat.read(work / "01-Squares.ipynb", 4).cells
    assert "[chapter 1](theory/01-squares.md)" in cells[0].source
    boxes = (work / "Checklist.md").read_text()
    assert "- [ ] **T1-1** Square. [Chapter 1](theory/01-squares.md)" in boxes
    (work / "theory").unlink()
    (work / "theory").symlink_to("gone")  # the lab was installed anew, elsewhere
    start_work(work, folder)
    assert (work / "theory" / "01-squares.md").read_text() == "# Squares\n"


def test_boxes_of_a_newer_edition_come_in_and_no_tick_is_lost(folder, work, page):
    start_work(work, folder)
    copy = work / "Checklist.md"
    mine = copy.read_text().replace("[ ] **T1-1**", "[x] **T1-1**") + "a note\n"
    copy.write_text(mine)
    page.write_text(page.read_text() + "- [ ] **P1-2** Do it again.\n")
    (upgrade,) = start_work(work, folder).upgraded
    assert upgrade.before.name.startswith("Checklist.older-edition-")
    assert (upgrade.before.suffix, upgrade.before.read_text()) == (".md", mine)
    assert copy.read_text() == mine.replace("a note", "- [ ] **P1-2** Do it again.\na note")
    copy.write_text("a note\n")  # boxes that the student removed come back with no start
    assert start_work(work, folder).upgraded == []
    assert copy.read_text() == "a note\n"
    (work / STATE_FILE).unlink()
    copy.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in start_work(work, folder).left_alone[copy]
    assert copy.read_bytes() == b"\xff\xfe\x00"
