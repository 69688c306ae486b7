"""The CSV files: what stands where, and that no spreadsheet computes any of it."""

import csv
import io

import pandas as pd
import pytest

from grader.reports.grades import grades_csv, guarded, points_csv, write_reports
from grader.reports.pages import Course
from tests.grader.reports.conftest import ROOT, SQUARE, check, flag, perfect, result


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def course(notebooks):
    half = (
        check("values", points=2.0),
        check("signs", "failed"),
        check("values", "died", exercise=ROOT),
    )
    return Course.of(
        [
            perfect("ada", seconds=12.34),
            result("bob", *half, flags=(flag(), flag("library call"), flag())),
            result("eve", reason="no JSON"),
            result("zoe", check("a", points=0.5, exercise="ex-2-1-b"), notebook="02-B"),
        ],
        notebooks,
    )


def test_grades_have_a_row_for_each_student_and_notebook(course):
    found = [list(row.values()) for row in rows(grades_csv(course))]
    assert found == [
        ["ada", "01-Squares", "4", "4", "", "graded", "", "12.3", "ada/01-Squares.ipynb"],
        ["bob", "01-Squares", "2", "4", "late; library call", "graded", "", "0.0",
         "bob/01-Squares.ipynb"],
        ["eve", "01-Squares", "0", "4", "", "refused", "no JSON", "0.0", "eve/01-Squares.ipynb"],
        ["zoe", "02-B", "0.5", "0.5", "", "graded", "", "0.0", "zoe/02-B.ipynb"],
    ]  # fmt: skip


def test_points_have_one_row_a_student_and_a_column_for_each_notebook(course):
    ada, bob, eve, zoe = rows(points_csv(course))
    assert (ada["01-Squares"], ada["02-B"], ada["total"], ada["out_of"]) == ("4", "", "4", "4.5")
    assert (bob["total"], bob[SQUARE], bob[ROOT]) == ("2", "2", "0")
    assert (eve["01-Squares"], eve["total"]) == ("0", "0")
    assert (zoe["01-Squares"], zoe["02-B"], zoe["total"]) == ("", "0.5", "0.5")


@pytest.mark.parametrize(
    "name", ["00123", "ada.lovelace", "x=1", "Müller, Jörg", "a-b@uni.edu", "O'Neil", "a;b", '"q"']
)
def test_an_ordinary_identifier_comes_back_unchanged(notebooks, tmp_path, name):
    write_reports([perfect(name)], tmp_path / "out", notebooks=notebooks)
    for file in ("grades.csv", "points.csv"):
        table = pd.read_csv(tmp_path / "out" / file, dtype=str)
        assert list(table["student"]) == [name]
        # By this mark spreadsheet programs know UTF-8.
        assert (tmp_path / "out" / file).read_bytes().startswith(b"\xef\xbb\xbfstudent,")


@pytest.mark.parametrize(
    "text",
    [
        *("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1+1", "  =1+1", "\n=1+1", '"=1+1'),
        *("＝1+1", "ada;=1+1;", "ada\n=1+1", 'ada;"=1+1";', "ada,@SUM(A1)"),
    ],
)
def test_no_text_begins_a_value_as_a_formula_wherever_a_program_cuts_the_line(notebooks, text):
    grades = grades_csv(Course.of([perfect(text), result("x", path=text, reason=text)], notebooks))
    for separator in ",;\t":
        for line in csv.reader(io.StringIO(grades), delimiter=separator):
            for value in line:
                assert value.strip(' \t\r\n"')[:1] not in tuple("=+-@＝＋－＠"), (separator, value)


@pytest.mark.parametrize(
    ("given", "kept"), [("=1+1", "'=1+1"), ("a;-1", "a;'-1"), ("caf\udce9", "caf\\udce9")]
)
def test_a_guarded_text_keeps_all_its_characters(given, kept):
    assert guarded(given) == kept
