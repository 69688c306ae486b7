"""One student's page: what was asked, what came out, which likely mistake, how many points."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from grader.grade.results import CheckResult, SubmissionResult
from grader.reports.course import Course, Question, checks_of, earned
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
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}")


def page_names(students: Iterable[str]) -> dict[str, str]:
    """Say where each student's page goes, relative to the reports' folder.

    A plain identifier in lower case names its page; of others the plain part does, with a digest
    of the whole, so that no two share a page on any file system, and none leaves the folder.
    """
    names = {}
    for student in students:
        name = student
        if not _PLAIN.fullmatch(name):
            digest = hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()[:10]
            # "+" never stands in a plain identifier, so no two students can meet here.
            name = f"{re.sub(r'[^a-z0-9]+', '-', student.lower())[:40].strip('-')}+{digest}"
        names[student] = f"students/{name}.html"
    return names


def _checks(checks: Iterable[CheckResult], question: Question) -> list[dict[str, Any]]:
    """Describe the checks of an exercise; a diagnosis that repeats is said once."""
    shown, before = [], set()
    for check in checks:
        words, tone = STATUS_WORDS.get(check.status, (check.status, "none"))
        if check.given is not None:
            words, tone = "by your instructor", "good" if check.given >= check.points else "none"
        message = check.remark or ("" if words == "passed" else check.message.strip())
        said = message
        if message and message in before:
            said = "As above." if tone == "bad" else ""
        before.add(message)
        asks = question.asks.get(check.grade_id) or check.grade_id
        shown.append({"asks": asks, "words": words, "tone": tone, "said": said, "check": check})
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
    return {"result": result, "exercises": exercises if result.status == "graded" else []}


def student_page(course: Course, student: str) -> str:
    """Make the page of one student, as HTML.

    It names no other student, and says nothing that is for instructors only. The next step is the
    first exercise with a mistake, else the first without all points.
    """
    notebooks = [_notebook(course, result) for result in course.of_student(student)]
    left = [
        {"notebook": notebook["result"].notebook, **exercise}
        for notebook in notebooks
        for exercise in notebook["exercises"]
        if exercise["earned"] < exercise["question"].total
    ]
    wrong = [one for one in left if any(check["tone"] == "bad" for check in one["checks"])]
    return render(
        "student.html",
        course=course,
        student=student,
        notebooks=notebooks,
        next=next(iter(wrong or left), None),
        earned=course.total(student),
        out_of=sum(
            course.out_of(name) for name in {n["result"].notebook for n in notebooks} - {""}
        ),
    )
