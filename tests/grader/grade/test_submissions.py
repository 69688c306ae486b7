import io
import os
import shutil
import unicodedata
import zipfile
from datetime import datetime

import pytest

from grader.grade.submissions import MAX_BYTES, find_submissions


@pytest.fixture
def submissions(tmp_path, hand_in):
    hand_in()
    return tmp_path / "submissions"


@pytest.fixture
def notebook(submissions):
    """The bytes of a notebook of which nothing tells the student."""
    data = (submissions / "ada" / "01-Powers.ipynb").read_bytes()
    shutil.rmtree(submissions / "ada")
    return data


def found(folder, solved_folder, **options):
    return find_submissions(folder, notebooks=solved_folder, **options)


def only(folder, solved_folder, **options):
    (one,) = found(folder, solved_folder, **options)
    return one


def zipped(files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 11, 20, 12, 0, 0)), content)
    return data.getvalue()


# Names of files and folders as people and course systems give them, and whose they are.
NAMES = {
    "ada_01-Powers.ipynb": "ada",
    "ada_lovelace--01-Powers.ipynb": "ada_lovelace",
    "x_1--01-Powers.ipynb": "x_1",
    "ada_1_01-Powers.ipynb": "ada_1",
    "ada/01-Powers/01-Powers.ipynb": "ada",
    "ada/final FINAL.ipynb": "ada",
    "ada/mine.ipynb.txt": "ada",
    "ada.ipynb": "ada",
    "01-Powers (1).ipynb": "submissions",
    "علی‌رضا/01-Powers.ipynb": "علی‌رضا",
    "lovelaceada_123_9001_01-Powers.ipynb": "lovelaceada_123",
    "turingalan_LATE_125_9002_01-Powers-1.ipynb": "turingalan_125",
    "hoppergrace_7_9003_my work--01-Powers_2.ipynb": "hoppergrace_7",
    "team_a_9_9004_01-Powers.ipynb": "team_a_9",
    "देवीकुमार_12_9007_01-Powers.ipynb": "देवीकुमार_12",
    "กิตติชัย_13_9008_01-Powers.ipynb": "กิตติชัย_13",
    "王小明_14_9009_01-Powers.ipynb": "王小明_14",
    "mu\u0308llerjo\u0308rg_LATE_15_9010_01-Powers.ipynb": "müllerjörg_15",
    "Jo\u0308rg Mu\u0308ller_16_assignsubmission_file/01.ipynb": "Jörg Müller_16",
    "anon_x5Ab1_9005_01-Powers.ipynb": "anon_x5Ab1",
    "LATE_anon_y5Ab1_9006_01-Powers.ipynb": "anon_y5Ab1",
    "Ada Lovelace_12345_assignsubmission_file/01-Powers.ipynb": "Ada Lovelace_12345",
    "Participant_77_assignsubmission_file_/a/mine.ipynb": "Participant_77",
    "Alan Turing_8_assignsubmission_file_01-Powers (1).ipynb": "Alan Turing_8",
}


@pytest.mark.parametrize(("name", "student"), NAMES.items())
def test_the_name_of_a_folder_or_a_file_tells_the_student(
    submissions, solved_folder, notebook, name, student
):
    (submissions / name).parent.mkdir(parents=True, exist_ok=True)
    (submissions / name).write_bytes(notebook)

    one = only(submissions, solved_folder)

    assert not one.refused
    path = unicodedata.normalize("NFC", name)
    assert (one.student, one.notebook, one.path) == (student, "01-Powers", path)
    assert bool(one.flags) == ("LATE" in name)


def test_a_download_is_read_as_it_is_and_so_are_zips_in_it(submissions, solved_folder, notebook):
    download = submissions / "COURSE-Lab 1-42.zip"
    mac = {"__MACOSX/mine/._01.ipynb": b"x", "mine/01.ipynb": notebook}
    download.write_bytes(
        zipped(
            {
                "Ada Lovelace_1_assignsubmission_file/01-Powers.ipynb": notebook,
                "Ada Lovelace_1_assignsubmission_onlinetext/onlinetext.html": b"Hello",
                "Alan Turing_2_assignsubmission_file/work.zip": zipped(mac),
                "Grace Hopper_3_assignsubmission_file/answers.docx": b"see attached",
                "Kurt Gödel_4_assignsubmission_file/broken.zip": b"PK",
            }
        )
    )
    ada, alan, grace, kurt = found(download, solved_folder)
    assert (ada.student, alan.student) == ("Ada Lovelace_1", "Alan Turing_2")
    assert alan.path == "Alan Turing_2_assignsubmission_file/work.zip/mine/01.ipynb"
    assert (grace.student, grace.refused[:20]) == ("Grace Hopper_3", "there is no notebook")
    assert "zip cannot be read" in kurt.refused


