"""The two commands, and the files that say which packages they install."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import gpu_tests

# Everywhere the lab is meant to run.
PYTHONS = ("3.11", "3.12", "3.13")
SYSTEMS = ("linux", "darwin")
EXTRAS = ("notebook", "grader", "dev", "triton", "book", "browser")


def disagreements(pyproject, constraints, environment):
    """Return the differences between three files, given as text; empty if they agree."""
    content, out = tomllib.loads(pyproject), []
    project, chosen = content["project"], content["tool"]["uv"]["constraint-dependencies"]
    pins = [Requirement(ln) for ln in constraints.splitlines() if ln and not ln.startswith("#")]
    for pin in pins:
        if not re.fullmatch(r"==[^*+,]+", str(pin.specifier)):
            out.append(f"constraints.txt: {pin} is not one public version")

    extras = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras, *chosen)]
    for requirement, python, system in product(wanted, PYTHONS, SYSTEMS):
        here = {"python_version": python, "python_full_version": f"{python}.5"}
        here["sys_platform"] = system
        name = canonicalize_name(requirement.name)
        unavailable = name == "triton" and system == "darwin"  # it exists for Linux only
        if name == project["name"] or unavailable or not applies(requirement, here):
            continue
        versions = [
            str(pin.specifier).removeprefix("==")
            for pin in pins
            if canonicalize_name(pin.name) == name and applies(pin, here)
        ]
        if len(versions) != 1 or not requirement.specifier.contains(versions[0], True):
            out.append(f"{requirement} on Python {python}, {system}: pinned {versions}")

    conda = yaml.safe_load(environment)["dependencies"]
    (torch,) = (text for text in chosen if text.startswith("torch=="))
    if {"pip": ["-c constraints.txt", torch, "-e .[notebook,dev]"]} not in conda:
        out.append(f"environment.yml: pip does not install {torch} and the project")
    accepted = Requirement(next(d for d in conda if str(d).startswith("python>"))).specifier
    required = Requirement(f"python{project['requires-python']}").specifier
    minors = [f"3.{minor}" for minor in range(8, 20)]
    if tuple(minor for minor in minors if accepted.contains(minor)) != PYTHONS:
        out.append(f"environment.yml: its Python does not fit the tested {PYTHONS}")
    if not all(required.contains(minor) for minor in PYTHONS):
        out.append("pyproject.toml: requires-python leaves out a tested version")
    return out


def test_the_images_for_servers_install_the_chosen_torch(project, files):
    chosen = tomllib.loads(files[0])["tool"]["uv"]["constraint-dependencies"]
    (torch,) = (text for text in chosen if text.startswith("torch=="))
    for name in ("binder/postBuild", "docs/Dockerfile", "docs/class-server.md", "docs/install.md"):
        assert f"--torch-backend cpu {torch}" in (project / name).read_text(encoding="utf-8")


def applies(requirement, here):
    return requirement.marker is None or requirement.marker.evaluate(here)


@pytest.fixture(scope="module")
def files(project):
    names = ("pyproject.toml", "constraints.txt", "environment.yml")
    return [(project / name).read_text(encoding="utf-8") for name in names]


def test_pyproject_constraints_and_conda_environment_agree(files):
    assert disagreements(*files) == []


# --- scripts/setup.sh and the Makefile ------------------------------------------------------------


@pytest.fixture
def checkout(project, tmp_path):
    """A copy of what setup.sh reads, in a folder whose name holds a space."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    scripts = "scripts/setup.sh", "scripts/lock.sh"
    for name in ("pyproject.toml", "constraints.txt", "Makefile", *scripts):
        shutil.copy(project / name, copy / name)
    return copy


