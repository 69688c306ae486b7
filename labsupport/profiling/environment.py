"""What is installed, what is missing, and which command mends it?

`diagnose()` is the list behind `labsupport doctor`; with quick=True it is the preflight of
`make lab`: it looks at files and installed versions only, and does not import PyTorch.
The short card that opens each notebook is `labsupport.profiling.card`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from labsupport.paths import ProjectNotFoundError, project_root
from labsupport.profiling.health import Check, check_health
from labsupport.profiling.provenance import package_version

Capability = tuple[int, int]

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
NOTEBOOK_RAM_GIB = 6  # what the heaviest notebook may use
FREE_DISK_GIB = 2  # checkpoints, recorded runs, a second copy of the notebooks
FREE_GPU_GIB = 6  # the sizes of the notebooks suit an 8 GB GPU

LAB = "make lab"
LAB_CUDA = "make lab TORCH=cuda"


def diagnose(quick: bool = False) -> list[Check]:
    """All findings about this machine, most basic first.

    Args:
        quick: only what needs no PyTorch import (well under 0.3 s).
    """
    found = [
        check_python(),
        check_system(),
        check_ram(),
        check_torch_build(),
        check_kernel(),
        *_check_folders(),
    ]
    if not quick:
        # Before PyTorch starts on the GPU, as this process would be one of its users then.
        health = check_health()
        if package_version("torch") is not None:  # else check_torch_build has said so
            found += check_device()
        found += health
    return found


def to_json(items: Iterable[Check]) -> str:
    """The findings as a JSON list of objects with name, status, detail and remedy."""
    return json.dumps([asdict(item) for item in items], indent=2, ensure_ascii=False)


def check_python(version: tuple[int, ...] | None = None) -> Check:
    """Whether Python (this one unless `version` is given) is new enough."""
    version = tuple(sys.version_info[:3]) if version is None else version
    text = ".".join(map(str, version))
    if version[:2] < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return Check(
            "Python",
            "fail",
            f"{text}; the lab needs {wanted} or newer",
            f"install Python {wanted} or newer, remove .venv, then: {LAB}",
        )
    return Check("Python", "ok", f"{text} ({sys.executable})")


def check_system(system: str | None = None) -> Check:
    """Whether the lab is tested on this operating system."""
    system = platform.system() if system is None else system
    detail = f"{system} {platform.release()} {platform.machine()}"
    if system in ("Linux", "Darwin"):
        return Check("System", "ok", detail)
    return Check(
        "System",
        "warn",
        f"{detail}; the lab is tested on Linux and macOS",
        "wsl --install   (then work inside the Linux that it gives you)",
    )


def check_ram() -> Check:
    """Whether the heaviest notebook fits into the memory that is free now."""
    import psutil

    memory = psutil.virtual_memory()
    free, total = memory.available / 2**30, memory.total / 2**30
    detail = f"{free:.1f} GiB available of {total:.1f} GiB"
    if free < NOTEBOOK_RAM_GIB:
        return Check(
            "Memory",
            "warn",
            f"{detail}; a notebook may use {NOTEBOOK_RAM_GIB} GiB",
            "close other programs and shut down idle notebook kernels",
        )
    return Check("Memory", "ok", detail)


def check_disk(root: Path) -> Check:
    """Whether there is room for checkpoints and recorded runs under `root`."""
    free = shutil.disk_usage(root).free / 2**30
    detail = f"{free:.1f} GiB free under {root}"
    if free < FREE_DISK_GIB:
        return Check("Disk", "warn", f"{detail}; {FREE_DISK_GIB} GiB are wanted", "pip cache purge")
    return Check("Disk", "ok", detail)


def nvidia_driver() -> str | None:
    """How an NVIDIA driver shows itself here, or None; nothing is started or imported."""
    for trace in ("/proc/driver/nvidia/version", "/dev/nvidiactl"):
        if os.path.exists(trace):
            return trace
    return shutil.which("nvidia-smi")


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed PyTorch was built for, or None, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def check_torch_build() -> Check:
    """PyTorch's version, and whether its build fits the NVIDIA driver found."""
    return judge_torch(package_version("torch"), torch_cuda_version(), nvidia_driver())


def judge_torch(version: str | None, cuda: str | None, driver: str | None) -> Check:
    """The finding for an installed version (or None), its CUDA version and a driver's trace."""
    if version is None:
        return Check("PyTorch", "fail", "not installed", LAB)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        return Check("PyTorch", "fail", f"{version}; the lab needs {wanted} or newer", LAB)
    if driver and not cuda:
        return Check(
            "PyTorch",
            "warn",
            f"{version} is a CPU build, but an NVIDIA driver is here ({driver}): "
            "the GPU stays unused",
            LAB_CUDA,
        )
    if cuda and not driver:
        return Check(
            "PyTorch",
            "ok",
            f"{version} for CUDA {cuda}; no NVIDIA driver found, so it uses the CPU",
        )
    return Check("PyTorch", "ok", f"{version} for {f'CUDA {cuda}' if cuda else 'the CPU'}")


