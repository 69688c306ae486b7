"""Points as CSV files, for a spreadsheet or a learning platform."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from grader.grade.results import SubmissionResult
from grader.reports.course import Course, earned
from grader.reports.rendering import plain, points

# What spreadsheet programs take for a formula: at the beginning of a value, and behind whatever
# some of them take for the end of one (a comma here is a semicolon in other countries' settings).
_FORMULA = re.compile(r"(^|[;,\t\r\n])(?=[\s\"]*[=+\-@＝＋－＠])")
MIB = 2**20


def guarded(text: str) -> str:
    """A text that no spreadsheet program computes: an apostrophe stands before `=`, `+`, `-`, `@`.

    Texts that look like no formula, such as every ordinary identifier, stay as they are.
    """
    return _FORMULA.sub(r"\1'", plain(text))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([guarded(name) for name in header])
    writer.writerows([guarded(value) for value in row] for row in rows)
    return text.getvalue()


def kinds_of_flags(result: SubmissionResult) -> str:
    """Which flags a submission has, each kind once: "late; library call"."""
    return "; ".join(dict.fromkeys(flag.kind for flag in result.flags))


def grades_csv(course: Course) -> str:
    """A row for each student and notebook; a column of points for each exercise.

    The columns of other notebooks' exercises are empty. A refused submission has 0 points.
    """
    exercises = [question.exercise for question in course.exercises]
    header = [
        *("student", "notebook", "points", "out_of", "late", "flags", "status", "reason"),
        *("seconds", "peak_memory_mib", "edition", "file", *exercises),
    ]

    def row(result: SubmissionResult) -> list[str]:
        own = {question.exercise for question in course.questions.get(result.notebook, ())}
        return [
            result.student,
            result.notebook,
            points(result.earned),
            points(course.out_of_notebook(result.notebook)),
            "yes" if any(flag.kind == "late" for flag in result.flags) else "",
            kinds_of_flags(result),
            result.status,
            result.reason,
            f"{result.seconds:.1f}",
            f"{result.peak_memory_bytes / MIB:.0f}",
            result.edition,
            result.path,
            *(points(earned(result, name)) if name in own else "" for name in exercises),
        ]

    return _table(header, map(row, course.results))


def points_csv(course: Course) -> str:
    """A row for each student: points of each notebook, of all together, and of each exercise.

    A notebook that a student did not hand in is empty, and counts as 0 in the total.
    """
    exercises = [(name, q.exercise) for name in course.questions for q in course.questions[name]]
    header = ["student", *course.questions, "total", "out_of", *(name for _, name in exercises)]

    def row(student: str) -> list[str]:
        own = {result.notebook: result for result in course.of_student(student)}
        return [
            student,
            *(points(own[name].earned) if name in own else "" for name in course.questions),
            points(sum(result.earned for result in own.values())),
            points(course.out_of),
            *(points(earned(own[nb], name)) if nb in own else "" for nb, name in exercises),
        ]

    return _table(header, map(row, course.students))
