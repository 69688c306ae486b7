"""Which results count, and which diagnoses are the same."""

import pytest

from grader.reports.course import Course
from tests.grader.reports.small_course import SQUARE, check, perfect, result


def mistakes(course):
    return course.mistakes("01-Squares")


def test_of_two_results_for_a_student_and_notebook_the_later_counts(notebooks):
    course = Course.of([result("ada", check("values", "failed")), perfect("ada")], notebooks)
    assert [r.earned for r in course.results] == [4.0]


def test_files_that_belong_to_no_notebook_are_all_kept(notebooks):
    refused = [
        result("ada", notebook="", path=f"ada/{name}", status="refused") for name in ("a", "b")
    ]
    assert len(Course.of(refused, notebooks).results) == 2


def test_results_are_in_order_of_student_and_notebook(notebooks):
    names = ["eve", "Ada"]
    results = [result(name, notebook=nb) for nb in ("02-B", "01-Squares") for name in names]
    assert [(r.student, r.notebook) for r in Course.of(results, notebooks).results] == [
        ("Ada", "01-Squares"),
        ("Ada", "02-B"),
        ("eve", "01-Squares"),
        ("eve", "02-B"),
    ]


def test_a_diagnosis_counts_once_a_student_and_the_commonest_comes_first(notebooks):
    course = Course.of(
        [
            result(
                "a", check("values", "failed", "Bad sign."), check("signs", "failed", "Bad sign.")
            ),
            result("b", check("values", "failed", "Bad sign."), check("x", "failed", "Rare.")),
            result("c", check("values", "passed", "Bad sign.")),
        ],
        notebooks,
    )
    assert mistakes(course) == [(SQUARE, "Bad sign.", 2), (SQUARE, "Rare.", 1)]


def test_diagnoses_that_differ_in_their_numbers_only_are_the_same(notebooks):
    said = ["12 of 40 are wrong: 0.5 instead of -1e-05.", "9 of 40 are wrong: nan instead of 2."]
    results = [result(f"s{i}", check("values", "failed", text)) for i, text in enumerate(said)]
    ((_, message, students),) = mistakes(Course.of(results, notebooks))
    assert students == 2
    assert message in said


@pytest.mark.parametrize("pair", [("float16", "float32"), ("x1 is wrong", "x2 is wrong")])
def test_names_that_hold_digits_are_not_numbers(notebooks, pair):
    results = [result(f"s{i}", check("values", "failed", text)) for i, text in enumerate(pair)]
    assert len(mistakes(Course.of(results, notebooks))) == 2


def test_what_follows_the_first_line_does_not_make_another_mistake(notebooks):
    results = [
        result(f"s{i}", check("values", "failed", f"f raised TypeError.\nCalled with {name}."))
        for i, name in enumerate(("q", "k"))
    ]
    assert mistakes(Course.of(results, notebooks)) == [(SQUARE, "f raised TypeError.", 2)]


def test_a_stub_is_no_mistake_and_a_program_that_died_is_one(notebooks):
    results = [
        result("a", check("values", "not written", "square is not written yet.")),
        result("b", check("values", "died")),
        result("c", check("values", "timeout", "No answer within 60 s.")),
    ]
    assert mistakes(Course.of(results, notebooks)) == [
        (SQUARE, "(died)", 1),
        (SQUARE, "No answer within 60 s.", 1),
    ]
