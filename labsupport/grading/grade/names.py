"""Which names a piece of Python needs and binds, read from its text and never by running it."""

import ast
import builtins
import symtable
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__", "get_ipython", "display"}
MAX_NODES = 100_000


class UnparsableError(ValueError):
    """Text that is no Python, or too much of it."""


@dataclass(frozen=True)
class Statement:
    """A statement of a cell's outermost level.

    Attributes:
        text: as it was written.
        binds: names that it gives a value.
        needs: names that it, or a function in it, looks up outside of itself.
        changes: names whose object it changes without binding them (`table["a"] = 1`).
        star: whether it is `from ... import *`.
    """

    text: str
    binds: frozenset[str]
    needs: frozenset[str]
    changes: frozenset[str] = frozenset()
    star: bool = False


def parse_source(source: str) -> ast.Module:
    """Parse Python text that nobody has looked at.

    Raises:
        UnparsableError: it is no Python, or so deep or long that it looks like an attack.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
                raise UnparsableError("it is too long to be read")
            return tree
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise UnparsableError(f"SyntaxError: {error.msg}{where}") from None
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        if isinstance(error, UnparsableError):
            raise
        raise UnparsableError("it cannot be read: too deep, or characters of no text") from None


def without_magics(source: str) -> str:
    """A cell's text without IPython's own lines (`%time`, `!pip`); "" for another language.

    A text that is Python as it stands stays as it is: a line of a string may begin with `%`.
    One that is no Python, whatever IPython does to it, is returned as no Python.
    """
    try:
        parse_source(source)
        return source
    except UnparsableError:
        # Only here, since it imports IPython's parts.
        from labsupport.grading.grade.magics import translated

        return translated(source)


def statements(source: str) -> list[Statement]:
    """The statements of a cell.

    Raises:
        UnparsableError: it is no Python.
    """
    lines = source.split("\n")
    found = []
    for node in parse_source(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [_statement(one, ast.unparse(one)) for one in _one_by_one(node)]
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        text = "\n".join(lines[first - 1 : node.end_lineno])
        if ";" in text and not decorators:
            # Two statements in a line.
            text = _segment(lines[first - 1 : node.end_lineno], node)
        found.append(_statement(node, text))
    return found


def _segment(lines: list[str], node: ast.stmt) -> str:
    """What `ast.get_source_segment` gives, without going through the whole source each time."""
    parts = [line.encode() for line in lines]
    parts[-1] = parts[-1][: node.end_col_offset]
    parts[0] = parts[0][node.col_offset :]
    return b"\n".join(parts).decode()


def _one_by_one(node: ast.Import | ast.ImportFrom) -> Iterator[ast.Import | ast.ImportFrom]:
    """An import of several names as one each: of them, only some may be needed, or exist."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield ast.Import([alias])
        else:
            yield ast.ImportFrom(node.module, [alias], node.level)


def _statement(node: ast.stmt, text: str) -> Statement:
    star = isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    if star:
        return Statement(text, frozenset(), frozenset(), star=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = symtable.symtable(text, "<cell>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnparsableError(f"{type(error).__name__}: {error}") from None
    binds = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    needs = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    for inner in _scopes(table):
        for symbol in inner.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                needs.add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                binds.add(symbol.get_name())
    own = binds if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
    return Statement(text, frozenset(binds), frozenset(needs - own), frozenset(_changed(node)))


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    todo = list(table.get_children())
    while todo:
        inner = todo.pop()
        yield inner
        todo += inner.get_children()


def _changed(node: ast.stmt) -> Iterator[str]:
    """Names whose object a statement changes: an item, an attribute, or by a method of it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return
    for inner in ast.walk(node):
        target = None
        if isinstance(inner, ast.Attribute | ast.Subscript) and isinstance(
            inner.ctx, ast.Store | ast.Del
        ):
            target = inner.value
        elif isinstance(node, ast.Expr) and inner is node.value and isinstance(inner, ast.Call):
            target = inner.func
            if isinstance(target, ast.Name):
                target = None
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def free_names(source: str) -> set[str]:
    """The names that a cell needs and does not bind itself; builtins are left out.

    Raises:
        UnparsableError: it is no Python.
    """
    found = statements(source)
    bound = frozenset().union(*(one.binds for one in found)) if found else frozenset()
    wanted = frozenset().union(*(one.needs for one in found)) if found else frozenset()
    return set(wanted - bound - _BUILTINS)


def bound_names(source: str) -> set[str]:
    """The names that a cell binds.

    Raises:
        UnparsableError: it is no Python.
    """
    return set().union(*(one.binds for one in statements(source)))
