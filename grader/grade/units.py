"""The pieces of a notebook that run or are left out as a whole; which of them an exercise needs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from grader.grade import names
from grader.grade.magics import without_magics
from grader.grade.names import Statement
from grader.grade.pristine import Pristine

_DEFINITION = re.compile(r"(?:@|async def |def |class )")
_IMPORT = re.compile(r"(?:import|from)\b")
_COMPOUND = re.compile(r"(?:@|(?:async|def|class|for|while|with|if|try|match)\b)")


@dataclass(frozen=True)
class Unit:
    """What is taken or left as a whole: a solution cell, or a statement of another cell."""

    text: str
    binds: frozenset[str]
    needs: frozenset[str]
    changes: frozenset[str] = frozenset()
    star: bool = False
    calls: frozenset[str] = frozenset()
    awaits: bool = False
    exercise: str = ""
    cell: int = -1


def unit_of(one: Statement, cell: int = -1) -> Unit:
    """A statement as a unit; `cell` is where it stands in a submission, -1 for the instructor's."""
    return Unit(
        one.text, one.binds, one.needs, one.changes, one.star, one.calls, one.awaits, cell=cell
    )


def bare(text: str) -> str:
    """A text by which equal statements are known."""
    return "\n".join(line.rstrip() for line in text.strip().split("\n"))


@lru_cache(maxsize=32)
def setup_units(pristine: Pristine) -> tuple[Unit, ...]:
    """The statements of the instructor's cells that are no part of an exercise."""
    units = []
    for cell in pristine.cells:
        if cell.kind == "code" and not cell.grade_id:
            found = names.statements(without_magics(cell.source))
            units += [unit_of(one) for one in found if one.binds or one.star]
    return tuple(units)


def future_imports(units: Iterable[Unit]) -> list[str]:
    """The texts by which Python reads all others in another way."""
    found = [unit.text for unit in units if unit.text.startswith("from __future__ import ")]
    return sorted(set(found))


def closure(
    exercise: str, wanted: set[str], setup: Sequence[Unit], units: Sequence[Unit]
) -> set[int]:
    """What has to run so that an exercise's names exist: positions in setup, then units."""
    everything = (*setup, *units)
    border = len(setup)
    binders: dict[str, list[int]] = {}
    changers: dict[str, list[int]] = {}
    callers: dict[str, list[int]] = {}
    for number, unit in enumerate(everything):
        for name in unit.binds:
            binders.setdefault(name, []).append(number)
        for name in unit.changes if number >= border else ():
            changers.setdefault(name, []).append(number)
        for name in unit.calls if number >= border else ():
            callers.setdefault(name, []).append(number)
    stars = [number for number, unit in enumerate(everything) if unit.star]
    own = [n for n, unit in enumerate(everything) if unit.exercise == exercise]
    chosen = set(own)
    # What the exercise itself defines is not taken from a later scratch cell, as in the notebook.
    settled = frozenset().union(*(everything[n].binds for n in own))
    todo = list(wanted | frozenset().union(*(everything[n].needs for n in own)))
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name in settled:
            continue
        seen.add(name)
        theirs = [n for n in binders.get(name, ()) if n >= border]
        # The student's own definition counts; one that builds on the instructor's needs both.
        ours = [n for n in binders.get(name, ()) if n < border]
        again = any(name in everything[n].needs for n in theirs)
        picked = [*theirs, *(ours if again or not theirs else ())]
        if theirs:
            # A module is not changed by what is called in it, or else all tests of it would run.
            module = all(_IMPORT.match(everything[n].text) for n in theirs)
            changing = [
                n
                for n in changers.get(name, ())
                if not (module and _COMPOUND.match(everything[n].text))
            ]
            called = {other for n in changing for other in everything[n].binds - {name}}
            picked += [*changing, *(n for other in called for n in callers.get(other, ()))]
        elif not ours:
            picked += stars
        for number in picked:
            if number not in chosen:
                chosen.add(number)
                todo += everything[number].needs
    return chosen


def packed(units: Iterable[Unit]) -> list[str]:
    """Cells: functions, solutions and what awaits as they are, other statements together."""
    cells: list[str] = []
    simple: list[str] = []

    def flush() -> None:
        if simple:
            # One that fails must not keep the next from running.
            cells.append(
                f"for _text in {simple!r}:\n    try:\n        exec(_text)\n"
                "    except Exception as _error:\n        _failed = _error\n"
            )
            simple.clear()

    for unit in units:
        if unit.exercise or unit.awaits or _DEFINITION.match(unit.text):
            flush()
            cells.append(unit.text)
        else:
            simple.append(unit.text)
    flush()
    return cells
