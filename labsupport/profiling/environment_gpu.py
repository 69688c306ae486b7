"""Which GPU is here, what can it run, and which optional packages would help on it?

The part of `environment.diagnose` that needs PyTorch imported.
"""

from __future__ import annotations

import shutil

from labsupport.profiling.environment import (
    FREE_GPU_GIB,
    LAB_CUDA,
    Check,
    nvidia_driver,
    torch_cuda_version,
)
from labsupport.profiling.provenance import package_version

Capability = tuple[int, int]


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
