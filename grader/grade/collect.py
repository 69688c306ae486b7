"""`labsupport collect`: what students pushed before the work was due."""

import os
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from grader.grade.submissions import read_table

_TIMEOUT_S = 300


def collect_command(
    git: Annotated[Path, typer.Option(help="A CSV file with the columns student and url.")],
    due: Annotated[datetime, typer.Option(help="When the work was due, in this machine's time.")],
    to: Annotated[Path, typer.Option(help="The folder of submissions.")],
) -> None:
    """Clone students' repositories as they were when the work was due (instructors).

    Students can set the dates of commits; a server's log of pushes is more reliable.
    """
    failed = 0
    for row in read_table(git, "student", "url"):
        try:
            typer.echo(f"{row['student']}: {collect(row['student'], row['url'], due, to)}")
        except (ValueError, OSError, subprocess.SubprocessError) as error:
            failed += 1
            typer.echo(f"{row['student']}: skipped, {error}", err=True)
    typer.echo("Note: the dates of commits are the student's own; nothing here proves them.")
    if failed:
        raise RuntimeError(f"{failed} of the repositories could not be collected, see above")


def collect(student: str, url: str, due: datetime, folder: Path) -> str:
    """Clone one repository into FOLDER/STUDENT; return the commit and its date.

    Files get the time of the last commit that changed them. Where that fails, nothing is left.
    """
    target = folder / student
    if not student or target.parent != folder or student.startswith((".", "-")):
        raise ValueError("the name cannot be a folder's")
    if target.exists():
        raise ValueError(f"{target} is there already")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _git("clone", "--quiet", "--", url, str(target))
        inside = ("-C", str(target))
        commit = _git(*inside, "rev-list", "-1", f"--before={due.astimezone().isoformat()}", "HEAD")
        if not commit:
            raise ValueError(f"there is no commit before {due:%Y-%m-%d %H:%M}")
        _git(*inside, "checkout", "--quiet", commit)
        for path in target.rglob("*.ipynb"):
            name = str(path.relative_to(target))
            changed = _git(*inside, "log", "-1", "--format=%ct", "--", name)
            if changed and not path.is_symlink():
                os.utime(path, (int(changed), int(changed)))
        return _git(*inside, "log", "-1", "--format=%h of %ci")
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def _git(*words: str) -> str:
    # Without a question for a password, which nobody would answer.
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(
        ["git", *words], env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(" ".join(done.stderr.split()) or f"git {words[0]} failed")
    return done.stdout.strip()
