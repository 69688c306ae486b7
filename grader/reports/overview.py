"""The class at a glance: points by exercise, the commonest mistakes, times, what needs a look."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grader.grade.results import SubmissionResult
from grader.reports.course import (
    OF_THE_MACHINE,
    Course,
    checks_of,
    earned,
    flags_to_look_at,
)
from grader.reports.page import short_name
from grader.reports.questions import Question
from grader.reports.rendering import render

MISTAKES_SHOWN = 12
SLOWEST_SHOWN = 5
# Of the statuses, what the table of checks shows apart; the rest is counted together.
_APART = ("passed", "failed", "not written")


def _exercise(question: Question, graded: Sequence[SubmissionResult]) -> dict[str, Any]:
    reached = [earned(result, question.exercise) for result in graded]
    checks = []
    for check, worth in question.points.items():
        statuses = Counter(
            given.status
            for result in graded
            for given in checks_of(result, question.exercise)
            if given.grade_id == check
        )
        checks.append(
            {
                "name": short_name(check, question.exercise),
                "asks": question.asks.get(check, ""),
                "points": worth,
                "counts": [statuses[status] for status in _APART],
                "others": statuses.total() - sum(statuses[status] for status in _APART),
            }
        )
    return {
        "question": question,
        "mean": statistics.fmean(reached) if reached else 0.0,
        "all": sum(points >= question.total for points in reached),
        "none": sum(points == 0 for points in reached),
        "checks": checks,
    }


def _notebook(course: Course, name: str) -> dict[str, Any]:
    graded = course.graded(name)
    reached = [result.earned for result in graded]
    seconds = [result.seconds for result in graded]
    titles = {question.exercise: question.title for question in course.questions[name]}
    mistakes = course.mistakes(name)
    return {
        "name": name,
        "out_of": course.out_of_notebook(name),
        "graded": graded,
        "mean": statistics.fmean(reached) if reached else 0.0,
        "median": statistics.median(reached) if reached else 0.0,
        "median_seconds": statistics.median(seconds) if seconds else 0.0,
        "peak": max((result.peak_memory_bytes for result in graded), default=0),
        "slowest": sorted(graded, key=lambda r: -r.seconds)[:SLOWEST_SHOWN],
        "exercises": [_exercise(question, graded) for question in course.questions[name]],
        "titles": titles,
        "mistakes": mistakes[:MISTAKES_SHOWN],
        "rarer": len(mistakes[MISTAKES_SHOWN:]),
    }


def _student(course: Course, student: str) -> dict[str, Any]:
    own = {result.notebook: result for result in course.of_student(student)}
    return {
        "name": student,
        "notebooks": [own.get(name) for name in course.questions],
        "earned": sum(result.earned for result in own.values()),
        "flags": sum(len(flags_to_look_at(result)) for result in own.values()),
    }


def overview_page(course: Course, pages: Mapping[str, str]) -> str:
    """The overview of the class, as HTML.

    Args:
        course: the results.
        pages: where each student's page lies, for the links.
    """
    return render(
        "overview.html",
        course=course,
        pages=pages,
        notebooks=[_notebook(course, name) for name in course.questions],
        students=[_student(course, student) for student in course.students],
        refused=[result for result in course.results if result.status == "refused"],
        flagged=[(r, flags) for r in course.results if (flags := flags_to_look_at(r))],
        machine=sorted(
            {f.text for r in course.results for f in r.flags if f.kind == OF_THE_MACHINE}
        ),
    )
