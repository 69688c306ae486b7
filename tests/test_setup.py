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

from tests.shell import program

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


@pytest.mark.parametrize(
    ("which", "old", "new"),
    [
        (0, '"torch>=2.11"', '"torch>=2.14"'),
        (0, '"rich>=', '"einops>=0.8",\n    "rich>='),
        (0, 'requires-python = ">=3.11"', 'requires-python = ">=3.12"'),
        (1, "torch==2.13.0", "torch==2.12.0"),
        (1, "torch==2.13.0", "torch==2.13.0+cpu"),
        (1, "triton==3.7.1 ; sys_platform == 'linux'", ""),
        (1, "\nnumpy==", "\nnumpy>="),
        (1, "\nruff==", "\nruff==0.1.0 ; python_version < '3.12'\nruff=="),
        (2, "torch==2.13.0", "torch==2.12.0"),
        (2, "[notebook,dev]", "[notebook]"),
        (2, "python>=3.11,<3.14", "python>=3.11,<3.13"),
    ],
)
def test_a_disagreement_is_found(files, which, old, new):
    changed = list(files)
    assert old in changed[which]
    changed[which] = changed[which].replace(old, new)
    assert disagreements(*changed) != []


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


# --- scripts/setup.sh -------------------------------------------------------------------------


@pytest.fixture
def checkout(project, tmp_path):
    """A copy of what setup.sh reads, in a folder whose name holds a space."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "Makefile"):
        shutil.copy(project / name, copy / name)
    return copy


def set_up(checkout, path=None, **environment):
    """Run setup.sh with nothing of ours in the environment; `path` comes first on the PATH."""
    tools = "/usr/bin:/bin"
    return subprocess.run(
        ["/bin/bash", "scripts/setup.sh"],
        cwd=checkout,
        env={"PATH": f"{path}:{tools}" if path else tools, "HOME": str(checkout), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def ready_venv(checkout, torch="cpu"):
    """A .venv as setup.sh leaves it, as far as setup.sh can tell, without the packages."""
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / ".made-by-setup").touch()
    (venv / ".torch").write_text(f"{torch}\n")
    stamp = subprocess.run(
        ["/bin/bash", "scripts/setup.sh", "fingerprint"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    (venv / ".ready").write_text(stamp.stdout)
    return venv


def test_an_old_python_is_named_and_the_way_to_a_newer_one_is_shown(checkout, tmp_path):
    bin_folder = tmp_path / "bin"
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python"):
        program(bin_folder / name, "echo 3.9")
    done = set_up(checkout, bin_folder)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer; found: python3 is 3.9;" in done.stderr
    assert "sudo apt install" in done.stderr
    assert "brew install" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_python_named_by_the_user_is_the_only_one_tried(checkout, tmp_path):
    program(tmp_path / "my bin" / "python3.10", "echo 3.10")
    done = set_up(checkout, PYTHON=str(tmp_path / "my bin" / "python3.10"))
    assert "python3.10 is 3.10; " not in done.stdout
    assert f"{tmp_path}/my bin/python3.10 is 3.10;" in done.stderr


def test_a_missing_venv_module_names_the_debian_package(checkout, tmp_path):
    # Says it is Python 3.12 and fails at `import ensurepip, venv`, as Debian's does.
    program(tmp_path / "bin" / "python3", 'case "$2" in *ensurepip*) exit 1;; esac; echo 3.12')
    done = set_up(checkout, tmp_path / "bin")
    assert done.returncode == 1
    assert "sudo apt install python3.12-venv" in done.stderr


def test_an_unknown_build_of_pytorch_is_refused(checkout):
    done = set_up(checkout, TORCH="rocm")
    assert "TORCH=rocm is unknown" in done.stderr
    assert "TORCH=cpu or TORCH=cuda" in done.stderr


def test_an_environment_that_is_ready_is_used_at_once(checkout):
    ready_venv(checkout)
    for choice in ({}, {"TORCH": "cpu"}, {"PYTHON": sys.executable}):
        done = set_up(checkout, **choice)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Stops setup.sh where it would begin to install, so that what it decided can be seen.
NO_PYTHON = {"PYTHON": "no-such-python"}


def test_a_venv_made_by_somebody_else_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    done = set_up(checkout)
    assert done.returncode == 1
    assert "did not make it" in done.stderr
    assert (checkout / ".venv" / "precious").exists()


@pytest.mark.parametrize("damage", ["interrupted", "broken", "moved", "other build"])
def test_an_environment_that_cannot_be_trusted_is_started_over(checkout, damage):
    venv = ready_venv(checkout)
    choice = dict(NO_PYTHON)
    if damage == "interrupted":
        (venv / ".ready").unlink()
    elif damage == "broken":
        (venv / "bin" / "python").unlink()
    elif damage == "moved":
        moved = checkout.with_name("elsewhere")
        checkout.rename(moved)
        checkout = moved
    else:
        choice["TORCH"] = "cuda"
    done = set_up(checkout, **choice)
    assert "starting .venv over" in done.stdout
    assert not (checkout / ".venv").exists()


def test_changed_pins_update_the_environment_in_place(checkout):
    venv = ready_venv(checkout)
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# newer\n")
    done = set_up(checkout, **NO_PYTHON)
    assert "starting .venv over" not in done.stdout
    assert "needs Python" in done.stderr
    assert venv.exists()


OTHER = f"{sys.version_info.major}.{13 if sys.version_info.minor != 13 else 12}"


def test_another_python_than_that_of_the_environment_starts_it_over(checkout, tmp_path):
    venv = ready_venv(checkout)
    program(tmp_path / "bin" / "other", f"echo {OTHER}")
    done = set_up(checkout, PYTHON=str(tmp_path / "bin" / "other"))
    assert "starting .venv over" in done.stdout
    assert f"Python {OTHER}, PyTorch for cpu" in done.stdout
    assert not (venv / "bin").exists()


@pytest.mark.parametrize("name", ["no-such-python", "old"])
def test_a_python_that_will_not_do_leaves_the_environment_alone(checkout, tmp_path, name):
    venv = ready_venv(checkout)
    program(tmp_path / "bin" / "old", "echo 3.9")
    done = set_up(checkout, tmp_path / "bin", PYTHON=name)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert (venv / ".ready").exists()


def test_an_environment_that_stays_is_named_by_its_own_python(checkout, tmp_path):
    ready_venv(checkout)
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# newer\n")
    program(tmp_path / "bin" / "python3", f"echo {OTHER}")
    done = set_up(checkout, tmp_path / "bin")  # it stops where it looks for pip
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"Python {version}, PyTorch for cpu" in done.stdout


# --- the Makefile -----------------------------------------------------------------------------


def make(*arguments, cwd):
    return subprocess.run(
        ["make", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_make_alone_lists_every_command(project):
    listed = set(re.findall(r"^make ([\w-]+)", make(cwd=project).stdout, re.MULTILINE))
    assert {"lab", "fetch", "test", "test-all", "notebooks", "format", "update", "clean"} <= listed


def test_make_test_runs_every_check(project):
    plan = make("-n", "test", f"PY={sys.executable}", cwd=project).stdout
    steps = [
        "labsupport.cli fetch",
        "ruff check",
        "ruff format --check",
        "pyrefly check",
        "typos",
        '-m "not slow and not browser"',
        "--nbval-lax",
    ]
    positions = [plan.find(step) for step in steps]
    assert -1 not in positions
    assert positions == sorted(positions)


@pytest.fixture
def offline_python(tmp_path):
    """Stands in for .venv's Python: says what it is asked to run, and can fetch nothing."""
    fetch = '*"labsupport.cli fetch"*) echo "labsupport: no network" >&2; exit 1'
    program(tmp_path / "bin" / "python", f'echo "ran $*"; case "$*" in {fetch};; esac')
    return tmp_path / "bin" / "python"


