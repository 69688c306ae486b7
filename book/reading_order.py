"""Chapters and the sections of the notebooks beside them: the table of theory/README.md, read.

A row reads "notebook 1, sections 1.5 and 1.6 | chapter 3". Sections come as "section 1.4",
"sections 1.1 to 1.3", "sections 1.7, 1.8 and 1.11"; without any, the whole notebook is meant.
Several chapters are separated by semicolons, and may have a remark: "chapter 6, as far as rounding
errors".
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ROW = re.compile(r"^\| *\[?notebook (\d+)(?:\]\([^)]*\))?([^|]*)\| *(.*?) *\|$", re.MULTILINE)


class Reading(NamedTuple):
    """A chapter to read with some sections of a notebook."""

    notebook: int
    sections: tuple[int, ...]  # (1, 2, 3) for 1.1 to 1.3; empty: all of the notebook
    chapter: int
    remark: str  # what else the table says, such as "as far as rounding errors"


def readings(table: str) -> list[Reading]:
    """The rows of the reading order that are about notebooks, in the text of theory/README.md."""
    found = []
    for notebook, where, what in _ROW.findall(table.partition("## Reading order")[2]):
        spans = re.findall(r"\d\.(\d+)(?: to \d\.(\d+))?", where)
        sections = tuple(n for a, b in spans for n in range(int(a), int(b or a) + 1))
        for chapter, remark in re.findall(r"chapter (\d+)[, ]*([^;]*)", what):
            found.append(Reading(int(notebook), sections, int(chapter), remark))
    return found
