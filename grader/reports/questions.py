"""What was asked: the titles of exercises and checks, from an instructor's notebook."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path

from grader.grade.pristine import Pristine, pristine_notebooks
from labsupport import paths
from labsupport.course.editions import ReleaseError

_CARD = re.compile(r"^### (Exercise .+)\n+(.*)", re.MULTILINE)
_CHAPTER = re.compile(r"\(([\w-]+\.md)[#)]")
# The docstring of a check repeats which exercise it belongs to.
_EXERCISE = re.compile(r"^Exercise [\d-]+( \([a-z, ]+\))?: ")


@dataclass(frozen=True)
class Question:
    """One exercise as it was set.

    Attributes:
        exercise: the grade_id of its solution cell.
        title: such as "Exercise 1-1 · Textbook attention with a mask".
        card: the line below it: difficulty, minutes, points; "" if there is none.
        points: each check cell's, by grade_id, in the notebook's order.
        asks: what each check asks for, by grade_id, in one line; "" where nothing says it.
        chapter: where the theory explains it, such as "02-online-softmax.md", or "".
    """

    exercise: str
    title: str
    card: str = ""
    points: dict[str, float] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)
    chapter: str = ""

    @property
    def total(self) -> float:
        """All points of the exercise."""
        return sum(self.points.values())


def what_a_check_asks(source: str) -> str:
    """Return the first line of the docstring of the first check that a cell calls, or ""."""
    from labsupport import checks

    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="checks"), attr=name)):
                said = inspect.getdoc(getattr(checks, name, None)) or ""
                return _EXERCISE.sub("", said.split("\n")[0])
    return ""


@functools.cache
def _chapters() -> dict[str, str]:
    """The chapter that explains an exercise, such as "1-3", by the table of the three days."""
    try:
        text = (paths.project_root() / "theory/three-days.md").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {
        number: link[1]
        for line in text.split("\n")
        if (link := _CHAPTER.search(line))
        for number in re.findall(r"\*\*(\d-\d)\*\*", line)
    }


def questions_of(notebook: Pristine) -> list[Question]:
    """Return the exercises of an instructor's notebook, in its order.

    Which exercise a check belongs to is the grader's rule; an exercise has the card above its cell.
    """
    made: dict[str, Question] = {}
    title = card = ""
    for cell in notebook.cells:
        if found := _CARD.search(cell.source if cell.kind == "markdown" else ""):
            title, card = found[1].strip(), found[2].strip()
        if not (cell.solution or cell.grade):
            continue
        exercise = notebook.exercise_of(cell.grade_id)
        if exercise not in made:
            number = "-".join(exercise.split("-")[1:3])
            chapter = _chapters().get(number, "")
            made[exercise] = Question(exercise, title or exercise, card, {}, {}, chapter)
            title = card = ""
        if cell.grade:
            made[exercise].points[cell.grade_id] = cell.points
            made[exercise].asks[cell.grade_id] = what_a_check_asks(cell.source)
    return list(made.values())


def questions_in(folder: Path) -> dict[str, list[Question]]:
    """Return the same of all notebooks of a folder, by name; none where there is no notebook."""
    try:
        notebooks = pristine_notebooks(folder)
    except ReleaseError:
        return {}
    return {name: questions_of(notebook) for name, notebook in notebooks.items()}
