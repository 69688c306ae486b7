"""What was asked: the titles of exercises and checks, from an instructor's notebook."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path

from grader.grade.pristine import Pristine, pristine_notebooks
from labsupport.course.editions import ReleaseError

_CARD = re.compile(r"^### (Exercise .+)\n+(.*)", re.MULTILINE)
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
    """

    exercise: str
    title: str
    card: str = ""
    points: dict[str, float] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All points of the exercise."""
        return sum(self.points.values())


def what_a_check_asks(source: str) -> str:
    """What the first check that a cell calls says of itself: its docstring's first line, or ""."""
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


def questions_of(notebook: Pristine) -> list[Question]:
    """The exercises of an instructor's notebook, in its order.

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
            made[exercise] = Question(exercise, title or exercise, card, {}, {})
            title = card = ""
        if cell.grade:
            made[exercise].points[cell.grade_id] = cell.points
            made[exercise].asks[cell.grade_id] = what_a_check_asks(cell.source)
    return list(made.values())


def questions_in(folder: Path) -> dict[str, list[Question]]:
    """The same of all notebooks of a folder, by name; none where there is no notebook."""
    try:
        notebooks = pristine_notebooks(folder)
    except ReleaseError:
        return {}
    return {name: questions_of(notebook) for name, notebook in notebooks.items()}
