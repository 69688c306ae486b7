"""Reading a notebook that may be anything, in bounded time and memory."""

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 20 * 2**20
MAX_CELLS, MAX_SOURCE, MAX_SOURCES = 5_000, 200_000, 2_000_000
_EDITION = re.compile(r"[0-9a-f]{12}")
# Cannot be seen, but Persian and Indic names are spelt with them.
JOINERS = "\u200c\u200d"


class UnreadableError(ValueError):
    """A file that is no notebook, or is not allowed to be read; says why."""


def printable(text: str) -> str:
    """Return a text that a terminal only shows, and that can be written into a file.

    Halves of surrogate pairs become `\\ud...` in letters, control characters question marks.
    """
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() or c in JOINERS else "?" for c in text)


@dataclass(frozen=True)
class Cell:
    """What is kept of a student's cell: nothing else of it is ever used.

    Attributes:
        kind: "code", "markdown" or "raw".
        source: its text.
        grade_id: which cell of the lab's notebook it says that it is, or "".
    """

    kind: str
    source: str
    grade_id: str = ""


def parse(data: bytes) -> tuple[tuple[Cell, ...], str]:
    """Return the cells of a notebook file, and the student edition it came from ("" if unknown).

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
    edition = _inside(content, "metadata", "labsupport", "edition")
    known = isinstance(edition, str) and _EDITION.fullmatch(edition)
    return kept, str(edition) if known else ""


def _inside(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(cell: dict[str, Any]) -> Cell:
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(line for line in source if isinstance(line, str))
    if not isinstance(source, str):
        source = ""
    if len(source) > MAX_SOURCE:
        raise UnreadableError(f"one of its cells has more than {MAX_SOURCE:,} characters")
    # Halves of surrogate pairs are no text: they can't be written to a file.
    source = source.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    kind, name = cell.get("cell_type"), _inside(cell, "metadata", "nbgrader", "grade_id")
    return Cell(
        kind=kind if kind in ("code", "markdown") else "raw",
        source=source,
        grade_id=name if isinstance(name, str) and len(name) <= 200 else "",
    )
