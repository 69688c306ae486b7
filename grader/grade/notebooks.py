"""Notebooks: the instructor's, which decide what counts, and students', which may be anything."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labsupport.course.editions import solved_notebooks

MAX_BYTES = 20 * 2**20
MAX_CELLS, MAX_SOURCE, MAX_SOURCES = 5_000, 200_000, 2_000_000
# Cannot be seen, but Persian and Indic names are spelt with them.
JOINERS = "\u200c\u200d"


class UnreadableError(ValueError):
    """A file that is no notebook, or is not allowed to be read; says why."""


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook; of a student's, only the first three are ever used.

    Its kind is "code", "markdown" or "raw"; `grade_id` is its name in nbgrader's metadata, or "".
    """

    kind: str
    source: str
    grade_id: str = ""
    solution: bool = False
    grade: bool = False
    points: float = 0.0


@dataclass(frozen=True)
class Pristine:
    """A solved notebook: its name, and all of its cells."""

    name: str
    cells: tuple[Cell, ...]

    @property
    def solutions(self) -> dict[str, Cell]:
        """The cells that students fill in, by grade_id."""
        return {cell.grade_id: cell for cell in self.cells if cell.solution}

    @property
    def graded(self) -> dict[str, Cell]:
        """The cells that give points, by grade_id, in their order."""
        return {cell.grade_id: cell for cell in self.cells if cell.grade and not cell.solution}

    def exercise_of(self, grade_id: str) -> str:
        """Return the exercise of a check: the longest grade_id that it begins with."""
        named = (one for one in self.solutions if f"{grade_id}-".startswith(f"{one}-"))
        return max(named, key=len, default=grade_id)


def pristine_notebooks(folder: Path | None = None) -> dict[str, Pristine]:
    """Read the solved notebooks of a folder, by name; the lab's own if None.

    Raises:
        labsupport.course.editions.ReleaseError: there are none.
    """
    found = solved_notebooks(folder)
    return {path.stem: _read(path, path.stat().st_mtime_ns) for path in found}


@functools.lru_cache(maxsize=32)
def _read(path: Path, modified: int) -> Pristine:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return Pristine(path.stem, tuple(_cell(cell, trusted=True) for cell in cells))


def parse(data: bytes) -> tuple[Cell, ...]:
    """Return the cells of a student's file, in bounded time and memory.

    Raises:
        UnreadableError: it is no notebook.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:120]
        raise UnreadableError(f"it is not valid JSON: {said}") from error
    if (version := _inside(content, "nbformat")) != 4:
        raise UnreadableError(f"it says notebook format {str(version)[:20]}; the lab's is 4")
    cells = content.get("cells")
    if not isinstance(cells, list):
        raise UnreadableError("it has no list of cells")
    if len(cells) > MAX_CELLS:
        raise UnreadableError(f"it has {len(cells):,} cells, and {MAX_CELLS:,} are allowed")
    kept = tuple(_cell(cell) for cell in cells if isinstance(cell, dict))
    if sum(len(cell.source) for cell in kept) > MAX_SOURCES:
        raise UnreadableError(f"its cells hold more than {MAX_SOURCES:,} characters")
    return kept


def _inside(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(cell: dict[str, Any], trusted: bool = False) -> Cell:
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(line for line in source if isinstance(line, str))
    if not isinstance(source, str):
        source = ""
    if len(source) > MAX_SOURCE:
        raise UnreadableError(f"one of its cells has more than {MAX_SOURCE:,} characters")
    # Halves of surrogate pairs are no text: they can't be written to a file.
    source = source.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    kind, role = cell.get("cell_type"), _inside(cell, "metadata", "nbgrader") or {}
    name = _inside(role, "grade_id")
    name = name if isinstance(name, str) and len(name) <= 200 else ""
    made = Cell(kind if kind in ("code", "markdown") else "raw", source, name)
    if not trusted:
        return made
    roles = bool(role.get("solution")), bool(role.get("grade")), float(role.get("points") or 0)
    return Cell(made.kind, source, name, *roles)


def printable(text: str) -> str:
    """Return a text that a terminal only shows, and that can be written into a file.

    Halves of surrogate pairs become `\\ud...` in letters, control characters question marks.
    """
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in JOINERS else "?" for c in text)
