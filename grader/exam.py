"""The lab for an exam: without the answers to the exercises, and still with working checks.

Two editions of the package are made from `grader.answers`:

- for students (`write_exam_edition`): the lab's FlashAttention in PyTorch and in
  Triton is left out. What models, measurements and checks run on is *sealed*: the modules work, and
  their source is compressed text.
- for the kernel in which a submission is graded (`write_package`): what is sealed for students is
  left out there too, checks included, because the grader checks in a process of its own.

What an examinee can still find: whoever knows Python unseals a module with two lines, or reads the
answers with a debugger while a check compares with them; several sealed functions, such as
`apply_rotary_emb`, can be called instead of written; PyTorch has attention of its own; the lab may
be published. Sealing keeps honest people from reading an answer by accident, and no more. Points
are safe from it only in so far as a submission is graded without those modules, and as the room is
supervised.

A check draws inputs and compares with the right results for them, so it needs the answer. Where
fixed inputs are enough, stored cases take its place (`labsupport.checks.cases.STORED`).
"""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

from grader import exam_files, left_out
from grader.answers import ANSWERS, CHECKS_AS_THEY_ARE, Answer
from grader.left_out import seal
from labsupport import paths
from labsupport.checks import cases
from labsupport.course.editions import ReleaseError, make_edition, solved_notebooks

_KEPT_DECORATORS = ("staticmethod", "classmethod", "property", "dataclass", "triton.jit")
# The grader's own files that run in the student's process.
_KERNEL_SIDE = (
    "grader/__init__.py",
    "grader/grade/__init__.py",
    "grader/grade/inside.py",
    *(f"grader/handover/{name}.py" for name in ("__init__", "codec", "encoding", "wire", "worker")),
)
_NOT_HERE = "not part of the exam edition"

_NO_BACKENDS = f'''

# The exam edition has neither of the lab's own: they answer exercises 1-4, 1-5 and 4-3.
import dataclasses as _dataclasses

BACKENDS = tuple(
    _dataclasses.replace(_entry, missing=lambda: "{_NOT_HERE}")
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

_NO_CHECKS = '''"""The checks are not here: the grader checks what is handed in, elsewhere."""

from typing import Any

from labsupport.checks.verdict import CheckFailed
from labsupport.checks.yours import compare_prediction, solution_or_reference
from labsupport.left_out import LeftOutFunction

__all__ = ["CheckFailed", "compare_prediction", "solution_or_reference", "yours_or_ours"]

yours_or_ours = solution_or_reference  # its name in older copies of the notebooks


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"labsupport.checks has no {name!r}")
    return LeftOutFunction(f"checks.{name}", "that it checks")
