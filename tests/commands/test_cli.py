"""The `labsupport` program, run as users run it; and what importing the package costs."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import labsupport
from labsupport import paths
from labsupport.cli import app


def fresh(code, cwd):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


def modules_after(statement, cwd):
    done = fresh(f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))", cwd)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_imports_nothing_else(project):
    extra = modules_after("import labsupport", project) - modules_after(
        "import importlib, types, warnings", project
    )
    assert extra == {"labsupport", "lazy_loader"}
    named = "import labsupport; labsupport.paths.project_root()"
    assert "labsupport.paths" in modules_after(named, project)
    with pytest.raises(AttributeError, match="atention"):
        _ = labsupport.atention


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import labsupport.attention", "pandas matplotlib typer nbgrader flash_attn transformers"),
        (
            "from labsupport.cli import app; from typer.testing import CliRunner; "
            "assert '--save-memory' in CliRunner().invoke(app, ['train', '--help']).output",
            "torch pandas matplotlib numpy",
        ),
        (
            "from labsupport.commands.monitor import run_monitored; "
            "from labsupport.profiling import environment; "
            "assert len(environment.diagnose(quick=True)) >= 4",
            "torch pandas matplotlib numpy",
        ),
    ],
    ids=["attention", "help", "doctor and monitor"],
)
def test_what_starts_fast_imports_nothing_heavy(project, code, absent):
    assert not set(absent.split()) & modules_after(code, project)


def test_doctor_prints_a_line_for_each_item_and_fails_only_if_one_fails():
    done = CliRunner().invoke(app, ["doctor", "--quick"])
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert len(lines) >= 4
    assert all(re.match(r"\[(ok|warn|fail)\] ", line) for line in lines)
    assert done.exit_code == any(line.startswith("[fail]") for line in lines)


def test_an_error_is_one_line_and_a_maintainer_can_ask_for_the_traceback(python, tmp_path):
    command = ["-c", "from labsupport.cli import main; main()", "release", "--to", "out"]
    command += ["--notebooks", tmp_path]
    done = python(*command)
    assert done.returncode == 1
    assert done.stderr.startswith("labsupport: there is no notebook")
    assert done.stderr.count("\n") == 1
    assert "Traceback" in python(*command, env=os.environ | {"LABSUPPORT_DEBUG": "1"}).stderr


def test_a_copy_installed_away_from_the_project_says_how_to_mend_it(project, tmp_path):
    shutil.copytree(project / "labsupport", tmp_path / "site" / "labsupport")
    code = "import sys; sys.path.insert(0, '.'); from labsupport import paths; paths.data_dir()"
    done = fresh(code, tmp_path / "site")
    assert "away from its notebooks and data" in done.stderr
    assert "pip install -e ." in done.stderr


def test_an_installed_wheel_finds_its_files_inside_of_the_package(project, tmp_path):
    package = tmp_path / "site" / "labsupport"
    (package / "project" / "notebooks").mkdir(parents=True)
    for name in ("__init__.py", "paths.py"):
        shutil.copy(project / "labsupport" / name, package / name)
    code = (
        "import sys; sys.path.insert(0, 'site'); from labsupport import paths; "
        "print(paths.notebooks_dir(), paths.work_dir().resolve())"
    )
    done = fresh(code, tmp_path)
    assert done.stdout.split() == [str(package / "project/notebooks"), str(tmp_path / "work")]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / paths.STATE_FILE).touch()
    assert fresh(code.replace("'site'", "'../site'"), tmp_path / "work").stdout == done.stdout


def test_python_does_not_die_of_an_interrupt_that_was_caught_inside_exec(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\n"
        "from labsupport.interrupt import interrupted_status\n"
        "try:\n"
        "    exec('raise KeyboardInterrupt')  # as if it had struck while a dataclass was made\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "sys.exit(interrupted_status())\n"
    )
    done = subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path)
    assert done.returncode == 130  # sys.exit(130) would end with -2
