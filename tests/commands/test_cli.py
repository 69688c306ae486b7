"""The `labsupport` program, run as users run it; and what importing the package costs."""

import json
import os
import subprocess
import sys

import pytest


def run_program(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "labsupport.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=120,
    )


def modules_after(statement, cwd):
    code = f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_imports_nothing_else(project):
    extra = modules_after("import labsupport", project) - modules_after("import importlib", project)
    assert extra == {"labsupport"}


def test_importing_attention_leaves_the_rest_alone(project):
    heavy = {"pandas", "matplotlib", "typer", "nbgrader", "flash_attn", "xformers", "transformers"}
    assert not heavy & modules_after("import labsupport.attention", project)


def test_a_subpackage_is_imported_when_it_is_first_named(project):
    loaded = modules_after("import labsupport; labsupport.paths.project_root()", project)
    assert "labsupport.paths" in loaded


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones():
    import labsupport

    with pytest.raises(AttributeError, match=r"no 'atention'; it has .*\battention, "):
        _ = labsupport.atention


def test_the_program_knows_its_version(project):
    import labsupport

    done = run_program("--version", cwd=project)
    assert done.stdout.strip() == f"labsupport {labsupport.__version__}"


def test_doctor_prints_a_line_for_each_item_and_fails_only_if_one_fails(project):
    done = run_program("doctor", "--quick", cwd=project)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  ")]
    assert lines
    assert all(line.startswith(("[ok]", "[warn]", "[fail]")) for line in lines)
    assert done.returncode == any(line.startswith("[fail]") for line in lines)


def test_doctor_speaks_json(project):
    done = run_program("doctor", "--quick", "--json", cwd=project)
    assert json.loads(done.stdout)


def test_the_quick_doctor_does_not_import_torch(project):
    quick = "from labsupport.profiling import environment; environment.diagnose(quick=True)"
    assert "torch" not in modules_after(quick, project)


def test_an_error_is_one_line_without_a_traceback(project, tmp_path):
    done = run_program("release", "--to", "out", "--notebooks", tmp_path, cwd=project)
    assert done.returncode == 1
    assert done.stderr.startswith("labsupport: there is no notebook")
    assert done.stderr.count("\n") == 1


def test_a_maintainer_can_ask_for_the_traceback(project, tmp_path):
    arguments = ("release", "--to", "out", "--notebooks", tmp_path)
    done = run_program(*arguments, cwd=project, LABSUPPORT_DEBUG="1")
    assert "Traceback" in done.stderr


def test_a_copy_installed_away_from_the_project_says_how_to_mend_it(project, tmp_path):
    import shutil

    shutil.copytree(project / "labsupport", tmp_path / "site" / "labsupport")
    where = tmp_path / "site"
    code = "import sys; sys.path.insert(0, '.'); from labsupport import paths; paths.data_dir()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=where)
    assert "installed as a copy" in done.stderr
    assert "pip install -e ." in done.stderr


def test_the_cache_lies_outside_of_the_project(project, tmp_path, monkeypatch):
    from labsupport import paths

    monkeypatch.delenv("LABSUPPORT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / "labsupport"
    assert paths.cache_dir().is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / ".cache" / "labsupport"