def test_a_students_own_zip_is_theirs(submissions, solved_folder, notebook):
    other = "mine\\bob_1_assignsubmission_file_01.ipynb"
    (submissions / "ada.zip").write_bytes(zipped({other: notebook}))

    one = only(submissions, solved_folder)

    assert (one.student, one.path) == ("ada", "ada.zip/mine/bob_1_assignsubmission_file_01.ipynb")


def test_a_zip_in_a_students_zip_is_not_opened(submissions, solved_folder, notebook):
    bomb = zipped({"01.ipynb": notebook})
    for _ in range(3):
        bomb = zipped({"deeper.zip": bomb})
    (submissions / "ada.zip").write_bytes(bomb)
    (submissions / "eve.zip").write_bytes(zipped({"huge.ipynb": b" " * (MAX_BYTES + 1)}))

    (submissions / "joe.zip").write_bytes(zipped({f"{n}.ipynb": b"" for n in range(10_001)}))

    ada, eve, joe = found(submissions, solved_folder)

    assert ada.refused.startswith("it is a zip in a zip")
    assert "MiB" in eve.refused
    assert "10,000 files" in joe.refused


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("place", [4, 8, 10, 60, 90, -60, -30])
def test_a_damaged_zip_stops_nothing(submissions, solved_folder, notebook, method, place):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        archive.writestr("01.ipynb", notebook)
    damaged = bytearray(data.getvalue())
    damaged[place] ^= 0xFF
    (submissions / "ada.zip").write_bytes(damaged)
    (submissions / "bob.ipynb").write_bytes(notebook)

    assert [one.student for one in found(submissions, solved_folder)] == ["ada", "bob"]


def test_one_notebook_alone_is_one_students(submissions, solved_folder):
    path = submissions / "ada" / "01-Powers.ipynb"
    assert only(path, solved_folder).student == only(path.parent, solved_folder).student == "ada"


# Files of one student, each with the bytes that are left of it and its time; which of them counts;
# and the flags, by kind and a part of the text.
LATE, HALF, DUE = "01-Powers.ipynb", "01-Powers (1).ipynb", datetime(2020, 1, 1)
REFUSED = f"{HALF} was refused (it is not valid JSON"
COUNTS = {
    "the larger number in Canvas": (
        {"ada_123_999_01.ipynb": (None, 2e9), "ada_LATE_123_1000_01-1.ipynb": (None, 1e6)},
        "ada_LATE_123_1000_01-1.ipynb",
        [("late", "Canvas"), ("duplicate", "the newest counts")],
    ),
    "the newest": ({LATE: (None, 1e6), HALF: (None, 2e9)}, HALF, [("duplicate", "newest counts")]),
    "a good one": ({LATE: (None, 1e6), HALF: (300, 2e9)}, LATE, [("duplicate", REFUSED)]),
    "a good one that is newer": ({LATE: (None, 1e6), HALF: (300, 5e5)}, LATE, []),
    "an earlier one": (
        {LATE: (None, 2e9), HALF: (None, 1e6)},
        HALF,
        [("duplicate", f"{LATE} was refused (it came late)")],
    ),
}


@pytest.mark.parametrize("which", COUNTS)
def test_of_several_files_one_counts_and_flags_name_the_others(
    submissions, solved_folder, notebook, which
):
    files, counts, flags = COUNTS[which]
    for name, (kept, time) in files.items():
        (submissions / name).write_bytes(notebook[:kept])
        os.utime(submissions / name, (time, time))
    options = {"due": DUE, "late": "ignore"} if which == "an earlier one" else {}

    one = only(submissions, solved_folder, **options)

    assert (one.path, one.refused) == (counts, "")
    assert [flag.kind for flag in one.flags] == [kind for kind, _ in flags]
    assert all(said in flag.text for flag, (_, said) in zip(one.flags, flags, strict=True))


def test_a_copy_saved_before_an_upgrade_counts_only_where_the_upgraded_one_is_missing(
    submissions, solved_folder
):
    work = submissions / "ada" / "01-Powers.ipynb"
    older = submissions / "ada" / "01-Powers.older-edition-0123abcd.ipynb"
    older.write_bytes(work.read_bytes())
    os.utime(work, (1_000_000, 1_000_000))  # as some archives lose the time

    one = only(submissions, solved_folder)
    assert (one.path, one.flags) == ("ada/01-Powers.ipynb", ())

    work.unlink()
    assert only(submissions, solved_folder).path == "ada/01-Powers.older-edition-0123abcd.ipynb"


