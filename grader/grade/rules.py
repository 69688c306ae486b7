"""Flags from a solution's text: names that an instructor should look at. They take no points."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from grader.grade.plan import MAY_USE_FUSED, Plan, parsed
from grader.grade.pristine import Pristine
from grader.grade.results import Flag

# Ready-made answers, by the last part of their names.
_READY_MADE = (
    *("scaled_dot_product_attention", "multi_head_attention_forward", "MultiheadAttention"),
    *("flex_attention", "memory_efficient_attention", "varlen_attn", "linear_cross_entropy"),
    *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"),
    *("TransformerEncoderLayer", "TransformerDecoderLayer", "apply_rotary_pos_emb"),
    *("eager_attention_forward", "sdpa_attention_forward", "rotary_embedding"),
)
# Ways to reach what is not named.
_REACHES = (
    *("exec", "eval", "__import__", "import_module", "globals", "locals", "vars"),
    *("attrgetter", "methodcaller", "getattr", "setattr", "__dict__", "__globals__", "__code__"),
    *("__builtins__", "__subclasses__", "_getframe", "f_back", "get_objects", "modules"),
    *("_destroy", "Library", "locate", "get_field", "read_pickle", "get_type_hints"),
    *("get_kernel", "decompose", "aten_decompositions", "library", "ops"),
)
_MODULES = (
    *("inspect", "gc", "ctypes", "subprocess", "multiprocessing", "threading", "socket", "urllib"),
    *("requests", "pickle", "marshal", "importlib", "runpy", "builtins", "signal", "sys", "os"),
    *("unittest", "timeit", "pydoc", "grader"),
)
_LAB = ("labsupport.attention", "labsupport.checks", "labsupport.distributed")
_PRIVATE = "a private attribute"
_ODD = {*_REACHES, *_MODULES, _PRIVATE}
_MANY_NUMBERS = 40


def flags_of(plan: Plan, pristine: Pristine) -> Iterator[Flag]:
    """Yield what a person should look at: names in the texts that ran, by exercise."""
    known = {name for cell in pristine.cells for name in _named(parsed(cell.source))}
    for step in plan.steps:
        tree = parsed(step.source) if step.source else None
        if tree is None:
            continue
        named = set(_named(tree)) - (known - {_PRIVATE})
        if not step.exercise.startswith(MAY_USE_FUSED) and (hits := named & set(_READY_MADE)):
            yield Flag(step.exercise, "library call", f"Names {', '.join(sorted(hits))}.")
        if hits := {
            n for n in named if n.startswith(_LAB) or n in (*_REACHES, *_MODULES, _PRIVATE)
        }:
            yield Flag(step.exercise, "odd name", f"Names {', '.join(sorted(hits))}.")
        numbers = sum(
            isinstance(one, ast.Constant) and isinstance(one.value, int | float)
            for one in ast.walk(tree)
        )
        if step.exercise and numbers > _MANY_NUMBERS:
            text = f"Holds {numbers} numbers: are answers written in?"
            yield Flag(step.exercise, "many numbers", text)


def _named(tree: ast.Module | None) -> Iterator[str]:
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            own = getattr(node.value, "id", "") in ("self", "cls") or node.attr[-2:] == "__"
            if node.attr[0] == "_" and not own:
                yield _PRIVATE
        elif isinstance(node, ast.alias):
            yield node.name
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from node.module.split(".")
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 99
        ):
            # Names in texts: getattr(F, "scaled_dot_product_attention").
            yield from node.value.replace(".", " ").split()
