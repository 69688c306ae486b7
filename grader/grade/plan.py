"""The cells of a submission that run, in the student's order.

Of the cells that the lab gave, those run that only import or define something, and those that bind
a name which the student's code needs; what measures and draws stays out. At each check cell the
names that it uses are noted as they stand there. Check cells themselves do not run here.
Flags name what an instructor should look at in a solution's text; they take no points.
"""

import ast
import builtins
import dis
import re
import tomllib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from grader.grade.results import Flag
from grader.grade.submissions import Cell, Pristine, Submission
from labsupport.course.editions import CODE_STUB

# Exercises whose solutions may call fused attention: to use it is what they ask.
MAY_USE_FUSED = ("ex-1-6", "ex-2-2")
_LIGHT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
_LOADS, _STORES = ("LOAD_NAME", "LOAD_GLOBAL"), ("STORE_NAME", "STORE_GLOBAL")
_SOLUTION = re.compile("### BEGIN SOLUTION.*?### END SOLUTION", re.DOTALL)
_HIDDEN = re.compile("### BEGIN HIDDEN TESTS.*?### END HIDDEN TESTS", re.DOTALL)


@dataclass(frozen=True)
class Check:
    """One check cell of the solved notebook, and the student's names that it uses."""

    grade_id: str
    exercise: str
    points: float
    source: str
    names: tuple[str, ...]

    @property
    def may_use_fused(self) -> bool:
        """Permission for the student's functions to call fused attention."""
        return self.exercise.startswith(MAY_USE_FUSED)


@dataclass(frozen=True)
class Step:
    """A cell to run, which may be an exercise's solution; or a check, at which names are noted."""

    source: str = ""
    exercise: str = ""
    check: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Cells that run for a submission in the student's order, and what is known before.

    `absent` has (status, message) by exercise whose solution cell is missing or as it was given.
    """

    checks: tuple[Check, ...]
    steps: tuple[Step, ...]
    absent: dict[str, tuple[str, str]]
    flags: tuple[Flag, ...]


def make_plan(pristine: Pristine, submission: Submission) -> Plan:
    """Decide what of a submission runs."""
    checks = {
        name: Check(
            name, pristine.exercise_of(name), cell.points, cell.source,
            tuple(sorted(names_of(cell.source)[0] - {"checks"})),
        )
        for name, cell in pristine.graded.items()
    }  # fmt: skip
    flags, absent = [], {}
    for name, solution in pristine.solutions.items():
        own = [cell for cell in submission.cells if cell.grade_id == name and cell.kind == "code"]
        if not own:
            absent[name] = "missing", "its cell is not in the notebook"
        elif all(_normal(cell.source) in ("", _as_given(solution)) for cell in own):
            absent[name] = "not written", "the cell is as it was given"
        if any("### BEGIN SOLUTION" in cell.source for cell in own):
            text = "Its cell holds the markers of the instructor's notebook, which no student gets."
            flags.append(Flag(name, "instructor's text", text))
        if len(own) > 1:
            text = f"{len(own)} cells have this exercise's grade_id: the last definition counts."
            flags.append(Flag(name, "duplicate", text))
    unneeded, steps = _unneeded_cells(pristine, submission.cells), []
    for cell in submission.cells:
        if cell.kind != "code" or not cell.source.strip():
            continue
        if check := checks.get(cell.grade_id):
            steps.append(Step(check=check.grade_id, names=check.names))
        elif cell.grade_id in pristine.solutions:
            steps.append(Step(cell.source, exercise=cell.grade_id))
        elif _normal(cell.source) not in unneeded:
            steps.append(Step(cell.source))
    return Plan(tuple(checks.values()), tuple(steps), absent, tuple(flags))


def _unneeded_cells(pristine: Pristine, cells: Sequence[Cell]) -> set[str]:
    """Return the given cells that do not run: they measure and draw, and nothing needs them."""
    given = {_as_given(c): c.source for c in pristine.cells if c.kind == "code" and not c.solution}
    theirs = [c.source for c in cells if c.kind == "code" and _normal(c.source) not in given]
    bound = frozenset().union(*(names_of(source)[1] for source in theirs))
    wanted = frozenset().union(*(names_of(source)[0] for source in theirs)) - bound
    left = {text: source for text, source in given.items() if not _is_light(source)}
    for text, source in reversed(list(left.items())):
        loads, binds = names_of(source)
        if binds & wanted:
            del left[text]
            wanted |= loads - binds
    return set(left)


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


@lru_cache(maxsize=4096)
def names_of(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global names that a cell looks up, and those to which it gives a value."""
    tree, found = parsed(source), []
    try:
        if tree is not None:
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            found = list(_instructions(compile(tree, "<cell>", "exec", flags, dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    loaded = frozenset(one.argval for one in found if one.opname in _LOADS)
    bound = frozenset(one.argval for one in found if one.opname in _STORES)
    return loaded - set(dir(builtins)), bound


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _as_given(cell: Cell) -> str:
    """Return a cell's text as students get it: solutions are stubs, hidden tests are gone."""
    return _normal(_HIDDEN.sub("", _SOLUTION.sub(CODE_STUB, cell.source)))


def _normal(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


_NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
_PRIVATE = "a private attribute"
_LAB = ("labsupport.attention", "labsupport.checks", "labsupport.distributed", _PRIVATE)
_MANY_NUMBERS = 40


def flags_of(plan: Plan, pristine: Pristine) -> Iterator[Flag]:
    """Yield what a person should look at: names in the texts that ran, by exercise."""
    known = {name for cell in pristine.cells for name in _named(parsed(cell.source))}
    ready_made, odd = set(_NAMES["ready_made"]), set(_NAMES["odd"])
    for step in plan.steps:
        tree = parsed(step.source) if step.source else None
        if tree is None:
            continue
        named = set(_named(tree)) - (known - {_PRIVATE})
        if not step.exercise.startswith(MAY_USE_FUSED) and (hits := named & ready_made):
            yield Flag(step.exercise, "library call", f"Names {', '.join(sorted(hits))}.")
        if hits := {name for name in named if name in odd or name.startswith(_LAB)}:
            yield Flag(step.exercise, "odd name", f"Names {', '.join(sorted(hits))}.")
        constants = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)]
        numbers = sum(isinstance(value, int | float) for value in constants)
        if step.exercise and numbers > _MANY_NUMBERS:
            text = f"Holds {numbers} numbers: are answers written in?"
            yield Flag(step.exercise, "many numbers", text)


def _named(tree: ast.Module | None) -> Iterator[str]:
    for node in ast.walk(tree) if tree else ():
        match node:
            case ast.Name(id=name):
                yield name
            case ast.Attribute(value=value, attr=name):
                yield name
                own = getattr(value, "id", "") in ("self", "cls") or name.endswith("__")
                if name.startswith("_") and not own:
                    yield _PRIVATE
            case ast.alias(name=name):
                yield from (name, *name.split("."))
            case ast.ImportFrom(module=str(name), names=names):
                yield from (name, *name.split("."), *(f"{name}.{one.name}" for one in names))
            case ast.Constant(value=str(text)) if len(text) < 99:
                # Names in texts: getattr(F, "scaled_dot_product_attention").
                yield from text.replace(".", " ").split()