'''


def _name_of(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


class _Emptied(ast.NodeTransformer):
    """Functions keep name and signature; a call of them says that they are left out."""

    def __init__(self, module: str, answer: Answer, names: tuple[str, ...]) -> None:
        self.module, self.answer, self.names = module, answer, names
        self.inside: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if node.name in self.answer.needed:
            return node
        self.inside.append(node.name)
        _without_docstring(node)
        self.generic_visit(node)
        self.inside.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self.answer.needed or (self.names and node.name not in self.names):
            return node
        name = ".".join([self.module, *self.inside, node.name])
        node.body = [ast.parse(f"left_out({name!r}, {self.answer.exercise!r})").body[0]]
        node.decorator_list = [d for d in node.decorator_list if _name_of(d) in _KEPT_DECORATORS]
        return node


def _without_docstring(node: ast.ClassDef) -> None:
    if ast.get_docstring(node) is not None:
        node.body[0] = ast.parse("...").body[0]


def empty(source: str, module: str, answer: Answer, names: tuple[str, ...] = ()) -> str:
    """A module whose functions say that they are left out; imports of it still work.

    Args:
        source: the module's text.
        module: its name, for the messages.
        answer: what it answers, and which names others need as they are.
        names: only these functions; all of them if empty.

    Returns:
        the new text. Comments and docstrings are gone too, since they explain the answer.
    """
    tree = ast.parse(source)
    tree = ast.fix_missing_locations(_Emptied(module, answer, names).visit(tree))
    body = tree.body
    if ast.get_docstring(tree) is not None:
        body = body[1:]
    first = 0
    while isinstance(body[first], ast.ImportFrom) and body[first].module == "__future__":
        first += 1
    door = ast.parse("from labsupport.left_out import left_out").body
    tree.body = [*body[:first], *door, *body[first:]]
    head = f'"""{_NOT_HERE.capitalize()}: it answers exercise {answer.exercise}."""\n\n'
    return head + ast.unparse(tree) + "\n"


def sealed(source: str, path: str, exercise: str) -> str:
    """A module that works as `source` does, and cannot be read at a glance."""
    return (
        f'"""Sealed in the exam edition: it answers exercise {exercise}."""\n\n'
        "from labsupport.left_out import unseal\n\n"
        f'exec(unseal("{seal(source)}", "labsupport/{path}"))\n'
    )


def _answer_to(path: str) -> Answer | None:
    for answer in ANSWERS:
        if path == answer.path or path.startswith(f"{answer.path}/"):
            return answer
    return None


def exam_package(for_grading: bool) -> Iterator[tuple[str, str]]:
    """The package without the answers.

    Args:
        for_grading: for the kernel of a submission that is graded, not for students.

    Yields:
        each file's path, relative to the package's parent folder, and its text.

    Raises:
        ValueError: an entry of `ANSWERS` names a file or function that is not there (any more).
    """
    package = paths.project_root() / "labsupport"
    unused = {answer.path for answer in ANSWERS}
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        if not all(part.isidentifier() for part in path.removesuffix(".py").split("/")):
            continue  # a copy that JupyterLab or an editor keeps, such as x-checkpoint.py
        source = file.read_text(encoding="utf-8")
        answer = _answer_to(path)
        if answer is not None:
            unused.discard(answer.path)
            source = _without_answer(source, path, answer, for_grading)
        elif path in _ADDED:
            source += _ADDED[path]
        elif path.startswith("checks/") and path.split("/")[1] not in CHECKS_AS_THEY_ARE:
            if for_grading:
                continue
            name = path.split("/")[1].removesuffix(".py")
            stored = name in cases.STORED
            source = cases.stored_source(name) if stored else sealed(source, path, "that it checks")
        elif path == "checks/__init__.py" and for_grading:
            source = _NO_CHECKS
        yield f"labsupport/{path}", source
    if unused:
        raise ValueError(f"ANSWERS names files that are not there: {', '.join(sorted(unused))}")
    yield "labsupport/left_out.py", Path(left_out.__file__).read_text(encoding="utf-8")


def _without_answer(source: str, path: str, answer: Answer, for_grading: bool) -> str:
    names = (*answer.needed, *answer.gone, *answer.gone_in_grading)
    missing = [name for name in names if f"def {name}(" not in source]
    if missing:
        raise ValueError(f"ANSWERS: {path} has no {', '.join(missing)} any more")
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if not source.strip() or path.endswith("__init__.py"):
        return source
    if answer.always or (answer.sealed and not for_grading):
        gone = answer.gone + (answer.gone_in_grading if for_grading else ())
        if gone:
            source = empty(source, module, answer, gone)
        return sealed(source, path, answer.exercise)
    return empty(source, module, answer)


def write_package(target: Path) -> Path:
    """Write the package on which a submission is graded; it holds no answer and no check.

    Args:
        target: a folder to put on the kernel's path; `labsupport/` is made in it, and `grader/`
            with what runs beside the student's code.

    Returns:
        the package's folder.

    Raises:
        FileExistsError: `target` holds a `labsupport` already.
        OSError: it cannot be written.
    """
    package = _write(target, for_grading=True)
    for path in _KERNEL_SIDE:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).parent.parent / path, target / path)
    # `paths.project_root()` then finds this folder, and nothing of the real one.
    (target / "pyproject.toml").write_text("", encoding="utf-8")
    return package


def write_exam_edition(target: Path, notebooks: Path | None = None) -> Path:
    """Write the project as students get it in an exam: a folder in which `make lab` works.

    It holds the student notebooks (and no text twins of them), the package without the answers,
    the data, the theory without its programs, and what installs all of it. It holds neither tests
    and scripts nor the history, which contain the answers too.

    Args:
        target: the folder; it must not exist, or be empty.
        notebooks: the folder of the solved notebooks; the lab's own if None.

    Returns:
        `target`.

    Raises:
        ReleaseError: a notebook is refused, or `target` holds something.
        OSError: the folder cannot be written to.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ReleaseError(f"{target} is not an empty folder; choose another one with --to")
    root = paths.project_root()
    editions = [make_edition(source) for source in solved_notebooks(notebooks)]
    texts = {f"notebooks/{edition.name}": edition.text for edition in editions}
    for page in sorted((root / "theory").glob("*.md")):
        texts[f"theory/{page.name}"] = exam_files.without_code(page.read_text(encoding="utf-8"))
    for name, cut in (("Makefile", exam_files.makefile), ("pyproject.toml", exam_files.pyproject)):
        texts[name] = cut((root / name).read_text(encoding="utf-8"))
    texts["README.md"] = exam_files.README
    target.mkdir(parents=True, exist_ok=True)
    for name in ("data", "theory/figures", "scripts/jupyterlab"):
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns(".*", "upkeep"))
    for name in ("constraints.txt", "environment.yml", "LICENSE"):
        shutil.copy(root / name, target / name)
    shutil.copy(root / "scripts" / "setup.sh", target / "scripts" / "setup.sh")
    for name, text in texts.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    _write(target, for_grading=False)
    return target


def _write(target: Path, *, for_grading: bool) -> Path:
    package = target / "labsupport"
    package.mkdir(parents=True)
    for path, text in exam_package(for_grading):
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return package
