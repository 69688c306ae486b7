"""Where does a number come from?  Device, versions, commit, date and clocks of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from typing import Any

from labsupport.paths import project_root

# Distributions whose version can change a measurement.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-4", "xformers", "numpy", "transformers")


def package_version(distribution: str) -> str | None:
    """The installed version of a distribution, found without importing it; None if absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance(device: Any = None, **extra: Any) -> dict[str, Any]:
    """Everything that one must know to repeat or to judge a measurement, ready for JSON.

    Args:
        device: where the measurement runs; by default the current GPU if there is one.
        extra: further entries, for example the shapes.
    """
    import psutil
    import torch

    from labsupport.profiling.hardware import detect_device
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    info = detect_device(where)
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": info.name,
        "device_kind": info.kind,
        "device_memory_gib": round(info.memory_bytes / 2**30, 1),
        "versions": {name: v for name in PACKAGES if (v := package_version(name))},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": git_commit(),
        "command": command_line(),
    }
    if where.type == "cuda":
        record["compute_capability"] = info.compute_capability
        record["cuda"] = torch.version.cuda
        record["gpu"] = gpu_state(where.index or 0)
    else:
        record["threads"] = torch.get_num_threads()
        record["cpu_mhz"] = _cpu_mhz()
        # Above the number of cores, other programs were at work and the times are too long.
        record["load_average"] = round(psutil.getloadavg()[0], 2)
    record.update(extra)
    return record


def command_line() -> str:
    """The command that started this program, as one would type it in the project's folder."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = (
        ["-m", spec.name.removesuffix(".__main__")]
        if spec is not None
        else [os.path.basename(sys.argv[0])]
    )
    return shlex.join(["python", *program, *sys.argv[1:]])


def git_commit() -> str | None:
    """The commit of the checkout, with '+changes' when files differ from it.

    A copy without git says it in the variable LABSUPPORT_COMMIT; None if nobody says it.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return os.environ.get("LABSUPPORT_COMMIT")
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def gpu_state(index: int = 0) -> dict[str, Any]:
    """Clocks, temperature and power of a GPU as NVML reports them now; empty without NVML.

    Keys: driver, sm_mhz, sm_max_mhz, memory_mhz, temperature_c, power_w, power_limit_w.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no binding, no driver, no permission: nothing to report
        return {}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(_nvml_index(index))
        readings = {
            "driver": lambda: pynvml.nvmlSystemGetDriverVersion(),
            "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "sm_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(
                handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
        state: dict[str, Any] = {}
        for name, read in readings.items():
            try:
                value = read()
            except pynvml.NVMLError:  # this GPU or this user cannot read it
                continue
            state[name] = value.decode() if isinstance(value, bytes) else value
        return state
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def _nvml_index(index: int) -> int:
    """NVML counts all GPUs, PyTorch those of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip().isdigit():
        return int(visible[index])
    return index


def _cpu_mhz() -> float | None:
    import psutil

    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return round(frequency.current) if frequency else None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=project_root(), capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
