"""The results of a course, and the pages that show them: one for each student, and the class's.

A page loads nothing and runs nothing. Its texts come from students, so Jinja escapes all of them;
should one ever slip through, the page's own policy still keeps a browser from obeying it.
"""

import ast
import base64
import contextlib
import hashlib
import inspect
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import jinja2

from grader.grade.plan import parsed
from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.grade.submissions import (
    NO_CLASS,
    Cell,
    ClassList,
    Pristine,
    Submission,
    printable,
    pristine_notebooks,
)
from labsupport import checks, paths

# The message of these says what a student did; that of the others, that nothing was there.
_MISTAKES = ("failed", "died", "timeout")
# A flag of this kind is about the machine that graded, and the same for all submissions.
OF_THE_MACHINE = "not confined"
_NUMBER = re.compile(r"(?<![\w.])-?(\d+(\.\d+)?(e[+-]?\d+)?|nan|inf)(?![\w])", re.IGNORECASE)
_CARD = re.compile(r"^##+ (Exercise .+)\n+(.*)", re.MULTILINE)
_CHAPTER = re.compile(r"\(([\w-]+\.md)[#)]")
_CHECK = re.compile(r"\bchecks\.(check_\w+)\(")
# The docstring of a check repeats which exercise it belongs to.
_EXERCISE = re.compile(r"^Exercise [\d-]+(, step \d| \([a-z, ]+\))?: ")


@dataclass(frozen=True)
class Question:
    """One exercise as it was set, by the grade_id of its first solution cell; its check cells.

    Its card is the line below its title; a chapter is such as "02-online-softmax.md"; either may be
    "".
    """

    exercise: str
    title: str
    card: str
    chapter: str
    checks: dict[str, Cell] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All points of the exercise."""
        return sum(check.points for check in self.checks.values())


def asked_by(source: str) -> str:
    """Return the first line of the docstring of the first check that a cell calls, or ""."""
    found = _CHECK.search(source)
    check = getattr(checks, found[1], None) if found else None
    return _EXERCISE.sub("", (inspect.getdoc(check) or "").split("\n")[0]) if check else ""


def number_of(exercise: str) -> str:
    """Return what the steps of an exercise share: "ex-4-3" of "ex-4-3-add"."""
    found = re.match(r"ex-\d+-\d+(?=-)", exercise)
    return found[0] if found else exercise


def questions_of(notebook: Pristine) -> list[Question]:
    """Return the exercises of an instructor's notebook, in its order.

    The grader's rule says which exercise a check belongs to; an exercise has the card above it.
    """
    # The table of the three days says which chapter explains an exercise, such as "1-3".
    days = (paths.project_root() / "theory/three-days.md").read_text(encoding="utf-8")
    chapters = {
        number: link[1]
        for line in days.split("\n")
        if (link := _CHAPTER.search(line))
        for number in re.findall(r"\*\*(\d-\d)\*\*", line)
    }
    made: dict[str, Question] = {}
    title = card = ""
    for cell in notebook.cells:
        if found := _CARD.search(cell.source if cell.kind == "markdown" else ""):
            title, card = found[1].strip(), found[2].strip()
        if not (cell.solution or cell.grade):
            continue
        exercise, number = cell.exercise, number_of(cell.exercise)
        if number not in made:
            chapter = chapters.get(number.removeprefix("ex-"), "")
            made[number] = Question(exercise, title or exercise, card, chapter)
            title = card = ""
        if cell.grade:
            made[number].checks[cell.grade_id] = cell
    return list(made.values())


@dataclass(frozen=True)
class Course:
    """The contents of all reports: a result for each student and notebook, and what was asked."""

    results: tuple[SubmissionResult, ...]
    questions: Mapping[str, Sequence[Question]]
    class_list: ClassList = NO_CLASS
    bonus: frozenset[str] = frozenset()  # notebooks whose points are shown apart

    @classmethod
    def of(
        cls,
        results: Sequence[SubmissionResult],
        notebooks: Path | None = None,
        class_list: ClassList = NO_CLASS,
    ) -> Self:
        """Order results as `write_reports` takes them, and find out what was asked."""
        # A refused file may not say which notebook it is: then each counts alone.
        latest = {(r.student, r.notebook, "" if r.notebook else r.path): r for r in results}
        unknown = Flag("", "unknown student", "The class list does not hold this student.")
        for key, result in latest.items():
            if class_list.rows and class_list.find(result.student, result.path) is None:
                latest[key] = replace(result, flags=(unknown, *result.flags))
        ordered = sorted(latest.values(), key=lambda r: (*_by_name(r.student), r.notebook, r.path))
        asked = pristine_notebooks(notebooks)
        names = sorted(asked.keys() & {r.notebook for r in ordered})
        bonus = frozenset(name for name in names if asked[name].bonus)
        names.sort(key=bonus.__contains__)  # further ones last
        questions = {name: questions_of(asked[name]) for name in names}
        return cls(tuple(ordered), questions, class_list, bonus)

    @property
    def students(self) -> list[str]:
        """Identifiers of everybody who handed in, sorted."""
        return sorted({r.student for r in self.results}, key=_by_name)

    @property
    def listed(self) -> dict[str, str | None]:
        """The name in the class list, or None, of everybody who handed in."""
        return {r.student: self.class_list.find(r.student, r.path) for r in self.results}

    @property
    def missing(self) -> list[str]:
        """Identifiers of those in the class who handed in nothing, sorted."""
        return sorted(set(self.class_list.rows) - set(self.listed.values()), key=_by_name)

    def out_of(self, name: str = "") -> float:
        """Return the points that a notebook is worth, or all without a bonus together."""
        chosen = [name] if name else self.questions.keys() - self.bonus
        return sum(q.total for one in chosen for q in self.questions.get(one, ()))

    def of_student(self, student: str) -> list[SubmissionResult]:
        """Return a student's notebooks in order."""
        return [r for r in self.results if r.student == student]

    def total(self, student: str, *, bonus: bool = False) -> float:
        """Return a student's points without the bonus points, or these alone."""
        theirs = self.of_student(student)
        return sum(r.earned for r in theirs if (r.notebook in self.bonus) == bonus)

    def graded(self, name: str) -> list[SubmissionResult]:
        """Return the submissions of one notebook that were run."""
        return [r for r in self.results if r.notebook == name and r.status == "graded"]

    def mistakes(self, name: str) -> list[tuple[str, str, int]]:
        """Return (exercise, message but for numbers, students) of one notebook, sorted."""
        said_to: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for result in self.graded(name):
            for check in result.checks:
                said = check.message.strip().split("\n")[0] or f"({check.status})"
                if check.status in _MISTAKES:
                    key = check.exercise, _NUMBER.sub("#", said)
                    said_to[key].setdefault(result.student, said)
        order = sorted(said_to.items(), key=lambda item: (-len(item[1]), item[0]))
        return [(exercise, min(to.values()), len(to)) for (exercise, _), to in order]


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


