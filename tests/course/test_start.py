"""Working copies: made once, then the student's own."""

import json
import subprocess
import sys

import nbformat
import pytest

from labsupport.course import checklist, merge, start
from labsupport.course.start import STATE_FILE, start_work


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


def test_an_upgrade_that_was_interrupted_between_two_writes_is_done_again(
    folder, work, change, monkeypatch
):
    copy = start_work(work, folder).created[0]
    mine = edit(copy)
    change(0, "# Squares, revised")

    def power_cut(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(start, "replace", power_cut)
        with pytest.raises(KeyboardInterrupt):
            start_work(work, folder)
    assert copy.read_bytes() == mine
    (upgrade,) = start_work(work, folder).upgraded
    assert upgrade.before.read_bytes() == mine
    assert len(list(work.glob("*.older-edition-*"))) == 1
    assert "Squares, revised" in copy.read_text()


def test_a_saved_copy_is_never_overwritten_by_another_one(folder, work, change):
    copy = start_work(work, folder).created[0]
    first = edit(copy)
    older = copy.read_bytes()
    change(0, "# Squares, revised")
    (upgrade,) = start_work(work, folder).upgraded
    copy.write_bytes(older + b"\n")  # the old file again, put back by hand
    (again,) = start_work(work, folder).upgraded
    assert again.before != upgrade.before
    assert upgrade.before.read_bytes() == first
    assert again.before.read_bytes() == older + b"\n"


def test_a_copy_that_is_saved_during_the_upgrade_is_left_as_saved(
    folder, work, change, monkeypatch
):
    copy = start_work(work, folder).created[0]
    edit(copy)
    change(0, "# Squares, revised")
    merge_really = merge.merge

    def meanwhile(mine, newer):
        copy.write_text(copy.read_text() + " ")
        return merge_really(mine, newer)

    monkeypatch.setattr(merge, "merge", meanwhile)
    saved = copy.read_bytes() + b" "
    report = start_work(work, folder)
    assert report.upgraded == []
    assert copy.read_bytes() == saved
    assert "changed while" in report.left_alone[copy]


@pytest.mark.parametrize("broken", [b"not json", b"\xff\xfe", b"[" * 100_000, b""])
def test_a_copy_that_cannot_be_read_is_left_alone_and_said(folder, work, change, broken):
    copy = start_work(work, folder).created[0]
    copy.write_bytes(broken)
    change(0, "# Squares, revised")
    report = start_work(work, folder)
    assert report.kept == [copy]
    assert copy.read_bytes() == broken
    assert "cannot be read" in report.left_alone[copy]
    assert any("left alone" in line for line in report.lines())


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
    assert start_work(work, folder).upgraded == []
    assert copy.read_bytes() == mine


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
        "import sys; from pathlib import Path; from labsupport.course.start import start_work\n"
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


@pytest.fixture
def boxes(theory):
    """The lab's checklist, beside its theory; returns how to make a newer edition of it."""
    page = theory / "checklists.md"
    page.write_text("- [ ] **T1-1** Square. [Chapter 1](01-squares.md)\n- [ ] **P1-1** Do it.\n")

    def newer():
        page.write_text(page.read_text() + "- [ ] **P1-2** Do it again.\n")

    return newer


def tick(work):
    """What a student does: tick a box, write a note, save."""
    copy = work / "Checklist.md"
    copy.write_text(copy.read_text().replace("[ ] **T1-1**", "[x] **T1-1**") + "a note\n")
    return copy


def test_a_first_start_gives_a_checklist_whose_links_lead_on(folder, work, boxes):
    report = start_work(work, folder)
    assert work / "Checklist.md" in report.created
    assert (
        "- [ ] **T1-1** Square. [Chapter 1](theory/01-squares.md)"
        in (work / "Checklist.md").read_text()
    )
    assert (work / "theory" / "01-squares.md").exists()


def test_boxes_of_a_newer_edition_come_in_and_no_tick_is_lost(folder, work, boxes):
    start_work(work, folder)
    copy = tick(work)
    mine = copy.read_text()
    boxes()
    (upgrade,) = start_work(work, folder).upgraded
    assert upgrade.before.name.startswith("Checklist.older-edition-")
    assert upgrade.before.suffix == ".md"
    assert upgrade.before.read_text() == mine
    assert copy.read_text() == mine.replace("a note", "- [ ] **P1-2** Do it again.\na note")
    again = copy.read_bytes()
    assert start_work(work, folder).upgraded == []
    assert copy.read_bytes() == again


def test_a_box_that_the_student_removed_comes_back_with_no_start(folder, work, boxes):
    start_work(work, folder)
    copy = tick(work)
    copy.write_text("a note\n")
    start_work(work, folder)
    assert copy.read_text() == "a note\n"


def test_a_checklist_that_cannot_be_read_is_left_alone_and_said(folder, work, boxes):
    start_work(work, folder)
    (work / "Checklist.md").write_bytes(b"\xff\xfe\x00")
    boxes()
    report = start_work(work, folder)
    assert (work / "Checklist.md").read_bytes() == b"\xff\xfe\x00"
    assert "cannot be read" in report.left_alone[work / "Checklist.md"]


def test_a_checklist_that_is_saved_during_the_upgrade_is_left_as_saved(
    folder, work, boxes, monkeypatch
):
    start_work(work, folder)
    copy = tick(work)
    boxes()
    add = checklist.with_new_items

    def meanwhile(mine, newer):
        copy.write_text("saved meanwhile")
        return add(mine, newer)

    monkeypatch.setattr(checklist, "with_new_items", meanwhile)
    report = start_work(work, folder)
    assert copy.read_text() == "saved meanwhile"
    assert "changed while" in report.left_alone[copy]
    monkeypatch.undo()
    assert [upgrade.copy for upgrade in start_work(work, folder).upgraded] == [copy]
