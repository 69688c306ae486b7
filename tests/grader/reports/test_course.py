"""Choice of the results that count, and grouping of equal diagnoses."""

import pytest

from grader.reports.pages import Course
from tests.grader.reports.conftest import SQUARE, check, perfect, result


def mistakes(course):
    return course.mistakes("01-Squares")


def test_the_later_of_two_results_counts_and_files_of_no_notebook_are_all_kept(notebooks):
    refused = [
        result("eve", notebook="", path=f"eve/{name}", reason="no JSON") for name in ("a", "b")
    ]
    results = [result("Bob", notebook="02-B"), *refused, result("Bob"), perfect("Bob")]
    course = Course.of(results, notebooks)
    assert [(r.student, r.notebook, r.earned) for r in course.results] == [
        ("Bob", "01-Squares", 4.0),
        ("Bob", "02-B", 0),
        ("eve", "", 0),
        ("eve", "", 0),
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


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        (["12 of 40 are wrong: 0.5, not -1e-05.", "9 of 40 are wrong: nan, not 2."], 1),
        (["f raised TypeError.\nCalled with q.", "f raised TypeError.\nCalled with k."], 1),
        (["float16", "float32"], 2),
        (["x1 is wrong", "x2 is wrong"], 2),
    ],
)
def test_diagnoses_that_differ_in_numbers_or_below_the_first_line_are_the_same(
    notebooks, said, kinds
):
    results = [result(f"s{i}", check("values", "failed", text)) for i, text in enumerate(said)]
    found = mistakes(Course.of(results, notebooks))
    assert [students for _, _, students in found] == [2] if kinds == 1 else [1, 1]
    assert all(message in [text.split("\n")[0] for text in said] for _, message, _ in found)


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