_TEMPLATES = Path(__file__).parent / "templates"
# Terminals' colours, which tracebacks are full of.
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LONGEST_MESSAGE = 3000


def plain(text: str) -> str:
    """Return a text that can be written as UTF-8 and shown: no colours, no control characters."""
    return printable(_ANSI.sub("", text.replace("\r\n", "\n")), "\n\t\xa0")


def message(text: str) -> str:
    """Cut a diagnosis where it no longer helps anybody."""
    text = plain(text.strip())
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"


def points(value: float) -> str:
    """Write points without needless digits: 3, 2.5."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def chapter(file: str) -> str:
    """Name a chapter by its file: chapter 2 for 02-online-softmax.md."""
    found = re.match(r"0*(\d+)-", file)
    return f"chapter {found[1]}" if found else file


_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    # Everything that a template prints passes through here.
    finalize=lambda value: plain(value) if type(value) is str else value,
)
_PAGES.filters |= {function.__name__: function for function in (message, points, chapter, asked_by)}
# The policy allows this style and no other, so the two must agree byte for byte.
_STYLE = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_own: dict[str, Any] = {"style": _STYLE, "digest": _DIGEST}
_PAGES.globals.update(_own)


# What a status is called on a page, and which of the three colours it has.
STATUS_WORDS = {
    "passed": ("passed", "good"),
    "failed": ("failed", "bad"),
    "known mistake": ("the same mistake, no further points lost", "none"),
    "not written": ("not written", "none"),
    "missing": ("cell missing", "none"),
    "died": ("program ended", "bad"),
    "timeout": ("took too long", "bad"),
    "not run": ("not run", "none"),
}
_PLAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,60}")


def page_names(students: Iterable[str]) -> dict[str, str]:
    """Say where each student's page goes, relative to the reports' folder.

    A plain identifier names its page; others get a digest, so that no two share a page.
    """
    names = {}
    for student in students:
        digest = hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()[:10]
        # "+" never stands in a plain identifier, so no two students can meet here.
        other = f"{re.sub(r'[^a-z0-9]+', '-', student.lower())[:40].strip('-')}+{digest}"
        names[student] = f"students/{student if _PLAIN.fullmatch(student) else other}.html"
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
        cell = question.checks.get(check.grade_id)
        asks = (asked_by(cell.source) if cell else "") or check.grade_id
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

    It names no other student, and says nothing that is for instructors only. The next step is where
    most points are missing; of equal ones, an exercise with a mistake before one that is not begun.
    """
    notebooks = [_notebook(course, result) for result in course.of_student(student)]
    theirs = {notebook["result"].notebook for notebook in notebooks} - {""}
    left = [
        {"notebook": notebook["result"].notebook, **exercise}
        for notebook in notebooks
        for exercise in notebook["exercises"]
        if exercise["earned"] < exercise["question"].total
    ]

    def worth(one: dict[str, Any]) -> tuple[float, bool]:
        wrong = any(check["tone"] == "bad" for check in one["checks"])
        return one["question"].total - one["earned"], wrong

    return _PAGES.get_template("student.html").render(
        course=course,
        student=student,
        notebooks=notebooks,
        next=max(left, key=worth, default=None),
        earned=course.total(student),
        out_of=sum(course.out_of(name) for name in theirs - course.bonus),
        bonus=course.total(student, bonus=True),
        bonus_out_of=sum(course.out_of(name) for name in theirs & course.bonus),
    )


