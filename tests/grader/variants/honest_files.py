"""Honest submissions that differ in the file: older, reordered, from other programs, renamed."""

import copy
import json
import os
import shutil
from pathlib import Path

from tests.grader.variants.course import EXERCISES, Copy, Variants, grade_id, solution

honest = Variants(attention=5, leak=2, softmax=6)


@honest()
def a_first_attempt_above(work: Copy) -> None:
    """The cell was copied: the wrong attempt is above the right one, with the same metadata."""
    at = work.solve().index("attention")
    first = copy.deepcopy(work.cell("attention"))
    first.source = "def textbook_attention(q, k, v, mask=None):\n    return v, v"
    work.notebook.cells.insert(at, first)


@honest(attention=0, softmax=0)
def only_the_leak(work: Copy) -> None:
    """One exercise solved, in the middle; the others are as they were handed out."""
    work.solve("leak")


@honest(attention=0)
def a_library_that_is_not_there(work: Copy) -> None:
    """An import that fails, then a use of its name."""
    work.solve().change(
        "attention", ("    scores = q", "    rearrange(q, 'a b -> b a')\n    scores = q")
    )
    work.add("from einops_that_is_not_here import rearrange", at=2)


@honest(softmax=0)
def older_edition_without_an_exercise(work: Copy) -> None:
    """The copy was made before the lab had the third exercise."""
    work.solve()
    cells = work.notebook.cells
    cells[:] = [c for c in cells if not grade_id(c).startswith(EXERCISES["softmax"])]
    work.notebook.metadata["labsupport"]["edition"] = "0123456789ab"


@honest()
def cells_reordered(work: Copy) -> None:
    """The student moved cells: checks stand before their solutions."""
    work.solve()
    work.notebook.cells.reverse()


@honest()
def helpers_of_helpers(work: Copy) -> None:
    """A chain of own cells: an import, a constant, a function that uses both."""
    at = work.solve().index("leak")
    work.change("leak", ("min(gap, seqlen)", "both(gap, seqlen)"))
    work.add("import operator as op", at=at)
    work.add("LEAST = 0", at=at + 1)
    work.add("def both(a, b):\n    return op.add(LEAST, min(a, b))", at=at + 2)


@honest()
def second_function_in_an_own_cell(work: Copy) -> None:
    """The student split the solution cell; the new half has no grade_id."""
    first, second = solution("leak").split("def repaired")
    work.solve().write("leak", first)
    work.add(f"def repaired{second}", at=work.index("leak") + 1)


@honest()
def solution_cell_split(work: Copy) -> None:
    """Split in JupyterLab, which gives both halves the metadata, the grade_id among it."""
    first, second = solution("leak").split("def repaired")
    work.solve().write("leak", first)
    work.add(f"def repaired{second}", at=work.index("leak") + 1)
    half = work.notebook.cells[work.index("leak") + 1]
    half.metadata = copy.deepcopy(work.cell("leak").metadata)


@honest()
def torchs_functions_by_pythons_names(work: Copy) -> None:
    """Names that Python has too, imported from a library in a cell of the student's."""
    work.solve().change("softmax", ("block.amax(-1)", "max(block, -1).values"))
    work.add("from torch import exp, max, maximum, sum, full", at=2)


@honest()
def set_by_functions(work: Copy) -> None:
    """Globals that functions set and store, called in cells of their own."""
    work.solve().change("leak", ("min(gap, seqlen)", "min(gap, seqlen) * ONE * SIZES['m']"))
    work.add("def setup():\n    global ONE\n    ONE = 1", at=2).add("setup()", at=3)
    work.add("SIZES = {}\ndef put(k, v): SIZES[k] = v", at=4).add("put('m', 1)", at=5)


@honest()
def awaited_and_timed(work: Copy) -> None:
    """Code for IPython that is none for Python: an await, a timed assignment, an indent."""
    work.solve().change("leak", ("min(gap, seqlen)", "min(gap, seqlen) * ONE * TIMED * INNER"))
    work.add("import asyncio\nONE = await asyncio.sleep(0, 1)", at=2)
    work.add("out = %time sum(range(10))\n%time TIMED = 1", at=3).add("    INNER = 1", at=4)


