"""The command `labsupport monitor`."""

import contextlib
import math
import resource
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
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

GRACE_S = 30.0
TERM_S = 5.0  # from SIGTERM to SIGKILL
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells say it


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
    ] = GRACE_S,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files.")] = False,
) -> None:
    """Run a program and sample its memory, that of its children and of the GPU.

    What the program leaves running is ended with it. The exit status is the program's.
    """
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


def run_monitored(
    command: list[str],
    *,
    interval: float = DEFAULT_INTERVAL_S,
    out: Path | None = None,
    chart: Path | None = None,
    device: int = 0,
    grace: float = GRACE_S,
    force: bool = False,
    live: float | None = None,
) -> int:
    """Run a program, sample its memory, and print on stderr what was found.

    The program keeps stdin, stdout and stderr. What it leaves running is ended with it. When it is
    interrupted it has `grace` seconds to end before SIGTERM and SIGKILL; a third interrupt ends it
    immediately. `live` are the seconds between lines about GPU and machine.

    Returns:
        The program's exit status; 128 + n if signal n ended it; 127 if it was not found, 126 if it
        cannot be executed.

    Raises:
        ValueError: the interval is too short, or the chart's type unknown.
        OSError: a file exists already, or its folder does not. Then nothing is run.
    """
    checked_interval(interval)
    check_chart(chart)
    for path in filter(None, (out, chart)):
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        if path.exists() and not force:
            raise FileExistsError(f"{path} exists: choose another name, or overwrite with --force")
    signals: list[int] = []
    with _collected(signals):
        try:
            child = psutil.Popen(command)
        except FileNotFoundError:
            _say(f"command not found: {command[0]}")
            return NOT_FOUND
        except OSError as error:
            _say(f"{command[0]} cannot be executed: {error.strerror}")
            return NOT_EXECUTABLE
        with monitor(interval, device, pid=child.pid, out=out) as watch:
            _wait(child, watch, signals, grace, live)
            left = watch.members()
            _end(left, signal.SIGTERM, signal.SIGKILL)
    status = 128 - child.returncode if child.returncode < 0 else child.returncode
    program = textwrap.shorten(shlex.join([Path(command[0]).name, *command[1:]]), 60)
    _say(f"{program} ended with status {status}")
    if left:
        _say(f"  it had left {len(left)} processes running, which were ended")
    for line in str(watch).splitlines():
        _say(f"  {line}")
    largest = format_bytes(own_peak(resource.RUSAGE_CHILDREN))
    _say(f"  the operating system's own peak of its largest process: {largest}")
    if chart is not None:
        watch.chart(program).savefig(chart)
    for path in filter(None, (out, chart)):
        _say(f"  written: {path}")
    return status


@contextlib.contextmanager
def _collected(signals: list[int]) -> Iterator[None]:
    """Collect the signals that would end this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN  # as under nohup
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _wait(
    child: psutil.Popen, watch: monitor, signals: list[int], grace: float, live: float | None
) -> None:
    """Wait for the program; pass signals on to it, and end it when its grace is over."""
    passed_on, deadline = 0, math.inf
    next_line = math.inf if live is None else 0.0
    while True:
        with contextlib.suppress(psutil.TimeoutExpired):
            child.wait(timeout=0.05)
            return None
        now = time.perf_counter()
        for number in signals[passed_on:]:
            passed_on += 1
            deadline = min(deadline, now + grace)
            # At a terminal, Control-C reaches the program too.
            if number != signal.SIGINT or not sys.stdin.isatty():
                child.send_signal(number)
        if passed_on >= 3:
            return _end([child, *watch.members()], signal.SIGKILL)
        if now >= deadline:
            return _end([child, *watch.members()], signal.SIGTERM, signal.SIGKILL)
        if now >= next_line:
            next_line = now + (live or 0)
            _say(live_line())


def _end(processes: list[psutil.Process], *signals: int) -> None:
    """Send each signal to those that still run, and wait some seconds for their end."""
    for number in signals:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        _, processes = psutil.wait_procs(processes, timeout=TERM_S)


def _say(text: str) -> None:
    print(f"labsupport monitor: {text}", file=sys.stderr, flush=True)


def _watch(interval: float, count: int | None) -> None:
    """Print a line until Control-C, or `count` times; in a terminal it replaces the one before."""
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
