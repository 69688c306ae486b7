"""The command `labsupport doctor`."""

from pathlib import Path
from typing import Annotated

import typer


def doctor_command(
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
