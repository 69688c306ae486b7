"""The reference: every public name from its docstring, every command from the program itself.

Sources for Sphinx, written for each build: `reference/index.rst` lists all names with a line each,
one page for each room describes its names (`sphinx.ext.autodoc`), `reference/commands.md` is
Typer's own description of the program. Code that is a public name leads here (`crosslinks`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

import labsupport
from labsupport.cli import app as program

ROOMS = (
    "attention", "precision", "profiling", "analysis", "models", "training", "distributed",
    "checks", "plotting",
)  # fmt: skip
FOLDER = Path("reference")
INDEX = """API and commands
================

Every public name of the package, and every command of the program, with a line each. The examples
run as they stand after ``import torch`` and ``from labsupport.ROOM import *``. Do you know another
library or course? Then begin with :doc:`/docs/coming-from`.

.. toctree::
   :hidden:

   /docs/coming-from
   commands
   {rooms}

Commands
--------

{commands}
"""
# Names without a docstring of their own.
VALUES = {
    "PRESETS": "Shapes of known models, for `DecoderConfig.preset`.",
    "STYLES": "Colour and marker of each implementation, in all charts.",
}
_COMMAND = re.compile(r"^#+ `(labsupport [\w ]+)`\n\n(.*?)(?=\n\n)", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^#+ `(labsupport[\w ]*)`\n.*?(?=^#|\Z)", re.MULTILINE | re.DOTALL)
_LISTED = re.compile(r"^\* `(\w+)`: .*$", re.MULTILINE)


def public_names(room: str) -> list[str]:
    """Return the names that a room, such as "attention", offers."""
    return sorted(getattr(labsupport, room).__all__, key=str.lower)


def reference_pages() -> Iterator[tuple[Path, str]]:
    """Yield path and text of each page of the reference."""
    commands = command_page()
    rows = "\n".join(
        f"* :ref:`{name} <{name.replace(' ', '-')}>`: {' '.join(text.split())}"
        for name, text in _COMMAND.findall(commands)
    )
    tables = "".join(f"\n{_room_head(room, '-')}\n{_summary(room)}\n" for room in ROOMS)
    index = INDEX.format(rooms="\n   ".join(ROOMS), commands=rows.replace("&#x27;", "'"))
    yield FOLDER / "index.rst", index + tables
    for room in ROOMS:
        yield FOLDER / f"{room}.rst", room_page(room)
    yield FOLDER / "commands.md", commands


def room_page(room: str) -> str:
    """Return the page of a room: its names in alphabetical order, for autodoc."""
    entries = "".join(f"\n{_directive(room, name)}\n" for name in public_names(room))
    module = f".. py:module:: labsupport.{room}\n.. currentmodule:: labsupport.{room}\n"
    return f"{_room_head(room, '=')}\n{module}{entries}"


def command_page() -> str:
    """Return the page of all commands, with their options, in Markdown."""
    command = typer.main.get_command(program)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="labsupport")
    first = dict(_COMMAND.findall(text))

    def linked(section: re.Match[str]) -> str:  # Typer cuts the sentences of its lists
        def entry(found: re.Match[str]) -> str:
            name = f"{section[1]} {found[1]}"
            link = f"[`{found[1]}`](#{name.replace(' ', '-')})"
            return f"* {link}: {' '.join(first[name].split())}" if name in first else found[0]

        return _LISTED.sub(entry, section[0])

    text = _SECTION.sub(linked, text)
    return re.sub(
        r"^(#+ `(labsupport [\w ]+)`)$",
        lambda found: f"({found[2].replace(' ', '-')})=\n{found[1]}",
        text.replace("# `labsupport`", "# Commands", 1),
        flags=re.MULTILINE,
    )


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _room_head(room: str, underline: str) -> str:
    title = f"labsupport.{room}"
    purpose = _doc(getattr(labsupport, room)).partition("\n\n")[0]
    return f"{title}\n{underline * len(title)}\n\n{purpose}\n"


def _summary(room: str) -> str:
    lines = []
    for name in public_names(room):
        value = getattr(getattr(labsupport, room), name)
        first = VALUES.get(name) or _doc(value).partition("\n\n")[0]
        lines.append(f"* :py:obj:`{name} <labsupport.{room}.{name}>`: {' '.join(first.split())}")
    return "\n".join(lines)


def _directive(room: str, name: str) -> str:
    value: Any = getattr(getattr(labsupport, room), name)
    if name in VALUES:
        return f".. py:data:: {name}\n\n   {VALUES[name]}"
    if not isinstance(value, type):
        return f".. autofunction:: {name}"
    kind = "exception" if issubclass(value, Exception) else "class"
    # Every matplotlib figure has its own `set`.
    return f".. auto{kind}:: {name}\n   :members:\n   :exclude-members: set"
