"""The exam edition: no answer can be read in it, and its checks still work."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

from grader import exam, exam_files
from grader.answers import ANSWERS, Answer
from grader.left_out import LeftOutError, LeftOutFunction, seal, unseal
from labsupport.course.editions import ReleaseError
from labsupport.paths import notebooks_dir
from tests.grader.leaks import leaks, secret_lines

NOTEBOOKS = sorted(notebooks_dir().glob("*.ipynb"))
# How the package takes the measured rows of a table. It says nothing of an exercise.
IDIOMS = {'ran = table[table.status == "ok"]'}
RUN_CHECKS = Path(__file__).with_name("run_checks.py")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The exam edition of the whole project."""
    return exam.write_exam_edition(tmp_path_factory.mktemp("exam") / "lab")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The package on which submissions are graded."""
    folder = tmp_path_factory.mktemp("graded")
    exam.write_package(folder)
    return folder


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


def results_of_checks(edition, notebooks, folder):
    """For each notebook: grade_id -> (what came of the check, the message). One process for all."""
    first, *lines = run_in(edition, RUN_CHECKS, folder, *notebooks).splitlines()
    assert first == str(edition / "labsupport" / "__init__.py")
    found = {notebook: {} for notebook in notebooks}
    for line in lines:
        notebook, name, kind, said = json.loads(line)
        found[Path(notebook)][name] = kind, said
    return found


@pytest.fixture(scope="module")
def in_the_exam(edition, tmp_path_factory):
    """What the checks of the exam edition say: of the solved notebooks, and of the students'."""
    stubs = [edition / "notebooks" / path.name for path in NOTEBOOKS]
    return results_of_checks(edition, [*NOTEBOOKS, *stubs], tmp_path_factory.mktemp("cells"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_check_passes_the_solution_without_the_references(in_the_exam, notebook):
    results = in_the_exam[notebook]
    assert len(results) >= 15
    assert {name: r for name, r in results.items() if r[0] != "passed"} == {}


@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS])
def test_every_check_fails_the_stub_by_saying_that_it_is_one(in_the_exam, edition, name):
    results = in_the_exam[edition / "notebooks" / name]
    assert len(results) >= 15
    for kind, said in results.values():
        assert kind == "CheckFailed"
        assert "is not written yet" in said


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_file_of_it_holds_a_line_of_a_solution(edition, notebook):
    secrets = secret_lines(nbformat.read(notebook, as_version=4)) - IDIOMS
    assert secrets
    found = {file: leaks(secrets, file) for file in edition.rglob("*") if file.is_file()}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_a_line_of_a_solution_in_the_package_would_be_found(edition, tmp_path):
    secrets = secret_lines(nbformat.read(NOTEBOOKS[0], as_version=4))
    found = set()
    for file in (notebooks_dir().parent / "labsupport").rglob("*.py"):
        found |= set(leaks(secrets, file))
    assert found, "the package of the full lab holds some line of some solution"


@pytest.mark.parametrize("for_grading", [False, True])
def test_a_copy_of_an_answer_that_an_editor_keeps_is_not_in_it(tmp_path, monkeypatch, for_grading):
    package = shutil.copytree(notebooks_dir().parent / "labsupport", tmp_path / "labsupport")
    before = dict(exam.exam_package(for_grading))
    answer = package / "attention" / "flash_torch.py"
    for copy in (".ipynb_checkpoints/flash_torch-checkpoint.py", "flash_torch copy.py", ".#old.py"):
        (answer.parent / copy).parent.mkdir(exist_ok=True)
        shutil.copy(answer, answer.parent / copy)
    monkeypatch.setattr(exam.paths, "project_root", lambda: tmp_path)
    assert dict(exam.exam_package(for_grading)) == before


def test_tests_twins_history_and_outputs_are_not_in_it(edition):
    names = {path.relative_to(edition).parts[0] for path in edition.rglob("*")}
    assert names == {
        *("LICENSE", "Makefile", "README.md", "constraints.txt", "environment.yml"),
        *("pyproject.toml", "data", "labsupport", "notebooks", "scripts", "theory"),
    }
    assert [path.name for path in sorted((edition / "notebooks").iterdir())] == [
        path.name for path in NOTEBOOKS
    ]
    assert not any("outputs" in cell and cell["outputs"] for cell in cells_of(edition))


