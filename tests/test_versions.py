"""The record of tested versions, the README's table of it, and the bounds in pyproject.toml."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts import versions
from tests.shell import program

ROW = dict.fromkeys(versions.COLUMNS, "") | {
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "triton": "3.7.1",
    "transformers": "5.17.0",
    "tests": "tests/models",
    "passed": "1088",
    "failed": "0",
    "skipped": "4",
    "date": "2026-11-22",
}


@pytest.fixture
def finished(pytestconfig):
    """For tests that judge the record: the run that writes it has not written its own row yet."""
    if pytestconfig.getoption("--record-versions", None):
        pytest.skip("this run is being recorded; the next one judges the record")


def recorded(package):
    return [Version(row[package]) for row in versions.read() if row[package]]


def test_the_readme_shows_the_record(finished):
    text = versions.README.read_text(encoding="utf-8")
    assert versions.with_table(text, versions.read()) == text, "run: python -m scripts.versions"


def test_no_recorded_run_has_failures(finished):
    for row in versions.read():
        assert row["failed"] in ("", "0"), versions.key(row)


@pytest.mark.parametrize("package", versions.PACKAGES)
def test_the_lower_bound_of_a_package_is_the_oldest_version_in_the_record(project, package):
    content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*content["dependencies"], *content["optional-dependencies"]["triton"]]
    specifier = next(r.specifier for r in map(Requirement, wanted) if r.name == package)
    (bound,) = [Version(part.version) for part in specifier if part.operator == ">="]
    assert min(recorded(package)).release[:2] == bound.release[:2]


@pytest.mark.parametrize("package", versions.PACKAGES)
def test_the_pinned_version_of_a_package_is_in_the_record(finished, project, package):
    lines = (project / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line.startswith(f"{package}==")]
    pinned = {str(pin.specifier).removeprefix("==") for pin in pins}
    assert pinned & {version.public for version in recorded(package)}, "see CONTRIBUTING.md, Upkeep"


def test_both_ends_of_the_supported_pythons_are_in_the_record(project):
    script = (project / "scripts" / "setup.sh").read_text(encoding="utf-8")
    supported = script.split('tested_minors="')[1].split('"')[0].split()
    named = {versions.key(row)[0] for row in versions.read()}
    assert {supported[0], supported[-1]} <= named


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
    planned = versions.table([ROW | dict.fromkeys(("passed", "failed", "skipped", "date"), "")])
    assert planned.splitlines()[-1] == (
        "| 3.11 | 2.13.0 | 3.7.1 | 5.17.0 | `tests/models` | | | not all passed yet |"
    )
    assert "| 1,088 | 0 | 2026-11-22 |" in versions.table([ROW])


TESTS = """
import pytest

def test_one(): pass
def test_two(): assert {two}
@pytest.mark.skip(reason="here")
def test_three(): pass
@pytest.fixture
def broken(): raise OSError
{more}
"""


@pytest.mark.parametrize(
    ("two", "more", "counts", "workers"),
    [
        ("False", "def test_four(broken): pass", ["1", "2", "1"], "0"),
        ("True", "", ["2", "0", "1"], "2"),
        ("True", "syntax error", None, "0"),
    ],
    ids=["failed, error", "passed", "not collected"],
)
def test_a_run_of_pytest_is_recorded_with_its_counts(project, tmp_path, two, more, counts, workers):
    (tmp_path / "test_it.py").write_text(TESTS.format(two=two, more=more))
    record = tmp_path / "versions.csv"
    command = [sys.executable, "-m", "pytest", "-p", "scripts.versions", "-n", workers]
    command += ["--record-versions", record, "-c", "/dev/null", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    if counts is None:
        assert "nothing recorded" in done.stdout
        assert not record.exists()
        return
    (row,) = versions.read(record)
    assert [row[name] for name in versions.COUNTS] == counts
    assert row["torch"] == versions.installed("torch")
    assert row["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


# --- scripts/versions.sh ----------------------------------------------------------------------


@pytest.fixture
def checkout(project, tmp_path):
    """A copy of versions.sh; uv and the Pythons that it makes only say that they were called."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(project / "scripts/versions.sh", tmp_path / "scripts/versions.sh")
    program(
        tmp_path / "python", 'echo "$0 $*" >> calls; case "$0 $*" in $FAIL) exit $STATUS;; esac'
    )
    made = 'for last; do :; done; mkdir -p "$last/bin"; cp python "$last/bin/python"'
    program(tmp_path / "build/uv/bin/uv", f'[ "$1" != venv ] || {{ {made}; }}')
    return tmp_path


def run_versions(checkout, *arguments, fail="nothing", status=0):
    """Start versions.sh by a relative path; returns its status and the Pythons' calls."""
    done = subprocess.run(
        ["/bin/bash", "versions.sh", *arguments],
        cwd=checkout / "scripts",
        env={"PATH": "/usr/bin:/bin", "FAIL": fail, "STATUS": str(status)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = (checkout / "calls").read_text().splitlines()
    calls = [re.search(r"versions-(\w+)/.* -m (pytest|scripts\.versions)", line) for line in lines]
    return done.returncode, [" ".join(call.groups()) for call in calls if call]


@pytest.mark.parametrize("status", [0, 1])
def test_a_run_that_fails_is_shown_in_the_readme_and_keeps_its_status(checkout, status):
    done = run_versions(checkout, "newest", fail="*-m?pytest*", status=status)
    assert done == (status, ["newest pytest", "newest scripts.versions"])


@pytest.mark.parametrize("failing", ["lowest", "newest"])
def test_without_an_argument_both_ends_are_run_and_the_worse_status_stays(checkout, failing):
    status, calls = run_versions(checkout, fail=f"*{failing}*-m?pytest*", status=3)
    assert status == 3
    both = ["pytest", "scripts.versions"]
    assert calls == [f"{end} {what}" for end in ("lowest", "newest") for what in both]
