"""What does an NVIDIA GPU do now: memory, utilisation, clocks, power, and what slows it down?

Asked from NVML, the driver's own interface, without PyTorch. Utilisation is the share of time in
which some kernel ran, however small a part of the GPU it used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

# The columns of a sample, with their units.
COLUMNS = (
    "gpu_tree_bytes",
    "gpu_used_bytes",
    "gpu_util_percent",
    "gpu_sm_mhz",
    "gpu_memory_mhz",
    "gpu_power_w",
    "gpu_throttle",
)
# nvml.h, nvmlClocksEventReasons (before driver 535: nvmlClocksThrottleReasons).
THROTTLE_BITS = {
    0x1: "idle",
    0x2: "clocks_set",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
CHOSEN_CLOCKS = ("idle", "clocks_set", "display_clocks")  # wanted, not a sign of trouble
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h


def throttle_names(mask: float) -> str:
    """The reasons in NVML's bit mask, joined by '+'; empty for none, or for NaN."""
    if math.isnan(mask):
        return ""
    bits = int(mask)
    known = [name for bit, name in THROTTLE_BITS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_BITS)
    return "+".join([*known, *([hex(rest)] if rest else [])])


def which_gpu(index: int, visible: str | None) -> int | str | None:
    """How NVML knows GPU `index` of PyTorch: by number, by UUID, or None if it is not visible.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES, or None if it is not set. As CUDA does, the list
            ends at its first entry that is no GPU.
    """
    if visible is None:
        return index
    entries: list[int | str] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdigit():
            entries.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            entries.append(entry)
        else:
            break
    return entries[index] if index < len(entries) else None


def tree_bytes(users: Iterable[tuple[int, int | None]], pids: set[int]) -> float:
    """GPU memory of the processes `pids`, in bytes; NaN if the driver does not say.

    Args:
        users: (process, bytes) of everybody on the GPU. A process with contexts for computing and
            for graphics is listed twice, with one figure.
    """
    mine: dict[int, int] = {}
    for pid, size in users:
        if pid not in pids:
            continue
        if size is None:
            return math.nan
        mine[pid] = max(size, mine.get(pid, 0))
    return float(sum(mine.values()))


def foreign_pids(namespace: int | None) -> bool:
    """Whether the driver's process numbers are not those of this process, as in a container.

    Args:
        namespace: the inode of /proc/self/ns/pid, or None where there is no such file.
    """
    return namespace is not None and namespace != FIRST_PID_NAMESPACE


def cuda_version(number: int | None) -> str:
    """CUDA's number of a version in words: 13010 is 13.1."""
    return "unknown" if number is None else f"{number // 1000}.{number % 1000 // 10}"


class GpuReader:
    """Reads one GPU; `open_gpu` makes it.

    Attributes:
        name, driver: as NVML says them.
        cuda: the newest CUDA version that the driver takes.
        total_bytes: memory of the GPU.
        note: what the readings cannot say here, or "".
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.name = _text(self._ask(lambda: nvml.nvmlDeviceGetName(handle)) or "NVIDIA GPU")
        self.driver = _text(self._ask(nvml.nvmlSystemGetDriverVersion) or "unknown")
        self.cuda = cuda_version(self._ask(nvml.nvmlSystemGetCudaDriverVersion))
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        self.total_bytes = int(memory.total) if memory else 0
        self._foreign = foreign_pids(_pid_namespace())
        self.note = (
            "in this container the driver's process numbers are not ours, so the GPU memory of the "
            "processes alone is unknown"
            if self._foreign
            else ""
        )

    def read(self, pids: set[int]) -> tuple[float, ...]:
        """One value for each of COLUMNS; NaN for what this GPU or this user cannot read."""
        nvml, handle = self._nvml, self._handle
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        sm = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        mem = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        power = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        throttle = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return (
            self._tree_bytes(pids),
            _number(memory.used if memory else None),
            _number(rates.gpu if rates else None),
            _number(sm),
            _number(mem),
            _number(power) / 1000,
            _number(throttle),
        )

    def close(self) -> None:
        """Give NVML back."""
        self._ask(self._nvml.nvmlShutdown)

    def _tree_bytes(self, pids: set[int]) -> float:
        if self._foreign:
            return math.nan
        users: list[tuple[int, int | None]] = []
        for ask in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            listed = self._ask(lambda ask=ask: getattr(self._nvml, ask)(self._handle))
            if listed is None and "Compute" in ask:
                return math.nan
            users += [(user.pid, user.usedGpuMemory) for user in listed or ()]
        return tree_bytes(users, pids)

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:  # this GPU, or this user, cannot read it
            return None


def open_gpu(index: int = 0) -> GpuReader | None:
    """The reader of GPU `index` in PyTorch's count, or None without a driver or without that GPU.

    PyTorch counts those of CUDA_VISIBLE_DEVICES. Where GPUs of different kinds are mixed, its order
    is NVML's only with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    chosen = which_gpu(index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if chosen is None:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no binding, no driver, no permission: there is no GPU to read
        return None
    try:
        if isinstance(chosen, str):
            return GpuReader(pynvml, pynvml.nvmlDeviceGetHandleByUUID(chosen))
        return GpuReader(pynvml, pynvml.nvmlDeviceGetHandleByIndex(chosen))
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        return None


def _pid_namespace() -> int | None:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