def test_a_file_after_the_date_is_marked_unless_a_download_has_lost_its_time(
    submissions, solved_folder
):
    def kinds(year):
        flags = only(submissions, solved_folder, due=datetime(year, 1, 1)).flags
        return [flag.kind for flag in flags]

    assert (kinds(2999), kinds(2000)) == ([], ["late"])
    late = only(submissions, solved_folder, due=DUE, late="ignore")
    assert (late.refused, [flag.kind for flag in late.flags]) == ("it came late", ["late"])
    (submissions / "ada").rename(submissions / "Ada_1_assignsubmission_file")
    assert kinds(2000) == []


@pytest.mark.slow
def test_a_zip_of_many_files_that_are_refused_is_one_row(submissions, solved_folder):
    names = [f"{n}.ipynb" for n in range(45)]
    (submissions / "bob.zip").write_bytes(zipped(dict.fromkeys(names, b" " * MAX_BYTES)))

    bob = found(submissions, solved_folder)[1]

    assert (bob.student, bob.refused[:17]) == ("bob", "it is not valid J")
    assert "other files were refused, too" in bob.flags[0].text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{not json", "not valid JSON"),
        ("[]".encode("utf-16"), "can't decode"),
        (b"[" * 200_000 + b"]" * 200_000, "recursion"),
        (b"[1, 2]", "format None"),
        (b'{"nbformat": 3, "worksheets": []}', "format 3"),
        (b'{"nbformat": "\\u001b]0;owned\\u0007", "cells": []}', "format ?]0;owned?;"),
        (b'{"nbformat": 4, "cells": {"a": 1}}', "no list of cells"),
        (b'{"nbformat": 4, "cells": [1, null, {"cell_type": "code", "source": 5}]}', "no exercise"),
    ],
)
def test_a_file_that_is_no_notebook_is_refused_with_a_reason(
    submissions, solved_folder, content, reason
):
    (submissions / "ada" / "01-Powers.ipynb").unlink()
    (submissions / "ada" / "other.ipynb").write_bytes(content)

    one = only(submissions, solved_folder)

    assert reason in one.refused
    assert one.refused.isprintable()


def test_a_huge_file_is_refused_and_not_read(submissions, solved_folder):
    with (submissions / "ada" / "01-Powers.ipynb").open("r+b") as file:
        file.truncate(10 * MAX_BYTES)
    assert "200.0 MiB" in only(submissions, solved_folder).refused


def test_links_and_pipes_are_not_followed(submissions, solved_folder, tmp_path):
    secret = tmp_path / "secret.ipynb"
    (submissions / "ada" / "01-Powers.ipynb").rename(secret)
    (submissions / "ada" / "01-Powers.ipynb").symlink_to(secret)
    (submissions / "bob").symlink_to(tmp_path / "solved")
    (submissions / "eve").mkdir()
    os.mkfifo(submissions / "eve" / "01-Powers.ipynb")

    reasons = {one.student: one.refused.split(".")[0] for one in found(submissions, solved_folder)}

    assert reasons == {
        "ada": "it is a symbolic link",
        "bob": "there is no notebook",
        "eve": "it is not a plain file",
    }


@pytest.mark.parametrize("name", ["a\nb", "\u202eada", "-rf", "\\ada", "a\x1b[2J"])
def test_names_with_tricks_are_refused_and_can_still_be_printed(submissions, solved_folder, name):
    (submissions / "ada").rename(submissions / name)

    one = only(submissions, solved_folder)

    assert one.refused
    assert one.student.isprintable()
    assert one.notebook == "01-Powers"


def test_a_student_without_a_notebook_is_told_apart_from_nobody(submissions, solved_folder):
    (submissions / "bob").mkdir()
    (submissions / "eve").mkdir()
    (submissions / "eve" / "answers.docx").write_text("see attached")
    (submissions / "class.csv").write_text("student\nada\n")

    refused = [one for one in found(submissions, solved_folder) if one.refused]

    assert [(one.student, one.refused.split(".")[0]) for one in refused] == [
        ("bob", "there is no notebook"),
        ("eve", "there is no notebook"),
    ]


def test_a_folder_without_submissions_is_an_error(tmp_path, solved_folder):
    (tmp_path / "empty").mkdir()

    with pytest.raises(ValueError, match="no notebook"):
        found(tmp_path / "empty", solved_folder)
    with pytest.raises(ValueError, match="no folder"):
        found(tmp_path / "nowhere", solved_folder)
