"""The student's checklist: a Markdown file with boxes, ticked in any editor.

The lab's own is `theory/checklists.md`; a student's copy of it lies beside the notebooks. An item
is known by its name: **T1-4** is about theory (P practice, A application), day 1, number 4. Its
text may change from edition to edition, or in a student's hands; its tick stays.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

FILE = "Checklist.md"
KINDS = {"T": "theory", "P": "practice", "A": "application"}

_ITEM = re.compile(
    r"\s*[-*+] \[(?P<box>[^\]]{0,3})\]\s+\**(?P<name>(?P<kind>[TPA])(?P<day>\d)-\d+)\b"
)
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


class Item(NamedTuple):
    """One box, such as "T1-4": "T", "P" or "A", and the day; ticked if there is anything in it."""

    name: str
    kind: str
    day: int
    ticked: bool


def items(text: str) -> list[Item]:
    """The boxes in a Markdown text, each name once; of two with a name either may be ticked."""
    found: dict[str, Item] = {}
    for line in text.splitlines():
        if (match := _ITEM.match(line)) is None:
            continue
        earlier = found.get(match["name"])
        ticked = bool(match["box"].strip()) or (earlier is not None and earlier.ticked)
        found[match["name"]] = Item(match["name"], match["kind"], int(match["day"]), ticked)
    return list(found.values())


def students_copy(text: str) -> str:
    """The lab's checklist for a student's folder, where `theory` is a link."""

    def moved(link: re.Match[str]) -> str:
        target = link[1]
        if target.startswith("../"):
            # Notebooks lie in the student's folder itself; all else is one level up, as before.
            return f"]({target.removeprefix('../notebooks/')})"
        return f"](theory/{target})"

    return _LINK.sub(moved, text)


def with_new_items(mine: str, newer: str) -> tuple[str, list[str]]:
    """A student's checklist, with boxes added that only a newer edition has.

    No line of theirs is changed or moved: their ticks, their notes and their wording stay.

    Args:
        mine: the student's file.
        newer: the newer edition, as `students_copy` returns it.

    Returns:
        the text, and the names of the new boxes.
    """
    lines, given = mine.splitlines(), newer.splitlines()
    known = {item.name for item in items(mine)}
    before, added = "", []
    for name, start, end in _blocks(given):
        if name not in known:
            ends = (end for box, _, end in _blocks(lines) if box == before)
            place = next(ends, len(lines))
            lines[place:place] = given[start:end]
            known.add(name)
            added.append(name)
        before = name
    return "\n".join(lines) + "\n", added


def _blocks(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each box's name, first line and end; lines that are indented after it are its own."""
    for start, line in enumerate(lines):
        if match := _ITEM.match(line):
            end = start + 1
            while end < len(lines) and lines[end].startswith("  ") and not _ITEM.match(lines[end]):
                end += 1
            yield match["name"], start, end
