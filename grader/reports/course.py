"""The results of a course in the order of the reports, and the questions that were asked."""

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from grader.grade.notebooks import Pristine, pristine_notebooks
from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.grade.tables import ClassList
from labsupport import checks, paths

# The message of these says what a student did; that of the others, that nothing was there.
_MISTAKES = ("failed", "died", "timeout")
# A flag of this kind is about the machine that graded, and the same for all submissions.
OF_THE_MACHINE = "not confined"
_NUMBER = re.compile(r"(?<![\w.])-?(\d+(\.\d+)?(e[+-]?\d+)?|nan|inf)(?![\w])", re.IGNORECASE)
_CARD = re.compile(r"^### (Exercise .+)\n+(.*)", re.MULTILINE)
_CHAPTER = re.compile(r"\(([\w-]+\.md)[#)]")
_CHECK = re.compile(r"\bchecks\.(check_\w+)\(")
# The docstring of a check repeats which exercise it belongs to.
_EXERCISE = re.compile(r"^Exercise [\d-]+(, step \d| \([a-z, ]+\))?: ")


@dataclass(frozen=True)
class Question:
    """One exercise as it was set.

    Attributes:
        exercise: the grade_id of its first solution cell; an exercise in steps has several.
        card: the line below its title: difficulty, minutes, points; "" if there is none.
        chapter: the explanation in the theory, such as "02-online-softmax.md", or "".
        points: each check cell's, by grade_id, in the notebook's order.
        asks: the request of each check, by grade_id, in one line; "" where nothing says it.
    """

    exercise: str
    title: str
    card: str
    chapter: str
    points: dict[str, float] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All points of the exercise."""
        return sum(self.points.values())


def asked_by(source: str) -> str:
    """Return the first line of the docstring of the first check that a cell calls, or ""."""
    found = _CHECK.search(source)
    check = getattr(checks, found[1], None) if found else None
    return _EXERCISE.sub("", (inspect.getdoc(check) or "").split("\n")[0]) if check else ""


@functools.cache
def _chapters() -> dict[str, str]:
    """The chapter that explains an exercise, such as "1-3", by the table of the three days."""
    text = (paths.project_root() / "theory/three-days.md").read_text(encoding="utf-8")
    return {
        number: link[1]
        for line in text.split("\n")
        if (link := _CHAPTER.search(line))
        for number in re.findall(r"\*\*(\d-\d)\*\*", line)
    }


def number_of(exercise: str) -> str:
    """Return what the steps of an exercise share: "ex-4-3" of "ex-4-3-add"."""
    found = re.match(r"ex-\d+-\d+(?=-)", exercise)
    return found[0] if found else exercise


def questions_of(notebook: Pristine) -> list[Question]:
    """Return the exercises of an instructor's notebook, in its order.

    The grader's rule says which exercise a check belongs to; an exercise has the card above it.
    """
    made: dict[str, Question] = {}
    title = card = ""
    for cell in notebook.cells:
        if found := _CARD.search(cell.source if cell.kind == "markdown" else ""):
            title, card = found[1].strip(), found[2].strip()
        if not (cell.solution or cell.grade):
            continue
        exercise = notebook.exercise_of(cell.grade_id)
        number = number_of(exercise)
        if number not in made:
            chapter = _chapters().get(number.removeprefix("ex-"), "")
            made[number] = Question(exercise, title or exercise, card, chapter)
            title = card = ""
        if cell.grade:
            made[number].points[cell.grade_id] = cell.points
            made[number].asks[cell.grade_id] = asked_by(cell.source)
    return list(made.values())


@dataclass(frozen=True)
class Course:
    """The contents of all reports: a result for each student and notebook, and what was asked."""

    results: tuple[SubmissionResult, ...]
    questions: Mapping[str, Sequence[Question]]
    class_list: ClassList | None = None

    @classmethod
    def of(
        cls,
        results: Sequence[SubmissionResult],
        notebooks: Path | None = None,
        class_list: ClassList | None = None,
    ) -> Self:
        """Order results as `write_reports` takes them, and find out what was asked."""
        # A file that was refused may not tell which notebook it is: then each counts by itself.
        latest = {(r.student, r.notebook, "" if r.notebook else r.path): r for r in results}
        known = [_known(result, class_list) for result in latest.values()]
        ordered = sorted(known, key=lambda r: (*_by_name(r.student), r.notebook, r.path))
        asked = pristine_notebooks(notebooks)
        names = sorted(asked.keys() & {r.notebook for r in ordered})
        return cls(tuple(ordered), {name: questions_of(asked[name]) for name in names}, class_list)

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
    return [c for c in result.checks if number_of(c.exercise) == number_of(exercise)]


def earned(result: SubmissionResult, exercise: str) -> float:
    """Return the points of one exercise in a submission; 0 where it was not run."""
    return sum(check.earned for check in checks_of(result, exercise))
