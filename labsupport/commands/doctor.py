"""The command `labsupport doctor`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only what takes no time: does not import PyTorch.")
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
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in items], indent=2, ensure_ascii=False))
    else:
        for item in items:
            typer.echo(f"{f'[{item.status}]':6} {item.name}: {item.detail}")
            if item.remedy:
                typer.echo(f"       to fix it: {item.remedy}")
    if any(item.status == "fail" for item in items):
        raise typer.Exit(1)
