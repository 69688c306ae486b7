"""From a submission to what runs: the student's code cells in their order.

Of the cells that the lab gave, those run that only import or define something, and those that bind
a name which the student's code needs; what measures and draws stays out. At each check cell the
names that it uses are noted as they stand there. Check cells themselves do not run here.
"""

from __future__ import annotations

import ast
import builtins
import dis
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from grader.grade.pristine import Pristine
from grader.grade.reading import Cell
from grader.grade.results import Flag
from grader.grade.submissions import Submission
from labsupport.course.editions import CODE_STUB, TEXT_STUB, regions

# Exercises whose solutions may call fused attention: to use it is what they ask.
MAY_USE_FUSED = ("ex-1-6", "ex-2-2")
_LIGHT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
_LOADS = {"LOAD_NAME", "LOAD_GLOBAL"}
_STORES = {"STORE_NAME", "STORE_GLOBAL"}


@dataclass(frozen=True)
class Check:
    """One check cell of the solved notebook.

    Attributes:
        grade_id: its own.
        exercise: the solution cell's.
        points: what it is worth.
        source: its text, hidden tests too.
        needs: the student's names that it uses.
        by_hand: whether it is an answer that a person judges.
    """

    grade_id: str
    exercise: str
    points: float
    source: str
    needs: tuple[str, ...] = ()
    by_hand: bool = False

    @property
    def may_use_fused(self) -> bool:
        """Permission for the student's functions to call fused attention."""
        return self.exercise.startswith(MAY_USE_FUSED)


@dataclass(frozen=True)
class Step:
    """A cell to run, or a check at which names are noted.

    Attributes:
        source: the cell's text; "" at a check.
        exercise: whose solution the cell is, or "".
        check: the check's grade_id, or "".
        names: that the check uses.
    """

    source: str = ""
    exercise: str = ""
    check: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Cells that run for a submission, and results that are known before.

    Attributes:
        checks: all of the solved notebook's, in order.
        steps: in the order of the student's notebook.
        settled: (status, message) of checks that need no run, by grade_id.
        absent: (status, message) by exercise whose solution cell is missing or as it was given: for
            the case that nothing else defines its names.
        flags: for an instructor.
    """

    checks: tuple[Check, ...]
    steps: tuple[Step, ...]
    settled: dict[str, tuple[str, str]]
    absent: dict[str, tuple[str, str]]
    flags: tuple[Flag, ...]


def make_plan(pristine: Pristine, submission: Submission) -> Plan:
    """Decide what of a submission runs."""
    checks = _checks(pristine)
    by_id = {check.grade_id: check for check in checks}
    given = _given(pristine)
    flags, settled, absent = [], {}, {}
    for check in checks:
        if check.by_hand:
            settled[check.grade_id] = _by_hand(check, submission.cells, flags)
    for name, solution in pristine.solutions.items():
        untouched = {"", _normal(_student_text(solution.source))}
        own = [cell for cell in submission.cells if cell.grade_id == name and cell.kind == "code"]
        if not own:
            absent[name] = "missing", "its cell is not in the notebook"
        elif all(_normal(cell.source) in untouched for cell in own):
            absent[name] = "not written", "the cell is as it was given"
        if any("### BEGIN SOLUTION" in cell.source for cell in own):
            text = "Its cell holds the markers of the instructor's notebook, which no student gets."
            flags.append(Flag(name, "instructor's text", text))
        if len(own) > 1:
            text = f"{len(own)} cells say that they are this exercise: the last definition counts."
            flags.append(Flag(name, "duplicate", text))
    wanted = _needed_cells(pristine, submission.cells, given)
    steps = []
    for cell in submission.cells:
        if cell.kind != "code" or not cell.source.strip():
            continue
        if cell.grade_id in by_id:
            if not by_id[cell.grade_id].by_hand:
                check = by_id[cell.grade_id]
                steps.append(Step(check=check.grade_id, names=check.needs))
        elif cell.grade_id in pristine.solutions:
            steps.append(Step(cell.source, exercise=cell.grade_id))
        elif _normal(cell.source) not in given or _normal(cell.source) in wanted:
            steps.append(Step(cell.source))
    return Plan(checks, tuple(steps), settled, absent, tuple(flags))


@lru_cache(maxsize=32)
def _checks(pristine: Pristine) -> tuple[Check, ...]:
    made = []
    for name, cell in pristine.graded.items():
        needs = () if cell.by_hand else tuple(sorted(loaded_names(cell.source) - {"checks"}))
        exercise = pristine.exercise_of(name)
        made.append(Check(name, exercise, cell.points, cell.source, needs, cell.by_hand))
    return tuple(made)


@lru_cache(maxsize=32)
def _given(pristine: Pristine) -> frozenset[str]:
    """The texts of all code cells as students get them, solutions apart."""
    return frozenset(
        _normal(_student_text(cell.source))
        for cell in pristine.cells
        if cell.kind == "code" and not (cell.solution and not cell.by_hand)
    )


def _needed_cells(
    pristine: Pristine, cells: Sequence[Cell], given: frozenset[str]
) -> frozenset[str]:
    """The given cells that run: imports, definitions, and what the student's code needs."""
    texts = {_normal(c.source): c.source for c in pristine.cells if c.kind == "code"}
    texts = {text: source for text, source in texts.items() if text in given}
    theirs = [c.source for c in cells if c.kind == "code" and _normal(c.source) not in given]
    bound = frozenset().union(*map(bound_names, theirs))
    wanted = frozenset().union(*map(loaded_names, theirs)) - bound
    chosen = {text for text, source in texts.items() if _is_light(source)}
    for text, source in reversed(texts.items()):
        if text not in chosen and bound_names(source) & wanted:
            chosen.add(text)
            wanted |= loaded_names(source) - bound_names(source)
    return frozenset(chosen)


