"""The command `labsupport doctor`, and the report that goes with a bug."""

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from labsupport import __version__
from labsupport.profiling.environment import diagnose
from labsupport.profiling.provenance import git_commit

LOG_LINES = 200
BEFORE_POSTING = (
    "Read it before you post it: it becomes public. It holds paths of this machine and, with "
    "--log, everything your program printed; take out names and secrets.\n"
    "Add what you ran, what you expected, and what happened instead."
)


def doctor_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Quick checks only: does not import PyTorch.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a file with everything that a bug report needs.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="A log whose end goes into the report.")] = None,
) -> None:
    """Show what works on this machine, what does not, and how to fix it."""
    if report is not None:
        write_report(report, log)
        typer.echo(f"written: {report}\n{BEFORE_POSTING}")
        return
    if log is not None:
        raise ValueError("--log FILE goes with --report FILE")
    items = diagnose(quick=quick)
    for item in items:
        typer.echo(f"{f'[{item.status}]':6} {item.name}: {item.detail}")
        if item.remedy:
            typer.echo(f"       to fix it: {item.remedy}")
    if any(item.status == "fail" for item in items):
        raise typer.Exit(1)


def write_report(path: Path, log: Path | None = None) -> None:
    """Write system, versions, a test of every attention and a log's last 200 lines, as Markdown.

    Raises:
        FileExistsError: `path` exists; nothing is overwritten.
        OSError: a file cannot be read or written.
    """
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines() if log else []
    with path.open("x", encoding="utf-8") as file:
        file.write(f"# labsupport {__version__}: bug report\n\n{BEFORE_POSTING}\n\n")
        file.write(f"{datetime.date.today()}, commit {git_commit() or 'unknown'}\n")
        for title, text in {
            "Doctor": "\n".join(map(str, diagnose(quick=True))),
            "System and versions": _run("torch.utils.collect_env"),
            "Attention": _run("labsupport.cli", "compare", "--seqlen", "256"),
            **({f"End of {log.name}": "\n".join(tail[-LOG_LINES:])} if log else {}),
        }.items():
            file.write(f"\n## {title}\n\n````text\n{text.strip()}\n````\n")


def _run(module: str, *arguments: str) -> str:
    """Return the output of a program: should PyTorch, a driver or a kernel crash, it says so."""
    command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
        )
    except subprocess.TimeoutExpired:
        return f"{module} did not end within 180 s"
    errors = f"{done.stderr}\n{module}: status {done.returncode}" if done.returncode else ""
    return done.stdout + errors
