"""Would a measurement here be disturbed?  Read-only: nothing is ever changed.

`labsupport doctor` shows these findings; a remedy is only named. Each GPU and the machine are read
once (`read_health`), and judged by functions of those readings. What a driver or a user may not
read is "not readable here", which is no fault.

The thresholds: work of others on a quarter of the cores, or a kernel of others in a tenth of the
time, makes timings of ours unsteady.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from labsupport.profiling.monitoring.gpu import FIRST_PID_NAMESPACE, foreign_pids
from labsupport.profiling.monitoring.gpu_state import GpuState, open_gpus, own_context
from labsupport.profiling.monitoring.view import process_name
from labsupport.profiling.units import format_bytes

Status = Literal["ok", "warn", "fail"]

UNREADABLE = "not readable here"
LOOK_S = 0.2  # how long other processes' use of the CPU is watched
BUSY_SHARE = 0.25
BUSY_GPU_PERCENT = 10
# Drivers whose "powersave" is an ordinary governor that follows the load (kernel documentation,
# intel_pstate and amd-pstate in active mode).
FOLLOWS_LOAD = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
QUIET = "measure again when they have ended, or on a machine of your own"


@dataclass(frozen=True)
class Check:
    """One finding.  `remedy` is the command, or the sentence, that mends it; empty when ok."""

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        tail = f"  -> {self.remedy}" if self.remedy else ""
        return f"[{self.status}] {self.name}: {self.detail}{tail}"


@dataclass(frozen=True)
class CpuState:
    """What is read of the CPU; None is what cannot be read here.

    Attributes:
        cores: logical ones of the machine.
        busy_by_others: cores' worth of work that other processes do.
        governors: how the system chooses the clock, of all cores.
        driver: the kernel's driver for the clocks.
        plugged: whether power comes from outside; None without a battery.
        battery_percent: its charge.
    """

    cores: int
    busy_by_others: float
    governors: tuple[str, ...] | None = None
    driver: str | None = None
    plugged: bool | None = None
    battery_percent: float | None = None


def check_health() -> list[Check]:
    """All findings about disturbances here; takes about 0.2 s."""
    gpus = open_gpus()
    found: list[Check] = []
    if gpus is not None:
        try:
            states = gpus.read()
        except RuntimeError as error:
            found.append(Check("GPU health", "warn", str(error), "nvidia-smi"))
        else:
            for state in states:
                found += judge_gpu(state, own=own_pids(), own_context=own_context())
        finally:
            gpus.close()
    return found + judge_cpu(read_cpu())


def own_pids() -> set[int] | None:
    """This process's number as the driver knows it; None where it knows us by another (container).

    Outside of Linux processes have one number only.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = FIRST_PID_NAMESPACE
    return None if foreign_pids(namespace) else {os.getpid()}


def read_cpu(seconds: float = LOOK_S) -> CpuState:
    """Watch the CPU for a moment, and read how its clock is chosen."""
    cores = psutil.cpu_count() or 1
    psutil.cpu_percent()
    own, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    busy = psutil.cpu_percent() / 100 * cores
    ours = (time.process_time() - own) / (time.perf_counter() - start)
    folder = Path("/sys/devices/system/cpu")
    governors = {
        text for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor") if (text := _read(path))
    }
    # Absent from psutil where the system has no such reading.
    battery = getattr(psutil, "sensors_battery", lambda: None)()
    return CpuState(
        cores,
        max(0.0, busy - ours),
        tuple(sorted(governors)) or None,
        _read(folder / "cpu0/cpufreq/scaling_driver") or None,
        battery.power_plugged if battery else None,
        battery.percent if battery else None,
    )


def judge_cpu(cpu: CpuState) -> list[Check]:
    """Load by others, the clock's governor, the battery."""
    return [_judge_load(cpu), _judge_governor(cpu), *_judge_battery(cpu)]


def judge_gpu(
    gpu: GpuState, *, own: set[int] | None = None, own_context: bool = False
) -> list[Check]:
    """Everything about one GPU: its users, clocks, modes and memory errors.

    Args:
        own: process numbers of ours, or None if the driver knows us by others.
        own_context: whether this process is on the GPU, for when its number is not known.
    """
    name = f"GPU {gpu.index}"
    return [
        _judge_users(name, gpu, own, own_context),
        _judge_clocks(name, gpu),
        _judge_power_limit(name, gpu),
        _judge_persistence(name, gpu),
        _judge_errors(name, gpu),
        _judge_mig(name, gpu),
        _judge_mps(name, gpu),
    ]


def _judge_users(name: str, gpu: GpuState, own: set[int] | None, own_context: bool) -> Check:
    title = f"{name} other processes"
    if gpu.users is None:
        return Check(title, "ok", UNREADABLE)
    users = {pid: size for pid, size in gpu.users.items() if pid not in (own or ())}
    others = {pid: size for pid, size in users.items() if pid not in gpu.drawing}
    count = len(others)
    if own is None:  # one of them may be this process, but which?
        count = max(0, count - own_context)
    if count:
        detail = f"{count}, with {_sizes(list(others.values()))}{_names(others, own)}"
        return Check(title, "warn", detail, QUIET)
    busy = gpu.busy_percent or 0
    if busy > BUSY_GPU_PERCENT and not own_context:
        detail = (
            f"none that can be seen, but a kernel ran in {busy}% of the last moments: a container "
            "may hide who"
        )
        return Check(title, "warn", detail, QUIET)
    nobody = "none that computes" if users else "none"
    return Check(title, "ok", nobody if own is not None else "none that can be seen")