def check_kernel() -> Check:
    """Whether JupyterLab and a Python kernel for it are installed."""
    versions = {name: package_version(name) for name in ("jupyterlab", "ipykernel")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check("Jupyter", "warn", f"not installed: {', '.join(missing)}", LAB)
    return Check("Jupyter", "ok", ", ".join(f"{name} {v}" for name, v in versions.items()))


def check_working_copy(root: Path) -> Check:
    """Whether the student's working copy is there, and can be written."""
    folder = root / "work"
    if not folder.exists():
        return Check("Working copy", "ok", f"none yet; `{LAB}` makes it in {folder}")
    if not os.access(folder, os.W_OK):
        return Check(
            "Working copy",
            "fail",
            f"{folder} cannot be written",
            f"sudo chown -R $(id -u) {folder}",
        )
    found = [path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    return Check("Working copy", "ok", f"{folder} (notebooks: {len(found)})")


def _check_folders() -> list[Check]:
    try:
        root = project_root()
    except ProjectNotFoundError as error:
        return [Check("Project folder", "fail", str(error), "pip install -e .")]
    return [check_disk(root), check_working_copy(root)]


def check_device() -> list[Check]:
    """The GPU's findings, then those of the optional packages, for the device at hand."""
    import torch

    if not torch.cuda.is_available():
        return [check_no_gpu(torch_cuda_version(), nvidia_driver()), *check_optional(None)]
    capability = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    return [
        Check("GPU", "ok", f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"),
        check_capability(capability),
        check_gpu_memory(free / 2**30, total / 2**30),
        *check_optional(capability),
    ]


def check_no_gpu(cuda: str | None, driver: str | None) -> Check:
    """No usable GPU: by choice, or because build and driver do not work together."""
    if cuda and driver:
        return Check(
            "GPU",
            "warn",
            f"PyTorch for CUDA {cuda} and an NVIDIA driver are here, but CUDA does not start: "
            "the driver may be too old for this build, or this process may not see the GPU",
            "nvidia-smi   (shows the newest CUDA version that the driver takes)",
        )
    if driver:
        return Check("GPU", "warn", "unused: PyTorch is a CPU build", LAB_CUDA)
    return Check("GPU", "ok", "none; every notebook also runs on the CPU")


def check_capability(capability: Capability) -> Check:
    """What the compute capability allows: below 8.0 neither flash-attn 2 nor bfloat16."""
    text = f"{capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return Check(
            "Compute capability",
            "warn",
            f"{text}: below 8.0, so flash-attn 2 cannot run and bfloat16 has no tensor cores",
            'use attention(..., backend="sdpa_efficient") with float16 or float32',
        )
    return Check("Compute capability", "ok", f"{text}: float16 and bfloat16 on tensor cores")


def check_gpu_memory(free_gib: float, total_gib: float) -> Check:
    """Whether enough of the GPU's memory is free for the notebooks."""
    detail = f"{free_gib:.1f} GiB free of {total_gib:.1f} GiB"
    if free_gib < FREE_GPU_GIB:
        return Check(
            "GPU memory",
            "warn",
            f"{detail}; the notebooks want {FREE_GPU_GIB} GiB",
            "nvidia-smi   (shows who uses the rest), then end those programs",
        )
    return Check("GPU memory", "ok", detail)


def check_optional(capability: Capability | None) -> list[Check]:
    """Optional packages and tools, judged by whether they would help here.

    Args:
        capability: the GPU's compute capability, or None without a usable GPU.
    """
    gpu = capability is not None
    ampere = gpu and capability >= (8, 0)
    hopper = gpu and capability[0] in (9, 10)
    return [
        _check_compiler(gpu),
        _check_package("triton", gpu, "Linux", "pip install -e '.[triton]'"),
        _check_package(
            "flash-attn",
            ampere,
            "compute capability 8.0",
            "pip install ninja packaging psutil setuptools wheel; "
            "pip install --no-build-isolation 'flash-attn>=2.8' (it compiles for a long time)",
        ),
        _check_package(
            "flash-attn-4", hopper, "compute capability 9.0 or 10.x", "pip install -e '.[hopper]'"
        ),
        # xFormers has nothing that SDPA lacks here, so its absence is never a warning.
        _check_package("xformers", False, "a GPU: pip install xformers", ""),
    ]


def _check_package(name: str, useful: bool, needs: str, install: str) -> Check:
    version = package_version(name)
    if version:
        return Check(name, "ok", version)
    if useful:
        return Check(name, "warn", "not installed; it would run on this GPU", install)
    return Check(name, "ok", f"not installed; optional (it needs {needs})")


def _check_compiler(gpu: bool) -> Check:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found:
        return Check("C++ compiler", "ok", found)
    detail = "none found; FlexAttention on a CPU is compiled with it"
    if gpu:
        return Check("C++ compiler", "ok", detail + " (not needed on this GPU)")
    return Check(
        "C++ compiler",
        "warn",
        detail,
        "sudo apt install g++   (on macOS: xcode-select --install)",
    )