@lru_cache(maxsize=4096)
def _is_light(source: str) -> bool:
    tree = parsed(source)
    return tree is not None and all(
        isinstance(node, _LIGHT)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
        for node in tree.body
    )


def parsed(source: str) -> ast.Module | None:
    """Return a cell's syntax tree, IPython's own lines translated; None if it is no Python."""
    from IPython.core.inputtransformer2 import TransformerManager

    for attempt in (lambda: source, lambda: TransformerManager().transform_cell(source)):
        try:
            return ast.parse(attempt())
        except Exception:  # neither parser says what it raises at a text nobody has looked at
            continue
    return None


def loaded_names(source: str) -> frozenset[str]:
    """Return the global names that a cell looks up, its functions' too."""
    return frozenset(name for name, stored in _names(source) if not stored) - set(dir(builtins))


def bound_names(source: str) -> frozenset[str]:
    """Return the global names to which a cell gives a value."""
    return frozenset(name for name, stored in _names(source) if stored)


@lru_cache(maxsize=4096)
def _names(source: str) -> frozenset[tuple[str, bool]]:
    tree = parsed(source)
    if tree is None:
        return frozenset()
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return frozenset(_names_in(compile(tree, "<cell>", "exec", flags, dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()


def _names_in(code: types.CodeType) -> Iterator[tuple[str, bool]]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            yield instruction.argval, False
        elif instruction.opname in _STORES:
            yield instruction.argval, True
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _student_text(source: str) -> str:
    """A cell as students get it: solutions are stubs, hidden tests are gone."""
    cut = {number for _, number, _ in regions(source)}
    lines, inside = [], False
    for number, line in enumerate(source.split("\n"), start=1):
        if "### BEGIN SOLUTION" in line:
            lines.append(CODE_STUB)
            inside = True
        elif inside and "### END SOLUTION" in line:
            inside = False
        elif number not in cut and " HIDDEN TESTS" not in line:
            lines.append(line)
    return "\n".join(lines)


def _normal(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def _by_hand(check: Check, cells: Sequence[Cell], flags: list[Flag]) -> tuple[str, str]:
    """A written answer never gets points here, but is brought to the instructor."""
    answer = next((c.source for c in cells if c.grade_id == check.grade_id), None)
    if answer is None:
        return "missing", "its cell is not in the notebook"
    if answer.strip() in ("", TEXT_STUB):
        return "not written", "nothing was written"
    flags.append(Flag(check.grade_id, "by hand", "A written answer: read it and give the points."))
    return "not run", "to be graded by hand"
