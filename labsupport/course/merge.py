"""A newer edition of a notebook and a student's copy of an older one, made into one notebook.

The newer edition gives the order. Into it come the student's solution cells, found by their
`grade_id`, and the cells of their own, each behind the cell that it stood behind. Other cells are
the instructor's, and renewed, unless the student changed one (a prediction, say) that the newer
edition did not change: then the student's stays. Which cells are whose, and which were changed, an
edition tells itself: its metadata hold the hash of each of its cells (`source_hashes`).

Only the standard library is needed, and nothing is read or written here.
"""

import copy
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Cell = dict[str, Any]
Notebook = dict[str, Any]

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Merged:
    """A merged notebook.

    Attributes:
        notebook: as JSON.
        conflicts: what could not be kept in its place, one sentence each.
    """

    notebook: Notebook
    conflicts: tuple[str, ...]


class MergeError(ValueError):
    """The student's file is no notebook that can be merged."""


def source_of(cell: Cell) -> str:
    """A cell's text; files hold it as one string or as a list of lines."""
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def source_hash(source: str) -> str:
    """Twelve hexadecimal digits; that a working copy finds the theory elsewhere is ignored."""
    text = source.replace("](../theory/", "](theory/").rstrip()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def source_hashes(cells: list[Cell]) -> dict[str, str]:
    """The hash of each cell's text, by the cell's id."""
    return {cell["id"]: source_hash(source_of(cell)) for cell in cells if "id" in cell}


def edition_of(notebook: Any) -> str | None:
    """The edition that a notebook came from; None if it does not say."""
    about = _dict(_dict(_dict(notebook).get("metadata")).get("labsupport"))
    return str(about["edition"]) if "edition" in about else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _exercise(cell: Cell, role: str) -> str | None:
    """The grade_id of a solution or of a check (a written answer is a solution)."""
    about = _dict(_dict(cell.get("metadata")).get("nbgrader"))
    is_solution = bool(about.get("solution"))
    if role == "check":
        found = bool(about.get("grade") or about.get("locked")) and not is_solution
    else:
        found = is_solution
    return str(about.get("grade_id")) if found else None


def merge(mine: Any, newer: Notebook) -> Merged:
    """Put a student's work into a newer edition.

    Args:
        mine: the student's notebook, as JSON gave it; it is not changed.
        newer: the newer student edition.

    Returns:
        the merged notebook, and what could not be kept in its place.

    Raises:
        MergeError: `mine` is no notebook of format 4.
    """
    cells = _dict(mine).get("cells")
    whole = isinstance(cells, list) and all(
        isinstance(cell, dict) and _is_text(cell.get("source", "")) for cell in cells
    )
    if not whole or _dict(mine).get("nbformat") != 4:
        raise MergeError("it is not a notebook of format 4")
    return _Merge(mine, newer).result()


def _is_text(source: Any) -> bool:
    is_lines = isinstance(source, list) and all(isinstance(line, str) for line in source)
    return isinstance(source, str) or is_lines


