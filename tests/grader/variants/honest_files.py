"""Honest submissions that differ in the file: older, reordered, from other programs, renamed."""

import copy
import json
import os
import shutil
from pathlib import Path

import nbformat

from tests.grader.variants.course import EXERCISES, Copy, Variants, grade_id, solution

honest = Variants(attention=4, memory=3, softmax=4)


@honest(softmax=0)
def older_edition_without_an_exercise(work: Copy) -> None:
    """The copy was made before the lab had the third exercise."""
    work.solve()
    cells = work.notebook.cells
    cells[:] = [c for c in cells if not grade_id(c).startswith(EXERCISES["softmax"])]
    work.notebook.metadata["labsupport"]["edition"] = "0123456789ab"


@honest()
def older_edition_with_fewer_checks(work: Copy) -> None:
    """The copy was made before the lab had some of its checks: today's decide."""
    work.solve()
    for exercise in ("attention", "softmax"):
        work.notebook.cells.remove(work.checks(exercise)[-1])
    work.notebook.metadata["labsupport"]["edition"] = "0123456789ab"


@honest()
def older_edition_with_other_given_text(work: Copy) -> None:
    """Texts and imports were others then."""
    work.solve()
    work.notebook.cells[0].source = "# The course of last year"
    work.notebook.cells[
        1
    ].source = "import math\nimport torch\nfrom labsupport import checks, nothing"
    del work.notebook.metadata["labsupport"]


@honest()
def cells_reordered(work: Copy) -> None:
    """The student moved cells: checks stand before their solutions."""
    work.solve()
    work.notebook.cells.reverse()


@honest()
def check_cells_deleted_by_accident(work: Copy) -> None:
    """The instructor's check cells count, and those are still there."""
    work.solve()
    for cell in work.checks("attention") + work.checks("memory"):
        work.notebook.cells.remove(cell)


@honest()
def prints_added_to_check_cells(work: Copy) -> None:
    """The student wanted to see more."""
    work.solve()
    for cell in work.checks("attention"):
        cell.source = f"print(torch.__version__)\n{cell.source}\nprint('done')"


@honest()
def helper_in_an_own_cell(work: Copy) -> None:
    """A solution that calls a function from a cell that the student added above."""
    work.solve().change("memory", ("2 * batch * heads * seqlen", "both(batch, heads) * seqlen"))
    work.add("def both(batch, heads):\n    return 2 * batch * heads", at=work.index("memory"))


@honest()
def helper_below_its_use(work: Copy) -> None:
    """The helper stands further down; the student ran the cells in another order."""
    work.solve().change("memory", ("2 * batch * heads * seqlen", "both(batch, heads) * seqlen"))
    work.add("def both(batch, heads):\n    return 2 * batch * heads")


@honest()
def helpers_of_helpers(work: Copy) -> None:
    """A chain of own cells: an import, a constant, a function that uses both."""
    at = work.solve().index("memory")
    work.change("memory", ("2 * batch * heads * seqlen", "both(batch, heads) * seqlen"))
    work.add("import operator as op", at=at)
    work.add("MATRICES = 2", at=at + 1)
    work.add("def both(b, h):\n    return op.mul(op.mul(MATRICES, b), h)", at=at + 2)


@honest()
def second_function_in_an_own_cell(work: Copy) -> None:
    """The student split the solution cell; the new half has no grade_id."""
    first, second = solution("memory").split("def longest_that_fits")
    work.solve().write("memory", first)
    work.add(f"def longest_that_fits{second}", at=work.index("memory") + 1)


@honest()
def solution_cell_split(work: Copy) -> None:
    """Split in JupyterLab, which gives both halves the metadata, the grade_id among it."""
    first, second = solution("memory").split("def longest_that_fits")
    work.solve().write("memory", first)
    work.add(f"def longest_that_fits{second}", at=work.index("memory") + 1)
    half = work.notebook.cells[work.index("memory") + 1]
    half.metadata = copy.deepcopy(work.cell("memory").metadata)


@honest()
def own_import_cell(work: Copy) -> None:
    """A library that the lab does not import, in a cell of the student's."""
    work.solve().change("softmax", ("torch.exp(m - shift)", "np.exp((m - shift).numpy())"))
    work.add("import numpy as np", at=2)


@honest()
def torchs_functions_by_pythons_names(work: Copy) -> None:
    """Names that Python has too, imported from a library in a cell of the student's."""
    work.solve().change("softmax", ("block.amax(dim=-1)", "max(block, dim=-1).values"))
    work.add("from torch import exp, max, maximum, sum, full", at=2)


@honest()
def table_filled_in_a_loop(work: Copy) -> None:
    """A dictionary of the student's, with what a loop in another cell puts into it."""
    work.solve().change("memory", ("2 * batch", "SIZES['m'] * batch"))
    work.add("SIZES = {}", at=2).add("for k in 'm':\n    SIZES.update({k: 2})", at=3)


