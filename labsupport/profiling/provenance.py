"""Provenance of a measurement: device, versions, commit, date and clocks."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from typing import Any

from labsupport.paths import project_root
from labsupport.profiling.gpu import read_gpus

# Distributions whose version can change a measurement.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-4", "xformers", "numpy", "transformers")
# Entries of "gpu" in a record, and the fields of `GpuState` that they come from.
GPU_ENTRIES = {
    "driver": "driver",
    "sm_mhz": "sm_mhz",
    "sm_max_mhz": "max_sm_mhz",
    "memory_mhz": "memory_mhz",
    "temperature_c": "celsius",
    "power_w": "power_w",
    "power_limit_w": "limit_w",
}


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
        gpus = read_gpus()
        state = gpus[where.index or 0] if (where.index or 0) < len(gpus) else None
        record["compute_capability"] = info.compute_capability
        record["cuda"] = torch.version.cuda
        read = {key: getattr(state, name, None) for key, name in GPU_ENTRIES.items()}
        record["gpu"] = {key: value for key, value in read.items() if value is not None}
    else:
        record["threads"] = torch.get_num_threads()
        with contextlib.suppress(OSError, NotImplementedError, AttributeError):
            record["cpu_mhz"] = round(psutil.cpu_freq().current)
        # Above the number of cores, other programs were at work and the times are too long.
        record["load_average"] = round(psutil.getloadavg()[0], 2)
    return record | extra


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


def _git(*arguments: str) -> str | None:
    # Installed in another project's .venv, git would tell that project's commit.
    if not (project_root() / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=project_root(), capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
