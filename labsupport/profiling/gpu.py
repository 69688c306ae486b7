"""NVIDIA GPUs as their driver reports them through NVML: memory, use, clocks, power, processes.

Nothing here imports PyTorch, and nothing is ever set. A value that this GPU, this driver or this
user cannot read is None.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

# Why clocks are below their maximum: nvml.h, nvmlClocksEventReasons.
REASONS = {
    0x1: "idle",
    0x2: "clocks chosen by a user",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "kept equal to other GPUs",
    0x20: "temperature (the driver slows it)",
    0x40: "temperature (the hardware slows it)",
    0x80: "power brake from outside",
    0x100: "clocks of a display",
}
WANTED = 0x1 | 0x2 | 0x100  # no sign of trouble
HOST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h


@dataclass(frozen=True)
class GpuState:
    """Snapshot of a GPU's state.

    Attributes:
        index: in PyTorch's count.
        busy_percent: share of the last moments in which some kernel ran, however small.
        limit_w, default_limit_w: power allowed now, and when it left the factory.
        reasons: NVML's bit mask of reasons for lower clocks.
        users: process number -> bytes on this GPU (None where the driver does not tell).
        persistence: whether the driver keeps the GPU initialised between programs.
    """

    index: int
    name: str
    driver: str = "unknown"
    busy_percent: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    memory_mhz: int | None = None
    celsius: int | None = None
    power_w: float | None = None
    limit_w: float | None = None
    default_limit_w: float | None = None
    reasons: int | None = None
    users: dict[int, int | None] | None = None
    persistence: bool | None = None

    def held_down_by(self) -> str:
        """The reasons why the clocks are low against the user's will; empty if they are not."""
        mask = (self.reasons or 0) & ~WANTED
        return ", ".join(word for bit, word in REASONS.items() if mask & bit)


def read_gpus() -> list[GpuState]:
    """The GPUs that PyTorch may see (CUDA_VISIBLE_DEVICES), now; empty without a driver."""
    nvml = _nvml()
    if nvml is None:
        return []
    try:
        found = visible_gpus(nvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        return [_read(nvml, index, chosen) for index, chosen in enumerate(found)]
    except nvml.NVMLError:
        return []


@functools.cache
def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no binding, no driver, no permission: there is no GPU to read
        return None
    return pynvml


def visible_gpus(count: int, visible: str | None) -> list[int | str]:
    """The GPUs of a machine that has `count`, as numbers or UUIDs, in PyTorch's order.

    `visible` is CUDA_VISIBLE_DEVICES; as in CUDA, the list ends at its first entry that is no GPU.
    """
    if visible is None:
        return list(range(count))
    entries: list[int | str] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdigit() and int(entry) < count:
            entries.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            entries.append(entry)
        else:
            break
    return entries


def foreign_pids() -> bool:
    """True where the driver knows processes by other numbers than we do, as in a container."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino != HOST_PID_NAMESPACE
    except OSError:
        return False


def _read(nvml: Any, index: int, chosen: int | str) -> GpuState:
    by = "UUID" if isinstance(chosen, str) else "Index"
    handle = getattr(nvml, f"nvmlDeviceGetHandleBy{by}")(chosen)

    def ask(name: str, *more: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError):  # this GPU, or this user, cannot read it
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *more)
        return None

    def watts(name: str) -> float | None:
        value = ask(name)
        return None if value is None else value / 1000

    memory, rates = ask("MemoryInfo"), ask("UtilizationRates")
    users, mode = ask("ComputeRunningProcesses"), ask("PersistenceMode")
    return GpuState(
        index=index,
        name=str(ask("Name") or "NVIDIA GPU"),
        driver=str(nvml.nvmlSystemGetDriverVersion()),
        busy_percent=rates and rates.gpu,
        used_bytes=memory and int(memory.used),
        total_bytes=memory and int(memory.total),
        sm_mhz=ask("ClockInfo", nvml.NVML_CLOCK_SM),
        max_sm_mhz=ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_mhz=ask("ClockInfo", nvml.NVML_CLOCK_MEM),
        celsius=ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=watts("PowerUsage"),
        limit_w=watts("EnforcedPowerLimit"),
        default_limit_w=watts("PowerManagementDefaultLimit"),
        reasons=ask("CurrentClocksThrottleReasons"),
        users=None if users is None else {user.pid: user.usedGpuMemory for user in users},
        persistence=None if mode is None else bool(mode),
    )
