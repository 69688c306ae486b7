"""Chapters and the sections of the notebooks beside them: the table of theory/README.md, read.

A row reads "notebook 1, sections 1.5 and 1.6 | chapter 3". Sections come as "section 1.4",
"sections 1.1 to 1.3", "sections 1.7, 1.8 and 1.11"; without any, the whole notebook is meant.
Several chapters are separated by semicolons, and may have a remark: "chapter 6, as far as rounding
errors".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ROW = re.compile(r"^\| *(.*?notebook.*?) *\| *(.*?) *\|$", re.MULTILINE)
_CHAPTER = re.compile(r"^chapter (\d+)(?:(?:,| )(.*))?$")


@dataclass(frozen=True)
class Reading:
    """A chapter to read with some sections of a notebook."""

    notebook: int
    sections: tuple[int, ...]  # (1, 2, 3) for 1.1 to 1.3; empty: all of the notebook
    chapter: int
    remark: str  # what else the table says, such as "as far as rounding errors"


def readings(table: str) -> list[Reading]:
    """The rows of the reading order that are about notebooks.

    Args:
        table: the text of theory/README.md.

    Raises:
        ValueError: there is no such table, or a row that cannot be understood.
    """
    found = []
    for where, what in _ROW.findall(table.partition("## Reading order")[2].partition("\n## ")[0]):
        notebook, sections = _place(where)
        for part in what.split(";"):
            chapter = _CHAPTER.match(part.strip())
            if chapter is None:
                raise ValueError(f"theory/README.md, reading order: {part.strip()!r} is no chapter")
            remark = (chapter[2] or "").strip()
            found.append(Reading(notebook, sections, int(chapter[1]), remark))
    if not found:
        raise ValueError("theory/README.md has no table under 'Reading order'")
    return found


def _place(text: str) -> tuple[int, tuple[int, ...]]:
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    number = re.match(r"notebook (\d+)(?:, sections? (.*))?$", words)
    if number is None:
        raise ValueError(f"theory/README.md, reading order: {text!r} is no place in a notebook")
    notebook, sections = int(number[1]), []
    for first, last in re.findall(r"(\d+\.\d+)(?: to (\d+\.\d+))?", number[2] or ""):
        start, stop = (int((name or first).partition(".")[2]) for name in (first, last))
        if {int(name.partition(".")[0]) for name in (first, last or first)} != {notebook}:
            raise ValueError(f"theory/README.md, reading order: {text!r} names another notebook")
        sections += range(start, stop + 1)
    return notebook, tuple(sections)
