"""The record of tested versions, the table of it in docs/, and the bounds in pyproject.toml."""

import os
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts import versions

ROW = dict.fromkeys(versions.COLUMNS, "") | {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "triton": "3.7.1",
    "transformers": "5.17.0",
    "tests": "tests/models",
    "passed": "1088",
    "failed": "0",
    "date": "2026-11-22",
}


@pytest.fixture
def finished(pytestconfig):
    """For tests that judge the record: the run that writes it has not written its own row yet."""
    if pytestconfig.getoption("--record-versions", None):
        pytest.skip("this run is being recorded; the next one judges the record")


def test_the_page_shows_the_record_in_which_no_run_has_failures(finished):
    text = versions.PAGE.read_text(encoding="utf-8")
    assert versions.with_table(text, versions.read()) == text, "run: python -m scripts.versions"
    assert {row["failed"] for row in versions.read()} <= {"", "0"}


def test_both_ends_of_all_supported_versions_are_in_the_record(finished, project):
    content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*content["dependencies"], *content["optional-dependencies"]["triton"]]
    specifiers = {r.name: r.specifier for r in map(Requirement, wanted)}
    lines = (project / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for package in versions.PACKAGES:
        recorded = [Version(row[package]) for row in versions.read() if row[package]]
        (bound,) = [p.version for p in specifiers[package] if p.operator == ">="]
        assert min(recorded).release[:2] == Version(bound).release[:2]
        pins = [Requirement(line) for line in lines if line.startswith(f"{package}==")]
        pinned = {str(pin.specifier).removeprefix("==") for pin in pins}
        assert pinned & {version.public for version in recorded}, "see CONTRIBUTING.md, Upkeep"
    script = (project / "scripts" / "setup.sh").read_text(encoding="utf-8")
    supported = script.split('tested_minors="')[1].split('"')[0].split()
    assert {supported[0], supported[-1]} <= {versions.key(row)[0] for row in versions.read()}


def test_a_later_run_takes_the_place_of_the_same_and_of_no_other(tmp_path):
    path = tmp_path / "versions.csv"
    for change in (
        {"passed": "1"},
        {"passed": "2", "python": "3.11.9", "torch": "2.13.0"},
        {"passed": "3", "transformers": "5.23.0"},
        {"passed": "4", "python": "3.12.1"},
        {"passed": "5", "tests": "tests"},
        {"passed": "6", "torch": "2.9.1"},
    ):
        versions.add(ROW | change, path)
    assert [row["passed"] for row in versions.read(path)] == ["6", "5", "2", "3", "4"]


def test_a_row_that_is_to_be_run_elsewhere_says_so():
    planned = versions.table([ROW | dict.fromkeys(("passed", "failed", "date"), "")])
    assert planned.splitlines()[-1] == (
        "| 3.11 | 2.13.0 | 3.7.1 | 5.17.0 | `tests/models` | | | not all passed yet |"
    )
    assert "| 1,088 | 0 | 2026-11-22 |" in versions.table([ROW])


TESTS = """
import pytest

def test_one(): pass
def test_two(): assert False
@pytest.mark.skip(reason="here")
def test_three(): pass
@pytest.fixture
def broken(): raise OSError
def test_four(broken): pass
"""


def test_a_run_of_pytest_is_recorded_with_its_counts_if_all_could_be_collected(project, tmp_path):
    record, file = tmp_path / "versions.csv", tmp_path / "test_it.py"
    command = [sys.executable, "-m", "pytest", "-p", "scripts.versions", "-c", "/dev/null"]
    command += ["--rootdir", tmp_path, "--record-versions", record, tmp_path]
    options = {"cwd": project, "env": os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
    file.write_text("syntax error")
    assert b"nothing recorded" in subprocess.run(command, capture_output=True, **options).stdout
    assert not record.exists()
    file.write_text(TESTS)
    subprocess.run(command, capture_output=True, **options)
    (row,) = versions.read(record)
    assert [row[name] for name in versions.COUNTS] == ["1", "2", "1"]
    assert row["torch"] == versions.installed("torch")
    assert row["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
