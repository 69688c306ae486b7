"""The results of a course in the order in which reports show them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.reports.questions import Question, questions_in

# The message of these says what a student did; that of the others, that nothing was there.
_MISTAKES = ("failed", "died", "timeout")
# A flag of this kind is about the machine that graded, and the same for all submissions.
OF_THE_MACHINE = "not confined"
_NUMBER = re.compile(r"(?<![\w.])-?(\d+(\.\d+)?(e[+-]?\d+)?|nan|inf)(?![\w])", re.IGNORECASE)


@dataclass(frozen=True)
class Mistake:
    """A diagnosis that several students got.

    Attributes:
        exercise: where.
        message: one of them, as it was said to a student.
        students: to how many.
    """

    exercise: str
    message: str
    students: int


@dataclass(frozen=True)
class Course:
    """What reports are made of.

    Attributes:
        results: one for each student and notebook, by student, then notebook.
        questions: the exercises of each notebook that somebody handed in.
    """

    results: tuple[SubmissionResult, ...]
    questions: Mapping[str, tuple[Question, ...]]

    @staticmethod
    def of(results: Sequence[SubmissionResult], notebooks: Path) -> Course:
        """Order results, and find out what was asked.

        Args:
            results: as `write_reports` takes them.
            notebooks: the folder of the instructor's notebooks.
        """
        # A file that was refused may not tell which notebook it is: then each counts by itself.
        latest = {(r.student, r.notebook, "" if r.notebook else r.path): r for r in results}
        ordered = sorted(latest.values(), key=lambda r: (*_by_name(r.student), r.notebook, r.path))
        set_there, questions = questions_in(notebooks), {}
        for name in sorted({r.notebook for r in ordered if r.notebook}):
            found = set_there.get(name, [])
            own = [r for r in ordered if r.notebook == name]
            questions[name] = (*found, *_questions_beside(found, own))
        return Course(tuple(ordered), questions)

    @property
    def students(self) -> list[str]:
        """Their identifiers, sorted."""
        return sorted({r.student for r in self.results}, key=_by_name)

    @property
    def exercises(self) -> list[Question]:
        """Of all notebooks, in order."""
        return [question for name in self.questions for question in self.questions[name]]

    @property
    def out_of(self) -> float:
        """All points that the notebooks are worth together."""
        return sum(question.total for question in self.exercises)

    def of_student(self, student: str) -> list[SubmissionResult]:
        """A student's notebooks in order."""
        return [r for r in self.results if r.student == student]

    def out_of_notebook(self, name: str) -> float:
        """All points of one notebook."""
        return sum(question.total for question in self.questions.get(name, ()))

    def graded(self, name: str) -> list[SubmissionResult]:
        """The submissions of one notebook that were run."""
        return [r for r in self.results if r.notebook == name and r.status == "graded"]

    def mistakes(self, name: str) -> list[Mistake]:
        """The diagnoses of one notebook, the commonest first, each counted once a student.

        Inputs are drawn anew for each run, so diagnoses that differ only in their numbers count
        as the same.
        """
        counted: Counter[tuple[str, str]] = Counter()
        wording: dict[tuple[str, str], Counter[str]] = {}
        for result in self.graded(name):
            seen: dict[tuple[str, str], str] = {}
            for check in result.checks:
                said = check.message.strip().split("\n")[0] or f"({check.status})"
                if check.status in _MISTAKES:
                    seen.setdefault((check.exercise, _NUMBER.sub("#", said)), said)
            for key, said in seen.items():
                counted[key] += 1
                wording.setdefault(key, Counter())[said] += 1
        order = sorted(counted, key=lambda key: (-counted[key], key))
        return [
            Mistake(key[0], max(sorted(wording[key]), key=wording[key].__getitem__), counted[key])
            for key in order
        ]


def flags_to_look_at(result: SubmissionResult) -> list[Flag]:
    """The flags that are about this submission."""
    return [flag for flag in result.flags if flag.kind != OF_THE_MACHINE]


def _by_name(student: str) -> tuple[str, str]:
    """Order as in a list of names, capital letters or not."""
    return student.casefold(), student


def checks_of(result: SubmissionResult, exercise: str) -> Iterator[CheckResult]:
    """The checks of one exercise in a submission."""
    return (check for check in result.checks if check.exercise == exercise)


def earned(result: SubmissionResult, exercise: str) -> float:
    """The points of one exercise in a submission; 0 where it was not run."""
    return sum(check.earned for check in checks_of(result, exercise))


def _questions_beside(
    found: Sequence[Question], results: Sequence[SubmissionResult]
) -> Iterator[Question]:
    """Exercises that results speak of and no notebook sets: it is not there, or has changed."""
    known = {question.exercise for question in found}
    checks: dict[str, dict[str, float]] = {}
    for result in results:
        for check in result.checks:
            if check.exercise not in known:
                checks.setdefault(check.exercise, {}).setdefault(check.grade_id, check.points)
    for exercise, points in checks.items():
        yield Question(exercise, exercise, points=points)
