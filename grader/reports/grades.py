"""Points as CSV files, for a spreadsheet or a learning platform."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from grader.grade.results import SubmissionResult
from grader.reports.course import Course, earned
from grader.reports.rendering import plain, points

# A formula for spreadsheet programs: at the beginning of a value, and after what some of them take
# for the end of one (a comma here is a semicolon in other countries' settings).
_FORMULA = re.compile(r"(^|[;,\t\r\n])(?=[\s\"]*[=+\-@＝＋－＠])")


def guarded(text: str) -> str:
    """Return a text that no spreadsheet program computes: an apostrophe before `=`, `+`, `-`, `@`.

    Texts that look like no formula, such as every ordinary identifier, stay as they are.
    """
    return _FORMULA.sub(r"\1'", plain(text))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, guard: bool = True) -> str:
    """Write a CSV file; `guard` keeps spreadsheet programs from computing any of it."""
    made = guarded if guard else plain
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [made(v) for v in row] for row in [header, *rows]
    )
    return text.getvalue()


def grades_csv(course: Course) -> str:
    """Write a row for each student and notebook. A refused submission has 0 points."""

    def row(result: SubmissionResult) -> dict[str, str]:
        return {
            "student": result.student,
            "notebook": result.notebook,
            "points": points(result.earned),
            "out_of": points(course.out_of(result.notebook)) if result.notebook else "0",
            "flags": "; ".join(dict.fromkeys(flag.kind for flag in result.flags)),
            "status": result.status,
            "reason": result.reason,
            "seconds": f"{result.seconds:.1f}",
            "file": result.path,
        }

    header = row(SubmissionResult("", "", "", ""))
    return table(list(header), [list(row(result).values()) for result in course.results])


def points_csv(course: Course) -> str:
    """Write a row for each student: points of each notebook, all together, and each exercise.

    A notebook that a student did not hand in is empty, and counts as 0 in the total.
    """
    exercises = [(name, q.exercise) for name in course.questions for q in course.questions[name]]
    header = ["student", *course.questions, "total", "out_of", *(name for _, name in exercises)]

    def row(student: str) -> list[str]:
        own = {result.notebook: result for result in course.of_student(student)}
        return [
            student,
            *(points(own[name].earned) if name in own else "" for name in course.questions),
            points(course.total(student)),
            points(course.out_of()),
            *(points(earned(own[nb], name)) if nb in own else "" for nb, name in exercises),
        ]

    return table(header, map(row, [*course.students, *course.missing]))
