"""The class at a glance: points, what needs a look, the commonest mistakes."""

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grader.grade.notebooks import Cell
from grader.grade.plan import parsed
from grader.grade.results import Flag, SubmissionResult
from grader.grade.submissions import Submission
from grader.reports.course import (
    OF_THE_MACHINE,
    Course,
    Question,
    checks_of,
    earned,
    flags_to_look_at,
    number_of,
)
from grader.reports.rendering import render

MISTAKES_SHOWN = 12
# Parts of a syntax tree. Solutions of a line or two agree by chance.
_SMALLEST = 70
Texts = Mapping[tuple[str, str], Sequence[Cell]]


def _exercise(question: Question, graded: Sequence[SubmissionResult]) -> dict[str, Any]:
    reached = [earned(result, question.exercise) for result in graded]
    given = [check for result in graded for check in checks_of(result, question.exercise)]
    counts = Counter((check.grade_id, check.status) for check in given)
    return {
        "question": question,
        "mean": statistics.fmean(reached or [0]),
        "all": sum(points >= question.total for points in reached),
        "none": reached.count(0),
        "counts": {
            check: [counts[check, status] for status in ("passed", "failed", "not written")]
            for check in question.points
        },
    }


def _notebook(course: Course, name: str) -> dict[str, Any]:
    graded = course.graded(name)
    reached = [result.earned for result in graded]
    mistakes = course.mistakes(name)
    return {
        "name": name,
        "graded": graded,
        "mean": statistics.fmean(reached or [0]),
        "median": statistics.median(reached or [0]),
        "exercises": [_exercise(question, graded) for question in course.questions[name]],
        "mistakes": mistakes[:MISTAKES_SHOWN],
        "rarer": len(mistakes[MISTAKES_SHOWN:]),
    }


def _student(course: Course, student: str) -> dict[str, Any]:
    own = {result.notebook: result for result in course.of_student(student)}
    return {
        "name": student,
        "notebooks": [own.get(name) for name in course.questions],
        "flags": sorted({flag.kind for r in own.values() for flag in flags_to_look_at(r)}),
    }


def _flags(course: Course, texts: Texts) -> dict[str, list[dict[str, Any]]]:
    """Group the flags by kind: a row for each student and text, with the cells it is about."""
    kinds: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for result in course.results:
        for flag in flags_to_look_at(result):
            row = {"student": result.student, "text": flag.text, "where": [], "cells": []}
            row = kinds.setdefault(flag.kind, {}).setdefault((result.student, flag.text), row)
            row["where"].append(flag.grade_id or result.notebook or result.path)
            row["cells"] += cells_of(flag, result, texts)
    return {kind: list(kinds[kind].values()) for kind in sorted(kinds)}


def texts_of(submissions: Iterable[Submission]) -> Texts:
    """Return the code cells of all files, by path and digest."""
    return {
        (one.path, one.digest): [cell for cell in one.cells if cell.kind == "code"]
        for one in submissions
    }


def cells_of(flag: Flag, result: SubmissionResult, texts: Texts) -> list[str]:
    """Return the cells that a flag speaks of: an exercise's, or those with the names in it."""
    cells = texts.get((result.path, result.digest), ())
    if flag.grade_id:
        return [cell.source for cell in cells if cell.grade_id == flag.grade_id]
    if not flag.text.startswith("Names "):
        return []
    names = re.findall(r"[\w.]*\w", flag.text.removeprefix("Names "))
    words = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    return [cell.source for cell in cells if not cell.grade_id and words.search(cell.source)]


def equal_solutions(
    results: Iterable[SubmissionResult], texts: Texts
) -> list[tuple[str, list[str], str]]:
    """Find solutions that several students handed in, but for comments and layout.

    Returns:
        exercise, students, and the text as the first of them wrote it; the longest come first.
    """
    same: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for result in results:
        written = {c.exercise for c in result.checks if c.status not in ("not written", "missing")}
        for cell in texts.get((result.path, result.digest), ()):
            tree = parsed(cell.source) if cell.grade_id in written else None
            if tree is not None and sum(1 for _ in ast.walk(tree)) >= _SMALLEST:
                same[cell.grade_id, ast.dump(tree)].setdefault(result.student, cell.source)
    found = [
        (exercise, list(sources), next(iter(sources.values())))
        for (exercise, _), sources in same.items()
        if len(sources) > 1
    ]
    return sorted(found, key=lambda one: (-len(one[2]), one))


def overview_page(course: Course, pages: Mapping[str, str], texts: Texts) -> str:
    """Make the overview of the class, as HTML; `pages` has the place of each student's page."""
    everybody = [_student(course, student) for student in course.students]
    asked = [question for questions in course.questions.values() for question in questions]
    titles = {number_of(question.exercise): question.title for question in asked}
    machine = [f.text for r in course.results for f in r.flags if f.kind == OF_THE_MACHINE]
    return render(
        "overview.html",
        course=course,
        pages=pages,
        notebooks=[_notebook(course, name) for name in course.questions],
        students=everybody,
        refused=[result for result in course.results if result.status == "refused"],
        flagged=sum(bool(student["flags"]) for student in everybody),
        flags=_flags(course, texts),
        equal=equal_solutions(course.results, texts),
        title=lambda exercise: titles.get(number_of(exercise), exercise),
        machine=sorted(set(machine)),
    )
