"""A small course, cut from the lab's first notebook, and a student's copy of it.

The exercises are the lab's own, word for word: textbook attention, a leaking mask and the running
softmax in `01-Small`, the tiled forward in `02-Tiled`. What lies between them is left out, so that
a test may grade many submissions.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labsupport.course.editions import make_edition
from labsupport.paths import notebooks_dir

EXERCISES = {
    "attention": "ex-1-1-textbook-attention",
    "leak": "ex-1-8-fault",
    "softmax": "ex-1-3-online-softmax",
    "tiled": "ex-1-4-tiled-forward",
    "half": "ex-1-6-half-precision",
}
POINTS = {"attention": 5, "leak": 2, "softmax": 6, "tiled": 9, "half": 5}
NOTEBOOKS = {
    "01-Small": ("attention", "leak", "softmax"),
    "02-Tiled": ("tiled",),
    "03-Mixed": ("tiled", "half"),
}

IMPORTS = (
    "import math\n\nimport torch\n\nfrom labsupport import checks\n"
    "from labsupport.attention import attention"
)
# Stands for the lab's long measurements. A grader that ran it would use up every time limit.
LONG_MEASUREMENT = "import time\n\ntime.sleep(100_000)"


def grade_id(cell: NotebookNode) -> str:
    return str(cell.metadata.get("nbgrader", {}).get("grade_id", ""))


@cache
def _lab() -> NotebookNode:
    (first,) = notebooks_dir().glob("01-*.ipynb")
    read = partial(nbformat.read, as_version=4)
    notebook = read(first)
    notebook.cells += read(notebooks_dir() / "further" / "masks.ipynb").cells
    return notebook


def _solved(exercises: Iterable[str]) -> NotebookNode:
    new = nbformat.v4
    cells = [new.new_markdown_cell("# A small course"), new.new_code_cell(IMPORTS)]
    for exercise in exercises:
        prefix = EXERCISES[exercise]
        cells.append(new.new_markdown_cell(f"## {prefix}\n\nRead the chapter first."))
        cells += [copy.deepcopy(c) for c in _lab().cells if grade_id(c).startswith(prefix)]
        cells.append(new.new_code_cell(LONG_MEASUREMENT))
    for cell in cells:
        cell.pop("outputs", None) if cell.cell_type == "markdown" else cell.update(outputs=[])
    return new.new_notebook(cells=cells, metadata=copy.deepcopy(_lab().metadata))


def write_course(folder: Path) -> None:
    folder.mkdir()
    for name, exercises in NOTEBOOKS.items():
        nbformat.write(_solved(exercises), folder / f"{name}.ipynb")


@cache
def _edition(name: str, folder: Path) -> str:
    return make_edition(folder / f"{name}.ipynb").text


@cache
def solution(exercise: str) -> str:
    """The cell of a student who solved the exercise: the solution, without markers."""
    (cell,) = (c for c in _lab().cells if grade_id(c) == EXERCISES[exercise])
    lines = cell.source.split("\n")
    return "\n".join(line for line in lines if not re.search(r"### (BEGIN|END) ", line))


class Copy:
    """A student's copy of a notebook's edition; the methods do what a student does in Jupyter."""

    def __init__(self, folder: Path, name: str = "01-Small") -> None:
        self.name = name
        self.notebook: NotebookNode = nbformat.reads(_edition(name, folder), as_version=4)

    def cell(self, exercise: str, check: str = "") -> NotebookNode:
        return self.notebook.cells[self.index(exercise, check)]

    def index(self, exercise: str, check: str = "") -> int:
        wanted = EXERCISES[exercise] + (f"-{check}" if check else "")
        return [grade_id(cell) for cell in self.notebook.cells].index(wanted)

    def checks(self, exercise: str) -> list[NotebookNode]:
        prefix = EXERCISES[exercise] + "-"
        return [cell for cell in self.notebook.cells if grade_id(cell).startswith(prefix)]

    def write(self, exercise: str, source: str) -> "Copy":
        self.cell(exercise).source = source
        return self

    def solve(self, *exercises: str) -> "Copy":
        """Write the right solution into these exercises, or into all."""
        for exercise in exercises or NOTEBOOKS[self.name]:
            self.write(exercise, solution(exercise))
        return self

    def change(self, exercise: str, *changes: tuple[str, str]) -> "Copy":
        """Replace text in the solution cell, each old text being there."""
        cell = self.cell(exercise)
        for old, new in changes:
            assert old in cell.source, f"the solution no longer contains {old!r}"
            cell.source = cell.source.replace(old, new)
        return self

    def add(self, source: str, *, at: int | None = None, kind: str = "code") -> "Copy":
        """Put a cell of the student's own at an index, or at the end."""
        make = getattr(nbformat.v4, f"new_{kind}_cell")
        cells = self.notebook.cells
        cells.insert(len(cells) if at is None else at, make(source))
        return self

    def text(self) -> str:
        return nbformat.writes(self.notebook)


