"""What a solution's text shows that its values do not: a library that did the work, and tricks.

A rule that is certain takes the exercise's points: the text names a function that computes what the
exercise asks to write. What only looks odd is a flag, and a person decides.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grader.grade.from_outside import names_from_outside
from grader.grade.names import UnparsableError, parse_source
from grader.grade.pristine import Pristine
from grader.grade.results import Flag

# What exercises ask to write, ready-made, by the last part of the name, wherever it comes from:
# attention, its parts, rotary embedding, and the loss without all logits.
_READY_MADE = frozenset(
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
        "_scaled_dot_product_attention_math_for_mps",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "varlen_attn",
        "eager_attention_forward",
        "sdpa_attention_forward",
        "TransformerEncoder",
        "TransformerEncoderLayer",
        "TransformerDecoder",
        "TransformerDecoderLayer",
        "_native_multi_head_attention",
        "_triton_multi_head_attention",
        "_triton_scaled_dot_attention",
        "_transformer_encoder_layer_fwd",
        "_flash_attention_forward_no_dropout_inplace",
        "apply_rotary_pos_emb",
        "linear_cross_entropy",
    }
)
_ATTENTION_MODULES = ("flash_attn", "flash_attn_interface", "xformers", "torch.nn.attention.flex",
                      "torch.nn.attention.varlen")  # fmt: skip
# Libraries of which any use is looked at; of the second, what surely is an answer.
_LAB, _TRANSFORMERS = "labsupport", "transformers"
_TRANSFORMERS_ANSWERS = ("attention_forward", "rotary_pos_emb")
# Of the lab: what it offers there is an answer to one exercise or another.
_LAB_ANSWERS = ("labsupport.attention", "labsupport.checks", "labsupport.distributed.ring")
# Not answers, though they live there.
_HARMLESS = frozenset({"CheckFailed", "compare_prediction", "solution_or_reference",
                       "yours_or_ours", "available_backends",
                       "last_call"})  # fmt: skip
_ODD_NAMES = {
    "exec": "runs text as a program",
    "eval": "runs text as a program",
    "compile": "runs text as a program",
    "__import__": "imports by a name that is computed",
    "import_module": "imports by a name that is computed",
    "globals": "looks at all names",
    "locals": "looks at all names",
    "vars": "looks at all names",
    "attrgetter": "takes an attribute by a name that is computed",
    "methodcaller": "takes an attribute by a name that is computed",
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
    "concurrent": "starts processes or threads",
    "threading": "starts threads",
    "_thread": "starts threads",
    "socket": "uses the network",
    "urllib": "uses the network",
    "requests": "uses the network",
    "http": "uses the network",
    "pickle": "loads objects",
    "importlib": "imports by a name that is computed",
    "pkgutil": "imports by a name that is computed",
    "runpy": "runs text as a program",
    "builtins": "reaches for Python's inside",
    "signal": "changes how the process ends",
    "sys": "reaches for Python's inside",
    "os": "reaches for the system",
    "shutil": "reaches for files",
    "pathlib": "reaches for files",
    "unittest": "replaces functions",
    "grader": "reaches for the grader",
}
# Not odd as a part of another library: `torch.signal` and `scipy.signal` process signals.
_ODD_PARTS = {name: what for name, what in _ODD_MODULES.items() if name != "signal"}
_ODD_ATTRIBUTES = {
    **_ODD_PARTS,
    "import_module": "imports by a name that is computed",
    "__import__": "imports by a name that is computed",
    "__builtins__": "reaches for Python's inside",
    "__dict__": "takes an attribute by a name that is computed",
    "__getattribute__": "takes an attribute by a name that is computed",
    "attrgetter": "takes an attribute by a name that is computed",
    "methodcaller": "takes an attribute by a name that is computed",
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
        own = _uses(solutions[exercise].source, given)
        allowed = own.sure | own.perhaps
        used = _uses(source, given)
        # Where the exercise is to use attention, any implementation of it will do.
        if not _certain(allowed) and (found := sorted(_certain(used.sure))):
            forbidden[exercise] = f"it calls {found[0]}, which does what the exercise asks to write"
        for name in sorted(_unsure(used, allowed))[:3]:
            flags.append(Flag(exercise, "library call", f"It uses {_described(name)}."))
        if exercise not in forbidden:
            for text in sorted(_unsure_texts(used, own))[:3]:
                flags.append(Flag(exercise, "library call", f"It names {text[:80]!r} in a text."))
        said = sorted(_oddities(_parsed(source)))
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
    return dict(_imported(tree))


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, known: Mapping[str, str]) -> str:
    """The full name that an expression stands for; "" if it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([known.get(node.id, node.id), *reversed(parts)])