def _sizes(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    total = f"{format_bytes(sum(known))} of its memory" if known else "memory " + UNREADABLE
    return total if len(known) == len(sizes) or not known else f"at least {total}"


def _names(others: dict[int, int | None], own: set[int] | None) -> str:
    if own is None:
        return " (in this container the driver's process numbers are not ours)"
    shown = [process_name(pid) for pid in list(others)[:4]]
    return f": {', '.join(shown)}{', ...' if len(others) > 4 else ''}"


def _judge_clocks(name: str, gpu: GpuState) -> Check:
    title = f"{name} clocks"
    clock = UNREADABLE
    if gpu.sm_mhz is not None:
        most = "" if gpu.max_sm_mhz is None else f" of {gpu.max_sm_mhz}"
        clock = f"SM {gpu.sm_mhz}{most} MHz"
    if gpu.celsius is not None:
        clock += f", {gpu.celsius} °C"
    if gpu.reasons is None:
        return Check(title, "ok", f"{clock}; what holds them down is {UNREADABLE}")
    if trouble := gpu.reason_words(chosen=False):
        return Check(
            title,
            "warn",
            f"{clock}; held down by: {', '.join(trouble)}",
            "let it cool down or end other work, and compare only runs of one session "
            "(nvidia-smi -q -d PERFORMANCE says more)",
        )
    chosen = gpu.reason_words()
    return Check(title, "ok", f"{clock}; {', '.join(chosen) if chosen else 'not held down'}")


def _judge_power_limit(name: str, gpu: GpuState) -> Check:
    title = f"{name} power limit"
    if gpu.limit_w is None:
        return Check(title, "ok", UNREADABLE)
    detail = f"{gpu.limit_w:.0f} W"
    if gpu.default_limit_w is not None and gpu.limit_w < gpu.default_limit_w - 1:
        return Check(
            title,
            "warn",
            f"{detail}, below the default of {gpu.default_limit_w:.0f} W: full speed may be out of "
            "reach",
            f"sudo nvidia-smi -i {gpu.index} -pl {gpu.default_limit_w:.0f}   (if it is yours to "
            "set)",
        )
    return Check(title, "ok", detail)


def _judge_persistence(name: str, gpu: GpuState) -> Check:
    title = f"{name} persistence mode"
    if gpu.persistence is None:
        return Check(title, "ok", UNREADABLE)
    if gpu.persistence:
        return Check(title, "ok", "on")
    return Check(
        title,
        "warn",
        "off: while no program uses the GPU its driver state is dropped, so a program's first call "
        "waits until it is set up again",
        "sudo nvidia-smi -pm 1   (until the next start of the machine)",
    )


def _judge_errors(name: str, gpu: GpuState) -> Check:
    title = f"{name} memory errors"
    if gpu.ecc is None:
        return Check(title, "ok", f"{UNREADABLE} (this GPU may not count them)")
    if not gpu.ecc:
        return Check(title, "ok", "not counted: ECC is off")
    if gpu.ecc_errors is None:
        return Check(title, "ok", f"ECC is on; the count is {UNREADABLE}")
    if gpu.ecc_errors:
        return Check(
            title,
            "warn",
            f"{gpu.ecc_errors} that could not be corrected since the driver was loaded: results "
            "may be wrong",
            "tell the administrator (nvidia-smi -q -d ECC,ROW_REMAPPER)",
        )
    return Check(title, "ok", "none that could not be corrected")


def _judge_mig(name: str, gpu: GpuState) -> Check:
    title = f"{name} MIG"
    if gpu.mig is None:
        return Check(title, "ok", f"{UNREADABLE} (this GPU may not have it)")
    if not gpu.mig:
        return Check(title, "ok", "off: the GPU is whole")
    return Check(
        title,
        "warn",
        "on: the GPU is cut into instances, and others may use the rest of it",
        "judge by measured ceilings, not by the figures of the whole GPU",
    )


def _judge_mps(name: str, gpu: GpuState) -> Check:
    title = f"{name} MPS"
    if gpu.mps is None:
        return Check(title, "ok", UNREADABLE)
    if not gpu.mps:
        return Check(title, "ok", "not in use")
    return Check(
        title,
        "warn",
        f"{gpu.mps} programs share the GPU at the same time through MPS",
        QUIET,
    )


def _judge_load(cpu: CpuState) -> Check:
    detail = f"other processes use {cpu.busy_by_others:.1f} of {cpu.cores} cores"
    if cpu.busy_by_others > BUSY_SHARE * cpu.cores:
        return Check("CPU load", "warn", f"{detail}: timings will vary", QUIET)
    return Check("CPU load", "ok", detail)


def _judge_governor(cpu: CpuState) -> Check:
    if cpu.governors is None:
        return Check("CPU clock", "ok", f"its governor is {UNREADABLE}")
    detail = f"governor {', '.join(cpu.governors)}"
    if cpu.driver:
        detail += f" (driver {cpu.driver})"
    if "powersave" not in cpu.governors or cpu.driver in FOLLOWS_LOAD:
        return Check("CPU clock", "ok", detail)
    return Check(
        "CPU clock",
        "warn",
        f"{detail}: the clock stays at its lowest",
        "sudo cpupower frequency-set -g performance   (until the next start of the machine)",
    )


def _judge_battery(cpu: CpuState) -> list[Check]:
    if cpu.plugged is None:
        return []
    charge = "" if cpu.battery_percent is None else f", {cpu.battery_percent:.0f}% charged"
    if cpu.plugged:
        return [Check("Power supply", "ok", f"plugged in{charge}")]
    detail = f"on battery{charge}: clocks may be lower"
    return [Check("Power supply", "warn", detail, "plug it in before you measure")]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
