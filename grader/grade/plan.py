"""The cells of a submission that run, in the student's order.

Of the cells that the lab gave, those run that only import or define something, and those that bind
a name which the student's code needs; what measures and draws stays out. Check cells do not run
here. Flags name what an instructor should look at in a solution's text; they take no points.
"""

import ast
import builtins
import contextlib
import re
import symtable
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from grader.grade.results import Flag
from grader.grade.submissions import Cell, Pristine, Submission
from labsupport.course.editions import CODE_STUB

# Exercises whose solutions may call fused attention: to use it is what they ask.
MAY_USE_FUSED = ("ex-1-6", "ex-2-2")
_LIGHT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
_SOLUTION = re.compile("### BEGIN SOLUTION.*?### END SOLUTION", re.DOTALL)
_HIDDEN = re.compile("### BEGIN HIDDEN TESTS.*?### END HIDDEN TESTS", re.DOTALL)


class Step(NamedTuple):
    """A cell to run, which may be an exercise's solution."""

    source: str
    exercise: str = ""


class Plan(NamedTuple):
    """Cells that run for a submission in the student's order, and what is known before.

    `absent` has (status, message) by exercise whose solution cell is missing or as it was given.
    """

    steps: list[Step]
    absent: dict[str, tuple[str, str]]
    flags: list[Flag]


def make_plan(pristine: Pristine, submission: Submission) -> Plan:
    """Decide what of a submission runs."""
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
        if own and name not in absent and (lost := _lost_lines(solution, own)):
            text = f"Lines that were given are changed or gone: {'; '.join(lost[:5])}"
            flags.append(Flag(name, "given lines changed", text))
    unneeded, steps = _unneeded_cells(pristine, submission.cells), []
    for cell in submission.cells:
        exercise = cell.grade_id if cell.grade_id in pristine.solutions else ""
        runs = cell.kind == "code" and cell.source.strip() and cell.grade_id not in pristine.graded
        if runs and (exercise or _normal(cell.source) not in unneeded):
            steps.append(Step(cell.source, exercise))
    return Plan(steps, absent, flags)


def _lost_lines(solution: Cell, own: Sequence[Cell]) -> list[str]:
    """Return the given lines of code that no cell of the student's has, however it is formatted."""
    given = _code_lines(_SOLUTION.sub("pass", solution.source))
    theirs = [line for cell in own for line in _code_lines(cell.source)]
    return [line for line in given if line not in theirs] if theirs else []


def _code_lines(source: str) -> list[str]:
    """Return the lines of a cell as Python writes them, without comments and docstrings."""
    tree = parsed(source)
    for node in ast.walk(tree) if tree else ():
        if isinstance(body := getattr(node, "body", None), list):
            kept = [one for one in body if not _is_docstring(one)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    lines: list[str] = []
    with contextlib.suppress(RecursionError):  # a text that nobody has looked at
        lines = ast.unparse(tree).split("\n") if tree else []
    return [line.strip() for line in lines if line.strip() not in ("", "pass")]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


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
