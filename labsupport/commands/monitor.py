"""The command `labsupport monitor`."""

import resource
import shlex
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from labsupport.commands.grid_options import check_chart
from labsupport.profiling.monitoring import (
    DEFAULT_INTERVAL_S,
    checked_interval,
    live_line,
    monitor,
    own_peak,
)
from labsupport.profiling.units import format_bytes


def monitor_command(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program and its arguments, after --.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Seconds between samples (0.1), or between lines of --live (1)."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show GPU and machine live, also without a program.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A CSV file, written while the program runs.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="A chart, as .png, .svg or .pdf, written at the end.")
    ] = None,
    device: Annotated[int, typer.Option(help="Number of the GPU, as in PyTorch.")] = 0,
) -> None:
    """Run a program and sample its memory, that of its children and of the GPU.

    The exit status is the program's.
    """
    refresh = checked_interval(1.0 if interval is None else interval)
    if command:
        # Lines may come seldom; a peak of memory would be missed.
        samples = min(refresh, DEFAULT_INTERVAL_S) if live or interval is None else interval
        files = {"out": out, "chart": chart}
        lines = refresh if live else None
        raise typer.Exit(
            run_monitored(command, interval=samples, device=device, live=lines, **files)
        )
    if not live:
        raise ValueError("which program? monitor -- COMMAND, or monitor --live without one")
    if out is not None or chart is not None:
        raise ValueError("--out and --chart record a program: give one after --")
    _watch(refresh)


def run_monitored(
    command: list[str],
    *,
    interval: float = DEFAULT_INTERVAL_S,
    out: Path | None = None,
    chart: Path | None = None,
    device: int = 0,
    live: float | None = None,
) -> int:
    """Run a program, sample its memory, and print on stderr what was found.

    The program keeps stdin, stdout and stderr, and gets the signals that would end this process.
    `live` are the seconds between lines about GPU and machine.

    Returns:
        The program's exit status; 128 + n if signal n ended it.

    Raises:
        ValueError: the chart's type is unknown.
        OSError: the program cannot be run; a file exists already, or its folder does not. Then
            nothing is run.
    """
    check_chart(chart)
    for path in filter(None, (out, chart)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        if path.exists():
            raise FileExistsError(f"{path} exists: choose another name")
    child = psutil.Popen(command)

    def pass_on(number: int, _: object) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():  # there, Control-C reaches both
            child.send_signal(number)

    old = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with monitor(interval, device, pid=child.pid, out=out) as watch:
            while True:
                try:
                    child.wait(timeout=live)
                    break
                except psutil.TimeoutExpired:
                    _say(live_line())
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    status = 128 - child.returncode if child.returncode < 0 else child.returncode
    program = textwrap.shorten(shlex.join([Path(command[0]).name, *command[1:]]), 60)
    largest = format_bytes(own_peak(resource.RUSAGE_CHILDREN))
    _say(f"{program} ended with status {status}")
    for line in str(watch).splitlines():
        _say(f"  {line}")
    _say(f"  the operating system's own peak of its largest process: {largest}")
    if chart is not None:
        watch.chart(program).savefig(chart)
    for path in filter(None, (out, chart)):
        _say(f"  written: {path}")
    return status


def _say(text: str) -> None:
    print(f"labsupport monitor: {text}", file=sys.stderr, flush=True)


def _watch(interval: float) -> None:
    """Print a line until Control-C; in a terminal it replaces the one before."""
    terminal = sys.stdout.isatty()
    start, end = ("\x1b[2K", "\r") if terminal else ("", "\n")
    psutil.cpu_percent()  # it counts from the call before
    try:
        time.sleep(min(interval, 0.1))
        while True:
            print(start, live_line(), sep="", end=end, flush=True)
            time.sleep(interval)
    except KeyboardInterrupt:
        if terminal:
            print()
