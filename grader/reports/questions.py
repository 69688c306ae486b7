"""The questions of a course: titles of exercises and checks, from an instructor's notebook."""

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass, field

from grader.grade.notebooks import Pristine
from labsupport import checks, paths

_CARD = re.compile(r"^### (Exercise .+)\n+(.*)", re.MULTILINE)
_CHAPTER = re.compile(r"\(([\w-]+\.md)[#)]")
_CHECK = re.compile(r"\bchecks\.(check_\w+)\(")
# The docstring of a check repeats which exercise it belongs to.
_EXERCISE = re.compile(r"^Exercise [\d-]+( \([a-z, ]+\))?: ")


@dataclass(frozen=True)
class Question:
    """One exercise as it was set.

    Attributes:
        exercise: the grade_id of its solution cell.
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
        if exercise not in made:
            number = "-".join(exercise.split("-")[1:3])
            made[exercise] = Question(
                exercise, title or exercise, card, _chapters().get(number, "")
            )
            title = card = ""
        if cell.grade:
            made[exercise].points[cell.grade_id] = cell.points
            made[exercise].asks[cell.grade_id] = asked_by(cell.source)
    return list(made.values())
