"""`labsupport grade`: notebooks in, points out."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from grader.grade.reading import printable
from grader.grade.results import SubmissionResult
from grader.grade.settings import Settings
from labsupport.interrupt import interrupted_status


def grade_command(
    submissions: Annotated[
        Path, typer.Argument(help="A folder of students' folders, or of notebooks.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for points, pages and results.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an earlier run was interrupted.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Submissions at the same time. Default: half the cores.")
    ] = None,
    notebook: Annotated[
        str | None, typer.Option(help="Only this notebook: the beginning of its name, such as 01.")
    ] = None,
    due: Annotated[
        datetime | None,
        typer.Option(help="When it was due; later files are marked, and get their points."),
    ] = None,
    cell_timeout: Annotated[
        float, typer.Option(help="Seconds for one cell, and for one check.")
    ] = Settings.cell_timeout_s,
    timeout: Annotated[
        float, typer.Option(help="Seconds for one notebook.")
    ] = Settings.notebook_timeout_s,
    memory: Annotated[
        float, typer.Option(help="GiB of memory for one submission.")
    ] = Settings.memory_bytes / 2**30,
    network: Annotated[
        bool, typer.Option("--network", help="Let submissions use the network.")
    ] = False,
    unconfined: Annotated[
        bool,
        typer.Option("--unconfined", help="Grade even if submissions can do whatever you can do."),
    ] = False,
    notebooks: Annotated[
        Path | None, typer.Option(help="The solved notebooks. Default: the lab's own.")
    ] = None,
) -> None:
    """Grade what students handed in (instructors): points, a page for each, the class.

    Submissions run confined, and are never believed. Results are written as they come; after an
    interruption --resume goes on.
    """
    limits = {"--cell-timeout": cell_timeout, "--timeout": timeout, "--memory": memory}
    for option, value in (limits | {"--jobs": 1 if jobs is None else jobs}).items():
        if not value > 0:
            raise ValueError(f"{option} {value} makes no sense: it has to be more than 0")
    from tqdm import tqdm

    from grader.grade.batch import read_results, run_batch
    from grader.reports import write_reports

    settings = Settings(
        cell_timeout_s=cell_timeout,
        notebook_timeout_s=timeout,
        memory_bytes=int(memory * 2**30),
        network=network,
        jobs=jobs or Settings.jobs,
        due=due,
        notebooks=notebooks,
        only=notebook,
        unconfined=unconfined,
    )
    bar = tqdm(total=0, unit="notebook", disable=None)

    def tell(result: SubmissionResult, done: int, total: int) -> None:
        bar.total, bar.n = total, done
        bar.set_postfix_str(_line(result), refresh=True)

    try:
        results = run_batch(submissions, out, settings, resume=resume, tell=tell)
    except KeyboardInterrupt:
        bar.close()
        if done := read_results(out):
            write_reports(done, out, notebooks=notebooks)
        typer.echo(
            f"Interrupted; {len(done)} are done, with reports, in {out}. Go on with --resume.",
            err=True,
        )
        raise typer.Exit(interrupted_status()) from None
    finally:
        bar.close()
    # First of all: whatever a terminal makes of the lines below, the reports are there.
    overview, *others = write_reports(results, out, notebooks=notebooks)
    for line in _table(results):
        typer.echo(line)
    for problem in sorted({f.text for r in results for f in r.flags if f.kind == "not confined"}):
        typer.echo(f"Warning: {problem}", err=True)
    typer.echo(f"written: {overview}, and {len(others)} files beside it")


def _line(result: SubmissionResult) -> str:
    return f"{result.student} {result.notebook[:2]}: {result.earned:g}/{result.points:g}"


def _table(results: list[SubmissionResult]) -> list[str]:
    """A line for each submission."""
    wide = max(len(result.student) for result in results)
    lines = []
    for result in results:
        name = result.notebook or result.path
        points = f"{result.earned:>5g} of {result.points:<3g}"
        said = result.reason if result.status == "refused" else ""
        flags = len([flag for flag in result.flags if flag.kind != "not confined"])
        if flags:
            said = f"{flags} to look at"
        # Also of results that an earlier version wrote.
        lines.append(printable(f"{result.student:{wide}}  {name:28}  {points}  {said}".rstrip()))
    return lines
