"""Moodle and Canvas: a download as they name it, graded, and back in the forms that they import."""

import csv
import io
import re
import unicodedata
import zipfile

import pytest
from typer.testing import CliRunner

from labsupport.cli import app

MOODLE = {
    "Ada Lovelace_4711_assignsubmission_file/01-Powers.ipynb": "good",
    "Alan M. Turing_4712_assignsubmission_file/mine.ipynb": "stub",
    "Alan M. Turing_4712_assignsubmission_onlinetext/onlinetext.html": "text",
    "Grace Hopper_4713_assignsubmission_file/answers.docx": "text",
}


def worksheet(people):
    """Moodle's grading worksheet for people by number."""
    header = (
        "Identifier,Full name,Email address,Status,Grade,Maximum Grade,Grade can be changed,"
        '"Last modified (submission)","Last modified (grade)","Feedback comments"\n'
    )
    line = 'Participant {},{},a@example.org,-,,100.00,Yes,-,"Friday, 20 November",\n'
    return header + "".join(line.format(*one) for one in people.items())


def gradebook(people):
    """Canvas's gradebook for people by number."""
    header = "Student,ID,SIS User ID,SIS Login ID,Section,Lab (77),Current Score\n"
    header += '"    Points Possible",,,,,100.00,(read only)\n'
    return header + "".join(f'"{name}",{n},s{n},l{n},A,,\n' for n, name in people.items())


CANVAS = {
    "lovelaceada_123_9001_01-Powers.ipynb": "good",
    "turingalan_LATE_125_9002_01-Powers-1.ipynb": "stub",
    "hopper_gracem_126_9003_01-Powers.ipynb": "text",
}
WORKSHEET = worksheet({4711: "Ada Lovelace", 4712: "Alan M. Turing", 4714: "Kurt Gödel"})
GRADEBOOK = gradebook({123: "Lovelace, Ada", 125: "Turing, Alan", 129: "Gödel, Kurt"})
# Names in letters with marks of their own, as one system composes them and another does not.
NAMES = ("José Ñuñez", "देवी कुमार", "กิตติชัย ใจดี", "王小明", "Þórður Ægisson")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("system", ["Moodle", "Canvas"])
def test_names_in_all_letters_find_their_rows_and_go_back(graded, system, form):
    people = dict(enumerate(NAMES, 4721))
    students, form_of_name = {
        "Moodle": (worksheet, "{}_{}_assignsubmission_file/01-Powers.ipynb"),
        "Canvas": (gradebook, "{0}_{1}_9{1}_01-Powers.ipynb"),
    }[system]
    short = (lambda name: name.replace(" ", "").lower()) if system == "Canvas" else str
    files = [form_of_name.format(short(name), n) for n, name in people.items()]
    other = {"NFC": "NFD", "NFD": "NFC"}[form]
    files = {unicodedata.normalize(form, name): "good" for name in files}
    (header, *rows), feedback = graded(files, unicodedata.normalize(other, students(people)), "0")
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    names = [row.get("Full name") or row["Student"] for row in rows]
    assert [name for name in names if "Points" not in name] == list(NAMES)
    numbers = [re.search(r"_(\d{4})_", name)[1] for name in feedback.namelist()]
    assert sorted(numbers) == [str(n) for n in people]
    assert b"unknown" not in feedback.read(feedback.namelist()[0])


def test_a_file_that_no_system_named_gets_no_row_of_its_number(graded):
    rows, _ = graded({**CANVAS, "ada_125.ipynb": "good"}, GRADEBOOK, "0")
    assert [row[1] for row in rows[2:]] == ["123", "125", "129", "126"]


# A broken notebook needs no kernel.
POINTS = pytest.mark.parametrize("points", ["0", pytest.param("5", marks=pytest.mark.slow)])


@pytest.fixture
def graded(tmp_path, hand_in, solved_folder):
    """Grade a download, and give back what stands in OUT/return."""
    contents = {"text": b"Dear teacher,"}
    for kind, cells in {"good": (), "stub": ("", "")}.items():
        contents[kind] = (tmp_path / "submissions" / hand_in(*cells).path).read_bytes()

    def grade(files, students, points):
        if points == "0":
            contents.update(good=b"{", stub=b"{")
        with zipfile.ZipFile(tmp_path / "download.zip", "w") as archive:
            for name, kind in files.items():
                archive.writestr(name, contents[kind])
        (tmp_path / "class.csv").write_text(students)
        words = ["grade", tmp_path / "download.zip", "--out", tmp_path / "out", "--unconfined"]
        words += ["--notebooks", solved_folder, "--students", tmp_path / "class.csv"]
        said = CliRunner().invoke(app, [str(word) for word in words])
        assert said.exit_code == 0, said.output
        folder = tmp_path / "out" / "return"
        (table,) = folder.glob("*.csv")
        rows = list(csv.reader(io.StringIO(table.read_text(encoding="utf-8"))))
        (feedback,) = folder.glob("*.zip")
        return rows, zipfile.ZipFile(feedback)

    return grade


@POINTS
def test_moodle_gets_its_worksheet_and_a_folder_for_each_student(graded, points):
    (header, *rows), feedback = graded(MOODLE, WORKSHEET, points)

    assert header == next(csv.reader(io.StringIO(WORKSHEET)))
    table = {row["Identifier"]: row for row in (dict(zip(header, r, strict=True)) for r in rows)}
    assert {name: row["Grade"] for name, row in table.items()} == {
        "Participant 4711": points,
        "Participant 4712": "0",
        "Participant 4714": "0",
        "Participant 4713": "0",
    }
    assert table["Participant 4711"]["Last modified (grade)"] == "Friday, 20 November"
    assert table["Participant 4713"]["Full name"] == "Grace Hopper"
    assert feedback.namelist() == [
        "Ada Lovelace_4711_assignsubmission_file_/feedback.html",
        "Alan M. Turing_4712_assignsubmission_file_/feedback.html",
        "Grace Hopper_4713_assignsubmission_file_/feedback.html",
    ]
    assert f"{points}</strong> of 5 points".encode() in feedback.read(feedback.namelist()[0])
    # As Moodle takes a name apart: four parts, and what is left is the file.
    assert [name.split("/")[0].split("_")[1] for name in feedback.namelist()] == [
        *("4711", "4712", "4713"),
    ]


@POINTS
def test_canvas_gets_its_gradebook_and_a_file_for_each_attachment(graded, points):
    (header, possible, *rows), feedback = graded(CANVAS, GRADEBOOK, points)

    students = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]
    assert header == [*students, "01-Powers", "All notebooks"]
    assert possible == ["    Points Possible", "", "", "", "", "5", "5"]
    assert [(row[0], row[1], row[5], row[6]) for row in rows] == [
        ("Lovelace, Ada", "123", points, points),
        ("Turing, Alan", "125", "0", "0"),
        ("Gödel, Kurt", "129", "0", "0"),
        ("hopper_gracem", "126", "0", "0"),
    ]
    # Canvas takes the first two numbers between underscores.
    numbers = {
        tuple([part for part in name.split("_") if part.isdigit()][:2])
        for name in feedback.namelist()
    }
    assert numbers == {("123", "9001"), ("125", "9002"), ("126", "9003")}
    assert all(name.endswith(".html") for name in feedback.namelist())
