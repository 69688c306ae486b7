"""Disturbances of a measurement on this machine. Read-only: nothing is ever changed.

`labsupport doctor` shows these findings; a remedy is only named. What a driver or a user may not
read is "not readable here", which is no fault. Work of others on a quarter of the cores, or a
kernel of others in a tenth of the time, makes timings unsteady.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from labsupport.profiling.gpu import GpuState, foreign_pids, read_gpus
from labsupport.profiling.units import format_bytes

UNREADABLE = "not readable here"
BUSY_SHARE = 0.25
BUSY_GPU_PERCENT = 10
QUIET = "measure again when they have ended, or on an idle machine"


@dataclass(frozen=True)
class Check:
    """One finding. `remedy` is the command, or the sentence, that fixes it; empty when ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        tail = f"  -> {self.remedy}" if self.remedy else ""
        return f"[{self.status}] {self.name}: {self.detail}{tail}"


def check_health() -> list[Check]:
    """All findings about disturbances here; takes about 0.2 s."""
    load = watch_load()
    time.sleep(0.2)
    gpus = [check for gpu in read_gpus() for check in judge_gpu(gpu)]
    return [*gpus, *check_launches(os.environ.get("CUDA_LAUNCH_BLOCKING")), load()]


def check_launches(blocking: str | None) -> list[Check]:
    """Warn if CUDA_LAUNCH_BLOCKING is set, to this value: it spoils measurements."""
    if blocking in (None, "", "0"):
        return []
    detail = "CUDA_LAUNCH_BLOCKING is set: every launch waits, so times are too long"
    return [Check("GPU launches", "warn", detail, "unset CUDA_LAUNCH_BLOCKING")]


def judge_gpu(gpu: GpuState) -> list[Check]:
    """A GPU's other users, clocks, power limit and persistence mode."""
    name = f"GPU {gpu.index}"
    others = {pid: size for pid, size in (gpu.users or {}).items() if pid != os.getpid()}
    users = Check(f"{name} other processes", "ok", "none" if gpu.users is not None else UNREADABLE)
    if others:
        used = format_bytes(sum(size or 0 for size in others.values()))
        which = " (in this container their numbers are unknown)"
        if not foreign_pids():
            which = f": {', '.join(map(str, others))}"
        users = Check(users.name, "warn", f"{len(others)}, with {used} of its memory{which}", QUIET)
    elif (gpu.busy_percent or 0) > BUSY_GPU_PERCENT and os.getpid() not in (gpu.users or {}):
        hidden = f"none visible, but a kernel ran in {gpu.busy_percent}% of the last moments"
        users = Check(users.name, "warn", hidden, QUIET)

    clock = UNREADABLE
    if gpu.sm_mhz is not None:
        clock = f"SM {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz"
        clock += "" if gpu.celsius is None else f", {gpu.celsius} °C"
    clocks = Check(f"{name} clocks", "ok", clock)
    if slowed := gpu.held_down_by():
        remedy = "let it cool down or end other work, and compare only runs of one session"
        clocks = Check(clocks.name, "warn", f"{clock}; limited by: {slowed}", remedy)

    watts, default = gpu.limit_w, gpu.default_limit_w
    power = Check(f"{name} power limit", "ok", UNREADABLE if watts is None else f"{watts:.0f} W")
    if watts is not None and default is not None and watts < default - 1:
        detail = f"{watts:.0f} W, below the default of {default:.0f} W"
        remedy = f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}   (if it is yours to set)"
        power = Check(power.name, "warn", detail, remedy)

    word = UNREADABLE if gpu.persistence is None else "on"
    persistence = Check(f"{name} persistence mode", "ok", word)
    if gpu.persistence is False:
        detail = "off: a program's first call waits until the driver has set the GPU up again"
        remedy = "sudo nvidia-smi -pm 1   (until the next start of the machine)"
        persistence = Check(persistence.name, "warn", detail, remedy)
    return [users, clocks, power, persistence]


def watch_load() -> Callable[[], Check]:
    """Return a function that says how much other processes have worked since now."""
    start, own, all_of_it = time.perf_counter(), time.process_time(), _busy_seconds()

    def found() -> Check:
        cores, seconds = psutil.cpu_count() or 1, max(time.perf_counter() - start, 1e-3)
        busy = _busy_seconds() - all_of_it - (time.process_time() - own)
        others = min(max(0.0, busy / seconds), float(cores))
        detail = f"other processes use {others:.1f} of {cores} cores"
        if others > BUSY_SHARE * cores:
            return Check("CPU load", "warn", f"{detail}: timings will vary", QUIET)
        return Check("CPU load", "ok", detail)

    return found


def _busy_seconds() -> float:
    """Time that all cores have worked."""
    times = psutil.cpu_times()
    idle = ("idle", "iowait", "guest", "guest_nice")  # a guest's time is in user already
    return sum(times) - sum(getattr(times, name, 0.0) for name in idle)


_spoken: list[Any] = []  # the notebook cells that have said it; None while a measurement is watched


@contextlib.contextmanager
def warn_if_busy(recorded: Callable[[], str] = str) -> Iterator[None]:
    """Say once in a notebook's cell, in one line, that others were at work during a measurement.

    Programs do not say it: they have `labsupport doctor`, and what they record says it.

    Args:
        recorded: makes the end of the line, such as a figure from a quiet machine.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = getattr(shell, "execution_count", None)
    if cell is None or _spoken[-1:] in ([None], [cell]):
        yield
        return
    _spoken.append(None)
    load = watch_load()
    try:
        yield
    finally:
        _spoken.pop()
    if (found := load()).status == "warn":
        _spoken.append(cell)
        print(f"Busy machine: {found.detail} and be too long. {recorded()}".rstrip())
