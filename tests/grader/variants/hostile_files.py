"""Hostile or broken notebooks: cells, metadata and files that a text of code cannot show.

Where only what lies around the work is strange, the student has its points.
"""

import json
import os
from pathlib import Path

import nbformat

from tests.grader.variants.course import EXERCISES, WRONG, Copy, Variants, solution

NOTHING = {"attention": 0, "leak": 0, "softmax": 0}
hostile = Variants(attention=5, leak=2, softmax=6)


@hostile(attention=0)
def check_cells_edited(work: Copy) -> None:
    """The checks of the copy say yes; they also claim 100 points each."""
    work.solve().write("attention", WRONG)
    for cell in work.checks("attention"):
        cell.source = "print('[ok] everything')"
        cell.metadata.nbgrader.update(points=100, locked=False)


@hostile(attention=0)
def check_cells_deleted(work: Copy) -> None:
    """Leave out the checks: without a check there may be no failure."""
    work.solve().write("attention", WRONG)
    for cell in work.checks("attention"):
        work.notebook.cells.remove(cell)


@hostile(attention=0)
def solution_cell_as_markdown(work: Copy) -> None:
    """A right solution, but as text: Jupyter would not run it."""
    cell = work.solve().cell("attention")
    cell.cell_type = "markdown"
    cell.pop("outputs"), cell.pop("execution_count")


@hostile(attention=0)
def check_cells_that_grade_themselves(work: Copy) -> None:
    """Check cells are declared solutions, so that their text is the student's."""
    work.solve().write("attention", WRONG)
    for cell in work.checks("attention"):
        cell.metadata.nbgrader.update(solution=True, grade=True, task=False)
        cell.source = "pass"


@hostile(attention=0)
def repeated_check_cells(work: Copy) -> None:
    """A check that passes, a hundred times: of a solved exercise, under another's name."""
    work.solve().write("attention", WRONG)
    passing = work.cell("leak", "rows")
    for number in range(100):
        work.add(passing.source)
        identifier = EXERCISES["attention"] + ("-values" if number % 2 else "-mask")
        made = {**passing.metadata.nbgrader, "grade_id": identifier, "points": 50}
        work.notebook.cells[-1].metadata["nbgrader"] = made


@hostile(attention=0)
def strange_metadata(work: Copy) -> None:
    """Points as text, schemas that do not exist, grade_ids that are paths or no text at all."""
    work.solve().write("attention", WRONG)
    for number, cell in enumerate(work.checks("attention")):
        cell.metadata.nbgrader.update(points="1e9", schema_version=-1, cell_type="code")
        cell.metadata.nbgrader["grade_id"] = ["../../etc/passwd", ["x"], {"a": 1}][number % 3]
    work.notebook.metadata["nbgrader"] = {"points": 1000, "status": "graded"}
    work.notebook.metadata["kernelspec"] = {"name": "../../evil", "argv": ["touch", "/tmp/evil"]}


@hostile(attention=0)
def unreadable_source(work: Copy) -> bytes:
    """Half of a surrogate pair, NUL bytes and control characters in a source."""
    work.solve().write("attention", f"# \ud800 \x00 \x0c \x1b[2J \u2028\n{WRONG}")
    return json.dumps(work.notebook).encode()


def _source(name: str, source: str, why: str) -> None:
    def build(work: Copy) -> None:
        work.solve().write("attention", source)

    build.__name__, build.__doc__ = name, why
    hostile(attention=0)(build)


_source("deep_parentheses", "x = " + "(" * 50_000 + ")" * 50_000, "Brackets that exhaust a parser.")
_source("unfinished_string", '"""' + "never closed\n" * 1000, "The rest of the notebook, quoted?")
_source("coroutine", solution("attention").replace("def ", "async def "), "Awaited by nobody.")
_source(
    "many_globals",
    "def f():\n    global " + ", ".join(f"a{i}" for i in range(8000)) + "\n"
    "    " + " = ".join(f"a{i}" for i in range(8000)) + " = 0\n" + WRONG,
    "Names whose use takes long to find out.",
)


@hostile(notebook="03-Mixed", tiled=0, half=5)
def through_another_exercise(work: Copy) -> None:
    """An exercise that may use attention, moved up, gives it to one that may not."""
    work.solve().write(
        "tiled",
        "def my_flash_forward(q, k, v, is_causal, block_q, block_k):\n"
        "    scores = q @ k.mT / math.sqrt(q.shape[-1])\n"
        "    if is_causal:\n"
        "        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool)"
        ".tril(k.shape[-2] - q.shape[-2]), -torch.inf)\n"
        "    return math.soft(q, k, v, causal=is_causal), scores.logsumexp(-1)",
    )
    cells = work.notebook.cells
    cells.insert(2, cells.pop(work.index("half")))
    cells[2].source += "\n\nmath.soft = attention"


@hostile(**NOTHING)
def invalid_json(work: Copy) -> bytes:
    """A download that stopped half way."""
    return work.solve().text().encode()[:3000]


@hostile()
def four_thousand_cells(work: Copy) -> None:
    """A right solution among many cells, which define the same helpers again and again."""
    work.solve()
    for number in range(4000):
        cell = nbformat.v4.new_code_cell(f"def helper_{number % 7}(x):\n    return x + {number}")
        work.notebook.cells.append(cell)


@hostile(by_hand=True)
def hard_link_to_the_instructor(student: Path, course: Path) -> None:
    """A second name of the solved notebook's own file: right, and flagged by its markers."""
    os.link(course / "01-Small.ipynb", student / "01-Small.ipynb")


@hostile(by_hand=True)
def surrounded_by_traps(student: Path, course: Path) -> None:
    """Everything that pytest, Python, IPython and Jupyter would pick up from a folder."""
    (student / "01-Small.ipynb").write_text(Copy(course).solve().text())
    trap = "import os\nos.system('touch \"$LABSUPPORT_TEST_CANARY\"')\n"
    packages = ("labsupport/__init__.py", "grader/__init__.py")
    for name in (*packages, "conftest.py", "sitecustomize.py", "torch.py", "x.pth"):
        (student / name).parent.mkdir(exist_ok=True)
        (student / name).write_text(trap)
    (student / "labsupport" / "checks.py").write_text(trap)
    (student / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (student / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-k nothing'\n")
    (student / ".ipython/profile_default/startup").mkdir(parents=True)
    (student / ".ipython/profile_default/startup/00.py").write_text(trap)
    (student / ".env").write_text("PYTHONPATH=.\n")
    (student / "results.jsonl").write_text("{}\n")
