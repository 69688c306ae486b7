"""Which names a piece of Python needs and binds, read from its text and never by running it."""

import ast
import builtins
import symtable
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__", "get_ipython", "display"}
MAX_NODES = 100_000
_DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef


class UnparsableError(ValueError):
    """Text that is no Python, or too much of it."""


@dataclass(frozen=True)
class Statement:
    """A statement of a cell's outermost level.

    Attributes:
        text: as it was written.
        binds: names that it gives a value.
        needs: names that it, or a function in it, looks up outside of itself.
        changes: names whose object it changes without binding them (`table["a"] = 1`); of a
            definition: the notebook's names that a call of it changes or binds.
        star: whether it is `from ... import *`.
        calls: functions that it calls for what they change, not for their value.
        awaits: whether only a notebook's cell can run it, for an `await` outside of functions.
    """

    text: str
    binds: frozenset[str]
    needs: frozenset[str]
    changes: frozenset[str] = frozenset()
    star: bool = False
    calls: frozenset[str] = frozenset()
    awaits: bool = False


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
    declared = set()
    for inner in _scopes(table):
        for symbol in inner.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                needs.add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                declared.add(symbol.get_name())
    changes, calls = set(_changed(node)), set(_called(node))
    if isinstance(node, _DEFINITIONS):
        # A name that it does not look up outside is its own, and its calls run when it is called.
        changes, calls, needs = changes & needs | declared, set(), (needs | declared) - binds
    return Statement(
        text,
        frozenset(binds | declared),
        frozenset(needs),
        frozenset(changes),
        calls=frozenset(calls),
        awaits=_awaits(node),
    )


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    todo = list(table.get_children())
    while todo:
        inner = todo.pop()
        yield inner
        todo += inner.get_children()


def _changed(node: ast.stmt) -> Iterator[str]:
    """Names whose object a statement changes: an item, an attribute, or by a method of it."""
    for inner in ast.walk(node):
        target = None
        if isinstance(inner, ast.Attribute | ast.Subscript) and isinstance(
            inner.ctx, ast.Store | ast.Del
        ):
            target = inner.value
        elif (call := _bare_call(inner)) and not isinstance(call.func, ast.Name):
            target = call.func
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def _called(node: ast.stmt) -> Iterator[str]:
    for inner in ast.walk(node):
        if (call := _bare_call(inner)) and isinstance(call.func, ast.Name):
            yield call.func.id


def _bare_call(node: ast.AST) -> ast.Call | None:
    """The call that is a statement of its own, awaited or not."""
    value = node.value if isinstance(node, ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    return value if isinstance(value, ast.Call) else None


def _awaits(node: ast.stmt) -> bool:
    todo: list[ast.AST] = [node]
    while todo:
        inner = todo.pop()
        if isinstance(inner, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        if isinstance(inner, ast.comprehension) and inner.is_async:
            return True
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(inner)
    return False


def free_names(source: str) -> set[str]:
    """The names that a cell needs and does not bind itself; builtins are left out.

    Raises:
        UnparsableError: it is no Python.
    """
    found = statements(source)
    bound = frozenset().union(*(one.binds for one in found)) if found else frozenset()
    wanted = frozenset().union(*(one.needs for one in found)) if found else frozenset()
    return set(wanted - bound - BUILTINS)


def bound_names(source: str) -> set[str]:
    """The names that a cell binds.

    Raises:
        UnparsableError: it is no Python.
    """
    return set().union(*(one.binds for one in statements(source)))
