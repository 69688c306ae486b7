"""The two commands, and the files that say which packages they install."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from itertools import product

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

# Everywhere the lab is meant to run.
PYTHONS = ("3.11", "3.12", "3.13")
SYSTEMS = ("linux", "darwin")
EXTRAS = ("notebook", "dev", "triton", "book", "browser")


def disagreements(pyproject, constraints, environment):
    """What the three files, given as text, say differently; empty if they agree."""
    project = tomllib.loads(pyproject)["project"]
    pins = [Requirement(ln) for ln in constraints.splitlines() if ln and not ln.startswith("#")]
    conda = yaml.safe_load(environment)
    out = []

    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    for pin in pins:
        if not re.fullmatch(r"==[^*+,]+", str(pin.specifier)):
            out.append(f"constraints.txt: {pin} is not one public version")
    for requirement in map(Requirement, wanted):
        if requirement.name == project["name"]:
            continue
        for python, system in product(PYTHONS, SYSTEMS):
            here = {"python_version": python, "python_full_version": f"{python}.5"}
            here["sys_platform"] = system
            if requirement.marker and not requirement.marker.evaluate(here):
                continue
            versions = [
                str(pin.specifier).removeprefix("==")
                for pin in pins
                if canonicalize_name(pin.name) == canonicalize_name(requirement.name)
                and (pin.marker is None or pin.marker.evaluate(here))
            ]
            if len(versions) != 1 or not requirement.specifier.contains(versions[0], True):
                out.append(f"{requirement} on Python {python}, {system}: pinned {versions}")

    chosen = {Requirement(text).name: text for text in _uv_pins(pyproject)}
    for name, text in chosen.items():
        if not any(p.name == name and p.specifier == Requirement(text).specifier for p in pins):
            out.append(f"constraints.txt does not hold {text}")

    pip = next((d["pip"] for d in conda["dependencies"] if isinstance(d, dict)), [])
    if pip != ["-c constraints.txt", chosen["torch"], "-e .[notebook,dev]"]:
        out.append(f"environment.yml: pip installs {pip}")
    python = [d for d in conda["dependencies"] if str(d).startswith("python>")]
    accepted = Requirement(python[0]).specifier if python else None
    required = Requirement(f"python{project['requires-python']}").specifier
    for minor in range(8, 20):
        version = Version(f"3.{minor}")
        if accepted is None or accepted.contains(version) != (f"3.{minor}" in PYTHONS):
            out.append(f"environment.yml: Python 3.{minor} does not fit the tested {PYTHONS}")
        if f"3.{minor}" in PYTHONS and not required.contains(version):
            out.append(f"pyproject.toml: requires-python leaves out the tested 3.{minor}")
    return out


def _uv_pins(pyproject):
    return tomllib.loads(pyproject)["tool"]["uv"]["constraint-dependencies"]


@pytest.fixture(scope="module")
def files(project):
    names = ("pyproject.toml", "constraints.txt", "environment.yml")
    return [(project / name).read_text(encoding="utf-8") for name in names]


def test_pyproject_constraints_and_conda_environment_agree(files):
    assert disagreements(*files) == []


def test_disagreements_are_found(files):
    for which, old, new in (
        (0, '"torch>=2.11"', '"torch>=2.14"'),
        (0, '"rich>=', '"einops>=0.8",\n    "rich>='),
        (0, 'requires-python = ">=3.11"', 'requires-python = ">=3.12"'),
        (1, "torch==2.13.0", "torch==2.13.0+cpu"),
        (1, "triton==3.7.1 ; sys_platform == 'linux'", ""),
        (1, "\nnumpy==", "\nnumpy>="),
        (2, "[notebook,dev]", "[notebook]"),
        (2, "python>=3.11,<3.14", "python>=3.11,<3.13"),
    ):
        changed = list(files)
        changed[which] = changed[which].replace(old, new)
        assert changed != files
        assert disagreements(*changed) != [], (old, new)


def test_installed_versions_are_the_pinned_ones(files):
    """Holds in the .venv that make builds; elsewhere there is nothing to compare."""
    from importlib.metadata import distributions
    from pathlib import Path

    if not (Path(sys.prefix) / ".ready").exists():
        pytest.skip("this Python is not that of a .venv made by `make`")
    # Not those that a package carries within itself, as setuptools does.
    found = distributions(path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    installed = {canonicalize_name(one.name): one.version for one in found}
    assert "torch" in installed
    for line in files[1].splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        here = installed.get(canonicalize_name(pin.name))
        if here is not None and (pin.marker is None or pin.marker.evaluate()):
            assert pin.specifier.contains(here, prereleases=True), f"{pin}: {here}"


# --- scripts/setup.sh and the Makefile ------------------------------------------------------------


@pytest.fixture
def checkout(project, tmp_path):
    """A copy of what setup.sh reads, in a folder whose name holds a space."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "Makefile"):
        shutil.copy(project / name, copy / name)
    return copy


