"""The solution in a notebook and the reference in the exercise's file are one function."""

import ast
import re

import jupytext
import pytest

from labsupport import checks
from labsupport.paths import notebooks_dir, notebooks_in, project_root

FOLDER = project_root() / "labsupport" / "checks"
SOLUTION = re.compile(r"^### BEGIN SOLUTION\n(.*?)^### END SOLUTION\n", re.MULTILINE | re.DOTALL)
# The notebook's name of a function, and the reference's.
RENAMED = {
    "my_flash_forward": "flash_forward",
    "my_flash_backward": "flash_backward",
}
# Where the two differ, and why.
DIFFERENT = {
    "split_qkv": "the notebook's calls its own `split_heads`",
    "lab_attention": "the notebook's refuses masks and dropout",
    "KVCache": "the notebook's pads both buffers in one line",
    "tile_counts": "the notebook's masks are large: it counts all tiles at once",
    "apply_rope": "the notebook's computes in float32, the reference also in float64",
    "merge_all": "the notebook's computes in float32, the reference in float64",
    "fit_time": "the notebook's shows the least squares",
    "choose": "the notebook's uses pandas, the reference rows that an edit can change",
}


def same(node):
    """The text of a function without what does not matter: name, docstrings, annotations."""
    node.name = ""
    node.decorator_list = []
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(one):
            del one.body[0]
        if isinstance(one, ast.FunctionDef):
            one.returns = None
        if isinstance(one, ast.arg):
            one.annotation = None
    return ast.unparse(node)


def functions(source):
    """Each function and class of a source, with its own text."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node, ast.get_source_segment(source, node)


@pytest.fixture(scope="module")
def references():
    return {
        (file.name[3:6], node.name): same(node)
        for file in FOLDER.glob("ex_*.py")
        for block in SOLUTION.findall(file.read_text(encoding="utf-8"))
        for node, _ in functions(block)
    }


def test_solutions_are_the_references_but_for_good_reason(references):
    equal, different = set(), set()
    for path in notebooks_in(notebooks_dir()):
        for cell in jupytext.read(path).cells:
            grading = cell.metadata.get("nbgrader", {})
            if not grading.get("solution"):
                continue
            number = grading["grade_id"][3:6].replace("-", "_")
            for node, text in functions(cell.source):
                name = node.name
                known = references.get((number, RENAMED.get(name, name)))
                if known and "### BEGIN SOLUTION" in text:
                    (equal if same(node) == known else different).add(name)
    assert different == DIFFERENT.keys()
    assert len(equal) > 50
    assert RENAMED.keys() <= equal


def test_each_exercise_has_one_file_and_all_its_checks_are_listed():
    numbers = [file.name[3:6] for file in sorted(FOLDER.glob("ex_*.py"))]
    asked = {
        cell.metadata["nbgrader"]["grade_id"][3:6].replace("-", "_")
        for path in notebooks_in(notebooks_dir())
        for cell in jupytext.read(path).cells
        if cell.metadata.get("nbgrader", {}).get("grade_id", "").startswith("ex-")
    }
    assert numbers == sorted(asked)
    for file in FOLDER.glob("ex_*.py"):
        defined = re.findall(r"^def (check_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(defined) == checks.EXERCISES[file.stem]


def test_nothing_of_a_solution_stands_outside_of_its_block():
    """Short lines, such as `return out`, occur everywhere."""
    for file in FOLDER.glob("ex_*.py"):
        text = file.read_text(encoding="utf-8")
        blocks, left = SOLUTION.findall(text), SOLUTION.sub("", text)
        assert blocks or file.stem == "ex_2_5_policy"  # judged by the lab's policies
        lines = {line.strip() for block in blocks for line in block.splitlines()}
        outside = {line.strip() for line in left.splitlines()}
        assert {line for line in lines & outside if len(line) > 40} == set()
        assert not re.search(r"\bMISTAKES = ", left)
