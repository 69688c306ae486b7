"""How much memory does a program use while it runs?  `labsupport monitor -- COMMAND`.

The program keeps its stdin, stdout and stderr; what is said here goes to stderr. Signals reach the
program first, and it has time to end. Then whatever it has left running is ended, and only then are
the summary and the chart written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from labsupport.profiling.monitoring.child import Child, Signals, adopt_orphans, say
from labsupport.profiling.monitoring.gpu import open_gpu
from labsupport.profiling.monitoring.live import LiveView
from labsupport.profiling.monitoring.processes import ProcessTree, memory_limit
from labsupport.profiling.monitoring.recording import format_row
from labsupport.profiling.monitoring.sampler import (
    DEFAULT_INTERVAL_S,
    MISSED,
    Sampler,
    gpu_limit,
    memory_lines,
    own_peak,
    sampling_line,
    small_print,
)
from labsupport.profiling.units import format_bytes

GRACE_S = 30.0
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells say it
CHART_TYPES = (".png", ".svg", ".pdf")


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
    """Run `command`, sample its memory, and say on stderr what was found.

    It is meant for a process that does nothing else: it collects all children of the process.

    Args:
        command: the program and its arguments.
        interval: seconds between samples.
        out: a CSV file, written while the program runs, one flushed line for each sample.
        chart: a picture of the curve, written at the end.
        device: the GPU, in PyTorch's count.
        grace: seconds that an interrupted program has to end before it is ended with SIGTERM, and
            5 s later with SIGKILL. A third interrupt ends it at once.
        force: overwrite `out` and `chart`.
        live: seconds between refreshes of a live view on stderr; None for no view. At a terminal
            the program then writes to a pipe, and its lines appear above the view.

    Returns:
        The program's exit status; 128 + n if signal n ended it; 127 if it was not found, 126 if it
        cannot be executed.

    Raises:
        ValueError: the interval is too short, the chart's type is unknown, or both files are one.
        OSError: a file exists already, or cannot be written. Then nothing is run.
    """
    _check_files(out, chart, force)
    adopt_orphans()
    tree = ProcessTree(count_root=False)
    sampler = Sampler(tree, open_gpu(device), interval)
    view = None if live is None else LiveView(live, sys.stderr)
    with contextlib.ExitStack() as stack:
        csv = stack.enter_context(_csv(out, sampler.recording.columns))
        signals = stack.enter_context(Signals())
        floor = own_peak()
        try:
            child = _start(command, tree, signals, grace, view)
        except OSError as error:
            if out is not None:
                out.unlink()
            return _not_started(command, error)
        try:
            while child.status is None:
                csv.write(format_row(sampler.recording.columns, sampler.sample()))
                if view is not None:
                    with contextlib.suppress(OSError):  # its reader has gone; the program goes on
                        view.refresh_if_due()
                child.wait_until(sampler.next_sample_at())
        finally:
            lasted = time.perf_counter() - sampler.began
            left = child.end_all()
            if view is not None:
                view.close()
    status = os.waitstatus_to_exitcode(child.status)
    status = 128 - status if status < 0 else status
    say(f"{_short(command)} ended with status {status} after {lasted:.1f} s")
    if left:
        say(f"  it had left running, and this ended: {', '.join(left)}")
    _report(sampler, child.maxrss, floor, lasted)
    if csv.error is not None:
        say(f"  {out} is not complete: {csv.error}")
    elif out is not None:
        say(f"  written: {out}")
    if chart is not None:
        _draw(sampler, chart, command)
    if sampler.gpu is not None:
        sampler.gpu.close()
    return status


def _start(
    command: list[str], tree: ProcessTree, signals: Signals, grace: float, view: LiveView | None
) -> Child:
    """Start the program; at a terminal with a view, its lines go through pipes."""
    if view is None:
        return Child(command, tree, signals, grace)
    pipes = view.pipes()
    try:
        streams = {name: write for name, (_, write) in pipes.items()}
        child = Child(command, tree, signals, grace, streams)
    except OSError:
        for read, _ in pipes.values():
            os.close(read)
        raise
    finally:
        for _, write in pipes.values():
            os.close(write)
    view.open()
    for read, _ in pipes.values():
        view.pass_on(read)
    return child


class _Csv:
    """A file of samples.  A full disk ends the file, not the program that is watched."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, line: str) -> None:
        """Append one line, so that it can be read at once."""
        if self._file is None or self.error is not None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self.error = error


@contextlib.contextmanager
def _csv(path: Path | None, columns: tuple[str, ...]) -> Iterator[_Csv]:
    if path is None:
        yield _Csv(None)
        return
    file = path.open("w", encoding="utf-8")
    try:
        csv = _Csv(file)
        csv.write(",".join(columns))
        yield csv
    finally:
        with contextlib.suppress(OSError):  # of a full disk, already said
            file.close()


def _check_files(out: Path | None, chart: Path | None, force: bool) -> None:
    if chart is not None and chart.suffix.lower() not in CHART_TYPES:
        raise ValueError(f"{chart}: a chart's name ends in {', '.join(CHART_TYPES)}")
    if out is not None and chart is not None and out.resolve() == chart.resolve():
        raise ValueError(f"--out and --chart name the same file, {out}: choose two names")
    for path in (out, chart):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
        if path.exists() and not force:
            raise FileExistsError(f"{path} exists: choose another name, or overwrite with --force")


def _short(command: list[str]) -> str:
    text = " ".join(shlex.join([Path(command[0]).name, *command[1:]]).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _not_started(command: list[str], error: OSError) -> int:
    program = command[0]
    if isinstance(error, FileNotFoundError):
        say(f"command not found: {program}")
        return NOT_FOUND
    say(f"{program} cannot be executed: {error.strerror}")
    return NOT_EXECUTABLE


def _report(sampler: Sampler, maxrss: int, floor: int, lasted: float) -> None:
    # A process starts as a copy of ours, and the system counts that too.
    size = format_bytes(maxrss)
    peak = f"{size} (ru_maxrss)" if maxrss > floor else f"below {size}"
    own = f"the system's own peak of its largest single process: {peak}"
    if sampler.tree.seen == 0:
        lines = ["it ended before the first sample: its memory was never read", own]
    else:
        first, *rest = memory_lines(sampler)
        lines = [first, own, *rest, sampling_line(sampler, sampler.cpu_s / lasted), MISSED]
    for line in lines:
        say(f"  {line}")


def _draw(sampler: Sampler, path: Path, command: list[str]) -> None:
    if sampler.tree.seen == 0:
        say("  no chart was drawn: there is nothing to draw")
        return
    recording = sampler.recording
    peak, mean = recording.peak("rss_bytes")[1], recording.mean("rss_bytes")
    title = f"{_short(command)}: at most {format_bytes(peak)}, {format_bytes(mean)} on average"
    limit, label = memory_limit()
    try:
        from labsupport.plotting.monitor import plot_monitor

        figure = plot_monitor(
            recording.frame(),
            title=title,
            limit=(label, limit),
            gpu_limit=gpu_limit(sampler.gpu),
            small_print=small_print(sampler),
        )
        figure.savefig(path)
    except Exception as error:  # the command's status is what counts
        say(f"  no chart was drawn: {type(error).__name__}: {error}")
    else:
        say(f"  written: {path}")
