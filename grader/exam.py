"""The package without answers to the exercises, for exams and for grading.

Functions that answer an exercise keep their names and signatures, and say that they are left out.
In an exam the checks judge by stored cases (`labsupport.checks.cases`): results of the reference
solutions and of typical mistakes, written down here while the solved notebooks' checks run. Where a
submission is graded there are none: the grader checks in its own process.
"""

import ast
import contextlib
import csv
import io
import json
import linecache
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grader import left_out
from grader.grade.submissions import read_solved
from labsupport import paths
from labsupport.course.editions import ReleaseError


@dataclass(frozen=True)
class Answer:
    """A line of answers.csv: a module, or folder, of the package that answers an exercise.

    The functions and classes `gone` are left out, or all; those `needed` by others stay.
    """

    path: str
    exercise: str
    gone: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


# Not in the table, because the package runs on them: masks (`attention/masks.py`, exercise 2-3),
# what Transformers calls (`models/integration/`, 2-2), training in 16 bits
# (`precision/optimizer.py`, 2-9).
with Path(__file__).with_name("answers.csv").open(encoding="utf-8") as _table:
    ANSWERS = tuple(
        Answer(row["path"], row["exercises"], *(tuple(row[n].split()) for n in ("gone", "needed")))
        for row in csv.DictReader(_table)
    )
_KEPT_DECORATORS = ("staticmethod", "classmethod", "property", "dataclass", "triton.jit")

# Whose place the functions of `stand_ins` take.
STAND_INS = {
    "analysis/predictor/calibration.py": ("calibrate_run",),
    "analysis/predictor/work.py": ("fused_bytes",),
    "analysis/roofline.py": ("roofline",),
    "analysis/traffic/formulas.py": ("closed_form", "visible_tiles"),
    "attention/flash_torch.py": ("flash_attention_forward", "flash_attention_backward"),
    "attention/online_softmax.py": ("merge_attention",),
    "attention/reference.py": ("standard_attention", "masked_attention", "oracle_attention"),
    "attention/rotary.py": ("rotary_angles", "apply_rotary_emb", "permute_rotary_rows"),
    "distributed/ring/merging.py": ("merge_into",),
    "distributed/ring/zigzag.py": ("chunks_of", "positions_of", "unshard_sequence"),
    "models/flops.py": ("model_flops",),
    "precision/autofix.py": ("safe_flash_attention",),
    "precision/losses.py": ("compute_loss",),
    "profiling/tables.py": ("score_mib",),
    "profiling/work.py": ("passes_of",),
    "training/measure.py": ("plan_memory",),
    "training/memory.py": ("chunked_cross_entropy",),
}

# What stands at the end of files that name what is left out.
_ADDED = tomllib.loads(Path(__file__).with_name("added.toml").read_text(encoding="utf-8"))


