"""Cells with IPython's own lines (`%time`, `!pip`) as plain Python.

IPython translates them, which runs nothing. What it makes of its own lines are calls of
`get_ipython()`; these are taken out again, since no magic is to run in the student's kernel.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from grader.grade.names import UnparsableError, parse_source

# Cell magics that run their body in the notebook.
_TRANSPARENT = ("time", "timeit", "capture", "prun")
_CALLS = ("run_line_magic", "run_cell_magic", "system", "getoutput", "show_usage")
_OPTIONS = re.compile(r"^(?:--no-raise-error\s+|-[tcpqov]\s+|-[nr]\s*\d+\s+)*")
# What IPython might translate. It reads the whole cell anew for each, and is slow at long words
# before a question mark: nobody may keep the grader busy with that.
_MARK = re.compile(r"^[ \t]*[%!?,;/]|=[ \t]*[%!]|\?[ \t]*$", re.MULTILINE)
_MAX_LENGTH, _MAX_MARKS = 50_000, 20
_LONG_WORD = re.compile(r"\S{1000}")


def without_magics(source: str) -> str:
    """A cell's text without IPython's own lines (`%time`, `!pip`); "" for another language.

    A text that is Python as it stands stays as it is: a line of a string may begin with `%`.
    One that is no Python, whatever IPython does to it, is returned as no Python.
    """
    try:
        parse_source(source)
        return source
    except UnparsableError:
        return translated(source)


@lru_cache(maxsize=4096)
def translated(source: str, depth: int = 3) -> str:
    """A cell's text without IPython's own lines, or what is no Python as it is.

    Statements behind `%time` and `%timeit`, and the body below `%%time` and its like, stay; all
    others become `pass` or None. Lines keep their numbers, but for those that a backslash joins.

    Args:
        source: the text.
        depth: how many magics may stand within each other.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    text = source.replace("\r\n", "\n").replace("\r", "\n")
    if len(text) > _MAX_LENGTH or len(_MARK.findall(text)) > _MAX_MARKS:
        return source
    if "?" in text and _LONG_WORD.search(text):
        return source
    try:
        plain = TransformerManager().transform_cell(text).removesuffix("\n")
    except Exception:  # there is no list of what IPython raises at text that nobody has looked at
        return source
    blank = re.match(r"(?:[ \t]*\n)*", text)
    above = "\n" * (blank.group().count("\n") if blank else 0)
    try:
        tree = parse_source(plain)
    except UnparsableError:
        return above + plain
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr):
        name, body = _magic(tree.body[0].value, "run_cell_magic")
        if name:
            return f"{above}\n{_python(body, depth)}" if name in _TRANSPARENT else ""
    return above + _spliced(plain, list(_replacements(tree, depth)))


def _magic(node: ast.AST, *methods: str) -> tuple[str, str]:
    """The name and the text of a magic, where a node is a call of one; else twice ""."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in (methods or _CALLS)
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "get_ipython"
    ):
        given = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        return (given or ["?"])[0] or "?", given[-1] if given else ""
    return "", ""


def _replacements(tree: ast.Module, depth: int) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """The magics in a tree, and what to write instead."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Expr) and any(found := _magic(node.value)):
            yield node, _statement_of(*found, depth) or "pass"
        elif isinstance(node, ast.expr) and any(found := _magic(node)):
            yield node, _value_of(*found, depth) or "None"
        else:
            todo += ast.iter_child_nodes(node)


def _statement_of(name: str, text: str, depth: int) -> str:
    """What a line magic runs in the notebook; "" if nothing."""
    if name not in ("time", "timeit"):
        return ""
    text = _python(_OPTIONS.sub("", text), depth).strip()
    try:
        body = parse_source(text).body
    except UnparsableError:
        return ""
    # What `%timeit` binds does not reach the notebook.
    binds = name == "timeit" and not all(isinstance(one, ast.Expr) for one in body)
    return "" if binds or "\n" in text else text


def _value_of(name: str, text: str, depth: int) -> str:
    """The value of a line magic as an expression; "" if it has none."""
    text = _statement_of(name, text, depth) if name == "time" else ""
    try:
        tree = ast.parse(text, mode="eval")
        return f"({ast.unparse(tree)})"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def _python(text: str, depth: int) -> str:
    try:
        parse_source(text)
        return text
    except UnparsableError:
        return translated(text, depth - 1) if depth else text


def _spliced(text: str, replacements: list[tuple[ast.stmt | ast.expr, str]]) -> str:
    lines = [line.encode() for line in text.split("\n")]
    replacements.sort(key=lambda one: (one[0].lineno, one[0].col_offset), reverse=True)
    for node, new in replacements:
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        # In an f-string, some versions of Python do not know where they are.
        if lines[first].startswith(b"get_ipython", node.col_offset):
            lines[first : last + 1] = [before + new.encode() + after, *[b""] * (last - first)]
    return b"\n".join(lines).decode()