@honest()
def set_by_functions(work: Copy) -> None:
    """What a function sets, and what another one stores, both called in cells of their own."""
    work.solve().change("memory", ("2 * batch", "(MATRICES * SIZES['m']) * batch"))
    work.add("def setup():\n    global MATRICES\n    MATRICES = 2", at=2).add("setup()", at=3)
    work.add("SIZES = {}\ndef put(k, v): SIZES[k] = v", at=4).add("put('m', 1)", at=5)


@honest()
def awaited_and_timed(work: Copy) -> None:
    """What IPython runs in a cell and Python does not: an await, a timed assignment, an indent."""
    work.solve().change("memory", ("2 * batch", "(MATRICES * TIMED * INNER) * batch"))
    work.add("import asyncio\nMATRICES = await asyncio.sleep(0, 2)", at=2)
    work.add("out = %time sum(range(10))\n%time TIMED = 1", at=3).add("    INNER = 1", at=4)


@honest()
def annotations_of_the_future(work: Copy) -> None:
    """Annotations with names that nobody imports, which are never looked up."""
    work.solve().change("memory", ("fits(memory,", "fits(memory: Bytes,"))
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
    work.solve().write("memory", "%%time\n" + solution("memory"))
    work.write("softmax", "%matplotlib inline\n" + solution("softmax") + "\n\n!ls\n?torch.exp")
    work.add("%timeit sum(range(10))").add("%%bash\necho hello").add("%load_ext autoreload")


@honest()
def a_question_in_a_comment(work: Copy) -> None:
    """A magic on top makes the cell IPython's, and a line of code ends with a question."""
    line = "scores = q @ k.mT / math.sqrt(q.shape[-1])"
    work.solve().change("attention", (line, f"{line}  # why the square root?"))
    work.write("attention", "%load_ext autoreload\n" + work.cell("attention").source)


@honest()
def installs_what_is_missing(work: Copy) -> None:
    """A shell line as the only statement of a block."""
    missing = "try:\n    import nothing_of_that_name\nexcept ImportError:\n    !pip --version\n\n"
    work.solve().write("attention", missing + solution("attention"))


@honest()
def outputs_stripped(work: Copy) -> None:
    """A tool removed outputs and execution counts."""
    for cell in work.solve().notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


@honest()
def many_outputs(work: Copy) -> None:
    """All cells were run; tables, pictures and an old error message are stored."""
    new = nbformat.v4.new_output
    for count, cell in enumerate(work.solve().notebook.cells):
        if cell.cell_type == "code":
            cell.execution_count = 90 - count
            cell.outputs = [
                new("stream", name="stdout", text="[ok]\n" * 2000),
                new("display_data", data={"image/png": "iVBORw0KGgo=" * 1000}),
                new("error", ename="ValueError", evalue="old", traceback=["\x1b[31mold"]),
            ]


@honest()
def from_colab(work: Copy) -> None:
    """Google Colab's metadata."""
    work.solve().notebook.metadata.update(
        {
            "colab": {"provenance": [], "gpuType": "T4", "toc_visible": True},
            "accelerator": "GPU",
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "widgets": {"application/vnd.jupyter.widget-state+json": {"version_major": 2}},
        }
    )
    for number, cell in enumerate(work.notebook.cells):
        cell.metadata.update(
            {
                "id": f"Xy{number}",
                "colab": {"base_uri": "https://localhost:8080/"},
                "executionInfo": {"status": "ok", "user": {"displayName": "A"}, "elapsed": 13},
                "outputId": f"{number:08x}",
            }
        )


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
def cell_ids_missing(work: Copy) -> bytes:
    """Format 4.2, as older programs write it: cells without ids, sources as lists of lines."""
    content = json.loads(work.solve().text())
    content["nbformat_minor"] = 2
    for cell in content["cells"]:
        cell.pop("id", None)
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)
    return json.dumps(content).encode()


@honest()
def cell_ids_repeated(work: Copy) -> bytes:
    """Copying cells in an editor gave several the same id."""
    content = json.loads(work.solve().text())
    for cell in content["cells"]:
        cell["id"] = "same"
    return json.dumps(content).encode()


@honest()
def byte_order_mark(work: Copy) -> bytes:
    """An editor on Windows put a byte order mark in front."""
    return b"\xef\xbb\xbf" + work.solve().text().encode()


@honest()
def windows_line_ends(work: Copy) -> bytes:
    """CRLF in the file and in the cells' sources."""
    for cell in work.solve().notebook.cells:
        cell.source = cell.source.replace("\n", "\r\n")
    return work.text().replace("\n", "\r\n").encode()


@honest()
def tabs_for_indentation(work: Copy) -> None:
    """Another editor's indentation."""
    for exercise in ("attention", "memory", "softmax"):
        work.write(exercise, solution(exercise).replace("    ", "\t"))


@honest(file="My solution, FINAL (2).ipynb")
def renamed_file(work: Copy) -> None:
    """The name of the file says nothing; its exercises do."""
    work.solve()


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


@honest(attention=0, memory=0, softmax=0, by_hand=True)
def nothing_handed_in(student: Path, course: Path) -> None:
    """An empty folder: no result at all, and no failure."""