def set_up(checkout, *arguments, **environment):
    """Run setup.sh with nothing of ours in the environment."""
    return subprocess.run(
        ["/bin/bash", "scripts/setup.sh", *arguments],
        cwd=checkout,
        env={"PATH": "/usr/bin:/bin", "HOME": str(checkout), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


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
    done = set_up(checkout, **NO_PYTHON)
    assert done.returncode == 1
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


def test_a_venv_made_by_somebody_else_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    done = set_up(checkout)
    assert done.returncode == 1
    assert "did not make it" in done.stderr
    assert (checkout / ".venv" / "precious").exists()


@pytest.mark.parametrize("damage", ["interrupted", "broken", "moved"])
def test_an_environment_that_cannot_be_trusted_is_started_over(checkout, damage):
    venv = ready_venv(checkout)
    if damage == "interrupted":
        (venv / ".ready").unlink()
    elif damage == "broken":
        (venv / "bin" / "python").unlink()
    else:
        moved = checkout.with_name("elsewhere")
        checkout.rename(moved)
        checkout = moved
    done = set_up(checkout, **NO_PYTHON)
    assert "starting .venv over" in done.stdout
    assert not (checkout / ".venv").exists()


def make(*arguments, cwd):
    return subprocess.run(
        ["make", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_make_alone_lists_every_command(project):
    listed = set(re.findall(r"^make ([\w-]+)", make(cwd=project).stdout, re.MULTILINE))
    makefile = (project / "Makefile").read_text(encoding="utf-8")
    assert {"lab", "fetch", "test", "test-all", "notebooks", "format", "update", "clean"} <= listed
    assert all(f"\n{command}:" in makefile for command in listed)


def test_make_clean_keeps_the_students_work(checkout):
    for folder in ("work", "labsupport"):
        (checkout / folder / "__pycache__").mkdir(parents=True)
    ready_venv(checkout)
    make("clean", cwd=checkout)
    assert (checkout / "work" / "__pycache__").exists()
    assert not (checkout / ".venv").exists()
    assert not (checkout / "labsupport" / "__pycache__").exists()


def test_the_packages_asked_for_are_those_of_the_extra(project):
    script = (project / "scripts/extra.sh").read_text(encoding="utf-8")
    asked = {name for line in re.findall(r'needed="(.*)"', script) for name in line.split(", ")}
    content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = content["optional-dependencies"]
    names = {Requirement(text).name for text in (*extras["book"], *extras["browser"])}
    imported = {"beautifulsoup4": "bs4"}
    assert asked == {imported.get(name, name.replace("-", "_")) for name in names}


def test_shell_scripts_are_sound(project):
    for script in [*(project / "scripts").glob("*.sh"), project / ".ci" / "run"]:
        subprocess.run(["/bin/bash", "-n", script], check=True)
        assert script.stat().st_mode & 0o100, f"{script} is not executable"