MISTAKES_SHOWN, _CELLS_SHOWN = 12, 5
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
            for check in question.checks
        },
    }


def _class_notebook(course: Course, name: str) -> dict[str, Any]:
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


def _flags(course: Course, texts: Texts) -> dict[str, list[dict[str, Any]]]:
    """Group the flags by kind: a row for each student and text, with the cells it is about."""
    kinds: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for result in course.results:
        for flag in flags_to_look_at(result):
            row = {"student": result.student, "text": flag.text, "where": [], "cells": []}
            row = kinds.setdefault(flag.kind, {}).setdefault((result.student, flag.text), row)
            row["where"].append(flag.grade_id or result.notebook or result.path)
            cells = texts.get((result.path, result.digest), ()) if flag.grade_id else ()
            row["cells"] += [one.source for one in cells if one.grade_id == flag.grade_id]
            del row["cells"][_CELLS_SHOWN:]
    return {kind: list(kinds[kind].values()) for kind in sorted(kinds)}


def texts_of(submissions: Iterable[Submission]) -> Texts:
    """Return the code cells of all files, by path and digest."""
    return {
        (one.path, one.digest): [cell for cell in one.cells if cell.kind == "code"]
        for one in submissions
    }


def equal_solutions(
    results: Iterable[SubmissionResult], texts: Texts
) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Return groups of students with the solutions that they share, each its exercise and text.

    The longest solution of a group stands first, and the group with the longest ones.
    """
    same: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for result in results:
        written = {c.exercise for c in result.checks if c.status not in ("not written", "missing")}
        for cell in texts.get((result.path, result.digest), ()):
            tree = parsed(cell.source) if cell.grade_id in written else None
            if tree is not None and sum(1 for _ in ast.walk(tree)) >= _SMALLEST:
                with contextlib.suppress(RecursionError):  # thousands of elif, say
                    same[cell.grade_id, ast.dump(tree)].setdefault(result.student, cell.source)
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
    for (exercise, _), sources in same.items():
        if len(sources) > 1:
            groups[tuple(sources)].append((exercise, next(iter(sources.values()))))
    found = [(list(who), sorted(cells, key=lambda c: -len(c[1]))) for who, cells in groups.items()]
    return sorted(found, key=lambda one: -sum(len(source) for _, source in one[1]))


def overview_page(course: Course, pages: Mapping[str, str], texts: Texts) -> str:
    """Make the overview of the class, as HTML; `pages` has the place of each student's page."""
    everybody = []
    for student in course.students:
        own = {result.notebook: result for result in course.of_student(student)}
        flags = {flag.kind for result in own.values() for flag in flags_to_look_at(result)}
        notebooks = [own.get(name) for name in course.questions]
        everybody.append({"name": student, "notebooks": notebooks, "flags": sorted(flags)})
    titles = {number_of(q.exercise): q.title for asked in course.questions.values() for q in asked}
    machine = [f.text for r in course.results for f in r.flags if f.kind == OF_THE_MACHINE]
    return _PAGES.get_template("overview.html").render(
        course=course,
        pages=pages,
        notebooks=[_class_notebook(course, name) for name in course.questions],
        students=everybody,
        refused=sum(result.status == "refused" for result in course.results),
        flagged=sum(bool(student["flags"]) for student in everybody),
        flags=_flags(course, texts),
        equal=equal_solutions(course.results, texts),
        title=lambda exercise: titles.get(number_of(exercise), exercise),
        machine=sorted(set(machine)),
    )
