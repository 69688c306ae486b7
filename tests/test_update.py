"""`make update`: its order, and what is said and kept when a step fails."""

import os
import shutil
import subprocess

import pytest

from tests.shell import program

STEPS = ["setup fetch", "test", "notebooks", "pictures", "notebook-tests"]


@pytest.fixture
def checkout(project, tmp_path):
    """A copy of what update.sh uses; `make` and the resolver only say that they were called."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/update.sh"):
        shutil.copy(project / name, copy / name)
    (copy / "constraints.txt").write_text("# pins\nnumpy==2.4.6\ntorch==2.13.0\n")
    program(copy / "scripts/constraints.sh", "sed -i.bak s/2.4.6/2.5.0/ constraints.txt")
    fail = 'case " $FAIL " in *" $1 "*) echo "it broke here"; exit 1;; esac'
    program(copy / "make", f'echo "$*${{ARGS:+, given $ARGS}}" >> calls\n{fail}')
    program(copy / ".venv/bin/python", 'echo "python $*" >> calls')
    return copy


def update(checkout, *arguments, fail=""):
    return subprocess.run(
        ["/bin/bash", "scripts/update.sh", *arguments],
        cwd=checkout,
        env={
            "PATH": os.environ["PATH"],
            "MAKE": str(checkout / "make"),
            "FAIL": fail,
            "ARGS": " ".join(arguments),  # so make hands it to what it starts
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(checkout):
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


def pins(checkout):
    return (checkout / "constraints.txt").read_text()


def test_everything_runs_in_order_and_the_new_pins_stay(checkout):
    done = update(checkout)
    assert done.returncode == 0, done.stderr
    made = calls(checkout)
    assert made[:-1] == STEPS
    assert made[-1].startswith("python -m pytest")
    assert "numpy==2.5.0" in pins(checkout)
    assert "-numpy==2.4.6" in done.stdout
    assert "+numpy==2.5.0" in done.stdout
    assert "torch==2.13.0" in done.stdout.split("chosen by hand")[1]
    assert not (checkout / "build/update").exists()


@pytest.mark.parametrize(
    ("failing", "step"), [("setup", "environment"), ("test", "tests"), ("pictures", "pictures")]
)
def test_a_failing_step_ends_it_and_the_way_on_is_shown(checkout, failing, step):
    done = update(checkout, fail=failing)
    assert done.returncode == 1
    assert calls(checkout)[-1].split()[0] == failing
    assert f"stopped at the step '{step}'" in done.stderr
    assert "+numpy==2.5.0" in done.stderr
    assert f"make update ARGS='--from {step}'" in done.stderr
    assert "it broke here" in (checkout / f"build/update/{step}.log").read_text()


@pytest.mark.parametrize("package", ["numpy", "transformers"])
def test_a_new_pin_that_is_in_no_record_is_told_how_to_get_its_row(checkout, package):
    (checkout / "constraints.txt").write_text("# pins\nnumpy==2.4.6\ntransformers==2.4.6\n")
    program(
        checkout / "scripts/constraints.sh",
        f"sed -i.bak s/{package}==2.4.6/{package}==2.5.0/ constraints.txt",
    )
    said = update(checkout, fail="test").stderr
    assert ("--record-versions" in said) == (package == "transformers")
    assert "--record-versions" not in update(checkout, fail="notebooks").stderr


@pytest.mark.parametrize("there", [True, False])
def test_the_resolver_takes_the_venv_s_python_where_there_is_one(checkout, there):
    program(checkout / "scripts/constraints.sh", 'echo "resolved with ${1:-the default}"')
    if not there:
        shutil.rmtree(checkout / ".venv")
    done = update(checkout, fail="setup")  # it would make .venv
    with_ = ".venv/bin/python" if there else "the default"
    assert f"resolved with {with_}\n" in done.stdout


def test_one_goes_on_at_the_step_that_failed(checkout):
    update(checkout, fail="notebooks")
    (checkout / "calls").unlink()
    done = update(checkout, "--from", "notebooks")
    assert done.returncode == 0
    assert calls(checkout)[:-1] == STEPS[2:]


def test_going_back_restores_the_pins_from_before_the_first_attempt(checkout):
    before = pins(checkout)
    update(checkout, fail="test")
    program(checkout / "scripts/constraints.sh", "sed -i.bak s/2.5.0/2.6.0/ constraints.txt")
    update(checkout, fail="test")
    assert "numpy==2.6.0" in pins(checkout)
    done = update(checkout, "--back")
    assert done.returncode == 0
    assert pins(checkout) == before
    assert calls(checkout)[-1] == "setup"
    assert update(checkout, "--back").returncode == 1


def test_a_resolver_that_fails_leaves_the_pins_alone(checkout):
    before = pins(checkout)
    program(checkout / "scripts/constraints.sh", "echo 'no solution found'; exit 1")
    done = update(checkout)
    assert "the pins are unchanged" in done.stderr
    assert pins(checkout) == before
    assert calls(checkout) == []


def test_changes_that_are_not_committed_stop_it(checkout):
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    done = update(checkout)
    assert done.returncode == 1
    assert "not committed" in done.stderr
    assert calls(checkout) == []


@pytest.mark.parametrize("arguments", [["--from"], ["--from", "nothing"]])
def test_an_unknown_step_or_option_is_refused(checkout, arguments):
    assert update(checkout, *arguments).returncode == 2
    assert calls(checkout) == []