class _Emptied(ast.NodeTransformer):
    """Functions keep name and signature; a call of them says that they are left out."""

    def __init__(self, module: str, answer: Answer) -> None:
        self.module, self.answer = module, answer
        self.inside: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if self._goes(node.name):
            self.inside.append(node.name)
            if ast.get_docstring(node) is not None:
                node.body[0] = ast.parse("...").body[0]
            self.generic_visit(node)
            self.inside.pop()
        elif self.answer.gone:  # a method that is listed
            self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.module.startswith("checks.") and node.name.startswith("check_"):
            node.decorator_list.append(ast.Name("stored"))
        if self._goes(node.name):
            name = ".".join([self.module, *self.inside, node.name])
            says = f"left_out({name!r}, {self.answer.exercise!r})"
            if self.module.startswith("checks."):  # pages call the student's in its place
                says = f"waits_for({self.answer.exercise!r})"
            node.body = [ast.parse(says).body[0]]
            kept = [d for d in node.decorator_list if _called(d) in _KEPT_DECORATORS]
            node.decorator_list = kept
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Empty a table of mistakes, whose edits quote the solution."""
        if _called(node.value) == "mistakes":
            node.value = ast.Tuple([])
        return node

    def _goes(self, name: str) -> bool:
        listed = not self.answer.gone or name in self.answer.gone or bool(self.inside)
        return listed and name not in self.answer.needed


def _called(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def empty(source: str, module: str, answer: Answer) -> str:
    """Return a module whose functions say that they are left out; imports of it still work.

    Comments are gone too, and with all functions the docstrings, since they explain the answer.
    """
    tree = ast.fix_missing_locations(_Emptied(module, answer).visit(ast.parse(source)))
    docstring = ast.get_docstring(tree, clean=False)
    body = tree.body[1:] if docstring is not None else tree.body
    future = [one for one in body if getattr(one, "module", "") == "__future__"]
    imports = "from labsupport.left_out import left_out"
    if module.startswith("checks."):
        imports += ", waits_for\nfrom labsupport.checks.cases import stored"
    said = f"{left_out.NOT_HERE.capitalize()}: it answers exercise {answer.exercise}."
    head = ast.Expr(ast.Constant(docstring if docstring and answer.gone else said))
    rest = [one for one in body if one not in future]
    tree.body = [head, *future, *ast.parse(imports).body, *rest]
    return ast.unparse(tree) + "\n"


def exam_package() -> Iterator[tuple[str, str]]:
    """Yield each file of the package without the answers: its path, and its text."""
    for path, source in package_files():
        answer = next((one for one in ANSWERS if f"{path}/".startswith(f"{one.path}/")), None)
        if answer is not None and not path.endswith("__init__.py"):
            source = empty(source, path.removesuffix(".py").replace("/", "."), answer)
        taken = " ".join(STAND_INS.get(path, ())).replace(" ", ", ")
        stands = f"\nfrom labsupport.stand_ins import {taken}\n" if taken else ""
        yield f"labsupport/{path}", source + stands + _ADDED.get(path, "")
    for name in ("left_out.py", "stand_ins.py"):
        own = Path(__file__).with_name(name)
        yield f"labsupport/{name}", own.read_text(encoding="utf-8")


def package_files() -> Iterator[tuple[str, str]]:
    """Yield the path, relative to the package, and the text of each of its Python files."""
    package = paths.project_root() / "labsupport"
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        # Not a copy that JupyterLab or an editor keeps, such as x-checkpoint.py.
        if all(part.isidentifier() for part in path.removesuffix(".py").split("/")):
            yield path, file.read_text(encoding="utf-8")


def write_files(target: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write texts to their paths below `target`."""
    for path, text in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")


def record_cases(notebooks: list[Path]) -> dict[str, list[Any]]:
    """Run the visible checks of solved notebooks; return what their references give, by check.

    Raise ReleaseError if a solution does not pass.
    """
    from labsupport import checks  # PyTorch with it, which the program's other commands do without
    from labsupport.checks import cases

    tapes: dict[str, list[Any]] = {}

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


def save_models(file: Path, runs: Sequence[str] = ("attention-h200",)) -> None:
    """Write what the stand-in of `calibrate_run` reads."""
    from labsupport.analysis import calibrate_run

    models = {run: calibrate_run(run)[0] for run in runs}
    stored = {
        run: {"spread": one.spread, "fits": [(key, vars(fit)) for key, fit in one.fits.items()]}
        for run, one in models.items()
    }
    file.write_text(json.dumps(stored), encoding="utf-8")


def exercises_of(notebook: Path) -> Iterator[tuple[str, str]]:
    """Yield a name and the text of all imports of a notebook, then of each solution and check."""
    cells = [cell for cell in read_solved(notebook).cells if cell.kind == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    imports = [ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    yield f"<{notebook.name}: imports>", "\n".join(imports)
    for cell in cells:
        if cell.solution or cell.grade:
            yield f"<{notebook.name}: {cell.grade_id}>", cell.source
