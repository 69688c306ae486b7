"""The package without what answers the exercises, for exams and for grading.

Functions that answer an exercise keep their names and signatures, and say that they are left out.
In an exam the checks judge by stored cases (`labsupport.checks.cases`): the results of the
reference solutions and of typical mistakes, written down here while the solved notebooks' checks
run. Where a submission is graded there are no cases: the grader checks in a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grader import left_out
from labsupport import paths
from labsupport.course.editions import ReleaseError

if TYPE_CHECKING:
    from labsupport.checks.cases import Tape


@dataclass(frozen=True)
class Answer:
    """A module of the package that holds the answer to an exercise.

    Attributes:
        path: the file, relative to the package; a folder stands for all Python files in it.
        exercise: which exercise, for the message.
        gone: names of functions and classes that are left out; all if empty.
        needed: names that stay, because others use them.
    """

    path: str
    exercise: str
    gone: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


def _checks(file: str, exercise: str, *references: str) -> Answer:
    return Answer(f"checks/{file}.py", exercise, references)


_KERNELS = ("forward", "backward", "hopper", "decode", "version1", "forward_gluon")
_TEMPLATE = ("with_update_kernel", "attention_with_update", "run_update")

# Not here, because the package runs on them: masks (`attention/masks.py`, exercise 2-3), and what
# Transformers calls (`models/integration/`, 2-2).
ANSWERS: tuple[Answer, ...] = (
    Answer("attention/flash_torch.py", "1-4, 1-5", needed=("autocast_off", "_block_sizes")),
    *(Answer(f"attention/kernels/{name}.py", "4-3") for name in _KERNELS),
    Answer("attention/kernels/template.py", "4-3", needed=_TEMPLATE),
    Answer("attention/online_softmax.py", "1-3, 3-4"),
    Answer("attention/reference.py", "1-1"),
    Answer("attention/rotary.py", "3-1"),
    Answer("distributed/ring/merge_kernel.py", "3-4"),
    Answer("distributed/ring/merging.py", "3-4"),
    Answer("distributed/ring/zigzag.py", "3-5"),
    Answer("distributed/minimal_ring.py", "3-4"),
    Answer("profiling/work.py", "4-1"),
    Answer("profiling/tables.py", "1-2", gone=("score_mib",)),
    Answer("precision/autofix.py", "1-6"),
    Answer("precision/losses.py", "3-2"),
    Answer("analysis/traffic", "4-2"),
    Answer("analysis/tiles.py", "4-2"),
    Answer("analysis/roofline.py", "4-1"),
    Answer("analysis/recommend.py", "4-5"),
    Answer("analysis/predictor/calibration.py", "4-4"),
    Answer("analysis/predictor/evaluate.py", "4-4"),
    Answer("analysis/predictor/work.py", "4-1"),
    Answer("models/flops.py", "2-4", gone=("model_flops",)),
    Answer("models/llama2c.py", "3-1"),
    Answer("training/memory.py", "3-2"),
    Answer("training/planner/formulas.py", "3-3"),
    _checks("textbook", "1-1, 1-2", "textbook_attention", "score_bytes", "longest_that_fits"),
    _checks("softmax", "1-3", "running_max_and_sum"),
    _checks("flash", "1-4, 1-5", "flash_forward", "flash_backward", "score_gradient"),
    _checks("dtypes", "1-6", "half_dtype", "full_attention"),
    _checks("layout", "2-1", "split_heads", "to_flash_layout", "split_qkv"),
    _checks("registered", "2-2", "flash_attention", "lab_attention"),
    _checks("decoding", "2-3", "visible"),
    _checks("amdahl", "2-4", "overall_speedup", "flop_share"),
    _checks("rotary", "3-1", "rotary_angles", "apply_rope", "pairs_to_halves"),
    _checks("chunked_loss", "3-2", "ChunkedLoss"),
    _checks("planning", "3-3", "held_bytes"),
    _checks("merging", "3-4", "merge", "merge_all"),
    _checks("zigzag_order", "3-5", "zigzag_chunks", "zigzag_positions", "unzigzag"),
    _checks("intensity", "4-1", "attention_cost", "roof"),
    _checks("counting", "4-2", "textbook_traffic", "tiled_traffic"),
    _checks("kernel", "4-3", "update"),
    _checks("fitting", "4-4", "fit_time", "predict_time", "held_out_error"),
    _checks("choosing", "4-5", "choose", "choice", "_chain"),
)
_KEPT_DECORATORS = ("staticmethod", "classmethod", "property", "dataclass", "triton.jit")

_NO_BACKENDS = f'''

# The exam edition has neither of the lab's own: they answer exercises 1-4, 1-5 and 4-3.
import dataclasses as _dataclasses

BACKENDS = tuple(
    _dataclasses.replace(_entry, missing=lambda: "{left_out.NOT_HERE}")
    if _entry.name in ("flash_triton", "flash_torch")
    else _entry
    for _entry in BACKENDS
)
'''

_NATIVE_RING = """

