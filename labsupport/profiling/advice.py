"""Advice on a measured case: how good it is, and what to do where it is slow or does not run.

How good is said against the device's own measured ceilings, by two marks from the FlashAttention-2
paper (abstract, and section 1): version 1 reached 25-40% of an A100's peak, version 2 50-73%.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import torch

from labsupport.profiling.benchmark import QUADRATIC_BACKENDS, predicted_shortage
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.units import format_bytes
from labsupport.profiling.work import bytes_of

GOOD, FAIR = 0.50, 0.25  # of the ceiling
ABNORMAL = 0.02  # of the ceiling: below it, something else than the algorithm is to blame
IMPOSSIBLE = 1.1  # of the ceiling: above it, the ceiling was measured too low
UNSTEADY = 0.25  # spread over median: above it, something else was at work
ROWS_OF_A_BLOCK = 128  # queries that a block of a GPU's kernel takes, about


class Bound(NamedTuple):
    """The least time in ms, what sets it ("arithmetic" or "memory"), and at which rate."""

    ms: float
    by: str
    rate: str


def bound_of(case: Case, ceilings: Ceilings) -> Bound | None:
    """The least time that the two measured ceilings leave to a case.

    None where no ceiling of its dtype was measured.
    """
    rate = ceilings.matmul_tflops.get(case.dtype)
    if rate is None:
        return None
    arithmetic = case.flops() / rate / 1e9
    memory = bytes_of(case) / ceilings.copy_gb_s / 1e6
    if arithmetic >= memory:
        return Bound(arithmetic, "arithmetic", f"matrix products at {rate:.3g} TFLOP/s")
    return Bound(memory, "memory", f"copying at {ceilings.copy_gb_s:.0f} GB/s")


def verdict(share: float) -> str:
    """ "good", "fair" or "to improve" for a part of the ceiling; "-" if unknown or impossible."""
    if math.isnan(share) or share > IMPOSSIBLE:
        return "-"
    return "good" if share >= GOOD else "fair" if share >= FAIR else "to improve"


def what_next(
    case: Case, ms: float, share: float, bound_by: str, best: tuple[float, str], sms: int | None
) -> str:
    """Return advice about a time: the first rule that applies.

    Args:
        share: the part of the ceiling, or NaN.
        bound_by: "arithmetic", "memory" or "".
        best: time and name of the fastest backend on this shape.
        sms: multiprocessors; None on a CPU.
    """
    best_ms, name = best
    blocks = case.batch * case.heads * math.ceil(case.seqlen / ROWS_OF_A_BLOCK)
    rules = (
        (
            case.backend in QUADRATIC_BACKENDS and best_ms < 0.9 * ms,
            f"writes the scores to memory and reads them again: use {name}",
        ),
        (
            sms is not None and case.dtype == "float32",
            "float32 leaves the tensor cores idle: --dtype bf16",
        ),
        (
            sms is not None and ms < 0.03,
            "too short to measure the kernel: launches count; a larger batch, or CUDA graphs",
        ),
        (
            sms is not None and blocks < sms,
            "too few blocks of queries for all multiprocessors: a larger batch, or split keys",
        ),
        (best_ms < 0.9 * ms, f"another kernel does the same faster: use {name}"),
        (
            GOOD <= share <= IMPOSSIBLE,
            "little is left here: look at the rest of the model (labsupport profile)",
        ),
        (
            bound_by == "memory",
            "moving the inputs takes longest: fewer key/value heads, or more queries for each key",
        ),
        (
            case.seqlen < 512,
            "short sequences leave little to tile: a larger batch, or several packed into one",
        ),
    )
    default = "see where the time goes: labsupport profile"
    return next((advice for applies, advice in rules if applies), default)


# (words in an error, in lower case; advice)
TROUBLES = (
    (
        ("undefined symbol",),
        "the package was built for another PyTorch: install the one for "
        f"torch {torch.__version__}, or build it here (pip install --no-build-isolation)",
    ),
    (
        ("not installed", "no module named", "importerror"),
        "labsupport doctor shows what is installed, and which command adds it",
    ),
    (
        ("inductorerror", "cppcompile", "nvcc", "ninja", "no c++ compiler", "compilationerror"),
        "a kernel could not be built. FlexAttention on a CPU needs a C++ compiler, Triton a C "
        "compiler, flash-attn's source nvcc. --backend sdpa_flash needs none",
    ),
)


def why_not(row: Mapping[str, Any], case: Case, device: torch.device) -> list[str]:
    """Lines of advice for a row whose status is not "ok"."""
    reason = str(row["reason"])
    if row["status"] == "out of memory":
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
        return [reason, *what_would_fit(case, free)]
    for words, advice in TROUBLES:
        if any(word in reason.lower() for word in words):
            return [reason, advice]
    if row["status"] == "unsupported":
        return [reason, "--backend auto takes one that can; labsupport compare shows all"]
    return [reason, "this is a bug, and worth reporting: labsupport doctor --report FILE"]


def what_would_fit(case: Case, available: int) -> list[str]:
    """The nearest cases that would fit into `free` bytes, by prediction."""
    halved = [case.seqlen >> i for i in range(1, case.seqlen.bit_length() - 4)]
    options = [(f"--seqlen {n}", replace(case, seqlen=n, kv_seqlen=n)) for n in halved]
    if case.backend in QUADRATIC_BACKENDS:
        options.append(("--backend sdpa_flash", replace(case, backend="sdpa_flash")))
    fitting: dict[str, str] = {}  # the nearest of each option
    for option, other in options:
        if not predicted_shortage(other, available):
            fitting.setdefault(option.split()[0], option)
    free = f"free: {format_bytes(available)}"
    if not fitting:
        return [f"{free}: nothing like it fits; end other programs first"]
    return [f"{free}. By prediction these would fit:", *(f"  {one}" for one in fitting.values())]


def why_slow(row: Mapping[str, Any], case: Case, device: torch.device, share: float) -> list[str]:
    """Lines of advice where a time looks wrong; none where it looks sound.

    Args:
        share: the part of the ceiling that the time reaches, or NaN.
    """
    if device.type == "cuda":
        others = "look for other programs and throttled clocks: labsupport doctor"
    else:
        others = f"repeat it alone; load {psutil.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    lines = []
    if share < ABNORMAL and case.seqlen >= 256:
        suspect = others
        if case.backend == "flash_triton" and device.type == "cpu":
            suspect = "Triton interprets its kernels here: don't time them"
        elif device.type == "cpu" and case.dtype in ("float16", "bfloat16"):
            suspect = f"many CPUs have no fast {case.dtype} arithmetic: try --dtype fp32"
        elif case.backend in ("standard", "sdpa_math", "flash_torch"):
            suspect = "this backend is for reading, not for speed: try --backend auto"
        lines.append(f"abnormally slow, {share:.1%} of the ceiling: {suspect}")
    if share > IMPOSSIBLE:
        lines.append(f"the ceiling was measured too low, while other programs ran: {others}")
    if row["q3_ms"] - row["q1_ms"] > UNSTEADY * row["median_ms"]:
        lines.append(f"unsteady, the quartiles are over a quarter of the median apart: {others}")
    return lines