def test_make_lab_starts_without_the_models_and_says_how_to_try_again(checkout, offline_python):
    done = make("lab", f"PY={offline_python}", cwd=checkout)
    assert done.returncode == 0
    assert "labsupport: no network" in done.stderr
    lines = done.stdout.splitlines()
    assert "[warn] models are missing" in next(line for line in lines if "make fetch" in line)
    assert any("ran -m jupyterlab" in line for line in lines)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("command", ["book", "links"])
def test_another_environment_is_asked_for_an_extra_and_left_as_it_is(
    project, checkout, tmp_path, command, there
):
    shutil.copy(project / "scripts/extra.sh", checkout / "scripts/extra.sh")
    ready_venv(checkout)  # of no concern
    answer = "exit 0" if there else 'echo "ModuleNotFoundError" >&2; exit 1'
    program(tmp_path / "bin" / "python", f'case "$*" in -c*) {answer};; esac; echo "ran $*"')
    python = tmp_path / "bin" / "python"
    done = make("--silent", command, f"PY={python}", cwd=checkout)
    if there:
        assert done.stdout.startswith("ran -m "), done.stderr
    else:
        said, stopped = done.stderr.splitlines()  # the second line is make's own
        assert f'{python} -m pip install -c constraints.txt -e ".[book]"' in said
        assert "***" in stopped
        assert done.stdout == ""
    assert not list((checkout / ".venv").glob(".extra-*"))