def set_up(checkout, *arguments, **environment):
    """Run setup.sh with nothing of ours in the environment."""
    return subprocess.run(
        ["/bin/bash", "scripts/setup.sh", *arguments],
        cwd=checkout, env={"PATH": "/usr/bin:/bin", "HOME": str(checkout), **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def ready_venv(checkout):
    """A .venv as setup.sh leaves it, as far as setup.sh can tell, without the packages."""
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / ".made-by-setup").touch()
    (venv / ".torch").write_text("cpu\n")
    (venv / ".ready").write_text(set_up(checkout, "fingerprint").stdout)
    return venv


# Stops setup.sh where it would begin to install, so that what it decided can be seen.
NO_PYTHON = {"PYTHON": "no-such-python"}


def test_an_environment_is_used_kept_updated_or_started_over(checkout):
    venv = ready_venv(checkout)
    for choice in ({}, {"TORCH": "cpu"}, {"PYTHON": sys.executable}):
        done = set_up(checkout, **choice)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    refused = set_up(checkout, TORCH="rocm").stderr
    assert "TORCH=rocm is unknown" in refused
    assert "TORCH=cpu or TORCH=cuda" in refused
    assert set_up(checkout, **NO_PYTHON).returncode == 1
    assert (venv / ".ready").exists()

    with (checkout / "constraints.txt").open("a") as file:
        file.write("# newer\n")
    done = set_up(checkout, **NO_PYTHON)
    assert "starting .venv over" not in done.stdout
    assert "needs Python 3.11 or newer" in done.stderr
    assert "sudo apt install" in done.stderr
    assert venv.exists()

    done = set_up(checkout, **NO_PYTHON, TORCH="cuda")
    assert "starting .venv over" in done.stdout
    assert not venv.exists()

    venv.mkdir()  # made by somebody else
    done = set_up(checkout)
    assert done.returncode == 1
    assert "did not make it" in done.stderr
    assert venv.exists()


@pytest.mark.parametrize("damage", ["interrupted", "broken", "moved"])
def test_an_environment_that_cannot_be_trusted_is_started_over(checkout, damage):
    venv = ready_venv(checkout)
    if damage == "interrupted":
        (venv / ".ready").unlink()
    elif damage == "broken":
        (venv / "bin" / "python").unlink()
    else:
        checkout = checkout.rename(checkout.with_name("elsewhere"))
    done = set_up(checkout, **NO_PYTHON)
    assert "starting .venv over" in done.stdout
    assert not (checkout / ".venv").exists()


def test_two_setups_of_one_clone_wait_for_each_other(checkout):
    lock = checkout / ".setup-lock"
    lock.symlink_to(str(os.getpid()))  # this process stands for a setup at work
    with subprocess.Popen(
        ["/bin/bash", "scripts/setup.sh"],
        cwd=checkout, env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, text=True,
    ) as second:  # fmt: skip
        assert "waiting: another make" in second.stdout.readline()
        ready_venv(checkout)  # what the first one leaves behind
        lock.unlink()
        assert second.wait(timeout=30) == 0
    assert not lock.is_symlink()


def test_the_lock_of_a_killed_setup_does_not_count(checkout):
    killed = subprocess.Popen(["true"])
    killed.wait()
    (checkout / ".setup-lock").symlink_to(str(killed.pid))
    assert "needs Python 3.11 or newer" in set_up(checkout, **NO_PYTHON).stderr
    assert not (checkout / ".setup-lock").is_symlink()


def make(*arguments, cwd):
    return subprocess.run(
        ["make", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_make_alone_lists_every_command(project):
    listed = set(re.findall(r"^make ([\w-]+)", make(cwd=project).stdout, re.MULTILINE))
    makefile = (project / "Makefile").read_text(encoding="utf-8")
    assert {"lab", "fetch", "test", "test-all", "notebooks", "format", "clean"} <= listed
    assert all(f"\n{command}:" in makefile for command in listed)


def test_make_clean_keeps_the_students_work(checkout):
    for folder in ("work", "labsupport"):
        (checkout / folder / "__pycache__").mkdir(parents=True)
    ready_venv(checkout)
    make("clean", cwd=checkout)
    assert (checkout / "work" / "__pycache__").exists()
    assert not (checkout / ".venv").exists()
    assert not (checkout / "labsupport" / "__pycache__").exists()


def test_shell_scripts_are_sound(project):
    for script in [*(project / "scripts").glob("*.sh"), project / ".ci" / "run"]:
        subprocess.run(["/bin/bash", "-n", script], check=True)
        assert script.stat().st_mode & 0o100, f"{script} is not executable"


def test_make_test_gpu_runs_files_that_skip_without_a_gpu_and_counts_outcomes():
    names = {Path(path).name for path in gpu_tests.tests()}
    assert {"attention", "test_ring.py", "test_generation.py"} <= names
    assert not {"test_setup.py", "test_gluon_backward.py", "test_architecture.py"} & names

    case = '<testcase classname="{}">{}</testcase>'.format
    cases = case("a", ""), case("a", "<failure/>"), case("b", "<skipped/>"), case("a", "")
    found = gpu_tests.counts(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert found == {"a": {"passed": 2, "failed": 1}, "b": {"skipped": 1}}
