"""One look at an NVIDIA GPU: all that the live view shows, and that the health check judges.

Read from NVML and nothing else; nothing is ever set. What a GPU, a driver or a user cannot read is
None: "not readable here" is not a fault.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labsupport.profiling.monitoring.gpu import CHOSEN_CLOCKS, THROTTLE_BITS, which_gpu

# Why the clocks are below their maximum; see nvml.h for the bits.
REASONS = {
    "idle": "idle",
    "clocks_set": "clocks chosen by a user",
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "kept equal to other GPUs",
    "sw_thermal": "temperature (the driver slows it)",
    "hw_thermal": "temperature (the hardware slows it)",
    "hw_power_brake": "power brake from outside",
    "display_clocks": "clocks of a display",
}
_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment; None is what cannot be read here.

    Attributes:
        index: in PyTorch's count.
        busy_percent: share of the last moments in which some kernel ran.
        sm_mhz, memory_mhz and their max_: clocks now, and at most.
        power_w, limit_w, default_limit_w: drawn now, allowed, and allowed when it left the factory.
        reasons: the mask of NVML's reasons for lower clocks.
        users: process number -> bytes on this GPU, or None where the size is kept secret.
        drawing: those of them that only draw, as a desktop does.
        persistence, mig: modes, on or off.
        ecc: whether errors of memory are counted; ecc_errors: those that could not be corrected,
            since the driver was loaded.
        mps: how many programs share the GPU through MPS.
    """

    index: int
    name: str
    busy_percent: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    memory_mhz: int | None = None
    max_memory_mhz: int | None = None
    celsius: int | None = None
    power_w: float | None = None
    limit_w: float | None = None
    default_limit_w: float | None = None
    reasons: int | None = None
    users: dict[int, int | None] | None = None
    drawing: frozenset[int] = frozenset()
    persistence: bool | None = None
    mig: bool | None = None
    ecc: bool | None = None
    ecc_errors: int | None = None
    mps: int | None = None

    def reason_words(self, *, chosen: bool = True) -> list[str]:
        """Why the clocks are low, in words; without `chosen` only what is a sign of trouble."""
        mask = self.reasons or 0
        known = [name for bit, name in THROTTLE_BITS.items() if mask & bit]
        words = [REASONS[name] for name in known if chosen or name not in CHOSEN_CLOCKS]
        rest = mask & ~sum(THROTTLE_BITS)
        return [*words, *([f"reason {rest:#x}, unknown to this program"] if rest else [])]


class Gpus:
    """The GPUs that PyTorch may see, as NVML knows them; `open_gpus` makes it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = self._find()

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> list[GpuState]:
        """All of them, now.

        Raises:
            RuntimeError: none of them answers any more, as after the driver was unloaded.
        """
        states = [self._state(index, handle) for index, handle in enumerate(self._handles)]
        if states and all(state.total_bytes is None and not state.name for state in states):
            raise RuntimeError("no GPU answers any more")
        return states

    def close(self) -> None:
        """Give NVML back."""
        self._ask("nvmlShutdown")

    def _find(self) -> list[Any]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        handles = []
        for index in range(self._ask("nvmlDeviceGetCount") or 0):
            chosen = which_gpu(index, visible)
            if chosen is None:
                break
            how = "UUID" if isinstance(chosen, str) else "Index"
            handle = self._ask(f"nvmlDeviceGetHandleBy{how}", chosen)
            if handle is not None:
                handles.append(handle)
        return handles

    def _state(self, index: int, handle: Any) -> GpuState:
        nvml = self._nvml

        def ask(name: str, *more: Any) -> Any:
            return self._ask(f"nvmlDeviceGet{name}", handle, *more)

        memory, rates = ask("MemoryInfo"), ask("UtilizationRates")
        mig, ecc = ask("MigMode"), ask("EccMode")
        name, (users, drawing) = ask("Name"), self._users(handle)
        return GpuState(
            index=index,
            name=name.decode() if isinstance(name, bytes) else name or "",
            busy_percent=rates.gpu if rates else None,
            used_bytes=int(memory.used) if memory else None,
            total_bytes=int(memory.total) if memory else None,
            sm_mhz=ask("ClockInfo", nvml.NVML_CLOCK_SM),
            max_sm_mhz=ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
            memory_mhz=ask("ClockInfo", nvml.NVML_CLOCK_MEM),
            max_memory_mhz=ask("MaxClockInfo", nvml.NVML_CLOCK_MEM),
            celsius=ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=_watts(ask("PowerUsage")),
            limit_w=_watts(ask("EnforcedPowerLimit")),
            default_limit_w=_watts(ask("PowerManagementDefaultLimit")),
            reasons=ask("CurrentClocksThrottleReasons"),
            users=users,
            drawing=drawing,
            persistence=_switch(ask("PersistenceMode")),
            mig=_switch(mig[0] if mig else None),
            ecc=_switch(ecc[0] if ecc else None),
            ecc_errors=ask(
                "TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            mps=_count(ask("MPSComputeRunningProcesses")),
        )

    def _users(self, handle: Any) -> tuple[dict[int, int | None] | None, frozenset[int]]:
        """Everybody on the GPU, and who only draws; computing and drawing are listed apart."""
        computing, drawing = (self._ask(name, handle) for name in _LISTS)
        if computing is None:
            return None, frozenset()
        users = {user.pid: user.usedGpuMemory for user in (*computing, *(drawing or ()))}
        return users, frozenset(users) - {user.pid for user in computing}

    def _ask(self, name: str, *arguments: Any) -> Any:
        question: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if question is None:  # an older binding
            return None
        try:
            return question(*arguments)
        except self._nvml.NVMLError:  # this GPU, this driver, or this user cannot
            return None


def open_gpus() -> Gpus | None:
    """The GPUs that PyTorch may see (CUDA_VISIBLE_DEVICES), or None if there is not one."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no binding, no driver, no permission: there is no GPU to read
        return None
    gpus = Gpus(pynvml)
    if len(gpus):
        return gpus
    gpus.close()
    return None


def own_context() -> bool:
    """Whether this process itself holds memory of a GPU, through PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _switch(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _count(listed: list[Any] | None) -> int | None:
    return None if listed is None else len(listed)
