"""Compile report of the Triton kernels, for a GPU that need not be there.

    python -m benchmarks resources --capability 90 --head-dim 64,128
    python -m benchmarks resources --kernel keys --head-dim 128 --search
    python -m benchmarks resources --capability 90 --hopper

Triton compiles for any NVIDIA GPU on any machine, and brings NVIDIA's `cuobjdump`, which takes the
result apart. So one can see before anything runs whether a tiling fits, and what limits it:

    registers     of one thread, 255 at most. What does not fit is spilled to memory, byte by byte
    shared_kib    for tiles of Q, K, V, dO; more stages need more of it
    programs      so many fit on one multiprocessor at once: the first to run out of registers,
                  shared memory or warps decides. 0: the kernel cannot run there
    hgmma, hmma, exp2, async_copies, local
                  instructions in the program's text, however often they run: on the tensor cores
                  (HGMMA is Hopper's, for products of 64 rows and more; HMMA is what came before),
                  MUFU.EX2, LDGSTS or UTMALDG, and loads and stores of what was spilled

Few registers or many programs are no end in themselves: only a GPU tells which tiling is fastest.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.runner import Case, names, numbers, run
from labsupport.attention.kernels.config import HALF, HOPPER, Tiling, padded, tiling
from labsupport.attention.kernels.mode import VARIABLE

if TYPE_CHECKING:
    import pandas as pd

# Triton's names.
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INSTRUCTIONS = {
    "hgmma": r"\bHGMMA\b",
    "hmma": r"\bHMMA\b",
    "exp2": r"\bMUFU\.EX2\b",
    "async_copies": r"\b(?:LDGSTS|UTMALDG)\b",
    "local": r"\b(?:STL|LDL)\b",
}


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor has.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """

    shared_kib: int
    warps: int
    programs: int
    registers: int = 65_536

    def fitting(self, registers: int, shared_bytes: int, warps: int) -> int:
        """How many programs fit at once.

        A warp gets its registers, in lots of 256, from a quarter of the multiprocessor; each
        program costs 1 KiB of shared memory more than it asks for.
        """
        a_warp = -(-registers * 32 // 256) * 256
        return min(
            4 * (self.registers // 4 // a_warp) // warps,
            self.shared_kib * 1024 // (shared_bytes + 1024),
            self.warps // warps,
            self.programs,
        )


LIMITS = {
    80: Limits(shared_kib=164, warps=64, programs=32),  # A100
    86: Limits(shared_kib=100, warps=48, programs=16),  # RTX 30
    89: Limits(shared_kib=100, warps=48, programs=24),  # RTX 40, L4
    90: Limits(shared_kib=228, warps=64, programs=32),  # H100, H200
}


@dataclass(frozen=True)
class Job:
    """One kernel, as a call with contiguous tensors compiles it."""

    capability: int
    kernel: str
    head_dim: int
    dtype: str
    causal: bool
    grouped: bool
    precision: str
    hopper: bool
    block_q: int
    block_k: int
    warps: int
    stages: int


def compile_report(
    *,
    capabilities: Sequence[int] = (80, 90),
    head_dims: Sequence[int] = (64, 128, 256),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    kernels: Sequence[str] = ("forward", "keys", "queries"),
    causal: bool = False,
    grouped: bool = False,
    precision: str = "ieee",
    hopper: bool = False,
    search: bool = False,
    tilings: Sequence[Tiling] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Compile kernels and count what they need; no GPU is used. One to three seconds a row.

    Args:
        capabilities: compute capabilities times ten: 90 is 9.0.
        head_dims: up to 256.
        dtypes: of the inputs: float16, bfloat16, float32.
        kernels: among "forward", "keys" (dK and dV) and "queries" (dQ).
        causal: with a causal mask.
        grouped: for fewer key/value heads than heads; Triton compiles a kernel of its own for
            one key/value head for each head.
        precision: "ieee" or "tf32", for float32.
        hopper: the kernels for Hopper: capability 90, half precision, head_dim 64 or 128.
        search: besides the tilings of `tuning.py`, those that differ from them in one number, by
            one step (blocks and warps doubled or halved, one stage more or less).
        tilings: these instead of the ones of `tuning.py`.
        progress: show a tqdm bar.

    Returns:
        A row for each kernel: its own columns (capability, kernel, head_dim, dtype, causal,
        grouped, precision, hopper, block_q, block_k, warps, stages), status, reason, registers a
        thread, spilled_bytes a thread, shared_kib a program, programs a multiprocessor, and the
        counts of instructions hgmma, hmma, exp2, async_copies and local. Where the compiler gives
        up, `reason` says why, and these are missing.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: a capability, dtype, kernel, head_dim or precision that is not known.
    """
    if find_spec("triton") is None:
        raise ModuleNotFoundError("Triton is not installed: pip install -e '.[triton]' (Linux)")
    _check("capability", capabilities, LIMITS)
    _check("head_dim", head_dims, range(1, 257))
    _check("dtype", dtypes, TYPES)
    _check("kernel", kernels, HALF)
    _check("precision", [precision], ("ieee", "tf32"))
    if hopper:
        _check("capability of Hopper", capabilities, [90])
        _check("head_dim of the kernels for Hopper", head_dims, list(HOPPER["forward"]))
        _check("dtype of the kernels for Hopper", dtypes, [torch.bfloat16, torch.float16])
    wanted = []
    for capability, dtype, kernel, head_dim in itertools.product(
        capabilities, dtypes, kernels, head_dims
    ):
        chosen = tiling(kernel, head_dim, dtype, interpreted=False, hopper=hopper)
        for plan in tilings or ([chosen, *neighbours(chosen)] if search else [chosen]):
            name = str(dtype).removeprefix("torch.")
            given = capability, kernel, head_dim, name, causal, grouped, precision, hopper
            wanted.append(Job(*given, plan.block_q, plan.block_k, plan.warps, plan.stages))
    # In processes of their own: without a GPU, this one interprets its kernels. Each takes seconds
    # to start.
    count = max(1, min(-(-len(wanted) // 4), os.cpu_count() or 1, 12))
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compiled, job) for job in wanted]
        cases = [Case(asdict(job), f.result) for job, f in zip(wanted, futures, strict=True)]
        return run(cases, torch.device("cpu"), progress=progress)


def neighbours(plan: Tiling) -> list[Tiling]:
    """The tilings that differ from `plan` in one number, by one step."""
    steps = [
        *(replace(plan, block_q=n) for n in (plan.block_q // 2, plan.block_q * 2)),
        *(replace(plan, block_k=n) for n in (plan.block_k // 2, plan.block_k * 2)),
        *(replace(plan, warps=n) for n in (4, 8) if n != plan.warps),
        *(replace(plan, stages=n) for n in (plan.stages - 1, plan.stages + 1)),
    ]
    return [t for t in steps if min(t.block_q, t.block_k) >= 16 and t.stages >= 1]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--capability", type=numbers, default=[80, 90], help=f"of {', '.join(map(str, LIMITS))}")
    add("--head-dim", type=numbers, default=[64, 128, 256])
    add("--dtype", type=names, default=["bfloat16", "float32"])
    add("--kernel", type=names, default=["forward", "keys", "queries"])
    add("--precision", default="ieee", help="of float32: ieee or tf32")
    add("--causal", action="store_true", help="with a causal mask")
    add("--grouped", action="store_true", help="fewer key/value heads than heads")
    add("--hopper", action="store_true", help="the kernels for Hopper GPUs")
    add("--search", action="store_true", help="also tilings next to the table's")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    try:
        return compile_report(
            capabilities=options.capability,
            head_dims=options.head_dim,
            dtypes=[getattr(torch, name, name) for name in options.dtype],
            kernels=options.kernel,
            causal=options.causal,
            grouped=options.grouped,
            precision=options.precision,
            hopper=options.hopper,
            search=options.search,
        )
    except (ValueError, ModuleNotFoundError) as error:
        raise SystemExit(str(error)) from error


def show(table: pd.DataFrame, options: argparse.Namespace | None = None) -> str:
    """Return the table as text, without the columns that say the same everywhere."""
    optional = ("causal", "grouped", "precision", "hopper", "status", "reason")
    shown = [name for name in table if name not in optional or table[name].nunique() > 1]
    return table[shown].to_string(index=False, na_rep="-", float_format="{:g}".format)


def _check(what: str, given: Iterable[Any], known: Any) -> None:
    for x in given:
        if x not in known:
            names = ", ".join(str(name).removeprefix("torch.") for name in known)
            choices = f"{known[0]} to {known[-1]}" if isinstance(known, range) else names
            raise ValueError(f"{what} {str(x).removeprefix('torch.')}: expected {choices}")


def _compiled(job: Job) -> dict[str, Any]:
    os.environ[VARIABLE] = "0"  # before Triton is imported
    import triton

    options = {"num_warps": job.warps, "num_stages": job.stages}
    target = import_module("triton.backends.compiler").GPUTarget("cuda", job.capability, 32)
    try:
        built = triton.compile(_source(job), target=target, options=options)
    except (RuntimeError, triton.errors.TritonError) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:  # the first error: the others say where
            reason = reason.__cause__
        said = str(reason).strip().splitlines()[-1:]
        return {"status": "failed", "reason": ": ".join([type(reason).__name__, *said])}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(built.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text[:500]
    registers, stack = map(int, found.groups())
    shared = built.metadata.shared
    return {
        "registers": registers,
        "spilled_bytes": stack,  # the kernels have no other use for a stack
        "shared_kib": shared / 1024,
        "programs": LIMITS[job.capability].fitting(registers, shared, job.warps),
        **{name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()},
    }


def _source(job: Job) -> Any:
    """The kernel with the types of its arguments, as Triton finds them in such a call."""
    from triton.compiler import ASTSource

    file = "forward" if job.kernel == "forward" else "backward"
    module = import_module(f"labsupport.attention.kernels.{file}{'_hopper' * job.hopper}")
    kernel = getattr(module, f"{'hopper_' * job.hopper}{job.kernel}_kernel")
    constants: dict[str, Any] = {
        "HEAD_DIM": job.head_dim, "D": padded(job.head_dim),
        "BLOCK_Q": job.block_q, "BLOCK_K": job.block_k,
        "LEFT": False, "RIGHT": job.causal, "ALIBI": False, "PACKED": False,
        "PRECISION": job.precision, "slopes": None, "cu_q": None, "cu_k": None,
    }  # fmt: skip
    # An integer that is 1 is a constant to Triton.
    constants |= {name: 1 for name in kernel.arg_names if re.fullmatch(r"stride_\w+d", name)}
    if not job.grouped:
        constants["group"] = 1
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    element = TYPES[getattr(torch, job.dtype)]
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "Rows":
            signature[name] = f"tensordesc<fp32[1,1,1,{job.block_q}]>"
        elif job.hopper and name.lstrip("d")[0].isupper() and name != "L":
            rows = job.block_q if name.lstrip("d") in "QO" else job.block_k
            signature[name] = f"tensordesc<{element}[1,1,{rows},{job.head_dim}]>"
        elif name in ("L", "Shift", "Delta"):
            signature[name] = "*fp32"
        elif name.lstrip("d")[0].isupper():
            signature[name] = f"*{element}"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        # Addresses and strides are multiples of 16, which allows wide loads.
        if signature[name].startswith("*") or (name not in constants and name[:6] == "stride"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