@dataclass(frozen=True)
class Variant:
    """One submission, and the points that it deserves by exercise.

    Where they are undeserved, it is `flagged`; with `atmost` it may get fewer.
    """

    name: str
    points: dict[str, int]
    hand_in: Callable[[Path, Path], None] = field(repr=False)
    why: str
    flagged: bool = False
    atmost: bool = False


WRONG = "def textbook_attention(q, k, v, mask=None):\n    return v, v\n"
_ATTENDS = """
def my_flash_forward(q, k, v, is_causal, block_q, block_k):
    n, m = q.shape[-2], k.shape[-2]
    mask = torch.ones(n, m, dtype=torch.bool)
    if is_causal:
        mask = mask.tril(m - n)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    return attend(q, k, v, attn_mask=mask), lse
"""
_OUT = "    out = torch.zeros_like(q)"


def read_variants(*files: Path) -> dict[str, Variant]:
    """Read submissions from texts of blocks `--- NAME (WHERE) POINTS: SENTENCE` and code.

    Where the code goes:
        cell: the first exercise's cell, above a wrong function if it defines none; no points.
        call: the body of the first exercise's function; no points.
        beside: above the first exercise's solution.
        attention, leak, softmax, tiled: it is that exercise's cell.
        attends: it binds `attend`, with which the tiled forward computes; no points for that.
        hides: in the solution of the tiled forward.
        edit_attention (and so on): edits of that exercise's solution, a line each: old -> new.
        work, mixed: it runs here, changes the solved `work` (a `Copy`) or puts files beside it into
            the folder `student`; its `data`, if there are, are handed in instead, as `name`.
    """
    found: dict[str, Variant] = {}
    head = re.compile(r"^--- (\S+) \((\w+)\)([^:]*): (.*)\n", re.MULTILINE)
    for file in files:
        _, *parts = head.split(file.read_text(encoding="utf-8"))
        usual = POINTS if file.stem == "honest" else POINTS | {"attention": 0, "tiled": 0}
        for name, where, said, why, code in zip(*(parts[i::5] for i in range(5)), strict=True):
            assert name not in found, f"two variants are called {name}"
            tiled = where in ("tiled", "attends", "hides", "edit_tiled")
            notebook = "03-Mixed" if where == "mixed" else "02-Tiled" if tiled else "01-Small"
            points = usual | {key: int(n) for key, n in re.findall(r"(\w+)=(\d)", said)}
            found[name] = Variant(
                name,
                {one: points[one] for one in NOTEBOOKS[notebook]},
                partial(_hand_in, notebook, where, code.strip("\n")),
                why,
                "flagged" in said,
                "atmost" in said,
            )
    return found


def _hand_in(notebook: str, where: str, code: str, student: Path, course: Path) -> None:
    work = Copy(course, notebook).solve()
    student.mkdir(parents=True)
    exercise = where.removeprefix("edit_")
    exercise = exercise if exercise in EXERCISES else NOTEBOOKS[notebook][0]
    if where in ("work", "mixed"):
        own = {"work": work, "student": student, "course": course, "name": f"{notebook}.ipynb"}
        names = globals() | {"json": json, "os": os} | own
        exec(code, names)
        if "data" not in names:
            names["data"] = names["work"].text().encode()
        if names["data"]:
            (student / names["name"]).write_bytes(names["data"])
        return
    if where == "call":
        lines = "\n".join(f"    {line}" for line in code.split("\n"))
        code = f"def textbook_attention(q, k, v, mask=None):\n{lines}\n"
    elif where == "cell" and "def textbook_attention" not in code.split("exec(")[0]:
        code = f"{code}\n\n\n{WRONG}"
    elif where == "beside":
        code = f"{code}\n\n\n{solution('attention')}"
    elif where == "attends":
        code += _ATTENDS
    elif where == "hides":
        code = solution("tiled").replace(_OUT, f"{code}\n{_OUT}")
    elif where.startswith("edit_"):
        edits = (line.replace("\\n", "\n").partition(" ->") for line in code.split("\n"))
        work.change(exercise, *((old, new.removeprefix(" ")) for old, _, new in edits))
        code = work.cell(exercise).source
    (student / f"{notebook}.ipynb").write_text(work.write(exercise, code).text())