# The lab's own kernel is not here, so on a CPU PyTorch's serves the lessons.
import dataclasses as _dataclasses

KERNELS = tuple(
    _dataclasses.replace(_kernel, in_auto=lambda device: True) if _kernel is NATIVE else _kernel
    for _kernel in KERNELS
)
"""

# What stands at the end of files that name what is left out.
_ADDED = {
    "attention/implementations.py": _NO_BACKENDS,
    "distributed/ring/kernels.py": _NATIVE_RING,
}


class _Emptied(ast.NodeTransformer):
    """Functions keep name and signature; a call of them says that they are left out."""

    def __init__(self, module: str, answer: Answer) -> None:
        self.module, self.answer = module, answer
        self.inside: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if self._stays(node.name):
            return node
        self.inside.append(node.name)
        if ast.get_docstring(node) is not None:
            node.body[0] = ast.parse("...").body[0]
        self.generic_visit(node)
        self.inside.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.module.startswith("checks.") and node.name.startswith("check_"):
            node.decorator_list.append(ast.Name("stored"))
        if self._stays(node.name):
            return node
        name = ".".join([self.module, *self.inside, node.name])
        node.body = [ast.parse(f"left_out({name!r}, {self.answer.exercise!r})").body[0]]
        kept = [d for d in node.decorator_list if _called(d) in _KEPT_DECORATORS]
        node.decorator_list = kept
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Empty a table of mistakes, whose edits quote the solution."""
        if _called(node.value) == "mistakes":
            node.value = ast.Tuple([])
        return node

    def _stays(self, name: str) -> bool:
        listed = not self.answer.gone or name in self.answer.gone or bool(self.inside)
        return name in self.answer.needed or not listed


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def empty(source: str, module: str, answer: Answer) -> str:
    """Return a module whose functions say that they are left out; imports of it still work.

    Comments are gone too, and with all functions the docstrings, since they explain the answer.
    """
    tree = ast.parse(source)
    tree = ast.fix_missing_locations(_Emptied(module, answer).visit(tree))
    body, docstring = tree.body, ast.get_docstring(tree, clean=False)
    if docstring is not None:
        body = body[1:]
    first = 0
    while isinstance(body[first], ast.ImportFrom) and body[first].module == "__future__":
        first += 1
    imports = "from labsupport.left_out import left_out"
    if module.startswith("checks."):
        imports += "\nfrom labsupport.checks.cases import stored"
    said = f"{left_out.NOT_HERE.capitalize()}: it answers exercise {answer.exercise}."
    if answer.gone:
        said = docstring or said
    head = ast.Expr(ast.Constant(said))
    tree.body = [head, *body[:first], *ast.parse(imports).body, *body[first:]]
    return ast.unparse(tree) + "\n"


