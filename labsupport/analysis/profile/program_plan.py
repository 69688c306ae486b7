"""How a program is run: under torch.profiler if it is Python, else under nsys, or alone."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from labsupport.analysis.profile import nsight
from labsupport.analysis.profile.report import Missing, NotHereError, Report
from labsupport.profiling.trace.run import RECORD_S

TRACERS = ("auto", "torch", "nsys", "none")
NSYS = "Nsight Systems"
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")


@dataclass
class Run:
    """A program to run: how it is run, and how that went."""

    report: Report
    command: list[str]
    tracer: str = "auto"
    after: float = 0.0
    seconds: float = RECORD_S
    interval: float = 0.1
    gpu: bool = False
    really: list[str] = field(default_factory=list)
    by: str = "none"
    status: int | None = None

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return self.report.folder


@dataclass(frozen=True)
class PythonCall:
    """A command that is Python: the interpreter with its options, and what it runs."""

    interpreter: list[str]
    program: list[str]


def as_python(command: list[str]) -> PythonCall | None:
    """The parts of a command that runs a Python program; None if it is something else.

    `python [options] script.py ...`, `python -m module ...`, `python -c code ...`, a script whose
    first line names Python (as commands that pip installs do), and a file that ends in .py.
    """
    program = shutil.which(command[0])
    if program is None:
        return None
    if _PYTHON.fullmatch(Path(command[0]).name):
        options = 1
        while options < len(command) and command[options].startswith("-"):
            word = command[options]
            if word in ("-m", "-c"):
                break
            if word == "-" or re.fullmatch(r"-[A-Za-z]+[mc]", word):
                return None  # the program comes from stdin, or is hidden in a bundle of options
            options += 2 if word in ("-X", "-W") else 1
        rest = command[options:]
        enough = 2 if rest[:1] in (["-m"], ["-c"]) else 1
        return PythonCall(command[:options], rest) if len(rest) >= enough else None
    interpreter = _first_line_python(Path(program))
    return PythonCall(interpreter, [program, *command[1:]]) if interpreter else None


def _first_line_python(script: Path) -> list[str] | None:
    try:
        with script.open("rb") as file:
            head = file.read(1024).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = shlex.split(head[0][2:])
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    if words and Path(words[0]).name == "sh" and len(head) > 1:
        # How pip writes a path that is too long for the first line: '''exec' "/path/python" ...
        found = re.match(r"'''exec' \"?([^\" ]+)\"?", head[1])
        words = [found[1]] if found else []
    return words if words and _PYTHON.fullmatch(Path(words[0]).name) else None


def _has_torch(interpreter: list[str]) -> bool:
    code = (
        "import importlib.util as u, sys; "
        "sys.exit(not (u.find_spec('torch') and u.find_spec('labsupport')))"
    )
    try:
        done = subprocess.run([*interpreter, "-c", code], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def plan(run: Run) -> list[Missing]:
    """Decide what traces the program: fills `run.really` and `run.by`; returns what is left out."""
    run.really = list(run.command)
    left_out = []
    if run.tracer in ("auto", "torch"):
        reason = "--tracer was set to another"
        python = as_python(run.command)
        if python is None:
            reason = "torch.profiler sees Python programs only, and this is none (see `What ran`)"
        elif not _has_torch(python.interpreter):
            reason = f"{python.interpreter[0]} has no PyTorch, or not this lab"
        else:
            run.by = "torch"
            run.really = [
                *python.interpreter,
                *("-m", "labsupport.profiling.trace.run", "--out", str(run.folder.absolute())),
                *("--after", f"{run.after:g}", "--seconds", f"{run.seconds:g}"),
                *("--", *python.program),
            ]
            return [Missing(NSYS, *_one_at_a_time())]
        left_out.append(Missing("trace of torch.profiler", reason))
    if run.tracer in ("auto", "nsys"):
        try:
            path = nsight.need("nsys", run.gpu)
        except NotHereError as why:
            left_out.append(Missing(NSYS, str(why), why.remedy))
        else:
            run.by = "nsys"
            run.really = [
                *(path, "profile", "--trace=cuda,nvtx,osrt", "--sample=none"),
                *("--force-overwrite=true", f"--output={run.folder / 'program-nsys'}"),
                *run.command,
            ]
    if run.tracer == "none":
        left_out.append(Missing("traces", "--tracer none asked for no trace"))
    return left_out


def _one_at_a_time() -> tuple[str, str]:
    return (
        "it and torch.profiler cannot look at one run together, and torch.profiler did",
        "again with `--tracer nsys`, on a machine with an NVIDIA GPU and Nsight Systems",
    )
