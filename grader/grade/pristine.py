"""The instructor's notebooks: their exercises, checks and points, which count and no others."""

import functools
from dataclasses import dataclass
from pathlib import Path

from labsupport.course import editions as release


@dataclass(frozen=True)
class PristineCell:
    """A cell of the solved notebook.

    Attributes:
        kind: "code" or "markdown".
        source: its text, with solutions and hidden tests.
        grade_id: "" for a cell that is no part of an exercise.
        solution: whether students write it.
        grade: whether it gives points.
        points: how many.
    """

    kind: str
    source: str
    grade_id: str = ""
    solution: bool = False
    grade: bool = False
    points: float = 0.0

    @property
    def by_hand(self) -> bool:
        """An answer that only a person can judge: written by the student, with points."""
        return self.solution and self.grade


@dataclass(frozen=True)
class Pristine:
    """A solved notebook.

    Attributes:
        name: the file's, without its ending.
        cells: all of them.
    """

    name: str
    cells: tuple[PristineCell, ...]

    @property
    def solutions(self) -> dict[str, PristineCell]:
        """The code cells that students fill in, by grade_id."""
        return {c.grade_id: c for c in self.cells if c.solution and not c.by_hand}

    @property
    def graded(self) -> dict[str, PristineCell]:
        """The cells that give points, by grade_id, in their order."""
        return {cell.grade_id: cell for cell in self.cells if cell.grade}

    def exercise_of(self, grade_id: str) -> str:
        """The exercise that a check belongs to: the longest grade_id that it begins with.

        Checks that do not follow the naming belong to the nearest exercise above them.
        """
        solutions = self.solutions
        named = [one for one in solutions if grade_id == one or grade_id.startswith(one + "-")]
        if named:
            return max(named, key=len)
        above = grade_id
        for cell in self.cells:
            if cell.grade_id == grade_id:
                break
            if cell.grade_id in solutions:
                above = cell.grade_id
        return above


@functools.lru_cache(maxsize=32)
def _read(path: Path, modified: int) -> Pristine:
    import nbformat

    cells = []
    for cell in nbformat.read(path, as_version=4).cells:
        role = cell.metadata.get("nbgrader", {})
        name, points = str(role.get("grade_id", "")), float(role.get("points", 0) or 0)
        solution, grade = bool(role.get("solution")), bool(role.get("grade"))
        cells.append(PristineCell(cell.cell_type, cell.source, name, solution, grade, points))
    return Pristine(path.stem, tuple(cells))


def pristine_notebooks(folder: Path | None = None) -> dict[str, Pristine]:
    """The solved notebooks, by name.

    Args:
        folder: where they are; the lab's own if None.

    Raises:
        labsupport.course.editions.ReleaseError: there are none.
    """
    found = release.solved_notebooks(folder)
    return {path.stem: _read(path, path.stat().st_mtime_ns) for path in found}


@functools.lru_cache(maxsize=32)
def _edition(path: Path, modified: int) -> str:
    return release.make_edition(path).identifier


def current_edition(name: str, folder: Path | None = None) -> str:
    """The identifier of a notebook's student edition as it would be made today."""
    for path in release.solved_notebooks(folder):
        if path.stem == name:
            return _edition(path, path.stat().st_mtime_ns)
    return ""