def test_the_packages_asked_for_are_those_of_the_extra(project):
    script = (project / "scripts/extra.sh").read_text(encoding="utf-8")
    asked = {name for line in re.findall(r'needed="(.*)"', script) for name in line.split(", ")}
    content = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = content["optional-dependencies"]
    names = {Requirement(text).name for text in (*extras["book"], *extras["browser"])}
    imported = {"beautifulsoup4": "bs4"}
    assert asked == {imported.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.parametrize("command", ["test", "fetch"])
def test_what_needs_the_models_stops_without_them(checkout, offline_python, command):
    done = make(command, f"PY={offline_python}", cwd=checkout)
    assert done.returncode != 0
    assert "labsupport: no network" in done.stderr
    assert done.stdout.count("ran ") == 1


@pytest.mark.parametrize(
    ("given", "there", "used"),
    [("", True, ".venv/bin/python"), ("", False, ""), ("PY=python", False, "python")],
)
def test_make_constraints_takes_the_python_that_is_there(checkout, given, there, used):
    if there:
        program(checkout / ".venv" / "bin" / "python", "")
    plan = make("-n", "constraints", *filter(None, [given]), cwd=checkout).stdout
    assert plan.split() == ["scripts/constraints.sh", *filter(None, [used])]


def test_make_clean_keeps_the_students_work(checkout):
    (checkout / "work").mkdir()
    (checkout / "work" / "__pycache__").mkdir()
    (checkout / "labsupport" / "__pycache__").mkdir(parents=True)
    ready_venv(checkout)
    make("clean", cwd=checkout)
    assert (checkout / "work" / "__pycache__").exists()
    assert not (checkout / ".venv").exists()
    assert not (checkout / "labsupport" / "__pycache__").exists()


def test_shell_scripts_are_sound(project):
    for script in [*(project / "scripts").glob("*.sh"), project / ".ci" / "run"]:
        subprocess.run(["/bin/bash", "-n", script], check=True)
        assert script.stat().st_mode & 0o100, f"{script} is not executable"


@pytest.mark.parametrize(
    ("arguments", "failing", "called", "status"),
    [
        ([], "", ["test", "test-browser"], 0),
        ([], "test", ["test"], 1),
        (["test"], "", ["test"], 0),
        (["browser"], "", ["test-browser"], 0),
        (["everything"], "", [], 2),
    ],
)
def test_continuous_integration_runs_what_it_is_asked_for(
    project, tmp_path, arguments, failing, called, status
):
    (tmp_path / ".ci").mkdir()
    shutil.copy(project / ".ci" / "run", tmp_path / ".ci" / "run")
    program(tmp_path / "bin" / "make", f'echo "$1 $2" >> calls; [ "$1" != "{failing}" ]')
    done = subprocess.run(
        ["/bin/bash", ".ci/run", *arguments],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
    )
    calls = tmp_path / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    assert done.returncode == status
    assert [line.split()[0] for line in lines] == called
    assert all("ARGS=--reruns 1 " in line for line in lines)


def test_what_make_test_was_given_does_not_reach_what_the_tests_call(tmp_path, project):
    """They call make too: `make lab`, for one, would hand pytest's options to JupyterLab."""
    says = 'echo "ARGS=$ARGS MAKEFLAGS=$MAKEFLAGS"'
    program(tmp_path / "python", says)
    given = [f"PY={tmp_path / 'python'}", "ARGS=--last-failed"]
    done = make("--silent", "notebook-tests", *given, cwd=project)
    assert done.stdout == "ARGS= MAKEFLAGS=\n", done.stderr
