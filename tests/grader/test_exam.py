"""The hand-out: a project that works, without solutions, and an exam that can still judge."""

import ast
import copy
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from typer.testing import CliRunner

from grader import exam, release
from grader.exam import ANSWERS, Answer
from labsupport.checks import cases, textbook
from labsupport.checks.verdict import CheckFailed, mutant
from labsupport.cli import app
from labsupport.course.editions import ReleaseError, student_edition
from labsupport.paths import notebooks_dir
from labsupport.training import DecoderConfig, MemoryOptions, plan_memory

NOTEBOOKS = sorted(notebooks_dir().glob("*.ipynb"))
GIVEN_OUT = {
    *("LICENSE", "Makefile", "README.md", "constraints.txt", "environment.yml", "pyproject.toml"),
    *("data", "labsupport", "notebooks", "scripts", "theory", "binder", ".devcontainer"),
}
QUICK = ("ex-1-1", "ex-1-2", "ex-1-3")  # the exercises of an exam that is made in a second


@pytest.fixture(scope="module")
def quick_notebook(tmp_path_factory):
    """A folder with a solved notebook of three exercises."""
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    own = [c for c in notebook.cells if grade_id(c).startswith(QUICK) and c.cell_type == "code"]
    imports = "import math\n\nimport torch\n\nfrom labsupport import checks"
    hints = "<details><summary>Hint {}: a</summary>".format
    hints = f"{hints(2)}{hints(3)}b</details></details>"
    left_out = "Slower is `flash_torch`. Run `capstone/data_parallel.py`."
    about = nbformat.v4.new_markdown_cell(
        f"Short (`python -m benchmarks\ntasks`). {left_out} Long.{hints}"
    )
    notebook.cells = [about, nbformat.v4.new_code_cell(imports), *own]
    folder = tmp_path_factory.mktemp("solved")
    nbformat.write(notebook, folder / NOTEBOOKS[0].name)
    return folder


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return release.write_project(tmp_path_factory.mktemp("course") / "lab")


@pytest.fixture(scope="module")
def quick_exam(tmp_path_factory, quick_notebook):
    return release.write_project(tmp_path_factory.mktemp("exam") / "lab", quick_notebook, exam=True)


@pytest.fixture(scope="module")
def whole_exam(tmp_path_factory):
    return release.write_project(tmp_path_factory.mktemp("exam") / "lab", exam=True)


