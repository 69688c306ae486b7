"""Reading a notebook file that may be anything, in bounded time and memory."""

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MAX_BYTES = 20 * 2**20
MAX_CELLS, MAX_SOURCE, MAX_SOURCES = 5_000, 200_000, 2_000_000
_EDITION = re.compile(r"[0-9a-f]{12}")
# Cannot be seen, but Persian and Indic names are spelt with them.
JOINERS = "\u200c\u200d"


class UnreadableError(ValueError):
    """A file that is no notebook, or is not allowed to be read; says why."""


def printable(text: str) -> str:
    """A text that a terminal only shows, and that can be written into a file.

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


@dataclass(frozen=True)
class RawFile:
    """A file's bytes, its SHA-256 and its time."""

    data: bytes
    digest: str
    modified: datetime


def read_bytes(path: Path) -> RawFile:
    """Read a plain file of at most MAX_BYTES; never through a symbolic link, never from a pipe.

    Raises:
        UnreadableError: it is too large, or not a plain file.
        OSError: it cannot be read.
    """
    try:
        # A pipe without a writer would have us wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise UnreadableError("it is a symbolic link") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise UnreadableError("it is not a plain file")
        if info.st_size > MAX_BYTES:
            raise UnreadableError(
                f"it has {info.st_size / 2**20:.0f} MiB, and {MAX_BYTES // 2**20} are allowed: "
                "clear the outputs and hand it in again"
            )
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UnreadableError(f"it grew beyond {MAX_BYTES // 2**20} MiB while it was read")
    digest = hashlib.sha256(data).hexdigest()
    return RawFile(data, digest, datetime.fromtimestamp(info.st_mtime).astimezone())


def parse(data: bytes) -> tuple[tuple[Cell, ...], str]:
    """The cells of a notebook file, and the student edition that it came from ("" if unknown).

    Raises:
        UnreadableError: it is no notebook.
    """
    if not data.strip():
        raise UnreadableError("the file is empty")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError("it is not UTF-8, which notebooks are written in") from error
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise UnreadableError("its JSON is nested too deeply") from error
    except ValueError as error:
        said = " ".join(str(error).split())[:120]
        raise UnreadableError(f"it is not valid JSON: {said}") from error
    if not isinstance(content, dict):
        raise UnreadableError("it is JSON, but not a notebook")
    version = content.get("nbformat")
    if isinstance(version, int) and 1 <= version <= 3:
        content = _upgrade(text)
    elif version != 4:
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


def _upgrade(text: str) -> dict[str, Any]:
    import nbformat

    try:
        upgraded = nbformat.reads(text, as_version=4)
        return json.loads(json.dumps(upgraded))
    except Exception as error:  # nbformat's converters expect notebooks, and fail in many ways
        said = " ".join(str(error).split())[:120]
        raise UnreadableError(f"it is of an old format that cannot be upgraded: {said}") from error


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
