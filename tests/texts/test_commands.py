"""Every command of the texts exists and takes its options; those for a CPU run and say something.

A page's commands run in order, in a folder that looks like the project's. `NOT_RUN` lists those
that need more than a CPU and a few minutes, with the reason.
"""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks.__main__ import PROGRAMS, parser_of
from labsupport.cli import app
from scripts import texts

COMMANDS = [command for path in texts.pages() for command in texts.commands(path)]
# What a command holds that is not run here, by the reason.
NOT_RUN = {
    "needs a GPU": (
        "nvidia-smi", "nvcc", "benchmarks decode", "benchmarks fp8", "benchmarks gluon_steps",
        "benchmarks loop_orders", "benchmarks training", "benchmarks tune",
        "traffic --three", "--seqlen (4096|.*8192)",
    ),
    "needs other machines, or changes the system": (
        "sudo ", "srun ", "ip netns", "ssh ", "rsync ", "tmux ", "git clone",
    ),
    "installs software": ("pip install", "-m uv ", "-m venv", "/uv "),
    "opens JupyterLab; tests/test_make_lab.py runs it": ("make lab", "labsupport lab"),
    "needs submissions; tests/grader/test_nbgrader.py runs it": (
        "nbgrader autograde", "nbgrader export",
    ),
    "stops on purpose": ("work/capstone/measure.py",),
    "lasts minutes": ("benchmarks long_positions", "benchmarks resources"),
    "writes a page of the project": ("benchmarks architectures",),
    "is make, which would set up an environment; `.ci/run` runs most": ("make ",),
    "is a part of a command": (
        "…", r"\|ring", " NAME", "FOLDER", "-- program", "stories15M.bin", "--check-baseline$",
        "generate --compare$",
    ),
}  # fmt: skip


def name(command: texts.Command) -> str:
    return f"{command.path.relative_to(texts.ROOT)}:{command.line}"


def reason(command: texts.Command) -> str:
    """The reason why a command is not run; "" for one that is."""
    if command.path.suffix == ".py":
        return "stands in a notebook"
    if not command.in_block and len(command.text.split()) < 3:
        return "is a name in a sentence"
    text = command.text.split("  #")[0]
    for why, parts in NOT_RUN.items():
        if any(re.search(part, text) for part in parts):
            return why
    return ""


def first_of_each(commands):
    """The commands without calls in sentences that stood in a sentence before."""
    seen = set()
    for command in commands:
        if command.in_block or command.text not in seen:
            yield command
        seen.add(command.text)


RUN = list(first_of_each(command for command in COMMANDS if not reason(command)))


@pytest.mark.parametrize("command", COMMANDS, ids=name)
def test_what_a_text_calls_exists_and_takes_these_options(command):
    text = re.sub(r"\$\w+", "1", command.text.replace("\\\n", " "))
    for line in text.split("\n"):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that goes on in the next line
            continue
        for start, word in enumerate(words):
            rest = words[start + 1 :]
            if word == "make" and not start:
                targets = [word for word in rest if re.fullmatch(r"[a-z-]+", word)]
                assert set(targets) <= make_targets(), line
            elif word == "labsupport" or word.endswith("bin/labsupport"):
                takes(rest, command)
            elif word == "-m" and rest[0].startswith(("labsupport", "benchmarks")):
                runs_as_a_program(rest, command)


@functools.cache
def make_targets():
    makefile = (texts.ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def takes(words, command):
    """The `labsupport` program accepts these words; a name in a sentence may lack arguments."""
    program = typer.main.get_command(app)
    while words and hasattr(program, "commands") and words != ["--help"]:
        program, words = program.commands[words[0]], words[1:]
    if words == ["--help"]:
        return
    try:
        program.make_context(program.name, [word for word in words if word != "…"])
    except Exception as error:
        lacks = "requires an argument" in str(error.args) or "Missing" in type(error).__name__
        if command.in_block or not lacks:
            raise


def runs_as_a_program(words, command):
    """`python -m words` does something: the module has a part that runs then."""
    module, *options = words
    if module == "labsupport.cli":
        return takes(options, command)
    if importlib.util.find_spec(module).submodule_search_locations:
        module += ".__main__"
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    assert '\nif __name__ == "__main__":' in source, f"python -m {module} does nothing"
    if words[0] == "benchmarks" and options[0] not in ("NAME", "PROGRAM", "--help"):
        assert options[0] in PROGRAMS
        parser_of(options[0]).parse_args(options[1:])
    return None


def test_no_reason_stands_for_nothing():
    for why, parts in NOT_RUN.items():
        for part in parts:
            assert any(re.search(part, command.text) for command in COMMANDS), (why, part)


# --- commands that run ----------------------------------------------------------------------------

TEXT = "The committee met on Monday. Ada signed the letter, and Grace read it aloud. " * 20
YOURS = {  # files of the reader's, by what the texts call them
    "letter.txt": TEXT,
    "notes.md": TEXT,
    "my-texts/one.txt": TEXT,
    "train.py": "import torch\n\nprint(torch.ones(2, 2) @ torch.ones(2, 2))\n",
    "run.py": "print(sum(range(10**6)))\n",
    "class.csv": "student\nada\ngrace\n",
}


class Reader:
    """A folder for each page, and what its commands did there, in order."""

    def __init__(self, folder):
        self.folder, self.done = folder, {}

    def folder_of(self, page):
        to = self.folder / str(page.relative_to(texts.ROOT)).replace("/", "-")
        if to.exists():
            return to
        (to / "work").mkdir(parents=True)
        for path in texts.ROOT.iterdir():
            if path.name not in (".git", ".venv", "work", "build", "dist", "course"):
                (to / path.name).symlink_to(path)
        (to / ".venv").symlink_to(sys.prefix)
        (solved,) = texts.ROOT.glob("notebooks/01-*.ipynb")
        for student in ("ada", "grace"):
            (to / "submissions" / student).mkdir(parents=True)
            shutil.copy(solved, to / "submissions" / student)
        for file, content in YOURS.items():
            (to / file).parent.mkdir(exist_ok=True)
            (to / file).write_text(content, encoding="utf-8")
        return to

    def run(self, command):
        """Run a command, after those of its page that stand before it."""
        if name(command) + command.text in self.done:
            return self.done[name(command) + command.text]
        for earlier in RUN[: RUN.index(command)]:
            if earlier.path == command.path:
                self.run(earlier)
        folder = self.folder_of(command.path)
        before = listing(folder)
        environment = os.environ | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
        text = command.text
        if not shutil.which("bwrap"):  # without a sandbox these, which we trust, run as we do
            text = re.sub(r"labsupport grade (?=\w)", "labsupport grade --unconfined ", text)
        # `make lab`, which is not run here, starts the folder; its place follows the package's.
        started = "labsupport start work && labsupport progress work"
        text = re.sub(r"\S*labsupport progress$", started, text)
        done = subprocess.run(
            ["bash", "-euc", text],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        done.changed = listing(folder) ^ before
        self.done[name(command) + command.text] = done
        return done


def listing(folder):
    """Contents of a folder, without what is linked into it, with times and sizes."""
    return {
        (path, path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.rglob("*")
        if not path.is_symlink()
    }


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return Reader(tmp_path_factory.mktemp("reader"))


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=lambda c: f"{name(c)} {c.text.split('#')[0][:60]}")
def test_a_command_of_a_text_runs_and_says_something(reader, command):
    done = reader.run(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or done.stderr.strip() or done.changed, "it did nothing"
