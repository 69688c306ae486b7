"""The hand-out: a project that works, without solutions."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from grader import release
from labsupport.course.editions import ReleaseError
from labsupport.paths import notebooks_dir, notebooks_in
from scripts import texts

NOTEBOOKS = notebooks_in(notebooks_dir())
GIVEN_OUT = {
    *("LICENSE", "Makefile", "README.md", "constraints.txt", "environment.yml", "pyproject.toml"),
    *("data", "labsupport", "notebooks", "scripts", "theory", "binder", ".devcontainer"),
    *("capstone", "docs"),
}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return release.write_project(tmp_path_factory.mktemp("course") / "lab")


def run_in(edition, *arguments):
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


def test_tests_twins_grader_and_history_are_not_handed_out(course):
    assert {path.name for path in course.iterdir()} == GIVEN_OUT
    given = [path for path in (course / "notebooks").rglob("*") if path.is_file()]
    assert sorted(given) == sorted(notebooks_in(course / "notebooks"))
    assert len(given) == len(NOTEBOOKS)
    assert not list(course.rglob("*-checkpoint*"))
    for path in given:
        text = path.read_text(encoding="utf-8")
        assert "BEGIN SOLUTION" not in text
        assert "HIDDEN TESTS" not in text
        assert not any(cell.get("outputs") for cell in json.loads(text)["cells"])


def test_all_links_lead_somewhere(course):
    for page in (*course.rglob("*.md"), *course.rglob("*.ipynb")):
        text = page.read_text(encoding="utf-8")
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s\\]*)#?([^)\s\\]*)\)", text):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {path}"
            if anchor and target.suffix == ".md":
                assert anchor in texts.anchors(target), f"{page}: {anchor}"


def test_its_texts_name_no_command_that_students_do_not_get(course):
    for page in course.rglob("*.md"):
        commands = set(re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")))
        assert commands <= {"help", "setup", "lab", "fetch", "clean"}, page


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
    copies = notebooks_in(course / "work")
    assert said.returncode == 0, said.stderr
    assert [path.name for path in copies] == [path.name for path in NOTEBOOKS]
    assert "0 of " in said.stdout


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


@pytest.mark.slow
def test_a_program_of_an_edition_says_in_one_line_that_the_grader_is_not_there(course):
    done = run_in(course, "-m", "labsupport.cli", "grade", "x", "--out", "y")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the package `grader` is not part of this edition" in done.stderr
