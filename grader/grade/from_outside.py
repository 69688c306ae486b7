"""Which names a text takes from outside, where it binds some of them itself, and in what order.

A text that says `attention = attention` binds the name, and still calls what was there before.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grader.grade.names import Statement, parse_source, statements

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_COMPOUND = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar,
    ast.Match,
)  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """A statement of a text's outermost level.

    Attributes:
        binds: names that it may give a value.
        firm: names that it gives a value whenever it runs.
        now: names that are looked up when it runs.
        needs: names that are looked up then, or by its functions when they are called.
        perhaps: names of which only running would tell whose they are.
        defines: whether it is a function or a class.
        compound: whether it holds other statements, and is neither.
    """

    binds: frozenset[str]
    firm: frozenset[str]
    now: frozenset[str]
    needs: frozenset[str]
    perhaps: frozenset[str]
    defines: bool
    compound: bool


def names_from_outside(source: str) -> tuple[set[str], set[str]]:
    """Names that a text looks up and that are not its own: surely, and perhaps.

    A function may call what is defined below it. What is looked up at once has to be bound before.

    Raises:
        UnparsableError: it is no Python.
    """
    steps = [_step(one) for one in statements(source) if not one.star]
    needed = _union(one.needs for one in steps)
    bound, firm = _union(one.binds for one in steps), _union(one.firm for one in steps)
    defined = _union(one.firm for one in steps if one.defines)
    surely = (needed - bound) | (_before_bound(steps, [one.binds for one in steps]) - defined)
    perhaps = (needed - firm) | _before_bound(steps, [one.firm for one in steps])
    perhaps |= _union(one.perhaps for one in steps)
    return surely, perhaps - surely


def _union(sets: Iterable[frozenset[str]]) -> set[str]:
    return set().union(*sets)


def _before_bound(steps: Sequence[_Step], binds: Sequence[frozenset[str]]) -> set[str]:
    """Names that are looked up before they are bound, also by functions that are called."""
    early: set[str] = set()
    bound: set[str] = set()
    looked_up: set[str] = set()
    later: dict[str, frozenset[str]] = {}
    todo: list[str] = []
    for step, own in zip(steps, binds, strict=True):
        todo += step.now
        while todo:
            name = todo.pop()
            if name not in looked_up:
                looked_up.add(name)
                todo += later.pop(name, ())
                if name not in bound and not (step.compound and name in own):
                    early.add(name)
        bound |= own
        for name in step.firm if step.defines else ():
            if name in looked_up:
                # Who called it once may call it again.
                todo += step.needs
            else:
                later[name] = later.get(name, frozenset()) | step.needs
    return early


def _step(one: Statement) -> _Step:
    node = parse_source(one.text).body[0]
    compound = isinstance(node, _COMPOUND)
    needs = one.needs - (_loop_variables(node) if compound else frozenset())
    firm, now, perhaps = _firm(node, one), needs, needs & _firm(node, one)
    if isinstance(node, _DEFINITIONS):
        at_once = frozenset(_at_once(node))
        now = needs & at_once
        # A name of a class's body, or one that is declared global, may be one from outside.
        declared = (inner.names for inner in ast.walk(node) if isinstance(inner, ast.Global))
        perhaps = at_once - needs - _methods(node)
        needs = needs.union(*declared)
    return _Step(
        one.binds, firm, now, needs, perhaps, isinstance(node, _DEFINITIONS), compound
    )  # fmt: skip


def _firm(node: ast.stmt, one: Statement) -> frozenset[str]:
    if isinstance(node, _DEFINITIONS):
        return frozenset({node.name})
    if isinstance(node, ast.Import | ast.ImportFrom):
        return one.binds
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return frozenset(name for target in targets for name in _names(target, ast.Store))


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, context)
    ]


def _at_once(node: ast.stmt) -> Iterable[str]:
    """Names that a definition looks up when it runs: decorators, defaults, a class's body."""
    if not isinstance(node, _DEFINITIONS):
        return _names(node, ast.Load)
    parts: list[ast.expr] = list(node.decorator_list)
    found: list[str] = []
    if isinstance(node, ast.ClassDef):
        parts += [*node.bases, *(keyword.value for keyword in node.keywords)]
        for inner in node.body:
            found += _at_once(inner)
    else:
        parts += [*node.args.defaults, *(one for one in node.args.kw_defaults if one)]
    for part in parts:
        found += _names(part, ast.Load)
    return found


def _methods(node: ast.stmt) -> frozenset[str]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return frozenset(inner.name for inner in body if isinstance(inner, _DEFINITIONS))


def _loop_variables(node: ast.stmt) -> frozenset[str]:
    """What `for` and `with` bind and nothing outside of their bodies looks up."""
    everywhere = Counter(_names(node, ast.Load))
    found: set[str] = set()
    for loop in ast.walk(node):
        if isinstance(loop, ast.For | ast.AsyncFor):
            targets = [loop.target]
        elif isinstance(loop, ast.With | ast.AsyncWith):
            targets = [item.optional_vars for item in loop.items if item.optional_vars]
        else:
            continue
        inside = Counter(name for inner in loop.body for name in _names(inner, ast.Load))
        bound = [name for target in targets for name in _names(target, ast.Store)]
        found |= {name for name in bound if inside[name] == everywhere[name]}
    return frozenset(found)