class _Merge:
    def __init__(self, mine: Notebook, newer: Notebook) -> None:
        self.mine, self.newer = mine, copy.deepcopy(newer)
        about = _dict(_dict(_dict(mine.get("metadata")).get("labsupport")).get("cells"))
        self.base = {str(name): str(value) for name, value in about.items()}
        self.conflicts: list[str] = []
        self.taken: dict[int, Cell] = {}  # index of a newer cell: the student's cell for it
        self.extra: dict[int, list[Cell]] = {}  # index of a newer cell: own cells that follow it

    def result(self) -> Merged:
        self._match()
        cells = [(cell, False) for cell in self.extra.get(-1, [])]
        for index, cell in enumerate(self.newer["cells"]):
            cells.append((self._renewed(cell, self.taken.get(index)), True))
            cells += [(own, False) for own in self.extra.get(index, [])]
        ids = {str(cell["id"]) for cell in self.newer["cells"] if "id" in cell}
        minor = self.newer.get("nbformat_minor", 0)
        self.newer["cells"] = list(_with_ids_of_their_own(cells, ids, minor))
        kept = {k: v for k, v in _dict(self.mine.get("metadata")).items() if k != "labsupport"}
        self.newer["metadata"] = {**self.newer["metadata"], **kept}
        return Merged(self.newer, tuple(self.conflicts))

    # --- which cell is which ----------------------------------------------------------------------

    def _match(self) -> None:
        solutions, checks, by_id, by_hash = self._places()
        anchor = -1
        for cell in self.mine["cells"]:
            name = _exercise(cell, "solution")
            if name is not None:
                place = solutions.get(name)
                fits = place is not None and self._takes_solution(place, cell, name)
                if place is None:
                    self._gone(cell, f"the exercise cell {name}")
                    fits = self._was_the_instructors(cell)
            elif (name := _exercise(cell, "check")) is not None:
                place = checks.get(name)
                fits = True
                if place is None:
                    self._gone(cell, f"the check {name}")
                elif place not in self.taken:
                    self.taken[place] = cell
                else:
                    self.conflicts.append(f"the check {name} was there twice")
            else:
                place = by_id.get(str(cell.get("id")))
                if place is None or place in self.taken:
                    place = next(
                        (p for p in by_hash.get(source_hash(source_of(cell)), ()) if self._free(p)),
                        None,
                    )
                fits = place is not None
                if fits:
                    self.taken[place] = cell
                elif self._was_the_instructors(cell):
                    fits = True  # gone from the newer edition, and never changed
            if place is not None:
                anchor = place
            if not fits:
                self.extra.setdefault(anchor, []).append(_own(cell))

    def _places(self) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, list]]:
        solutions: dict[str, int] = {}
        checks: dict[str, int] = {}
        by_id: dict[str, int] = {}
        by_hash: dict[str, list[int]] = {}
        for index, cell in enumerate(self.newer["cells"]):
            if (name := _exercise(cell, "solution")) is not None:
                solutions[name] = index
            elif (name := _exercise(cell, "check")) is not None:
                checks[name] = index
            else:
                by_id[str(cell.get("id"))] = index
                by_hash.setdefault(source_hash(source_of(cell)), []).append(index)
        return solutions, checks, by_id, by_hash

    def _free(self, place: int) -> bool:
        return place not in self.taken

    def _takes_solution(self, place: int, cell: Cell, name: str) -> bool:
        """Whether a solution cell is settled; if not, it stays as a cell of the student's own."""
        stub = self.newer["cells"][place]
        if not self._written(cell, stub):
            if place not in self.taken and cell.get("cell_type") == stub.get("cell_type"):
                self.taken[place] = cell
            return True
        if cell.get("cell_type") != stub.get("cell_type"):
            kind = cell.get("cell_type")
            self.conflicts.append(f"{name} is a {kind} cell in your copy: a new one was added")
            return False
        earlier = self.taken.get(place)
        if earlier is not None and self._written(earlier, stub):
            self.conflicts.append(f"{name} was there more than once: the first counts")
            return False
        self.taken[place] = cell
        return True

    def _written(self, cell: Cell, stub: Cell) -> bool:
        """Whether the student wrote something into a solution cell."""
        own = source_hash(source_of(cell))
        return own not in (self.base.get(str(stub.get("id"))), source_hash(source_of(stub)))

    def _was_the_instructors(self, cell: Cell) -> bool:
        """An unchanged cell of the older edition, even where an editor gave it another id."""
        own = source_hash(source_of(cell))
        return own == self.base.get(str(cell.get("id"))) or own in self.base.values()

    def _gone(self, cell: Cell, what: str) -> None:
        if not self._was_the_instructors(cell):
            self.conflicts.append(f"{what}, which you had changed, is not in the newer edition")

    # --- what a cell becomes ----------------------------------------------------------------------

    def _renewed(self, cell: Cell, own: Cell | None) -> Cell:
        if own is None:
            return cell
        source, base = source_of(own), self.base.get(str(cell.get("id")))
        changed = source_hash(source) != (base or source_hash(source_of(cell)))
        renewed = source_hash(source_of(cell)) != base
        is_check = _exercise(cell, "check") is not None
        name = _exercise(cell, "solution")
        if name is not None:
            if not self._written(own, cell):
                return cell
            if renewed and base is not None:
                self.conflicts.append(
                    f"what is given in {name} has changed: your cell is as you wrote it"
                )
        elif own.get("cell_type") != cell.get("cell_type") or (
            changed
            and (is_check or renewed)
            and source_hash(source) != source_hash(source_of(cell))
        ):
            what = f"the check {_exercise(cell, 'check')}" if is_check else _shown(source)
            self.conflicts.append(f"{what}: you changed this cell of the lab, and it was renewed")
            return cell
        elif not changed and renewed and base is not None:
            return cell
        kept = {**cell, "source": own.get("source", "")}
        for part in ("outputs", "execution_count", "attachments"):
            if part in own:
                kept[part] = copy.deepcopy(own[part])
        return kept


def _own(cell: Cell) -> Cell:
    """A cell as one of the student's own: not graded, and free to be deleted."""
    cell = copy.deepcopy(cell)
    metadata = _dict(cell.get("metadata"))
    hidden = ("nbgrader", "deletable", "editable")
    cell["metadata"] = {name: value for name, value in metadata.items() if name not in hidden}
    return cell


def _shown(source: str) -> str:
    first = next((line.strip() for line in source.split("\n") if line.strip()), "an empty cell")
    return repr(first if len(first) <= 40 else first[:37] + "...")


def _with_ids_of_their_own(
    cells: list[tuple[Cell, bool]], editions: set[str], minor: int
) -> Iterator[Cell]:
    """Ids must differ within a notebook; the edition's cells (True) keep theirs."""
    taken = set(editions)
    for number, (cell, is_editions) in enumerate(cells):
        name = str(cell.get("id", ""))
        if minor < 5:
            yield {part: value for part, value in cell.items() if part != "id"}
            continue
        if not is_editions and (name in taken or not _ID.fullmatch(name)):
            name = hashlib.sha256(f"{name} {number} {source_of(cell)}".encode()).hexdigest()[:12]
        taken.add(name)
        yield {**cell, "id": name}
