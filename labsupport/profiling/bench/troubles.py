"""What to do where a case does not run, or runs abnormally slowly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil
import torch

from labsupport.attention.kernels import mode
from labsupport.profiling.benchmark import QUADRATIC_BACKENDS, predicted_shortage
from labsupport.profiling.cases import Case
from labsupport.profiling.units import format_bytes

ABNORMAL = 0.02  # of the ceiling: below it, something else than the algorithm is to blame
IMPOSSIBLE = 1.1  # of the ceiling: above it, the ceiling was measured too low
UNSTEADY = 0.25  # spread over median: above it, something else was at work

# Words in an error of the compilers that backends call, in lower case.
BUILD_WORDS = (
    "inductorerror",
    "cppcompileerror",
    "nvcc",
    "ninja",
    "no c++ compiler",
    "compilationerror",
)
IMPORT_WORDS = ("not installed", "no module named", "undefined symbol", "importerror")


def why_not(row: Mapping[str, Any], case: Case, device: torch.device) -> list[str]:
    """Lines of advice for a row whose status is not "ok"."""
    reason = str(row["reason"])
    if row["status"] == "out of memory":
        return [reason, *what_would_fit(case, device)]
    lower = reason.lower()
    if any(word in lower for word in IMPORT_WORDS):
        hint = "to mend it: labsupport doctor says what is installed, and which command adds it"
        if "undefined symbol" in lower:
            hint = (
                "to mend it: the package was built for another PyTorch: install the one for "
                f"torch {torch.__version__}, or build it here (pip install --no-build-isolation)"
            )
        return [reason, hint]
    if any(word in lower for word in BUILD_WORDS):
        found = [name for name in ("g++", "gcc", "clang", "nvcc") if shutil.which(name)]
        return [
            reason,
            "a kernel could not be built. FlexAttention on a CPU needs a C++ compiler, Triton a C "
            f"compiler, flash-attn's source nvcc; here: {', '.join(found) or 'none of them'}",
            "meanwhile: --backend sdpa_flash needs no compiler",
        ]
    if row["status"] == "unsupported":
        return [reason, "--backend auto takes one that can; labsupport compare shows all"]
    return [reason, "this is a bug, and worth reporting: labsupport doctor --report FILE"]


def what_would_fit(case: Case, device: torch.device, available: int | None = None) -> list[str]:
    """The nearest cases that would fit into the memory that is free, by prediction."""
    free = _free_bytes(device) if available is None else available
    lines = [f"free: {format_bytes(free)}. By prediction these would fit:"]
    options = {
        "--backend sdpa_flash": replace(case, backend="sdpa_flash"),
        **{f"--batch {size}": replace(case, batch=size) for size in _halves(case.batch)},
        **{
            f"--seqlen {size}": replace(case, seqlen=size, kv_seqlen=size)
            for size in _halves(case.seqlen)
            if size >= 16
        },
    }
    if case.backend not in QUADRATIC_BACKENDS:
        del options["--backend sdpa_flash"]
    seen = set()
    for option, other in options.items():
        flag = option.split()[0]
        if flag not in seen and not predicted_shortage(other, free):
            seen.add(flag)
            lines.append(f"  {option}")
    if not seen:
        return [f"free: {format_bytes(free)}: nothing like it fits; end other programs first"]
    return lines


def why_slow(
    row: Mapping[str, Any], case: Case, device: torch.device, reached: float | None
) -> list[str]:
    """Lines of advice where a time looks wrong; none where it looks sound."""
    lines = []
    if reached is not None and reached < ABNORMAL and case.seqlen >= 256:
        lines.append(f"abnormally slow: {reached:.1%} of the ceiling. " + _suspect(case, device))
    if reached is not None and reached > IMPOSSIBLE:
        lines.append("the ceiling was measured too low, while others worked. " + _others(device))
    if row["q3_ms"] - row["q1_ms"] > UNSTEADY * row["median_ms"]:
        lines.append(
            "unsteady: the quartiles are more than a quarter of the median apart. "
            + _others(device)
        )
    return lines


def missing_profilers() -> list[str]:
    """Nsight's command-line programs that are not here, with what still works."""
    names = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
    return [
        f"{program} ({name}) is not here: https://developer.nvidia.com/nsight-systems has it; "
        "torch.profiler's traces need neither"
        for program, name in names.items()
        if shutil.which(program) is None
    ]


def _suspect(case: Case, device: torch.device) -> str:
    if case.backend == "flash_triton" and mode.interpreted():
        return "Triton interprets its kernels here, to be read and not to be timed."
    if device.type == "cpu" and case.dtype in ("float16", "bfloat16"):
        return f"Many CPUs have no fast {case.dtype} arithmetic: try --dtype fp32."
    if case.backend in ("standard", "sdpa_math", "flash_torch"):
        return "This backend is there to be read: try --backend auto."
    return _others(device)


def _others(device: torch.device) -> str:
    if device.type == "cuda":
        return "Look for other programs and for throttled clocks: labsupport doctor, nvidia-smi."
    load, cores = psutil.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        return f"Other programs are at work: load {load:.1f} on {cores} cores. Repeat it alone."
    return f"Repeat it; load {load:.1f} on {cores} cores, {torch.get_num_threads()} threads used."


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _halves(size: int) -> list[int]:
    halves = []
    while size > 1:
        size //= 2
        halves.append(size)
    return halves
