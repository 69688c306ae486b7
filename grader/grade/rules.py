"""Flags from a solution's text: names that an instructor should look at. They take no points."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from grader.grade.notebooks import Pristine
from grader.grade.plan import MAY_USE_FUSED, Plan, parsed
from grader.grade.results import Flag

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
