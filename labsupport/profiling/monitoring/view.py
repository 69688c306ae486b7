"""What the live view shows: GPUs and the machine, as a table for a terminal or as plain lines."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from labsupport.profiling.monitoring.gpu_state import GpuState
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_GPU = "no NVIDIA GPU: none is here, or its driver does not answer"
UNREADABLE = "not readable here"


@dataclass(frozen=True)
class MachineState:
    """The machine at one moment. load: processes that run or wait, averaged over 1 minute."""

    cpu_percent: float
    cores: int
    used_bytes: int
    total_bytes: int
    load: float | None


@dataclass(frozen=True)
class Moment:
    """One refresh.  `trouble` says why the GPUs could not be read this time."""

    time: datetime.datetime
    machine: MachineState
    gpus: list[GpuState]
    trouble: str = ""


def read_machine() -> MachineState:
    """CPU since the last call (the first one says 0), memory and load."""
    memory = psutil.virtual_memory()
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        load = None
    return MachineState(
        psutil.cpu_percent(),
        psutil.cpu_count() or 1,
        memory.total - memory.available,
        memory.total,
        load,
    )


def machine_line(machine: MachineState) -> str:
    """The machine in one line."""
    load = "" if machine.load is None else f", load {machine.load:.1f}"
    return (
        f"CPU {machine.cpu_percent:.0f}% of {machine.cores} cores{load}, memory "
        f"{format_bytes(machine.used_bytes)} of {format_bytes(machine.total_bytes)}"
    )


def gpu_rows(gpu: GpuState) -> dict[str, str]:
    """What is said of a GPU: name of the row -> words."""
    return {
        "in use": _with_unit(gpu.busy_percent, "% of the time", space=""),
        "memory": _of(_size(gpu.used_bytes), _size(gpu.total_bytes)),
        "SM clock": _of(gpu.sm_mhz, gpu.max_sm_mhz, "MHz"),
        "memory clock": _of(gpu.memory_mhz, gpu.max_memory_mhz, "MHz"),
        "temperature": _with_unit(gpu.celsius, "°C"),
        "power": _of(_rounded(gpu.power_w), _rounded(gpu.limit_w), "W"),
        "held down by": _reasons(gpu),
        "processes": _processes(gpu.users),
    }


def plain_lines(moment: Moment) -> list[str]:
    """The view where there is no terminal: a block of lines, for logs and for screen readers."""
    lines = [
        moment.time.isoformat(sep=" ", timespec="seconds"),
        f"  machine: {machine_line(moment.machine)}",
    ]
    for gpu in moment.gpus:
        words = "; ".join(f"{row} {text}" for row, text in gpu_rows(gpu).items())
        lines.append(f"  GPU {gpu.index} {gpu.name}: {words}")
    return lines + [f"  {line}" for line in _without_gpus(moment)]


def as_table(moment: Moment, interval: float, last_words: str = "") -> RenderableType:
    """The view in a terminal: a column for each GPU, the machine below."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    if moment.gpus:
        table = Table(title_justify="left", show_edge=False, pad_edge=False)
        table.add_column("")
        for gpu in moment.gpus:
            table.add_column(f"GPU {gpu.index} {gpu.name}", overflow="fold")
        columns = [gpu_rows(gpu) for gpu in moment.gpus]
        for row in columns[0]:
            table.add_row(row, *(Text(column[row]) for column in columns))
        parts.append(table)
    parts += [Text(line) for line in _without_gpus(moment)]
    parts.append(Text(f"machine: {machine_line(moment.machine)}"))
    if last_words:
        parts.append(Text(last_words, no_wrap=True, overflow="ellipsis"))
    when = moment.time.strftime("%H:%M:%S")
    parts.append(Text(f"{when}, every {interval:g} s; Control-C ends it", style="dim"))
    return Group(*parts)


def _without_gpus(moment: Moment) -> list[str]:
    if moment.trouble:
        return [f"the GPU could not be read this time: {moment.trouble}"]
    return [] if moment.gpus else [NO_GPU]


def _reasons(gpu: GpuState) -> str:
    if gpu.reasons is None:
        return UNREADABLE
    if trouble := gpu.reason_words(chosen=False):
        return ", ".join(trouble)
    wanted = ", ".join(gpu.reason_words())
    return f"nothing ({wanted})" if wanted else "nothing"


def _processes(users: dict[int, int | None] | None) -> str:
    if users is None:
        return UNREADABLE
    if not users:
        return "none that can be seen"
    return ", ".join(
        f"{process_name(pid)} {'?' if size is None else format_bytes(size)}"
        for pid, size in users.items()
    )


def process_name(pid: int) -> str:
    """A process as 'name (number)', or its number alone where it cannot be asked."""
    try:
        return f"{psutil.Process(pid).name()} ({pid})"
    except psutil.Error:
        return str(pid)


def _size(count: int | None) -> str | None:
    return None if count is None else format_bytes(count)


def _rounded(watts: float | None) -> int | None:
    return None if watts is None else round(watts)


def _with_unit(value: object, unit: str, space: str = " ") -> str:
    return UNREADABLE if value is None else f"{value}{space}{unit}"


def _of(value: object, most: object, unit: str = "") -> str:
    if value is None:
        return UNREADABLE
    text = f"{value}" if most is None else f"{value} of {most}"
    return f"{text} {unit}".rstrip()