def exam_package() -> Iterator[tuple[str, str]]:
    """Yield each file of the package without the answers: its path, and its text.

    Raises:
        ValueError: an entry of `ANSWERS` names a file or function that is not there (any more).
    """
    unused = {answer.path for answer in ANSWERS}
    for path, source in package_files():
        answer = next((a for a in ANSWERS if path == a.path or path.startswith(f"{a.path}/")), None)
        if answer is not None:
            unused.discard(answer.path)
            names = (*answer.needed, *answer.gone)
            gone = [n for n in names if f"def {n}(" not in source and f"class {n}(" not in source]
            if gone:
                raise ValueError(f"ANSWERS: {path} has no {', '.join(gone)} any more")
        if answer is not None and not path.endswith("__init__.py"):
            source = empty(source, path.removesuffix(".py").replace("/", "."), answer)
        yield f"labsupport/{path}", source + _ADDED.get(path, "")
    if unused:
        raise ValueError(f"ANSWERS names files that are not there: {', '.join(sorted(unused))}")
    yield "labsupport/left_out.py", Path(left_out.__file__).read_text(encoding="utf-8")


def package_files() -> Iterator[tuple[str, str]]:
    """Yield the path, relative to the package, and the text of each of its Python files."""
    package = paths.project_root() / "labsupport"
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        # Not a copy that JupyterLab or an editor keeps, such as x-checkpoint.py.
        if all(part.isidentifier() for part in path.removesuffix(".py").split("/")):
            yield path, file.read_text(encoding="utf-8")


def write_package(target: Path) -> Path:
    """Write the package on which a submission is graded; it holds no answer.

    Args:
        target: a folder to put on the kernel's path; `labsupport/` is made in it.

    Returns:
        the package's folder.

    Raises:
        FileExistsError: `target` holds a `labsupport` already.
        OSError: it cannot be written.
    """
    (target / "labsupport").mkdir(parents=True)
    write_files(target, exam_package())
    # `paths.project_root()` then finds this folder, and nothing of the real one.
    (target / "pyproject.toml").write_text("", encoding="utf-8")
    return target / "labsupport"


def write_files(target: Path, files: Iterator[tuple[str, str]]) -> None:
    """Write texts to their paths below `target`."""
    for path, text in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")


def record_cases(notebooks: list[Path]) -> dict[str, Tape]:
    """Run the visible checks of solved notebooks, and write down what their references give.

    Returns:
        the results of each check's references and mistakes, in order, by the check's name.

    Raises:
        ReleaseError: a solution does not pass its check.
    """
    from labsupport import checks  # PyTorch with it, which the program's other commands do without
    from labsupport.checks import cases

    tapes: dict[str, Tape] = {}

    def recorded(name: str, check: Callable[..., None]) -> Callable[..., None]:
        @wraps(check)
        def run(*students: Any, seed: int = 0) -> None:
            if seed == 0 and name not in tapes:
                with cases.recording() as tape:
                    check(*students)
                tapes[name] = tape

        return run

    names = {n: recorded(n, f) if n.startswith("check_") else f for n, f in vars(checks).items()}
    for notebook in notebooks:
        scope: dict[str, Any] = {"__name__": "exercises"}
        for where, source in exercises_of(notebook):
            scope["checks"] = SimpleNamespace(**names)
            # Triton and the check of kernels ask for the source.
            linecache.cache[where] = len(source), None, source.splitlines(keepends=True), where
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(source, where, "exec"), scope)
            except Exception as error:
                raise ReleaseError(f"{where}: {type(error).__name__}: {error}") from error
    return tapes


def exercises_of(notebook: Path) -> Iterator[tuple[str, str]]:
    """Yield a name and the text of all imports of a notebook, then of each solution and check."""
    import nbformat

    cells = [c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    imports = [ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    yield f"<{notebook.name}: imports>", "\n".join(imports)
    for cell in cells:
        about = cell.metadata.get("nbgrader", {})
        if about.get("solution") or about.get("grade"):
            yield f"<{notebook.name}: {about.grade_id}>", cell.source
