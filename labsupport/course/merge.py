"""Merging of a newer edition of a notebook with a student's copy of an older one.

The newer edition gives the order. The student's solution cells go to the same `grade_id`, and their
own cells follow the cell that they followed before. All other cells come from the newer edition,
except for one that the student changed (a prediction, for example) and the edition did not: then
the student's stays. An edition's metadata hold the hash of each of its cells (`source_hashes`).

Only the standard library is needed, and nothing is read or written here.
"""

import copy
import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

Cell = dict[str, Any]
Notebook = dict[str, Any]

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Merged(NamedTuple):
    """A merged notebook as JSON, and a sentence for each part that has no place in it."""

    notebook: Notebook
    conflicts: tuple[str, ...]


def source_of(cell: Cell) -> str:
    """A cell's text; files hold it as one string or as a list of lines."""
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def source_hash(source: str) -> str:
    """Return twelve hexadecimal digits; paths to the theory differ in copies, and are ignored."""
    text = source.replace("](../theory/", "](theory/").rstrip()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def source_hashes(cells: list[Cell]) -> dict[str, str]:
    """The hash of each cell's text, by the cell's id."""
    return {cell["id"]: source_hash(source_of(cell)) for cell in cells if "id" in cell}


def edition_of(notebook: Any) -> str | None:
    """Return the edition that a notebook came from; None if it does not say."""
    about = _about(notebook, "labsupport")
    return str(about["edition"]) if "edition" in about else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _about(value: Any, name: str) -> dict[str, Any]:
    """Return what the metadata of a notebook or a cell say under a name."""
    return _dict(_dict(_dict(value).get("metadata")).get(name))


def _key(cell: Cell) -> tuple[str, str]:
    """Return a cell's role and name: a solution's or a check's grade_id, another cell's id."""
    about = _about(cell, "nbgrader")
    if about.get("solution"):  # a written answer is a solution, too
        return "exercise cell", str(about.get("grade_id"))
    if about.get("grade") or about.get("locked"):
        return "check", str(about.get("grade_id"))
    return "", str(cell.get("id"))


def merge(mine: Any, newer: Notebook) -> Merged:
    """Put a student's work into a newer edition.

    Args:
        mine: the student's notebook, as JSON gave it; it is not changed.
        newer: the newer student edition.

    Returns:
        the merged notebook, and the parts that have no place in it.

    Raises:
        ValueError: `mine` is no notebook of format 4.
    """
    try:
        written_in = mine["nbformat"]
        for cell in mine["cells"]:
            source_of(cell)
    except (AttributeError, KeyError, TypeError):
        written_in = None
    if written_in != 4:
        raise ValueError("it is not a notebook of format 4")
    newer = copy.deepcopy(newer)
    hashes = _dict(_about(mine, "labsupport").get("cells"))
    base = {str(name): str(value) for name, value in hashes.items()}
    conflicts: list[str] = []
    taken, extra = _match(mine["cells"], newer["cells"], base, conflicts)
    merged = [(cell, False) for cell in extra.get(-1, [])]
    for index, cell in enumerate(newer["cells"]):
        if index in taken:
            cell = _renewed(cell, taken[index], base, conflicts)
        merged += [(cell, True), *((own, False) for own in extra.get(index, []))]
    newer["cells"] = list(_with_ids_of_their_own(merged))
    newer["metadata"] |= {k: v for k, v in _dict(mine.get("metadata")).items() if k != "labsupport"}
    return Merged(newer, tuple(conflicts))


def _hash(cell: Cell) -> str:
    return source_hash(source_of(cell))


def _match(
    mine: list[Cell], newer: list[Cell], base: dict[str, str], conflicts: list[str]
) -> tuple[dict[int, Cell], dict[int, list[Cell]]]:
    """Find the student's cell for each newer cell, and their own cells that follow one (or -1)."""
    places = {_key(cell): index for index, cell in enumerate(newer)}
    taken: dict[int, Cell] = {}
    extra: dict[int, list[Cell]] = {}
    anchor = -1
    for cell in mine:
        role, name = _key(cell)
        place = places.get((role, name))
        if not role and (place is None or place in taken):
            # An editor may have given the cell another id.
            alike = (i for i, c in enumerate(newer) if not _key(c)[0] and _hash(c) == _hash(cell))
            place = next((i for i in alike if i not in taken), None)
        anchor = anchor if place is None else place
        given = set(base.values()) if place is None else {_hash(newer[place])}
        if role and place is not None:
            given.add(base.get(str(newer[place].get("id")), ""))
        unchanged = _hash(cell) in given
        if role == "exercise cell" and unchanged:
            continue  # the newer stub stands there
        same_kind = place is not None and cell.get("cell_type") == newer[place].get("cell_type")
        if place is not None and place not in taken and (same_kind or not role):
            taken[place] = cell
        elif not unchanged:
            if role != "check":
                extra.setdefault(anchor, []).append(_own(cell))
            if role:
                conflicts.append(f"{role} {name}: the newer edition has no place for yours")
    return taken, extra


def _renewed(cell: Cell, own: Cell, base: dict[str, str], conflicts: list[str]) -> Cell:
    """Merge a cell that both the newer edition and the student have."""
    role, name = _key(cell)
    before = base.get(str(cell.get("id")))
    given, wrote = _hash(cell), _hash(own)
    changed, renewed = wrote not in (before or given, given), before not in (None, given)
    if role == "exercise cell":
        if renewed:
            conflicts.append(f"the given code of {name} has changed; your cell is unchanged")
    elif own.get("cell_type") != cell.get("cell_type") or (changed and (role or renewed)):
        what = f"the check {name}" if role else _shown(source_of(own))
        conflicts.append(f"{what}: you changed this cell of the lab; the new one replaced it")
        return cell
    elif wrote != given and not changed:
        return cell
    parts = ("outputs", "execution_count", "attachments")
    kept = {part: copy.deepcopy(own[part]) for part in parts if part in own}
    return {**cell, "source": own.get("source", ""), **kept}


def _own(cell: Cell) -> Cell:
    """Return a cell as one of the student's own: not graded, and free to be deleted."""
    cell = copy.deepcopy(cell)
    metadata = _dict(cell.get("metadata"))
    hidden = ("nbgrader", "deletable", "editable")
    cell["metadata"] = {name: value for name, value in metadata.items() if name not in hidden}
    return cell


def _shown(source: str) -> str:
    first = next((line.strip() for line in source.split("\n") if line.strip()), "an empty cell")
    return repr(first if len(first) <= 40 else first[:37] + "...")


def _with_ids_of_their_own(cells: list[tuple[Cell, bool]]) -> Iterator[Cell]:
    """Give each cell an id that no other has; the edition's cells (True) keep theirs."""
    taken = {str(cell["id"]) for cell, is_editions in cells if is_editions and "id" in cell}
    for number, (cell, is_editions) in enumerate(cells):
        name = str(cell.get("id", ""))
        if not is_editions and (name in taken or not _ID.fullmatch(name)):
            name = hashlib.sha256(f"{name} {number} {source_of(cell)}".encode()).hexdigest()[:12]
        taken.add(name)
        yield {**cell, "id": name}
