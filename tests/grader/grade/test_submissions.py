import json
import os
import shutil
from datetime import datetime

import nbformat
import pytest
from nbformat import v3

from grader.grade.reading import MAX_BYTES
from grader.grade.submissions import Refused, Submission, find_submissions
from labsupport.paths import notebooks_dir


@pytest.fixture
def submissions(tmp_path, hand_in):
    hand_in()
    return tmp_path / "submissions"


def found(folder, solved_folder, **options):
    return find_submissions(folder, notebooks=solved_folder, **options)


def only(folder, solved_folder, **options):
    (one,) = found(folder, solved_folder, **options)
    return one


def test_a_folder_is_a_student_and_the_exercises_tell_the_notebook(submissions, solved_folder):
    (submissions / "ada" / "01-Powers.ipynb").rename(submissions / "ada" / "final FINAL.ipynb")

    one = only(submissions, solved_folder)

    assert isinstance(one, Submission)
    assert (one.student, one.notebook) == ("ada", "01-Powers")
    assert one.path == "ada/final FINAL.ipynb"


@pytest.mark.parametrize(
    ("name", "student"),
    [
        ("ada_01-Powers.ipynb", "ada"),
        ("ada_lovelace--01-Powers.ipynb", "ada_lovelace"),
        ("x_1--01-Powers.ipynb", "x_1"),
        ("ada_1_01-Powers.ipynb", "ada_1"),
        ("ada/01-Powers/01-Powers.ipynb", "ada"),
    ],
)
def test_the_name_of_a_folder_or_a_file_tells_the_student(
    submissions, solved_folder, name, student
):
    target = submissions / name
    target.parent.mkdir(parents=True, exist_ok=True)
    (submissions / "ada" / "01-Powers.ipynb").rename(target)
    if target.parent == submissions:
        (submissions / "ada").rmdir()

    one = only(submissions, solved_folder)

    assert isinstance(one, Submission)
    assert one.student == student


# For each student, where the systems put a file, by its number and its name.
CANVAS = {
    "lovelaceada_123": "lovelaceada_123_{}_{}.ipynb",
    "turingalan_125": "turingalan_LATE_125_{}_{}-1.ipynb",
    "hoppergrace_7": "hoppergrace_7_{}_my work--{}_2.ipynb",
    "team_a_9": "team_a_9_{}_{}.ipynb",
    "anon_x5Ab1": "LATE_anon_x5Ab1_{}_{}.ipynb",
}
MOODLE = {
    "Ada Lovelace_12345": "Ada Lovelace_12345_assignsubmission_file/{1}.ipynb",
    "Participant 77_77": "Participant 77_77_assignsubmission_file_/{0}/mine.ipynb",
    "Alan Turing_8": "Alan Turing_8_assignsubmission_file_{1} (1).ipynb",
}


def exported(folder, names):
    """Whose the lab's notebooks are, in an export that holds all four of each student."""
    lab = sorted(notebooks_dir().glob("*.ipynb"))
    for number, notebook in enumerate(lab, 9001):
        for name in names.values():
            file = folder / name.format(number, notebook.stem)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(notebook, file)
    every = {(student, notebook.stem) for student in names for notebook in lab}
    found = find_submissions(folder)
    assert {(one.student, one.notebook) for one in found} == every
    assert len(found) == len(every)
    return found


def test_in_an_export_of_canvas_all_files_of_a_student_are_theirs(tmp_path):
    late = {one.student for one in exported(tmp_path, CANVAS) if one.flags}

    assert late == {student for student, name in CANVAS.items() if "LATE" in name}


def test_in_an_export_of_moodle_all_files_of_a_student_are_theirs(tmp_path):
    (tmp_path / "Ada Lovelace_12345_assignsubmission_onlinetext").mkdir()

    assert not any(one.flags for one in exported(tmp_path, MOODLE))


def test_of_a_resubmission_in_canvas_the_larger_number_counts(submissions, solved_folder):
    first = submissions / "lovelaceada_123_999_01-Powers.ipynb"
    second = submissions / "lovelaceada_LATE_123_1000_01-Powers-1.ipynb"
    (submissions / "ada" / "01-Powers.ipynb").rename(first)
    (submissions / "ada").rmdir()
    shutil.copy(first, second)
    os.utime(second, (1_000_000, 1_000_000))

    one = only(submissions, solved_folder)

    assert one.path == second.name
    assert [flag.kind for flag in one.flags] == ["late", "duplicate"]