def grade_id(cell):
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def start_in(edition, *arguments):
    """Python whose only packages of ours are the edition's, started outside of the project."""
    hidden = ("PYTHONPATH", "LABSUPPORT_ROOT", "PYTEST_CURRENT_TEST")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    # Without `site`, which would add this project's folder where it is installed as editable.
    packages = [path for path in sys.path if path.endswith("-packages")]
    environment["PYTHONPATH"] = os.pathsep.join([str(edition), *packages])
    return subprocess.run(
        [sys.executable, "-P", "-S", *map(str, arguments)],
        cwd=edition.parent,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def run_in(edition, *arguments):
    done = start_in(edition, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- what is absent -------------------------------------------------------------------------------


class Normal(ast.NodeTransformer):
    """Names numbered in their order; no docstrings, annotations and decorators."""

    def __init__(self):
        self.names = {}

    def number(self, name):
        return self.names.setdefault(name, f"n{len(self.names)}")

    def visit_Name(self, node):
        node.id = self.number(node.id)
        return node

    def visit_arg(self, node):
        node.arg, node.annotation = self.number(node.arg), None
        return node

    def visit_FunctionDef(self, node):
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        node.name, node.returns, node.decorator_list = "f", None, []
        return self.generic_visit(node)


def shape(function):
    """The numbers of its statements by kind: quickly told, and the same for the same function."""
    kinds = (ast.Return, ast.Assign, ast.AugAssign, ast.If, ast.For, ast.While)
    nodes = list(ast.walk(function))
    return tuple(sum(isinstance(node, kind) for node in nodes) for kind in kinds)


def functions(source):
    """The functions that compute something: (shape, syntax tree)."""
    found = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    return [(shape(one), one) for one in found if shape(one)[0]]


def normal(function):
    return ast.dump(Normal().visit(copy.deepcopy(function)))


@cache
def solution_functions():
    """The solutions' functions, normalised, by shape."""
    found = defaultdict(set)
    for path in NOTEBOOKS:
        solved = nbformat.read(path, as_version=4)
        for cell, given in zip(solved.cells, student_edition(solved).cells, strict=True):
            if cell.metadata.get("nbgrader", {}).get("solution"):
                stubs = {normal(function) for _, function in functions(given.source)}
                for key, function in functions(cell.source):
                    found[key] |= {normal(function)} - stubs
    return found


def sources(folder):
    """Each piece of Python that a project holds: files, cells, programs in Markdown."""
    for file in folder.rglob("*.py"):
        yield file, file.read_text(encoding="utf-8")
    for file in folder.rglob("*.ipynb"):
        for cell in nbformat.read(file, as_version=4).cells:
            if cell.cell_type == "code":
                yield file, cell.source
    for file in folder.rglob("*.md"):
        text = file.read_text(encoding="utf-8")
        for block in re.findall(r"^```python.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield file, block


def leaks(folder):
    """The files that hold a solution's function."""
    solutions, found = solution_functions(), set()
    assert sum(map(len, solutions.values())) >= 30
    for file, source in sources(folder):
        try:
            known = ((solutions.get(key, ()), one) for key, one in functions(source))
            if any(trees and normal(one) in trees for trees, one in known):
                found.add(file.relative_to(folder).as_posix())
        except SyntaxError:
            assert file.suffix in (".md", ".ipynb"), file  # pseudo-code, or a line of IPython's
    return found


def test_a_course_holds_no_solution_but_the_references_of_the_checks(course):
    assert {str(Path(path).parent) for path in leaks(course)} == {"labsupport/checks"}


def test_an_exam_holds_no_solution(quick_exam):
    assert leaks(quick_exam) == set()


def test_tests_twins_grader_and_history_are_not_handed_out(course, quick_exam):
    assert {path.name for path in course.iterdir()} == GIVEN_OUT | {"capstone"}
    assert {path.name for path in quick_exam.iterdir()} == GIVEN_OUT
    assert [path.name for path in sorted((course / "notebooks").iterdir())] == [
        path.name for path in NOTEBOOKS
    ]
    for path in (course / "notebooks").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "BEGIN SOLUTION" not in text
        assert "HIDDEN TESTS" not in text
        assert not any(cell.get("outputs") for cell in json.loads(text)["cells"])


def test_a_copy_that_an_editor_keeps_is_not_in_it(tmp_path, monkeypatch):
    for name in ("labsupport/a.py", "labsupport/.ipynb_checkpoints/a-checkpoint.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(exam.paths, "project_root", lambda: tmp_path)
    assert [path for path, _ in exam.package_files()] == ["a.py"]


# --- what is there --------------------------------------------------------------------------------


def anchors(text):
    """The anchors of a page's headings."""
    text = re.sub(r"^(```+).*?^\1[ ]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("which", ["course", "quick_exam"])
def test_all_links_lead_somewhere(which, request):
    folder = request.getfixturevalue(which)
    for page in (*folder.rglob("*.md"), *folder.rglob("*.ipynb")):
        text = page.read_text(encoding="utf-8")
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s\\]*)#?([^)\s\\]*)\)", text):
            target = page.parent / path if path else page
            if path.endswith(".ipynb") and which == "quick_exam":
                continue  # of this one there is one notebook
            assert target.exists(), f"{page.name}: {path}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page}: {anchor}"


def test_the_texts_of_an_exam_name_nothing_that_is_left_out(quick_exam, course):
    for page in (*quick_exam.rglob("*.md"), *course.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert "flash_torch" not in text or course in page.parents, page
        commands = set(re.findall(r"`make ([a-z-]+)", text))
        assert commands <= {"help", "setup", "lab", "fetch", "clean"}, page
    notebook = nbformat.read(quick_exam / "notebooks" / NOTEBOOKS[0].name, as_version=4)
    hints = "<details><summary>Hint 2: a</summary></details>"  # the outline is gone
    assert notebook.cells[0].source == f"Short. Long.{hints}"


def test_two_commands_of_the_readme_work_in_a_course(course):
    readme = (course / "README.md").read_text(encoding="utf-8")
    plan = subprocess.run(["make", "-n", "lab", "PY=python"], cwd=course, capture_output=True)
    assert plan.returncode == 0
    assert b"labsupport.cli lab" in plan.stdout
    assert "screenshots" not in (course / "Makefile").read_text(encoding="utf-8")
    assert "make lab" in readme
    assert ".venv/bin/labsupport progress" in readme
    program = "from labsupport.cli import app\nfor word in ('start', 'progress'):\n"
    said = run_in(course, "-c", program + "    app([word], standalone_mode=False)")
    copies = sorted((course / "work").glob("*.ipynb"))
    assert [path.name for path in copies] == [path.name for path in NOTEBOOKS]
    assert "0 of " in said


def test_it_can_be_installed_without_the_grader_and_lists_what_it_can(course):
    listed = subprocess.run(["make"], cwd=course, capture_output=True, text=True).stdout
    assert re.findall(r"^make (\S+)", listed, re.MULTILINE) == ["lab", "fetch", "clean"]
    project = tomllib.loads((course / "pyproject.toml").read_text(encoding="utf-8"))
    assert "entry-points" not in project["project"]
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert all((course / path).exists() for path in packed)


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ReleaseError, match="not an empty folder"):
        release.write_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_command_says_what_it_wrote(quick_notebook, tmp_path):
    command = ["release", "--to", str(tmp_path / "lab"), "--notebooks", str(quick_notebook)]
    said = CliRunner().invoke(app, command)
    assert said.stdout == f"written: {tmp_path / 'lab'}, for `make lab` there\n"


def test_a_solution_that_does_not_pass_stops_the_release(quick_notebook, tmp_path):
    text = next(quick_notebook.iterdir()).read_text(encoding="utf-8")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "01.ipynb").write_text(text.replace("return 2 * batch", "return batch"))
    with pytest.raises(ReleaseError, match=r"ex-1-2-score-memory-bytes.*CheckFailed"):
        release.write_project(tmp_path / "exam", tmp_path / "wrong", exam=True)
    assert not (tmp_path / "exam").exists()


# --- stored cases ---------------------------------------------------------------------------------


def stored(edition, monkeypatch):
    """A function to the edition's check of this name, in this process."""
    monkeypatch.setattr(cases, "FILE", edition / "labsupport" / "checks" / cases.FILE.name)
    return lambda name: cases.stored(getattr(import_module("labsupport.checks"), name))


@pytest.mark.parametrize(
    ("of", "table", "names"),
    [
        ("textbook_attention", textbook.MISTAKES, ("values", "mask", "empty_rows")),
        ("score_bytes", textbook.BYTE_MISTAKES, ("check_score_bytes",)),
        ("longest_that_fits", textbook.LENGTH_MISTAKES, ("check_largest_length",)),
    ],
    ids=["attention", "bytes", "length"],
)
def test_stored_cases_name_each_mistake(quick_exam, monkeypatch, of, table, names):
    check, of = stored(quick_exam, monkeypatch), getattr(textbook, of)
    chosen = [check(n if n.startswith("check") else f"check_textbook_{n}") for n in names]
    for one in chosen:
        one(of)
    for mistake in table:
        with pytest.raises(CheckFailed) as failed:
            for one in chosen:
                one(mutant(of, mistake.edit))
        assert mistake.say in str(failed.value)


def test_an_unknown_mistake_is_located(quick_exam, monkeypatch):
    check = stored(quick_exam, monkeypatch)
    wrong = lambda q, k, v: (v.new_zeros(2, 3, 5, 16), v.new_zeros(2, 3, 5, 7))  # noqa: E731
    with pytest.raises(CheckFailed, match="entries are wrong, the first at index"):
        check("check_textbook_values")(wrong)


@pytest.mark.parametrize(
    "value", [(1, [2.5, None]), float("inf"), "text", ([(True, "a")],)], ids=repr
)
def test_what_is_stored_comes_back(value, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "FILE", tmp_path / "cases.safetensors")
    cases.save_cases({"check": [value]}, cases.FILE)
    assert cases.stored_tape("check") == [value]


# --- the package ----------------------------------------------------------------------------------

SOURCE = '''"""How to square."""

from __future__ import annotations

MISTAKES = mistakes("""
Not squared.
    x * x -> x
""")


def square(x: float) -> float:
    """By x * x."""
    return x * x  # the trick


class Squares:
    """Also by x * x."""

    side = 3

    def area(self) -> float:
        return square(self.side)


def shape() -> str:
    return "square"


def check_square(student, seed=0):
    """Squared."""
'''


def test_what_is_emptied_keeps_names_and_needed_functions_and_loses_the_rest():
    text = exam.empty(SOURCE, "squares", Answer("squares.py", "1-1", needed=("shape",)))
    assert "x * x" not in text
    assert "trick" not in text
    assert "side = 3" in text
    assert "def square(x: float) -> float:\n    left_out('squares.square', '1-1')" in text
    assert "return 'square'" in text

    answer = Answer("checks/squares.py", "1-1", gone=("square", "Squares"))
    text = exam.empty(SOURCE, "checks.squares", answer)
    assert "x * x" not in text
    assert "MISTAKES = ()" in text
    assert "return 'square'" in text
    assert "@stored\ndef check_square" in text
    assert text.count("waits_for('1-1')") == 2


def test_each_line_of_the_table_of_answers_names_what_is_there():
    files = dict(exam.package_files())
    for answer in ANSWERS:
        sources = [s for path, s in files.items() if f"{path}/".startswith(f"{answer.path}/")]
        assert sources, answer.path
        for name in (*answer.gone, *answer.needed):
            assert any(f"def {name}(" in s or f"class {name}(" in s for s in sources), name


def test_a_chapter_keeps_its_prose_commands_and_tables_and_loses_its_programs():
    programs = "```python\nx * x\n```\n\n```text\n9\n```\n\nB\n\n```text\nfor each x\n```\n"
    text = release.without_code(f"A\n\n{programs}\nC\n\n```bash\nmake lab\n```\n")
    assert "x * x" not in text
    assert "for each x" not in text
    assert "```text\n9\n```" in text
    assert text.count("not part of the exam edition") == 2
    assert "```bash\nmake lab\n```" in text


# --- slow: the whole exam, and the package for grading --------------------------------------------


RUN_CELLS = """
import contextlib, io, json, linecache, sys, labsupport
print(labsupport.__file__)
for cells in json.load(open(sys.argv[1])):
    scope = {"__name__": "exercises"}
    for name, source in cells:
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, name, "exec"), scope)
        except Exception as error:
            print(json.dumps([name, type(error).__name__, str(error)]))
"""


def failed_in(edition, folder, *notebooks):
    """Run solutions and checks in an edition: kind and message of what fails, by cell's name."""
    cells = [list(exam.exercises_of(notebook)) for notebook in notebooks]
    (folder / "cells.json").write_text(json.dumps(cells))
    first, *lines = run_in(edition, "-c", RUN_CELLS, folder / "cells.json").splitlines()
    assert first == str(edition / "labsupport" / "__init__.py")
    return {name: rest for name, *rest in map(json.loads, lines)}


@pytest.mark.slow
def test_in_the_exam_solutions_pass_and_stubs_are_called_stubs(whole_exam, tmp_path):
    assert leaks(whole_exam) == set()
    assert failed_in(whole_exam, tmp_path, *NOTEBOOKS) == {}
    stubs = [whole_exam / "notebooks" / path.name for path in NOTEBOOKS]
    failed = failed_in(whole_exam, tmp_path, *stubs)
    assert len(failed) >= 60
    assert {kind for kind, _ in failed.values()} == {"CheckFailed"}
    assert all("is not written yet" in said for _, said in failed.values())


def stand_ins(notebook):
    """The cells' imports; each stand-in of a page, called by a function of one's own; its checks.

    A page names a stand-in where it takes the student's function, or the lab's until that passes.
    """
    trees = [
        ast.parse(re.sub(r"^[%!].*$", "", cell.source, flags=re.MULTILINE))
        for cell in nbformat.read(notebook, as_version=4).cells
        if cell.cell_type == "code"
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imports = [ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    yield "", "\n".join(imports)
    for node in nodes:
        if not (isinstance(node, ast.Call) and "solution_or_reference" in ast.unparse(node.func)):
            continue
        _, ours, *which = map(ast.unparse, node.args)
        plain = [check for check in which if check.startswith("checks.check_")]
        if plain and not ours.startswith("labs_chunks"):  # a function of the page, below
            for check in plain:
                yield f"{ours} | {check}", f"{check}(lambda *a, **o: ({ours})(*a, **o))"


def test_the_peaks_that_an_exam_knows_are_those_of_the_plan():
    text = Path(exam.__file__).with_name("stand_ins.py").read_text(encoding="utf-8")
    known = ast.literal_eval(re.search(r"^PEAKS = (.*)$", text, re.MULTILINE)[1])
    for (vocabulary, seqlen), peak in known.items():
        config = DecoderConfig.preset("tiny", vocab_size=vocabulary)
        savings = MemoryOptions(attention="standard")
        assert plan_memory(config, seqlen=seqlen, savings=savings).peak_bytes == peak


def test_stand_ins_are_found():
    found = [name for notebook in NOTEBOOKS for name, _ in stand_ins(notebook)]
    assert {"checks.choose | checks.check_choice_limits"} < set(found)
    assert len(found) > 30


@pytest.mark.slow
def test_in_the_exam_no_stand_in_that_a_page_names_passes_a_check(whole_exam, tmp_path):
    cells = [list(stand_ins(whole_exam / "notebooks" / path.name)) for path in NOTEBOOKS]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    _, *lines = run_in(whole_exam, "-c", RUN_CELLS, tmp_path / "cells.json").splitlines()
    failed = {name for name, *_ in map(json.loads, lines)}
    passed = {name for cell in cells for name, _ in cell} - failed - {""}
    # The repaired line of an optional exercise without points: any right kernel may do it.
    assert {name for name in passed if "check_careful_attention" not in name} == set()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("solved", [True, False], ids=["solved", "unsolved"])
def test_each_cell_of_an_exam_runs_or_says_in_a_line_what_it_waits_for(
    whole_exam, tmp_path, monkeypatch, path, solved
):
    for one in NOTEBOOKS:  # the second reads functions of the first
        given = nbformat.read(whole_exam / "notebooks" / one.name, as_version=4)
        for cell, answer in zip(given.cells, nbformat.read(one, as_version=4).cells, strict=True):
            if solved and answer.metadata.get("nbgrader", {}).get("solution"):
                cell.source = answer.source
        nbformat.write(given, tmp_path / one.name)
    monkeypatch.setenv("PYTHONPATH", str(whole_exam))
    notebook = nbformat.read(tmp_path / path.name, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("print(checks.__file__)"))
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, allow_errors=True, resources=folder).execute()
    assert notebook.cells[-1].outputs[0].text.startswith(str(whole_exam))
    waits = ["not part of the exam edition", "waits for one above"]
    waits += [] if solved else ["waits for", "is not written yet"]
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                said = "\n".join(output.traceback).splitlines()
                assert len(said) <= 2, f"cell {number}: {said[-20:]}"
                assert any(words in " ".join(said) for words in waits), f"cell {number}: {said}"
            assert not re.search(r"\bnan (times|MiB|ms)\b", output.get("text", "")), number


# One line of each solution, wrong, and the words by which the check names that.
WRONG = {
    "01": {
        "ex-1-1": ("/ math.sqrt(q.shape[-1])", "", "not divided by sqrt(head_dim)"),
        "ex-1-2": ("return 2 * batch", "return batch", "That is one matrix"),
    },
    "03": {"ex-3-5": ("2 * world - 1 - rank", "rank + world", "chunk r + world")},
    "04": {"ex-4-1": ("* dtype.itemsize", "* 4", "you always count 4 bytes")},
}


@pytest.mark.slow
@pytest.mark.parametrize("number", WRONG)
def test_in_the_exam_a_mistake_gets_its_name(whole_exam, tmp_path, number):
    (path,) = (path for path in NOTEBOOKS if path.name.startswith(number))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for exercise, (right, wrong, _) in WRONG[number].items():
            if grade_id(cell).startswith(exercise) and cell.metadata.nbgrader.solution:
                assert right in cell.source
                cell.source = cell.source.replace(right, wrong)
    nbformat.write(notebook, tmp_path / path.name)
    failed = failed_in(whole_exam, tmp_path, tmp_path / path.name)
    for exercise, (_, _, words) in WRONG[number].items():
        said = [text for name, (_, text) in failed.items() if exercise in name]
        assert any(words in text for text in said), said


@pytest.mark.slow
def test_every_module_can_still_be_imported(tmp_path):
    exam.write_files(tmp_path, exam.exam_package())
    modules = [
        ".".join(path.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((tmp_path / "labsupport").rglob("*.py"))
        if path.stem != "__main__"
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    run_in(tmp_path, "-c", code, *modules)


@pytest.mark.slow
def test_a_program_of_an_edition_says_in_one_line_that_the_grader_is_not_there(course):
    done = start_in(course, "-m", "labsupport.cli", "grade", "x", "--out", "y")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the package `grader` is not part of this edition" in done.stderr
