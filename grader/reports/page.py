"""One student's page: what was asked, what came out, which likely mistake, how many points."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable
from typing import Any

from grader.grade.results import CheckResult, SubmissionResult
from grader.reports.course import Course, checks_of, earned, flags_to_look_at
from grader.reports.questions import Question
from grader.reports.rendering import render

# What a status is called on a page, and which of the three colours it has.
STATUS_WORDS = {
    "passed": ("passed", "good"),
    "failed": ("failed", "bad"),
    "not written": ("not written", "none"),
    "missing": ("cell missing", "none"),
    "died": ("program ended", "bad"),
    "timeout": ("took too long", "bad"),
    "not run": ("not run", "none"),
}
_SAFE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,60}")
# Windows opens a device for these, whatever the ending.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def page_names(students: Iterable[str]) -> dict[str, str]:
    """Where each student's page goes, relative to the reports' folder.

    A plain identifier in lower case names its page; of others the plain part does, with a digest
    of the whole, so that no two share a page on any file system, and none leaves the folder.
    """
    names = {}
    for student in students:
        name = student
        if not _SAFE.fullmatch(name) or ".." in name or _DEVICES.fullmatch(name):
            digest = hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()[:10]
            word = re.sub(r"[^a-z0-9]+", "-", student.lower())[:40].strip("-")
            # "+" never stands in a plain identifier, so no two students can meet here.
            name = f"{word}+{digest}"
        names[student] = f"students/{name}.html"
    return names


def short_name(check: str, exercise: str) -> str:
    """A check's grade_id without its exercise's: "values"."""
    return check.removeprefix(f"{exercise}-")


def _check(check: CheckResult, question: Question) -> dict[str, Any]:
    words, tone = STATUS_WORDS.get(check.status, (check.status, "none"))
    return {
        "name": short_name(check.grade_id, question.exercise),
        "asks": question.asks.get(check.grade_id, ""),
        "words": words,
        "tone": tone,
        "message": "" if check.status == "passed" else check.message,
        "points": check.points,
        "earned": check.earned,
        "seconds": check.seconds,
    }


def _checks(checks: Iterable[CheckResult], question: Question) -> list[dict[str, Any]]:
    """The checks of an exercise. What all of them say (nothing is written yet) is said once."""
    shown = [_check(check, question) for check in checks]
    for earlier, later in reversed(list(itertools.pairwise(shown))):
        if later["message"] == earlier["message"]:
            later["message"] = ""
    return shown


def _notebook(course: Course, result: SubmissionResult) -> dict[str, Any]:
    exercises = [
        {
            "question": question,
            "earned": earned(result, question.exercise),
            "checks": _checks(checks_of(result, question.exercise), question),
        }
        for question in course.questions.get(result.notebook, ())
    ]
    return {
        "result": result,
        "flags": flags_to_look_at(result),
        "out_of": course.out_of_notebook(result.notebook),
        "exercises": exercises if result.status == "graded" else [],
    }


def student_page(course: Course, student: str) -> str:
    """The page of one student, as HTML.

    It names no other student, and links to no other page.
    """
    own = course.of_student(student)
    notebooks = [_notebook(course, result) for result in own]
    return render(
        "student.html",
        student=student,
        notebooks=notebooks,
        earned=sum(result.earned for result in own),
        out_of=sum(notebook["out_of"] for notebook in notebooks),
    )