def test_the_newest_of_several_files_counts_and_says_so(submissions, solved_folder):
    first = submissions / "ada" / "01-Powers.ipynb"
    second = submissions / "ada" / "01-Powers-1.ipynb"
    second.write_bytes(first.read_bytes())
    os.utime(first, (1_000_000, 1_000_000))

    one = only(submissions, solved_folder)

    assert one.path == "ada/01-Powers-1.ipynb"
    assert [flag.kind for flag in one.flags] == ["duplicate"]


def test_what_is_graded_instead_of_a_newer_file_that_was_refused_says_so(
    submissions, solved_folder
):
    draft = submissions / "ada" / "01-Powers.ipynb"
    newer = submissions / "ada" / "01-Powers (1).ipynb"
    newer.write_bytes(draft.read_bytes()[:300])
    os.utime(draft, (1_000_000, 1_000_000))

    one = only(submissions, solved_folder)

    assert one.path == "ada/01-Powers.ipynb"
    (flag,) = one.flags
    assert flag.kind == "duplicate"
    assert flag.text.startswith("ada/01-Powers (1).ipynb was refused (it is not valid JSON")
    assert flag.text.endswith("; this file was graded instead.")

    os.utime(newer, (500_000, 500_000))
    assert only(submissions, solved_folder).flags == ()


def test_a_newer_edition_laid_beside_the_work_is_not_the_work(submissions, solved_folder):
    work = submissions / "ada" / "01-Powers.ipynb"
    (submissions / "ada" / "01-Powers.new-edition-0123abcd.ipynb").write_bytes(work.read_bytes())

    assert only(submissions, solved_folder).path == "ada/01-Powers.ipynb"


def test_a_copy_saved_before_an_upgrade_counts_only_where_the_upgraded_one_is_missing(
    submissions, solved_folder
):
    work = submissions / "ada" / "01-Powers.ipynb"
    older = submissions / "ada" / "01-Powers.older-edition-0123abcd.ipynb"
    older.write_bytes(work.read_bytes())
    os.utime(work, (1_000_000, 1_000_000))  # as some archives lose the time

    one = only(submissions, solved_folder)
    assert one.path == "ada/01-Powers.ipynb"
    assert one.flags == ()

    work.unlink()
    assert only(submissions, solved_folder).path == "ada/01-Powers.older-edition-0123abcd.ipynb"


def test_a_file_after_the_date_is_marked_and_kept(submissions, solved_folder):
    early = only(submissions, solved_folder, due=datetime(2999, 1, 1))
    late = only(submissions, solved_folder, due=datetime(2000, 1, 1))

    assert [flag.kind for flag in early.flags] == []
    assert [flag.kind for flag in late.flags] == ["late"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"{not json", "not valid JSON"),
        ("[]".encode("utf-16"), "not UTF-8"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
        (b"[1, 2]", "not a notebook"),
        (b'{"nbformat": 99, "cells": []}', "format 99"),
        (b'{"nbformat": 4, "cells": {"a": 1}}', "no list of cells"),
        (b'{"nbformat": 3, "worksheets": 7}', "cannot be upgraded"),
        (b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": 5}]}', "no exercise"),
    ],
)
def test_a_file_that_is_no_notebook_is_refused_with_a_reason(
    submissions, solved_folder, content, reason
):
    (submissions / "ada" / "01-Powers.ipynb").unlink()
    (submissions / "ada" / "other.ipynb").write_bytes(content)

    one = only(submissions, solved_folder)

    assert isinstance(one, Refused)
    assert reason in one.reason


def test_a_huge_file_is_refused_and_not_read(submissions, solved_folder):
    with (submissions / "ada" / "01-Powers.ipynb").open("r+b") as file:
        file.truncate(10 * MAX_BYTES)

    one = only(submissions, solved_folder)

    assert isinstance(one, Refused)
    assert "200 MiB" in one.reason


