"""The class at a glance: points, what needs a look, the commonest mistakes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grader.grade.results import SubmissionResult
from grader.reports.cells import Texts, cells_of, equal_solutions
from grader.reports.course import OF_THE_MACHINE, Course, checks_of, earned, flags_to_look_at
from grader.reports.questions import Question
from grader.reports.rendering import render

MISTAKES_SHOWN = 12


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


def overview_page(course: Course, pages: Mapping[str, str], texts: Texts) -> str:
    """Make the overview of the class, as HTML; `pages` has the place of each student's page."""
    everybody = [_student(course, student) for student in course.students]
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
        titles={q.exercise: q.title for asked in course.questions.values() for q in asked},
        machine=sorted(set(machine)),
    )
