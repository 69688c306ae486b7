"""`labsupport grade`: notebooks in, points out."""

import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from grader.grade.journal import read_results
from grader.grade.reading import printable
from grader.grade.results import SubmissionResult
from grader.grade.settings import Settings
from labsupport.interrupt import interrupted_status

_POSITIVE = {"min": 0.001}


def grade_command(
    submissions: Annotated[
        Path, typer.Argument(help="Students' folders, or the zip of Moodle or Canvas.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for points, pages and results.")],
    students: Annotated[
        Path | None, typer.Option(help="The class: a system's list, or a column student.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier run.")] = False,
    due: Annotated[datetime | None, typer.Option(help="Later files are marked.")] = None,
    notebook: Annotated[str | None, typer.Option(help="Only this one, such as 01.")] = None,
    notebooks: Annotated[Path | None, typer.Option(help="The folder of solved ones.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions at a time.")] = Settings.jobs,
    timeout: Annotated[
        float, typer.Option(help="Seconds for one notebook.", **_POSITIVE)
    ] = Settings.notebook_timeout_s,
    cell_timeout: Annotated[
        float, typer.Option(help="Seconds for one cell, and for one check.", **_POSITIVE)
    ] = Settings.cell_timeout_s,
    memory: Annotated[
        float, typer.Option(help="GiB of memory for one submission.", **_POSITIVE)
    ] = Settings.memory_bytes / 2**30,
    network: Annotated[bool, typer.Option("--network", help="Let them use the network.")] = False,
    unconfined: Annotated[
        bool, typer.Option("--unconfined", help="Grade though nothing holds submissions back.")
    ] = False,
) -> None:
    """Grade what students handed in (instructors): points, a page for each, the class.

    Submissions run confined, and are never believed. Results are written as they come; after an
    interruption --resume goes on. Points in OUT/overrides.csv take the place of those of a check.
    """
    from tqdm import tqdm

    from grader.grade.batch import run_batch
    from grader.grade.submissions import find_submissions
    from grader.grade.tables import read_class
    from grader.reports import overruled, write_reports

    settings = Settings(
        cell_timeout_s=cell_timeout,
        notebook_timeout_s=timeout,
        memory_bytes=int(memory * 2**30),
        network=network,
        jobs=jobs,
        due=due,
        notebooks=notebooks,
        only=notebook,
        unconfined=unconfined,
    )
    found = find_submissions(submissions, notebooks=notebooks)
    if students:
        read_class(students)  # a mistake in it shows before an hour of grading
    typer.echo(_taken_for(sorted({one.student for one in found}), submissions), err=True)
    bar = tqdm(total=0, unit="notebook", disable=None)

    def tell(result: SubmissionResult, done: int, total: int) -> None:
        bar.total, bar.n = total, done
        bar.set_postfix_str(f"{result.student} {result.earned:g}/{result.points:g}", refresh=True)

    def write(results: list[SubmissionResult]) -> list[Path]:
        return write_reports(
            results, out, notebooks=notebooks, students=students, submissions=found
        )

    try:
        results = run_batch(submissions, out, settings, resume=resume, tell=tell)
    except KeyboardInterrupt:
        bar.close()
        if done := read_results(out):
            write(done)
        typer.echo(
            f"Interrupted; {len(done)} are done, with reports, in {out}. Go on with --resume.",
            err=True,
        )
        raise typer.Exit(interrupted_status()) from None
    except Exception:
        _remove_if_empty(out)
        raise
    finally:
        bar.close()
    # First of all: whatever a terminal makes of the lines below, the reports are there.
    overview, *others = write(results)
    for line in _table(overruled(results, out)):
        typer.echo(line)
    for problem in sorted({f.text for r in results for f in r.flags if f.kind == "not confined"}):
        typer.echo(f"Warning: {problem}", err=True)
    typer.echo(f"written: {overview}, and {len(others)} files beside it")


def _taken_for(students: list[str], submissions: Path) -> str:
    """Say whose work it is, so that one student's folder is not taken for a class unnoticed."""
    if len(students) == 1:
        return printable(
            f"One student, {students[0]}. For a class, name the folder of all students."
        )
    more = ", ..." if len(students) > 5 else ""
    return printable(f"{len(students)} students in {submissions}: {', '.join(students[:5])}{more}")


def _remove_if_empty(out: Path) -> None:
    """Leave no folder behind that holds no result, and nothing but what grading begins with."""
    begun = {".lock", ".gitignore", "results.jsonl"}
    if out.is_dir() and {path.name for path in out.iterdir()} <= begun and not read_results(out):
        shutil.rmtree(out)


def _table(results: list[SubmissionResult]) -> list[str]:
    """Make a line for each submission."""
    wide = min(30, max(len(result.student) for result in results))
    lines = []
    for result in results:
        name = result.notebook or result.path
        points = f"{result.earned:>5g} of {result.points:<3g}"
        kinds = dict.fromkeys(f.kind for f in result.flags if f.kind != "not confined")
        said = result.reason if result.status == "refused" else ", ".join(kinds)
        # Also of results that an earlier version wrote.
        student = f"{result.student[:wide]:{wide}}"
        lines.append(printable(f"{student}  {name[:28]:28}  {points}  {said}".rstrip()))
    return lines
