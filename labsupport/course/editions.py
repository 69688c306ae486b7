"""The student edition: the solved notebooks, without solutions, hidden tests and outputs.

nbgrader's own preprocessors do the cutting, in the order in which `nbgrader generate_assignment`
runs them, less those that need its database or a course folder. An instructor who prefers the
whole of nbgrader therefore gets the same cells from it. Around them stand checks: nbgrader lets
some mistakes of an author pass that would hand a solution to the students.
"""

import copy
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport import paths
from labsupport.course.merge import source_hashes

if TYPE_CHECKING:
    from nbformat import NotebookNode

CODE_STUB = "# YOUR CODE HERE\nraise NotImplementedError"
TEXT_STUB = "YOUR ANSWER HERE"

_GRADE_ID = re.compile(r"[a-zA-Z0-9_\-]+")
_MARKER = re.compile(r"\b(BEGIN|END) (SOLUTION|HIDDEN TESTS|MARK SCHEME)\b")
_NEEDS = {"SOLUTION": "solution", "HIDDEN TESTS": "grade", "MARK SCHEME": "task"}

# What else a cell's metadata holds is the author's, and may quote a solution.
_CELL_METADATA = ("nbgrader", "tags", "deletable", "editable", "slideshow", "jupyter")


class ReleaseError(ValueError):
    """A notebook from which no safe student edition can be made, or a target in the way."""


@dataclass(frozen=True)
class Edition:
    """The student edition of one notebook: file name (that of the solved one) and text.

    name: of the file within the folder of notebooks, such as "further/backward.ipynb".

    identifier: twelve hexadecimal digits that change with the contents. The notebook's own metadata
        carries them too (`labsupport.edition`), so that a copy tells which edition it came from.
    """

    name: str
    identifier: str
    text: str


def solved_notebooks(folder: Path | None = None) -> list[Path]:
    """Return the notebooks with their solutions, in order; a `ReleaseError` if there are none."""
    folder = paths.notebooks_dir() if folder is None else folder
    found = paths.notebooks_in(folder)
    if not found:
        raise ReleaseError(f"there is no notebook (*.ipynb) in {folder}")
    return found


def regions(source: str) -> Iterator[tuple[str, int, str]]:
    """Yield the lines of a cell's text that nbgrader will cut, without those of the markers.

    Yields:
        the kind of region ("SOLUTION", "HIDDEN TESTS", "MARK SCHEME"), the line's number in the
        cell, counted from 1, and the line.

    Raises:
        ReleaseError: the markers do not pair up.
    """
    kind = None
    for number, line in enumerate(source.split("\n"), start=1):
        marker = _MARKER.search(line)
        if marker is None:
            if kind:
                yield kind, number, line
        elif marker[1] == "BEGIN" and kind is None:
            kind = marker[2]
        elif marker[1] == "END" and kind == marker[2]:
            kind = None
        elif kind:
            raise ReleaseError(f"line {number}: {marker[0]} inside of BEGIN {kind}")
        else:
            raise ReleaseError(f"line {number}: {marker[0]} without BEGIN {marker[2]}")
    if kind:
        raise ReleaseError(f"BEGIN {kind} is never closed by END {kind}")


def _problems(notebook: "NotebookNode") -> Iterator[str]:
    """List everything that is wrong with a solved notebook, one sentence each."""
    seen: dict[str, int] = {}
    solutions = 0
    for index, cell in enumerate(notebook.cells):
        where = f"cell {index}"
        meta = cell.metadata.get("nbgrader", {})
        if any(meta.get(role) for role in ("solution", "grade", "locked")):
            name = str(meta.get("grade_id", ""))
            where += f" ({name})"
            if not _GRADE_ID.fullmatch(name):
                yield f"{where}: its grade_id may hold only letters, digits, '-' and '_'"
            elif name in seen:
                yield f"{where}: the same grade_id as cell {seen[name]}"
            seen.setdefault(name, index)
        solutions += bool(meta.get("solution"))
        try:
            for kind in sorted({kind for kind, _, _ in regions(cell.source)}):
                if not meta.get(_NEEDS[kind]):
                    yield (
                        f"{where}: holds BEGIN {kind}, but its nbgrader metadata does not say "
                        f'"{_NEEDS[kind]}": true'
                    )
        except ReleaseError as error:
            yield f"{where}, {error}"
    if not solutions:
        yield 'it has no solution cell (nbgrader metadata "solution": true), so nothing to cut'


def student_edition(notebook: "NotebookNode") -> "NotebookNode":
    """Reduce a solved notebook to what its students get.

    Args:
        notebook: the solved notebook (format 4); it is not changed.

    Returns:
        a new notebook: solutions replaced by stubs, hidden tests, outputs, execution counts and
        the authors' metadata removed, checks locked and all exercise cells given a checksum.

    Raises:
        ReleaseError: something in the notebook is wrong; the message names every such cell.
    """
    problems = list(_problems(notebook))
    if problems:
        raise ReleaseError("; ".join(problems))
    from nbgrader import preprocessors as nb

    edition = copy.deepcopy(notebook)
    resources: dict[str, Any] = {}
    for preprocessor in (
        nb.LockCells(),
        nb.ClearSolutions(code_stub={"python": CODE_STUB}, text_stub=TEXT_STUB),
        nb.ClearOutput(),
        nb.CheckCellMetadata(),
        nb.ComputeChecksums(),
        nb.ClearHiddenTests(),
        nb.ClearMarkScheme(),
        # Again: hidden tests counted until here, and a student's copy is compared without them.
        nb.ComputeChecksums(),
        nb.CheckCellMetadata(),
    ):
        try:
            edition, resources = preprocessor.preprocess(edition, resources)
        except Exception as error:
            # nbgrader raises several unrelated kinds. Their first line says what it is about.
            reason = str(error).split("\n")[0]
            raise ReleaseError(f"nbgrader's {type(preprocessor).__name__}: {reason}") from error
    for cell in edition.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in _CELL_METADATA}
        if cell.metadata.get("nbgrader", {}).get("solution"):
            # A picture pasted into a written answer is part of the answer.
            cell.pop("attachments", None)
    edition.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return edition


def name_of(source: Path) -> str:
    """Return a notebook's name within its folder: "01-Title.ipynb", "further/backward.ipynb"."""
    return f"further/{source.name}" if source.parent.name == "further" else source.name


def make_edition(source: Path) -> Edition:
    """Make the student edition of one notebook file.

    Args:
        source: the solved notebook. A student edition is its own: where an instructor hands out
            the lab with editions in `notebooks/`, working copies are made of those.

    Raises:
        ReleaseError: it is no notebook, or `student_edition` refuses it.
        OSError: it cannot be read.
    """
    import nbformat

    try:
        solved = nbformat.read(source, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, KeyError) as error:
        raise ReleaseError(f"{source}: not a Jupyter notebook: {error}") from error
    if known := solved.metadata.get("labsupport", {}).get("edition"):
        return Edition(name_of(source), known, nbformat.writes(solved) + "\n")
    try:
        edition = student_edition(solved)
    except ReleaseError as error:
        raise ReleaseError(f"{source.name}: {error}") from error
    identifier = hashlib.sha256(nbformat.writes(edition).encode()).hexdigest()[:12]
    # By the hashes an upgrade can tell what a student changed (`labsupport.course.merge`).
    hashes = source_hashes(edition.cells)
    edition.metadata["labsupport"] = {"edition": identifier, "cells": hashes}
    return Edition(name_of(source), identifier, nbformat.writes(edition) + "\n")
