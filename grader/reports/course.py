"""The results of a course in the order in which reports show them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grader.grade.notebooks import pristine_notebooks
from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.grade.tables import ClassList
from grader.reports.questions import Question, questions_of

# The message of these says what a student did; that of the others, that nothing was there.
_MISTAKES = ("failed", "died", "timeout")
# A flag of this kind is about the machine that graded, and the same for all submissions.
OF_THE_MACHINE = "not confined"
_NUMBER = re.compile(r"(?<![\w.])-?(\d+(\.\d+)?(e[+-]?\d+)?|nan|inf)(?![\w])", re.IGNORECASE)


@dataclass(frozen=True)
class Course:
    """The contents of all reports: a result for each student and notebook, and what was asked."""

    results: tuple[SubmissionResult, ...]
    questions: Mapping[str, Sequence[Question]]
    class_list: ClassList | None = None

    @staticmethod
    def of(
        results: Sequence[SubmissionResult],
        notebooks: Path | None = None,
        class_list: ClassList | None = None,
    ) -> Course:
        """Order results as `write_reports` takes them, and find out what was asked."""
        # A file that was refused may not tell which notebook it is: then each counts by itself.
        latest = {(r.student, r.notebook, "" if r.notebook else r.path): r for r in results}
        known = [_known(result, class_list) for result in latest.values()]
        ordered = sorted(known, key=lambda r: (*_by_name(r.student), r.notebook, r.path))
        asked = pristine_notebooks(notebooks)
        names = sorted(asked.keys() & {r.notebook for r in ordered})
        return Course(
            tuple(ordered), {name: questions_of(asked[name]) for name in names}, class_list
        )

    @property
    def students(self) -> list[str]:
        """Identifiers of everybody who handed in, sorted."""
        return sorted({r.student for r in self.results}, key=_by_name)

    @property
    def missing(self) -> list[str]:
        """Identifiers of those in the class who handed in nothing, sorted."""
        if self.class_list is None:
            return []
        there = {self.class_list.find(student) for student in self.students}
        return sorted(set(self.class_list.rows) - there, key=_by_name)

    def out_of(self, name: str = "") -> float:
        """Return the points that a notebook is worth, or all of them together."""
        chosen = self.questions.values() if not name else [self.questions.get(name, ())]
        return sum(question.total for questions in chosen for question in questions)

    def of_student(self, student: str) -> list[SubmissionResult]:
        """Return a student's notebooks in order."""
        return [r for r in self.results if r.student == student]

    def total(self, student: str) -> float:
        """Return all points of a student."""
        return sum(result.earned for result in self.of_student(student))

    def graded(self, name: str) -> list[SubmissionResult]:
        """Return the submissions of one notebook that were run."""
        return [r for r in self.results if r.notebook == name and r.status == "graded"]

    def mistakes(self, name: str) -> list[tuple[str, str, int]]:
        """Return (exercise, message, number of students) of one notebook, the commonest first.

        Diagnoses that differ only in their numbers count as the same: inputs are drawn anew.
        """
        said_to: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for result in self.graded(name):
            for check in result.checks:
                said = check.message.strip().split("\n")[0] or f"({check.status})"
                if check.status in _MISTAKES:
                    key = check.exercise, _NUMBER.sub("#", said)
                    said_to[key].setdefault(result.student, said)
        order = sorted(said_to.items(), key=lambda item: (-len(item[1]), item[0]))
        return [(exercise, min(to.values()), len(to)) for (exercise, _), to in order]


def _known(result: SubmissionResult, class_list: ClassList | None) -> SubmissionResult:
    if class_list is None or class_list.find(result.student) is not None:
        return result
    flag = Flag("", "unknown student", "The class list does not hold this student.")
    return replace(result, flags=(flag, *result.flags))


def flags_to_look_at(result: SubmissionResult) -> list[Flag]:
    """Return the flags that are about this submission."""
    return [flag for flag in result.flags if flag.kind != OF_THE_MACHINE]


def _by_name(student: str) -> tuple[str, str]:
    """Order as in a list of names, capital letters or not."""
    return student.casefold(), student


def checks_of(result: SubmissionResult, exercise: str) -> list[CheckResult]:
    """Return the checks of one exercise in a submission."""
    return [check for check in result.checks if check.exercise == exercise]


def earned(result: SubmissionResult, exercise: str) -> float:
    """Return the points of one exercise in a submission; 0 where it was not run."""
    return sum(check.earned for check in checks_of(result, exercise))
