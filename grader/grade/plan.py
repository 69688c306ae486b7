"""The cells of a submission that run, in the student's order.

Of the cells that the lab gave, those run that only import or define something, and those that bind
a name which the student's code needs; what measures and draws stays out. At each check cell the
names that it uses are noted as they stand there. Check cells themselves do not run here.
Flags name what an instructor should look at in a solution's text; they take no points.
"""

import ast
import builtins
import contextlib
import itertools
import re
import symtable
import textwrap
import tomllib
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


# IPython's own lines: `x = %time f(y)`, `%%capture`, `!ls`, `torch.exp?`.
_MAGIC = re.compile(r"^([ \t]*+(?:[\w., ]++=[ \t]*+)?)(%%?\w+|!)[ \t]*+(.*)", re.MULTILINE)
_HELP = re.compile(r"^[ \t]*+(\?{1,2}[\w.*%]++|[\w.*%]++\?{1,2})[ \t]*+$", re.MULTILINE)


def parsed(source: str) -> ast.Module | None:
    """Return a cell's syntax tree; None if it is no Python.

    Of a magic, its name stays as a text, and its argument if that is Python. (IPython's own
    translation takes minutes for hundreds of magics.)
    """
    return _tree(_python(source))


def _python(source: str) -> str:
    if _tree(source):
        return source
    return textwrap.dedent(_MAGIC.sub(_as_text, _HELP.sub("", source)))


def _as_text(magic: re.Match[str]) -> str:
    before, name, rest = magic.groups()
    code = f"; {rest}" if rest and name != "!" and _tree(rest) else ""
    return f"{before}({name!r},){code}"


def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except Exception:  # the parser does not say what it raises at a text nobody has looked at
        return None


@lru_cache(maxsize=4096)
def names_of(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global names that a cell looks up, and those to which it gives a value."""
    tables = []
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tables = [symtable.symtable(_python(source), "<cell>", "exec")]
    for table in tables:
        tables += table.get_children()
    found = [(t, one) for t in tables for one in t.get_symbols()]
    found = [one for t, one in found if t.get_type() == "module" or one.is_global()]
    loaded = frozenset(one.get_name() for one in found if one.is_referenced())
    bound = (one.get_name() for one in found if one.is_assigned() or one.is_imported())
    return loaded - set(dir(builtins)), frozenset(bound)


def _as_given(cell: Cell) -> str:
    """Return a cell's text as students get it: solutions are stubs, hidden tests are gone."""
    return _normal(_HIDDEN.sub("", _SOLUTION.sub(CODE_STUB, cell.source)))


def _normal(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


_NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
_READY_MADE, _ODD = frozenset(_NAMES["ready_made"]), frozenset(_NAMES["odd"])
_ATTENDS = re.compile(r"\..*(attention|attn|rotary)", re.IGNORECASE)
_IPYTHON = re.compile(r"^[ \t]*+(?:[\w., ]++=[ \t]*+)?[%!?/,;]", re.MULTILINE)
_PRIVATE = "a private attribute"
_LAB = ("labsupport.attention", "labsupport.checks", "labsupport.distributed")
_USUAL = ("__future__", "__init__", "__post_init__", "__name__", "__doc__", "__version__")
_MANY_NUMBERS, _MOST_FLAGS = 40, 50


def flags_of(plan: Plan, pristine: Pristine) -> Iterator[Flag]:
    """Yield what a person should look at: names in the student's cells that ran, by exercise."""
    given = {_as_given(cell) for cell in pristine.cells}
    steps = [one for one in plan.steps if one.source and _normal(one.source) not in given]
    known, solved = _names_in(pristine.cells), _names_in(tuple(pristine.solutions.values()))
    trees = [parsed(step.source) for step in steps]
    named = [frozenset(_named(tree)) for tree in trees]
    everywhere, flags = known.union(*named), []
    for step, tree, names in zip(steps, trees, named, strict=True):
        name, new = step.exercise, names - known
        made = {n for n in new if n.strip(".") in _READY_MADE or _ATTENDS.match(n)}
        if made and not name.startswith(MAY_USE_FUSED):
            flags.append(Flag(name, "library call", f"Names {_list(made)}."))
        odd = {n for n in names - solved if n.strip(".") in _ODD or n in ("compile", _PRIVATE)}
        # `math.soft = attention` sets an attribute of a module.
        odd |= {n for n in names if n[-2:] == " =" and f"import {n.split('.')[0]}" in everywhere}
        odd |= {n for n in new if n.startswith(_LAB)}
        if odd:
            flags.append(Flag(name, "odd name", f"Names {_list(odd)}."))
        if tree is None and _IPYTHON.search(step.source):
            flags.append(Flag(name, "odd name", "For IPython, and cannot be read as Python."))
        values = [getattr(one, "value", None) for one in ast.walk(tree or ast.Pass())]
        numbers = sum(isinstance(value, int | float) for value in values)
        if name and numbers > _MANY_NUMBERS:
            text = f"Holds {numbers} numbers: are answers written in?"
            flags.append(Flag(name, "many numbers", text))
    yield from itertools.islice(dict.fromkeys(flags), _MOST_FLAGS)


def _list(names: set[str]) -> str:
    return ", ".join(sorted({name.strip(".") for name in names})[:20])


@lru_cache(maxsize=64)
def _names_in(cells: tuple[Cell, ...]) -> frozenset[str]:
    return frozenset(name for cell in cells for name in _named(parsed(cell.source)))


def _named(tree: ast.Module | None) -> Iterator[str]:
    """Yield names, and words in texts; those of attributes and imports begin with a dot."""
    for node in ast.walk(tree) if tree else ():
        match node:
            case ast.Name(id=name):
                yield name
            case ast.Attribute(value=value, attr=name):
                if getattr(value, "id", "") not in ("self", "cls"):
                    yield from _dotted(name)
                if isinstance(node.ctx, ast.Store):
                    while isinstance(value, ast.Attribute):
                        name, value = f"{value.attr}.{name}", value.value
                    yield f"{getattr(value, 'id', '')}.{name} ="
            case ast.MatchClass(kwd_attrs=names):
                yield from (f".{name}" for name in names)
            case ast.alias(name=name, asname=other):
                yield from (name, *_dotted(name), f"import {(other or name).split('.')[0]}")
            case ast.ImportFrom(module=str(name), names=names):
                yield from (name, *_dotted(name), *(f"{name}.{one.name}" for one in names))
            case ast.Constant(value=str(text)) if len(text) < 99:
                # Names in texts: getattr(F, "scaled_dot_product_attention").
                yield from re.findall(r"%*\w+", text)


def _dotted(name: str) -> Iterator[str]:
    for part in name.split("."):
        yield f".{part}" if part[:1] != "_" or part in _USUAL or part in _ODD else _PRIVATE
