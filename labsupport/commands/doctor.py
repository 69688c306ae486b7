"""The command `labsupport doctor`."""

from pathlib import Path
from typing import Annotated

import typer


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
        from labsupport.profiling.bug_report import BEFORE_POSTING, write_report

        write_report(report, log)
        typer.echo(f"written: {report}\n{BEFORE_POSTING}")
        return
    if log is not None:
        raise ValueError("--log FILE goes with --report FILE")
    from labsupport.profiling.environment import diagnose

    items = diagnose(quick=quick)
    for item in items:
        typer.echo(f"{f'[{item.status}]':6} {item.name}: {item.detail}")
        if item.remedy:
            typer.echo(f"       to fix it: {item.remedy}")
    if any(item.status == "fail" for item in items):
        raise typer.Exit(1)