@dataclass(frozen=True)
class _Uses:
    """What a text takes from libraries.

    Attributes:
        sure: full names.
        perhaps: those that the text's own names may hide.
        texts: strings that name something of a library.
    """

    sure: set[str]
    perhaps: set[str]
    texts: set[str]


def _uses(source: str, given: Mapping[str, str]) -> _Uses:
    tree = _parsed(source)
    try:
        # A name of the text's own may be that of an import without being it.
        surely, perhaps = names_from_outside(source)
    except UnparsableError:
        surely, perhaps = set(), set()
    imported = _imports(tree)
    # All of them: a name may be imported twice.
    sure = {full for _, full in _imported(tree) if _of_interest(full)} | _by_getattr(tree)
    # After `from ... import *` a name comes from nowhere that can be seen.
    sure |= {name for name in surely - given.keys() if name in _READY_MADE}
    theirs = {name: full for name, full in given.items() if name in surely}
    hidden = {name: full for name, full in given.items() if name in perhaps}
    unsure: set[str] = set()
    # An import in one function hides nothing from another.
    for known in ({**theirs, **imported}, {**imported, **theirs}):
        certain, rest = _taken(tree, known)
        sure |= certain
        unsure |= rest
    unsure = unsure.union(*_taken(tree, {**imported, **theirs, **hidden})) - sure
    return _Uses(sure, unsure, set(filter(_names_a_library, _texts(tree))))


def _taken(tree: ast.Module, known: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Full names of interest, where these names are known: surely, and perhaps."""
    definitions = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    own = {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    sure: set[str] = set()
    perhaps: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in known:
            name = known[node.id]
            # A whole library, and not as the beginning of a longer name.
            if _of_interest(name) or (name in (_LAB, _TRANSFORMERS) and id(node) not in inner):
                sure.add(name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name, of_library = _dotted(node, known) or node.attr, _root(node) in known
            if node.attr in _READY_MADE or (of_library and _of_interest(name)):
                # A method of the text's own may have such a name.
                (sure if of_library or node.attr not in own else perhaps).add(name)
    return sure, perhaps


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _by_getattr(tree: ast.Module) -> set[str]:
    """getattr(F, "scaled_dot_product_attention") is no text: it takes the function."""
    return {
        str(one.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        for one in node.args[1:2]
        if isinstance(one, ast.Constant) and str(one.value) in _READY_MADE
    }


def _texts(tree: ast.Module) -> Iterator[str]:
    """The strings of a text; what stands alone, as a docstring does, does nothing."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value.strip()


def _names_a_library(text: str) -> bool:
    return text.startswith(_LAB) or re.split(r"[.:]", text)[-1] in _READY_MADE


def _of_interest(name: str) -> bool:
    return (
        name.rpartition(".")[2] in _READY_MADE
        or name.startswith(_ATTENTION_MODULES)
        or name.startswith((f"{_LAB}.", f"{_TRANSFORMERS}."))
    )


def _certain(names: set[str]) -> set[str]:
    """Those that compute what an exercise may ask for, and are no helper."""
    found = set()
    for name in names:
        last = name.rpartition(".")[2]
        ready_made = last in _READY_MADE or name.startswith(_ATTENTION_MODULES)
        of_the_lab = name.startswith(_LAB_ANSWERS) and name not in _LAB_ANSWERS
        of_transformers = name.startswith(f"{_TRANSFORMERS}.") and any(
            part in last for part in _TRANSFORMERS_ANSWERS
        )
        if ready_made or of_transformers or (of_the_lab and last not in _HARMLESS):
            found.add(name)
    return found


def _unsure(used: _Uses, allowed: set[str]) -> set[str]:
    """Names that a person should look at, because the rules cannot tell."""
    found = (used.sure | used.perhaps) - allowed
    found = {name for name in found if name.rpartition(".")[2] not in _HARMLESS}
    if not _certain(allowed):
        return found - _certain(used.sure)
    # Where attention may be called, Transformers' wrapper of it may still be what is asked for.
    return {name for name in found if name.startswith(_TRANSFORMERS) or not _certain({name})}


def _unsure_texts(used: _Uses, own: _Uses) -> set[str]:
    any_will_do = _certain(own.sure | own.perhaps)
    found = used.texts - own.texts
    return {text for text in found if text.startswith(_LAB) or not any_will_do}


def _described(name: str) -> str:
    return f"{name} of the lab" if name.startswith(_LAB) else name


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
            said.update(_odd_imports(node))
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


def _odd_imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # `from torch import os` imports it, too.
        names = [f"{node.module}.{name}" for name in names]
    for name in names:
        first, *others = name.split(".")
        if first in _ODD_MODULES:
            yield _ODD_MODULES[first]
        yield from (_ODD_PARTS[other] for other in others if other in _ODD_PARTS)
