"""What a solution's text shows that its values do not: a library that did the work, and tricks.

A rule that is certain takes the exercise's points: the text names a function that computes what the
exercise asks to write. What only looks odd is a flag, and a person decides.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from labsupport.grading.grade.names import UnparsableError, free_names, parse_source
from labsupport.grading.grade.pristine import Pristine
from labsupport.grading.grade.results import Flag

# Attention (or its parts) ready-made, by the last part of the name, wherever it comes from.
_ATTENTION_NAMES = frozenset(
    {
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "MultiheadAttention",
        "flex_attention",
        "memory_efficient_attention",
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_with_kvcache",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
    }
)
_ATTENTION_MODULES = ("flash_attn", "flash_attn_interface", "xformers", "torch.nn.attention.flex")
# Of the lab: what it offers there is an answer to one exercise or another.
_LAB = "labsupport"
_LAB_ANSWERS = ("labsupport.attention", "labsupport.checks", "labsupport.distributed.ring")
# Not answers, though they live there.
_HARMLESS = frozenset({"CheckFailed", "compare_prediction", "yours_or_ours", "available_backends",
                       "last_call"})  # fmt: skip
_ODD_NAMES = {
    "exec": "runs text as a program",
    "eval": "runs text as a program",
    "compile": "runs text as a program",
    "__import__": "imports by a name that is computed",
    "globals": "looks at all names",
    "open": "opens a file",
    "input": "waits for somebody to type",
    "__builtins__": "reaches for Python's inside",
    "breakpoint": "stops in the debugger",
}
_ODD_MODULES = {
    "inspect": "looks into who calls it",
    "gc": "looks at objects that are not its own",
    "ctypes": "reaches below Python",
    "subprocess": "starts programs",
    "multiprocessing": "starts processes",
    "socket": "uses the network",
    "urllib": "uses the network",
    "requests": "uses the network",
    "http": "uses the network",
    "pickle": "loads objects",
    "importlib": "imports by a name that is computed",
    "signal": "changes how the process ends",
    "sys": "reaches for Python's inside",
    "os": "reaches for the system",
    "shutil": "reaches for files",
    "pathlib": "reaches for files",
    "unittest": "replaces functions",
}
_ODD_ATTRIBUTES = {
    "__subclasses__": "reaches for Python's inside",
    "__globals__": "reaches for Python's inside",
    "__code__": "reaches for Python's inside",
    "_getframe": "looks into who calls it",
    "f_back": "looks into who calls it",
    "f_locals": "looks into who calls it",
    "modules": "looks at loaded modules",
}
_MANY_NUMBERS = 40


@dataclass(frozen=True)
class Findings:
    """What the rules say about one submission.

    Attributes:
        forbidden: by exercise, why it gets no points.
        flags: for a person to look at.
    """

    forbidden: dict[str, str]
    flags: tuple[Flag, ...]


def flags_of(sources: Mapping[str, str], pristine: Pristine) -> Findings:
    """Apply the rules.

    Args:
        sources: what would run for each exercise, of the student's own text.
        pristine: the instructor's notebook. What its own solution of an exercise calls, a student
            may call there too; the instructor's imports say what a name stands for.
    """
    setup = "\n".join(
        cell.source for cell in pristine.cells if cell.kind == "code" and not cell.grade_id
    )
    given = _imports(_parsed(setup))
    forbidden: dict[str, str] = {}
    flags: list[Flag] = []
    solutions = pristine.solutions
    for exercise, source in sources.items():
        tree = _parsed(source)
        allowed = _library_calls(solutions[exercise].source, given)
        used = _library_calls(source, given)
        # Where the exercise is to use attention, any implementation of it will do.
        if not _certain(allowed) and (found := sorted(_certain(used))):
            forbidden[exercise] = f"it calls {found[0]}, which does what the exercise asks to write"
        unsure = {
            name
            for name in used - _certain(used) - allowed
            if name.startswith(_LAB) and name.rpartition(".")[2] not in _HARMLESS
        }
        for name in sorted(unsure)[:3]:
            flags.append(Flag(exercise, "library call", f"It uses {name} of the lab."))
        said = sorted(_oddities(tree))
        if said:
            flags.append(Flag(exercise, "unusual code", f"It {'; it '.join(said[:4])}."))
    return Findings(forbidden, tuple(flags))


def _parsed(source: str) -> ast.Module:
    try:
        return parse_source(source)
    except UnparsableError:
        return ast.Module([], [])


def _imports(tree: ast.Module) -> dict[str, str]:
    """What imported names stand for: {"F": "torch.nn.functional"}."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found[alias.asname] = alias.name
                else:
                    found[alias.name.split(".")[0]] = alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _dotted(node: ast.expr, known: Mapping[str, str]) -> str:
    """The full name that an expression stands for; "" if it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([known.get(node.id, node.id), *reversed(parts)])


def _library_calls(source: str, given: Mapping[str, str]) -> set[str]:
    """Full names of what a text takes from libraries."""
    tree = _parsed(source)
    try:
        # A local variable may bear the name of an import without being it.
        free = free_names(source)
    except UnparsableError:
        free = set()
    own = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    }
    known = {name: full for name, full in given.items() if name in free} | _imports(tree)
    found = {full for full in _imports(tree).values() if _of_interest(full)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            name = _dotted(node, known)
            if name.split(".")[0] in own and "." not in name:
                continue
            if isinstance(node, ast.Name) and node.id not in known:
                continue
            if _of_interest(name) or (
                isinstance(node, ast.Attribute) and node.attr in _ATTENTION_NAMES
            ):
                found.add(name or node.attr if isinstance(node, ast.Attribute) else name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            # getattr(F, "scaled_dot_product_attention") says it too.
            for one in node.args:
                if isinstance(one, ast.Constant) and one.value in _ATTENTION_NAMES:
                    found.add(str(one.value))
    return found


def _of_interest(name: str) -> bool:
    return (
        name.rpartition(".")[2] in _ATTENTION_NAMES
        or name.startswith(_ATTENTION_MODULES)
        or name.startswith(_LAB + ".")
    )


def _certain(names: set[str]) -> set[str]:
    """Those that compute what an exercise may ask for, and are no helper."""
    found = set()
    for name in names:
        last = name.rpartition(".")[2]
        ready_made = last in _ATTENTION_NAMES or name.startswith(_ATTENTION_MODULES)
        of_the_lab = name.startswith(_LAB_ANSWERS) and name not in _LAB_ANSWERS
        if ready_made or (of_the_lab and last not in _HARMLESS):
            found.add(name)
    return found


def _oddities(tree: ast.Module) -> set[str]:
    """What honest solutions of these exercises do not do."""
    said: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _ODD_NAMES:
            said.add(_ODD_NAMES[node.id])
        elif isinstance(node, ast.Attribute) and node.attr in _ODD_ATTRIBUTES:
            if node.attr != "modules" or _dotted(node, {}) == "sys.modules":
                said.add(_ODD_ATTRIBUTES[node.attr])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            )
            for module in modules:
                if (what := _ODD_MODULES.get((module or "").split(".")[0])) is not None:
                    said.add(what)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            computed = len(node.args) > 1 and not isinstance(node.args[1], ast.Constant)
            if node.func.id in ("getattr", "setattr", "delattr") and computed:
                said.add("takes an attribute by a name that is computed")
            elif node.func.id in ("setattr", "delattr"):
                said.add("changes an object's attributes by name")
        elif isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            numbers = [one for one in ast.walk(node) if isinstance(one, ast.Constant)]
            if len(numbers) >= _MANY_NUMBERS:
                said.add(f"holds {_MANY_NUMBERS} or more constants in one place")
        if isinstance(node, ast.Attribute) and _dotted(node, {}).startswith("torch.ops."):
            said.add("calls PyTorch's operators by their inner names")
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and _dotted(target, {}).startswith(
                    ("torch.", "checks.", "labsupport.", "np.", "numpy.")
                ):
                    said.add("replaces a part of a library")
    return said
