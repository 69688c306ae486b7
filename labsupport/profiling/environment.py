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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from labsupport.paths import ProjectNotFoundError, project_root
from labsupport.profiling.provenance import package_version

if TYPE_CHECKING:
    from labsupport.profiling.card import EnvironmentCard

Status = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
NOTEBOOK_RAM_GIB = 6  # what the heaviest notebook may use
FREE_DISK_GIB = 2  # checkpoints, recorded runs, a second copy of the notebooks
FREE_GPU_GIB = 6  # the sizes of the notebooks suit an 8 GB GPU

LAB = "make lab"
LAB_CUDA = "make lab TORCH=cuda"


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
        found += _check_device()
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


def environment_card(device: str | None = None) -> EnvironmentCard:
    """The short card that opens each notebook; see `labsupport.profiling.card`."""
    from labsupport.profiling import card

    return card.environment_card(device)


def _check_folders() -> list[Check]:
    try:
        root = project_root()
    except ProjectNotFoundError as error:
        return [Check("Project folder", "fail", str(error), "pip install -e .")]
    return [check_disk(root), check_working_copy(root)]


def _check_device() -> list[Check]:
    from labsupport.profiling.health import check_health

    # Before PyTorch starts on the GPU, as this process would be one of its users then.
    health = check_health()
    if package_version("torch") is None:
        return health  # check_torch_build has said so
    from labsupport.profiling.environment_gpu import check_device

    return check_device() + health