def test_jupyterlab_looks_there_as_it_does_in_the_lab(edition):
    used = (edition / "Makefile").read_text(encoding="utf-8")
    (folder,) = re.findall(r"^LAB_CONFIG = \$\(CURDIR\)/(.+)$", used, re.M)
    own = notebooks_dir().parent / folder
    files = [path.relative_to(own) for path in own.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for file in files:
        assert (edition / folder / file).read_bytes() == (own / file).read_bytes()


def cells_of(edition):
    for path in (edition / "notebooks").glob("*.ipynb"):
        yield from json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["edition", "graded"])
def test_every_module_can_still_be_imported(which, request):
    folder = request.getfixturevalue(which)
    modules = [
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for package in ("labsupport", "grader")
        for path in sorted((folder / package).rglob("*.py"))
        if path.stem != "__main__"
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    run_in(folder, "-c", code, *modules)


def test_its_program_says_in_one_line_that_the_grader_is_not_there(edition):
    done = start_in(edition, "-m", "labsupport.cli", "grade", "x", "--out", "y")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the package `grader` is not part of this edition" in done.stderr


def test_it_can_be_installed_without_the_grader(edition):
    project = tomllib.loads((edition / "pyproject.toml").read_text(encoding="utf-8"))
    assert "entry-points" not in project["project"]
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert all((edition / package).is_dir() for package in packages)


def test_the_labs_own_flash_attention_is_left_out_and_says_so(edition):
    said = run_in(
        edition,
        "-c",
        "import torch\n"
        "from labsupport.attention import attention, available_backends, flash_attention_forward\n"
        "q = torch.ones(1, 4, 1, 16)\n"
        "print(attention(q, q, q, causal=True).shape)\n"
        "for call in (lambda: attention(q, q, q, backend='flash_torch'),\n"
        "             lambda: flash_attention_forward(q, q, q)):\n"
        "    try:\n        call()\n    except RuntimeError as error:\n        print(error)\n",
    )
    assert said.count("not part of the exam edition") == 2
    assert said.startswith("torch.Size([1, 4, 1, 16])")


WHEN_GRADED = """
import torch
from labsupport import attention as lab, checks, distributed
from labsupport.attention.kernels.template import attention_with_update
from labsupport.precision import FlashAttentionConfig
q = torch.ones(4, 16)
for answer in (lambda: lab.standard_attention(q, q, q), lambda: lab.online_softmax(q),
               lambda: lab.merge_attention(q, q[:, 0], q, q[:, 0]),
               lambda: lab.apply_rotary_emb(q, q, q),
               lambda: distributed.positions_of(4, 0, 2, zigzag=True),
               lambda: checks.held_bytes(1), lambda: checks.choose(1)):
    try:
        answer()
    except RuntimeError as error:
        print(type(error).__name__)
x, y = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16)
first = [t.transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in (x, y, y)]
mask = torch.ones(5, 9).bool().tril(4)
right = torch.nn.functional.scaled_dot_product_attention(*first, attn_mask=mask)
for function in (lab.attention, lab.flash_attention):
    torch.testing.assert_close(function(x, y, y, causal=True), right.transpose(1, 2))
print(lab.attention(*[x.half()] * 3).dtype, FlashAttentionConfig.bfloat16().residual)
"""


def test_where_a_submission_is_graded_answers_cannot_be_called_and_what_solutions_need_can(graded):
    said = run_in(graded, "-c", WHEN_GRADED).split()
    assert said == ["LeftOutError"] * 7 + ["torch.float16", "torch.bfloat16"]


def test_solutions_run_where_a_submission_is_graded_and_no_check_does(graded, tmp_path):
    for results in results_of_checks(graded, NOTEBOOKS, tmp_path).values():
        assert {kind for kind, _ in results.values()} == {"LeftOutError"}


def test_what_is_handed_out_is_the_same_each_time():
    assert list(exam.exam_package(False)) == list(exam.exam_package(False))


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ReleaseError, match="not an empty folder"):
        exam.write_exam_edition(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_answer_that_is_not_there_any_more_is_named(monkeypatch):
    monkeypatch.setattr(exam, "ANSWERS", (*ANSWERS, Answer("attention/gone.py", "9-9")))
    with pytest.raises(ValueError, match=r"not there: attention/gone\.py"):
        list(exam.exam_package(False))


def test_a_needed_name_that_is_not_there_any_more_is_named(monkeypatch):
    wrong = Answer("attention/rotary.py", "3-1", needed=("no_such_function",))
    monkeypatch.setattr(exam, "ANSWERS", (wrong,))
    with pytest.raises(ValueError, match="has no no_such_function any more"):
        list(exam.exam_package(False))


SOURCE = '''"""How to square."""

from __future__ import annotations


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
'''


def test_what_is_emptied_keeps_names_and_needed_functions_and_loses_the_rest():
    text = exam.empty(SOURCE, "squares", Answer("squares.py", "1-1", needed=("shape",)))
    assert "x * x" not in text
    assert "trick" not in text
    module = {}
    door = "from labsupport.left_out import left_out"
    exec(text.replace(door, "from grader.left_out import left_out"), module)
    assert module["shape"]() == "square"
    assert module["Squares"].side == 3
    for call in (lambda: module["square"](2.0), module["Squares"]().area):
        with pytest.raises(LeftOutError, match="answers exercise 1-1"):
            call()


def test_what_is_sealed_works_and_does_not_show_its_text():
    text = seal(SOURCE)
    assert "square" not in text
    module = {}
    exec(unseal(text, "squares.py"), module)
    assert module["square"](3.0) == 9.0


SEALED_CHECKS = """
from labsupport import checks
from labsupport.checks import chunked_loss, softmax
from labsupport.checks.verdict import mutant

for check, solution, mistake in (
    (checks.check_running_values, softmax.running_max_and_sum, softmax.MISTAKES[0]),
    (checks.check_loss_values, chunked_loss.ChunkedLoss, chunked_loss.LOSS_MISTAKES[0]),
):
    try:
        check(mutant(solution, mistake.edit))
    except checks.CheckFailed as failure:
        assert mistake.say in str(failure), failure
    else:
        raise AssertionError(f"{check.__name__} passed")
"""


def test_sealed_checks_name_mistakes_too(edition):
    assert run_in(edition, "-c", SEALED_CHECKS) == ""


def test_a_function_that_is_left_out_can_be_passed_on_and_not_called():
    ours = LeftOutFunction("checks.choose", "4-5")
    assert ours.__name__ == "checks.choose"
    with pytest.raises(LeftOutError, match="4-5"):
        ours(1, 2)


def test_a_chapter_keeps_its_prose_and_commands_and_loses_its_programs():
    chapter = "A\n\n```python\nx * x\n```\n\n```text\n9\n```\n\nB\n\n```bash\nmake lab\n```\n"
    text = exam_files.without_code(chapter)
    assert "x * x" not in text
    assert "9" not in text
    assert text.count("not part of the exam edition") == 1
    assert "```bash\nmake lab\n```" in text


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_lab_gives_working_copies_of_the_edition(edition, tmp_path):
    copy = shutil.copytree(edition, tmp_path / "lab")
    plan = subprocess.run(["make", "-n", "lab", "PY=python"], cwd=copy, capture_output=True)
    assert plan.returncode == 0
    assert b"jupyterlab" in plan.stdout
    assert subprocess.run(["make"], cwd=copy, capture_output=True).returncode == 0
    run_in(copy, "-m", "labsupport.cli", "start")
    copies = sorted((copy / "work").glob("*.ipynb"))
    assert [path.name for path in copies] == [path.name for path in NOTEBOOKS]
    assert "YOUR CODE HERE" in copies[0].read_text(encoding="utf-8")
    assert "0 of " in run_in(copy, "-m", "labsupport.cli", "progress")
