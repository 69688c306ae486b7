"""`labsupport grade`: notebooks in, points out."""

import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from grader.grade.results import Settings, SubmissionResult, read_results
from grader.grade.submissions import Late, printable
from labsupport.interrupt import interrupted_status


def grade_command(
    submissions: Annotated[
        Path, typer.Argument(help="Students' folders, or the zip of Moodle or Canvas.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for points, pages and results.")],
    students: Annotated[
        Path | None, typer.Option(help="The class: a system's list, or a column student.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an earlier run.")] = False,
    due: Annotated[datetime | None, typer.Option(help="Later files are marked.")] = None,
    late: Annotated[Late, typer.Option(help="Late files count, or are ignored.")] = "count",
    notebooks: Annotated[Path | None, typer.Option(help="The folder of solved ones.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions at a time.")] = Settings.jobs,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for one notebook.")
    ] = Settings.notebook_timeout_s,
    cell_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for one cell, and for one check.")
    ] = Settings.cell_timeout_s,
    memory: Annotated[
        float, typer.Option(min=0.001, help="GiB of memory for one submission.")
    ] = Settings.memory_bytes / 2**30,
    unconfined: Annotated[
        bool,
        typer.Option("--unconfined", help="Grade without a sandbox: trusted submissions only."),
    ] = False,
) -> None:
    """Grade submissions (instructors): points, a page for each student, an overview.

    Submissions run in a sandbox. Results are written as they come; after an interruption --resume
    continues. Points in OUT/overrides.csv replace those of a check.
    """
    from tqdm import tqdm

    from grader.grade.batch import run_batch
    from grader.grade.submissions import NO_CLASS, find_submissions, read_class
    from grader.reports.grades import write_reports

    limits = Settings(cell_timeout, timeout, int(memory * 2**30), jobs, notebooks, unconfined)
    if out.resolve().is_relative_to(submissions.resolve()):
        raise ValueError(f"{out} lies in the folder of submissions; choose another with --out")
    found = find_submissions(submissions, notebooks=notebooks, due=due, late=late)
    class_list = read_class(students) if students else NO_CLASS
    # So that one student's folder is not taken for a class unnoticed.
    names = sorted({one.student for one in found})
    said = f"{len(names)} students in {submissions}: {', '.join(names[:5])}"
    said += ", ..." if len(names) > 5 else ""
    if len(names) == 1:
        said = f"One student, {names[0]}. For a class, name the folder of all students."
    typer.echo(printable(said), err=True)
    bar = tqdm(total=len(found), unit="notebook", disable=None)

    def tell(result: SubmissionResult, done: int) -> None:
        bar.n = done
        bar.set_postfix_str(f"{result.student} {result.earned:g}/{result.points:g}", refresh=True)

    try:
        results = run_batch(found, out, limits, resume=resume, tell=tell)
    except KeyboardInterrupt:
        bar.close()
        done = read_results(out)
        if done:
            write_reports(done, out, found, notebooks=notebooks, class_list=class_list)
        said = f"Interrupted; {len(done)} are done, with reports, in {out}. Go on with --resume."
        typer.echo(said, err=True)
        raise typer.Exit(interrupted_status()) from None
    except Exception:
        if out.is_dir() and {path.name for path in out.iterdir()} <= {".lock", ".gitignore"}:
            shutil.rmtree(out)
        raise
    finally:
        bar.close()
    # First of all: the reports are there even if a terminal fails on the lines below.
    results, files = write_reports(results, out, found, notebooks=notebooks, class_list=class_list)
    wide = min(30, max(len(result.student) for result in results))
    for result in results:
        kinds = dict.fromkeys(flag.kind for flag in result.flags if flag.kind != "not confined")
        said = result.reason or ", ".join(kinds)
        whose = f"{result.student[:wide]:{wide}}  {(result.notebook or result.path)[:28]:28}"
        points = f"{result.earned:>5g} of {result.points:<3g}"
        typer.echo(printable(f"{whose}  {points}  {said}".rstrip()))
    for problem in sorted({f.text for r in results for f in r.flags if f.kind == "not confined"}):
        typer.echo(f"Warning: {problem}", err=True)
    typer.echo(f"written: {files[0]}, and {len(files) - 1} files beside it")
