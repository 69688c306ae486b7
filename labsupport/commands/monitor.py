"""The command `labsupport monitor`: memory of a program over time, and of the GPU beside it."""

import contextlib
import datetime
import shlex
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from labsupport.profiling.gpu import read_gpus
from labsupport.profiling.units import format_bytes

MIB = 2**20


def monitor_command(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program and its arguments, after --.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(
            help="Seconds between samples (0.1), or between lines of --live (1).",
            min=0.001,
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Show machine and GPU live, without a program.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A CSV file: seconds, MiB used, MiB free.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="A chart, as .png, .svg or .pdf.")] = None,
    device: Annotated[int, typer.Option(min=0, help="Number of the GPU, as in PyTorch.")] = 0,
) -> None:
    """Run a program and sample its memory, that of its children and of the GPU.

    The exit status is the program's. Memory is sampled, so shorter peaks can be missed.
    """
    if live == bool(command):
        raise ValueError("which program? monitor -- COMMAND, or monitor --live without one")
    if device and device >= len(read_gpus()):
        raise ValueError(f"--device {device}: there are {len(read_gpus())} GPUs")
    if command:
        raise typer.Exit(run_monitored(command, interval or 0.1, out, chart, device))
    _watch(interval or 1.0)


def run_monitored(
    command: list[str],
    interval: float = 0.1,
    out: Path | None = None,
    chart: Path | None = None,
    device: int = 0,
) -> int:
    """Run a program, sample its memory, and print on stderr what was found.

    The program keeps stdin, stdout and stderr, and gets the signals that would end this process.

    Returns:
        The program's exit status; 128 + n if signal n ended it.

    Raises:
        ValueError, OSError: a file has an unknown type, or exists, or its folder does not; the
            program cannot be run. Then nothing is run.
    """
    if chart is not None and chart.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{chart.name}: a chart is a .png, .svg or .pdf file")
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
    rows, start = [], time.perf_counter()
    try:
        while child.returncode is None:
            rows.append({"time_s": time.perf_counter() - start, **sample(child, device)})
            with contextlib.suppress(psutil.TimeoutExpired):
                child.wait(timeout=interval)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    status = 128 - child.returncode if child.returncode < 0 else child.returncode
    _report(textwrap.shorten(shlex.join(command), 60), status, rows, out, chart)
    return status


def sample(program: psutil.Process, device: int) -> dict[str, float]:
    """Return the memory of a program and its descendants, and what is free, in MiB.

    Memory is the sum of resident set sizes, in which shared pages count more than once. On a GPU
    also what all programs use there, and what is free.
    """
    used = 0
    with contextlib.suppress(psutil.Error):  # it has ended
        for process in (program, *program.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used += process.memory_info().rss
    row = {"used_mib": used / MIB, "free_mib": psutil.virtual_memory().available / MIB}
    for gpu in read_gpus()[device : device + 1]:
        if gpu.used_bytes is not None and gpu.total_bytes is not None:
            row["gpu_used_mib"] = gpu.used_bytes / MIB
            row["gpu_free_mib"] = (gpu.total_bytes - gpu.used_bytes) / MIB
    return row


def _report(
    program: str, status: int, rows: list[dict[str, float]], out: Path | None, chart: Path | None
) -> None:
    """Print peak and average; write the samples and their chart."""
    import pandas as pd

    table = pd.DataFrame(rows).round(3)
    table = table[table["used_mib"] > 0]  # after its end a program uses nothing
    found = ["it ended before its memory was read"] if table.empty else []
    for column, words in (("used_mib", "memory"), ("gpu_used_mib", "GPU memory of all programs")):
        if column in table and not table.empty:
            used = table[column]
            peak = (
                f"{words}: peak {used.max():,.0f} MiB after {table['time_s'][used.idxmax()]:.1f} s"
            )
            found.append(f"{peak}, {used.mean():,.0f} MiB on average")
    for line in (f"{program} ended with status {status}", *found):
        print(f"labsupport monitor: {line}", file=sys.stderr)
    if out is not None:
        table.to_csv(out, index=False)
    if chart is not None and not table.empty:
        from labsupport.plotting.charts import plot_samples

        small_print = f"{datetime.date.today()}; {len(table)} samples, shorter peaks can be missed"
        plot_samples(table, title=f"{program}: {found[0]}", small_print=small_print).savefig(chart)


def _watch(interval: float) -> None:
    """Print a line until Control-C; in a terminal it replaces the one before."""
    start, end = ("\x1b[2K", "\r") if sys.stdout.isatty() else ("", "\n")
    try:
        while True:
            print(start, live_line(), sep="", end=end, flush=True)
            time.sleep(interval)
    except KeyboardInterrupt:
        print()


def live_line() -> str:
    """Return the state of the machine and its GPUs in one line."""
    memory = psutil.virtual_memory()
    used = f"{format_bytes(memory.total - memory.available)} of {format_bytes(memory.total)}"
    parts = [f"{datetime.datetime.now():%H:%M:%S}  CPU {psutil.cpu_percent():.0f}%, memory {used}"]
    for gpu in read_gpus():
        memory = f"{format_bytes(gpu.used_bytes or 0)} of {format_bytes(gpu.total_bytes or 0)}"
        figures = (
            (gpu.busy_percent, f"{gpu.busy_percent}% in use"),
            (gpu.used_bytes, memory),
            (gpu.sm_mhz, f"SM {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz"),
            (gpu.power_w, f"{gpu.power_w or 0:.0f} W"),
            (gpu.held_down_by() or None, f"limited by {gpu.held_down_by()}"),
        )
        read = ", ".join(text for value, text in figures if value is not None)
        parts.append(f"GPU {gpu.index} {read or 'not readable here'}")
    return "  |  ".join(parts if len(parts) > 1 else [*parts, "no NVIDIA GPU"])
