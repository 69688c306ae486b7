"""The command `labsupport monitor`."""

import sys
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer


def monitor_command(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program and its arguments, after --.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Seconds between samples (0.1), or between lines of --live (1)."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show GPU and machine now; without a program, only that.")
    ] = False,
    count: Annotated[
        int | None, typer.Option(min=1, help="End --live without a program after so many lines.")
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
    from labsupport.profiling.monitoring import DEFAULT_INTERVAL_S, run_monitored

    if count is not None and (command or not live):
        raise ValueError("--count goes with --live, and without a program")
    refresh = 1.0 if interval is None else interval
    if command:
        samples = DEFAULT_INTERVAL_S if interval is None else interval
        status = run_monitored(
            command,
            # Lines may come seldom; a peak of memory would be missed.
            interval=min(samples, DEFAULT_INTERVAL_S) if live else samples,
            out=out,
            chart=chart,
            device=device,
            grace=grace,
            force=force,
            live=refresh if live else None,
        )
        raise typer.Exit(status)
    if not live:
        raise ValueError("which program? monitor -- COMMAND, or monitor --live without one")
    if out is not None or chart is not None:
        raise ValueError("--out and --chart record a program: give one after --")
    _watch(refresh, count)


def _watch(interval: float, count: int | None) -> None:
    """Print a line until Control-C, or `count` times; in a terminal it replaces the one before."""
    from labsupport.profiling.monitoring import checked_interval, live_line

    checked_interval(interval)
    terminal = sys.stdout.isatty()
    psutil.cpu_percent()  # it counts from the call before
    try:
        time.sleep(min(interval, 0.1))
        shown = 0
        while True:
            print(*("\x1b[2K",) * terminal, live_line(), sep="", end="\r" if terminal else "\n")
            sys.stdout.flush()
            shown += 1
            if shown == count:
                break
            time.sleep(interval)
    except KeyboardInterrupt:
        pass
    if terminal:
        print()