def test_links_and_pipes_are_not_followed(submissions, solved_folder, tmp_path):
    secret = tmp_path / "secret.ipynb"
    (submissions / "ada" / "01-Powers.ipynb").rename(secret)
    (submissions / "ada" / "01-Powers.ipynb").symlink_to(secret)
    (submissions / "bob").symlink_to(tmp_path / "solved")
    (submissions / "eve").mkdir()
    os.mkfifo(submissions / "eve" / "01-Powers.ipynb")

    reasons = {one.student: one.reason for one in found(submissions, solved_folder)}

    assert reasons == {
        "ada": "it is a symbolic link",
        "bob": "it is a symbolic link",
        "eve": "it is not a plain file",
    }


@pytest.mark.parametrize("name", ["a\nb", "\u202eada", "-rf", "..\\ada", "a\x1b[2J"])
def test_names_with_tricks_are_refused_and_can_still_be_printed(submissions, solved_folder, name):
    (submissions / "ada").rename(submissions / name)

    one = only(submissions, solved_folder)

    assert isinstance(one, Refused)
    assert one.student.isprintable()


@pytest.mark.parametrize("name", ["علی\u200cرضا", "क्\u200dष", "PDF\u200cها"])
def test_names_that_are_spelt_with_joiners_are_graded(submissions, solved_folder, name):
    (submissions / "ada").rename(submissions / name)

    one = only(submissions, solved_folder)

    assert isinstance(one, Submission)
    assert one.student == name


def test_a_joiner_does_not_make_a_second_student_of_the_same_look(submissions, solved_folder):
    (submissions / "ada").rename(submissions / "a\u200cda")

    assert isinstance(only(submissions, solved_folder), Refused)


@pytest.mark.parametrize(("wide", "kind"), [(150, Submission), (201, Refused)])
def test_the_parts_of_a_path_may_be_long_the_whole_longer(submissions, solved_folder, wide, kind):
    folder = submissions / "ada" / ("x" * wide) / ("y" * wide)
    folder.mkdir(parents=True)
    (submissions / "ada" / "01-Powers.ipynb").rename(folder / "01-Powers.ipynb")

    one = only(submissions, solved_folder)

    assert isinstance(one, kind)
    assert one.path.endswith("/01-Powers.ipynb")


def test_a_refused_name_still_tells_the_notebook(submissions, solved_folder):
    file = submissions / "ada" / "01-Powers.ipynb"
    file.rename(file.with_name("\u202e01-Powers.ipynb"))

    one = only(submissions, solved_folder)

    assert isinstance(one, Refused)
    assert one.notebook == "01-Powers"


def test_an_old_format_is_upgraded(submissions, solved_folder):
    path = submissions / "ada" / "01-Powers.ipynb"
    new = nbformat.read(path, as_version=4)
    cells = [
        v3.new_code_cell(input=cell.source, metadata=dict(cell.metadata)) for cell in new.cells
    ]
    old = v3.new_notebook(worksheets=[v3.new_worksheet(cells=cells)])
    path.write_text(json.dumps(old))

    one = only(submissions, solved_folder)

    assert isinstance(one, Submission)
    assert "ex-1-1-square" in {cell.grade_id for cell in one.cells}


def test_a_student_without_a_notebook_is_told_apart_from_nobody(submissions, solved_folder):
    (submissions / "bob").mkdir()
    (submissions / "bob" / "answers.docx").write_text("see attached")

    reasons = [one.reason for one in found(submissions, solved_folder) if isinstance(one, Refused)]

    assert reasons == ["there is no notebook in this folder"]


def test_a_folder_without_submissions_is_an_error(tmp_path, solved_folder):
    (tmp_path / "empty").mkdir()

    with pytest.raises(ValueError, match="no notebook"):
        found(tmp_path / "empty", solved_folder)
    with pytest.raises(ValueError, match="no folder"):
        found(tmp_path / "nowhere", solved_folder)


@pytest.mark.parametrize(
    ("version", "said"),
    [("\ud800", "format \\ud800;"), ("\x1b]0;owned\x07\x1b[2J", "format ?]0;owned??[2J;")],
)
def test_a_reason_that_repeats_the_file_can_be_printed(submissions, solved_folder, version, said):
    content = json.dumps({"nbformat": version, "cells": []})
    (submissions / "ada" / "01-Powers.ipynb").write_text(content)

    one = only(submissions, solved_folder)

    assert said in one.reason
    assert one.reason.encode("utf-8").isascii()
    assert one.reason.isprintable()
