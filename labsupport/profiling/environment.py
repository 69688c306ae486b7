"""Installation check: what is here, what is missing, and the command that fixes it.

`diagnose()` is the list that `labsupport doctor` prints; with quick=True it is the preflight of
`make lab`: it looks at files and installed versions only, and does not import PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from labsupport.paths import ProjectNotFoundError, work_dir
from labsupport.profiling.health import Check, check_health
from labsupport.profiling.provenance import package_version
from labsupport.profiling.units import format_bytes

Capability = tuple[int, int]

MIN_TORCH = (2, 11)
NOTEBOOK_RAM_GIB = 6  # what the heaviest notebook may use
FREE_DISK_GIB = 2  # checkpoints, recorded runs, a second copy of the notebooks
FREE_GPU_GIB = 6  # the sizes of the notebooks suit an 8 GB GPU

# What an optional package needs, and how it is installed.
PACKAGES = {
    "triton": ("a GPU and Linux", "pip install 'labsupport[triton]'"),
    "flash-attn": (
        "compute capability 8.0",
        "pip install ninja packaging psutil setuptools wheel; pip install --no-build-isolation "
        "'flash-attn>=2.8' (it compiles for a long time)",
    ),
    "flash-attn-4": ("compute capability 9.0 or 10.x", "pip install 'labsupport[hopper]'"),
    "xformers": ("a GPU", "pip install xformers"),
}
LAB = "make lab"
LAB_CUDA = "make lab TORCH=cuda   (without a clone: pip install --force-reinstall torch)"


def diagnose(quick: bool = False) -> list[Check]:
    """All findings about this machine, most basic first.

    Args:
        quick: only what needs no PyTorch import (well under 0.3 s).
    """
    torch_version = package_version("torch")
    import psutil

    ram = psutil.virtual_memory()
    remedy = "close other programs and shut down idle notebook kernels"
    found = [
        Check("Python", "ok", f"{platform.python_version()} ({sys.executable})"),
        _check_room("Memory", ram.available, ram.total, NOTEBOOK_RAM_GIB, remedy),
        judge_torch(torch_version, torch_cuda_version(), nvidia_driver()),
        *_check_folders(),
    ]
    if quick:
        return found
    # Before PyTorch starts on the GPU, as this process would be one of its users then.
    health = check_health()
    return [*found, *(check_device() if torch_version else []), *health]


def _check_room(name: str, free: int, total: int, wanted_gib: int, remedy: str) -> Check:
    detail = f"{format_bytes(free)} free of {format_bytes(total)}"
    if free < wanted_gib * 2**30:
        return Check(name, "warn", f"{detail}; {wanted_gib} GiB are wanted", remedy)
    return Check(name, "ok", detail)


def nvidia_driver() -> str | None:
    """A file that shows an NVIDIA driver, or None; nothing is started or imported."""
    for trace in ("/proc/driver/nvidia/version", "/dev/nvidiactl"):
        if os.path.exists(trace):
            return trace
    return shutil.which("nvidia-smi")


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed PyTorch was built for, or None, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def judge_torch(version: str | None, cuda: str | None, driver: str | None) -> Check:
    """The finding for an installed version (or None), its CUDA version and a driver's trace."""
    if version is None:
        return Check("PyTorch", "fail", "not installed", LAB)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        return Check("PyTorch", "fail", f"{version}; the lab needs {wanted} or newer", LAB)
    if driver and not cuda:
        detail = f"{version} is a CPU build, but an NVIDIA driver is here: the GPU stays unused"
        return Check("PyTorch", "warn", detail, LAB_CUDA)
    detail = f"{version} for {f'CUDA {cuda}' if cuda else 'the CPU'}"
    if cuda and not driver:
        detail += "; no NVIDIA driver found, so it uses the CPU"
    return Check("PyTorch", "ok", detail)


def _check_folders() -> list[Check]:
    try:
        work = work_dir()
    except ProjectNotFoundError as error:
        return [Check("Project folder", "fail", str(error), "pip install -e .")]
    disk = shutil.disk_usage(work.parent)
    room = _check_room("Disk", disk.free, disk.total, FREE_DISK_GIB, "pip cache purge")
    if not work.exists() or os.access(work, os.W_OK):
        return [room]
    remedy = f"sudo chown -R $(id -u) {work}"
    return [room, Check("Working copy", "fail", f"{work} cannot be written", remedy)]


def check_device() -> list[Check]:
    """The GPU's findings, then those of the optional packages, for the device at hand."""
    import torch

    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        none = check_no_gpu(torch_cuda_version(), nvidia_driver(), visible)
        return [none, *check_optional(None)]
    capability = torch.cuda.get_device_capability()
    remedy = "nvidia-smi   (shows who uses the rest), then end those programs"
    return [
        Check("GPU", "ok", f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"),
        check_capability(capability),
        _check_room("GPU memory", *torch.cuda.mem_get_info(), FREE_GPU_GIB, remedy),
        *check_optional(capability),
    ]


def check_no_gpu(cuda: str | None, driver: str | None, visible: str | None = None) -> Check:
    """No usable GPU: by choice, or because build and driver do not work together.

    `visible` is CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    if driver is None:
        return Check("GPU", "ok", "none; every notebook also runs on the CPU")
    if cuda is None:
        return Check("GPU", "warn", "unused: PyTorch is a CPU build", LAB_CUDA)
    if visible is not None:
        detail = f"hidden: CUDA_VISIBLE_DEVICES is {visible!r}, which names no GPU of this machine"
        return Check("GPU", "warn", detail, "unset CUDA_VISIBLE_DEVICES")
    detail = "CUDA does not start: the driver may be too old, or may not let this process see a GPU"
    remedy = "nvidia-smi   (shows the newest CUDA version that the driver takes)"
    return Check("GPU", "warn", detail, remedy)


def check_capability(capability: Capability) -> Check:
    """Check the compute capability: below 8.0 neither flash-attn 2 nor bfloat16."""
    text = f"{capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return Check("Compute capability", "ok", f"{text}: float16 and bfloat16 on tensor cores")
    detail = f"{text}: below 8.0, so flash-attn 2 cannot run and bfloat16 has no tensor cores"
    remedy = 'use attention(..., backend="sdpa_efficient") with float16 or float32'
    return Check("Compute capability", "warn", detail, remedy)


def check_optional(capability: Capability | None) -> list[Check]:
    """Optional packages and tools, judged by whether they would help on this GPU, if any."""
    from labsupport.attention.implementations import TRIED  # imports PyTorch

    numbers = capability or (0, 0)
    # xFormers has nothing that SDPA lacks here, so its absence is never a warning.
    useful = {
        "triton": capability is not None,
        "flash-attn": numbers >= (8, 0),
        "flash-attn-4": numbers[0] in (9, 10),
        "xformers": False,
    }
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    checks = [Check("C++ compiler", "ok", compiler or "none found (not needed on this GPU)")]
    if not compiler and capability is None:
        detail = "none found; FlexAttention on a CPU is compiled with it"
        remedy = "sudo apt install g++   (on macOS: xcode-select --install)"
        checks = [Check("C++ compiler", "warn", detail, remedy)]
    for name, helps in useful.items():
        needs, install = PACKAGES[name]
        if version := package_version(name):
            tried = f"; {TRIED[name]}" if name in TRIED else ""
            checks.append(Check(name, "ok", version + tried))
        elif helps:
            checks.append(Check(name, "warn", "not installed; it would run on this GPU", install))
        else:
            checks.append(Check(name, "ok", f"not installed; optional (it needs {needs})"))
    return checks