@honest()
def annotations_of_the_future(work: Copy) -> None:
    """Annotations with names that nobody imports, which are never looked up."""
    work.solve().change("leak", ("repaired(x,", "repaired(x: Tokens,"))
    work.add("from __future__ import annotations", at=1)


@honest()
def own_cells_that_fail(work: Copy) -> None:
    """Experiments that nothing depends on: one raises, one is no Python, one would take hours."""
    work.solve().add("1 / 0", at=2).add("this is no Python", at=3)
    work.add("while True:\n    pass").add("raise SystemExit")


@honest()
def ten_own_experiments(work: Copy) -> None:
    """Many cells with measurements and notes between the exercises."""
    work.solve()
    for number in range(10):
        work.add(f"import time\n\ntime.sleep({1000 + number})", at=3 + number)
        work.add(f"Note {number}: slower than I thought.", kind="markdown")


@honest()
def magics(work: Copy) -> None:
    """Timing magics and a shell line, in a solution cell and in own cells."""
    work.solve().write("leak", "%%time\n" + solution("leak"))
    shown = "%matplotlib inline\n%config InlineBackend.figure_format = 'retina'\n%load_ext nothing"
    work.write("softmax", f"{shown}\n{solution('softmax')}\n\n!ls\n?torch.exp")
    work.add("%timeit sum(range(10))").add("%%bash\necho hello").add("%load_ext autoreload")


@honest()
def from_vs_code(work: Copy) -> None:
    """VS Code's metadata, and the name of a virtual environment that is not here."""
    work.solve().notebook.metadata.update(
        {
            "kernelspec": {
                "name": "lab-env",
                "display_name": "lab-env (3.12)",
                "language": "python",
            },
            "language_info": {
                "name": "python",
                "version": "3.12.1",
                "nbconvert_exporter": "python",
            },
            "vscode": {"interpreter": {"hash": "0" * 64}},
        }
    )
    for cell in work.notebook.cells:
        cell.metadata["vscode"] = {"languageId": "python"}


@honest()
def cell_ids_repeated(work: Copy) -> bytes:
    """Copying cells in an editor gave several the same id."""
    content = json.loads(work.solve().text())
    for cell in content["cells"]:
        cell["id"] = "same"
    return json.dumps(content).encode()


@honest(file="My solution, FINAL (2).ipynb")
def windows_line_ends(work: Copy) -> bytes:
    """CRLF and tabs in the cells, a byte order mark, no ids, and a name that says nothing."""
    work.solve()
    for cell in work.notebook.cells:
        cell.source = cell.source.replace("    ", "\t").replace("\n", "\r\n")
    content = json.loads(work.text())
    content["nbformat_minor"] = 2
    for cell in content["cells"]:
        cell.pop("id", None)
    return b"\xef\xbb\xbf" + json.dumps(content, indent=1).replace("\n", "\r\n").encode()


@honest(by_hand=True)
def handed_in_twice(student: Path, course: Path) -> None:
    """An older attempt lies beside the final one: the newest counts."""
    student.mkdir(exist_ok=True)
    older, newer = student / "01-Small.ipynb", student / "01-Small (1).ipynb"
    older.write_text(Copy(course).text())
    newer.write_text(Copy(course).solve().text())
    os.utime(older, (1_700_000_000, 1_700_000_000))


@honest(by_hand=True)
def checkpoints_beside(student: Path, course: Path) -> None:
    """Jupyter's folder of checkpoints, with an older state in it, and an unrelated data file."""
    (student / ".ipynb_checkpoints").mkdir(parents=True)
    (student / "01-Small.ipynb").write_text(Copy(course).solve().text())
    checkpoint = student / ".ipynb_checkpoints" / "01-Small-checkpoint.ipynb"
    checkpoint.write_text(Copy(course).text())
    (student / "data.csv").write_text("a,b\n1,2\n")
    shutil.copy(checkpoint, student / "notes.txt")
