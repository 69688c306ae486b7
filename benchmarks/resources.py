"""Compile report of the Triton kernels, for a GPU that need not be there.

    python -m benchmarks resources --capability 90 --head-dim 64,128
    python -m benchmarks resources --kernel keys --head-dim 128 --causal
    python -m benchmarks resources --capability 90 --hopper

Triton compiles for any NVIDIA GPU on any machine, and brings NVIDIA's `cuobjdump`, which takes the
result apart. So one can see before anything runs whether a tiling fits, and what limits it:

    registers     of one thread, 255 at most. What does not fit is spilled to memory, byte by byte
    programs      that fit on one multiprocessor together; 0: the kernel cannot run there
    hgmma, hmma   instructions on the tensor cores (HGMMA is Hopper's) in the program's text
    local         loads and stores of what was spilled
"""

import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.runner import Trial, numbers, run, some_of
from labsupport.attention.kernels.config import KernelConfig, padded, tiling
from labsupport.attention.kernels.mode import VARIABLE
from labsupport.profiling.grids import refusal

# Triton's names.
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
KERNELS = {
    "forward": ("forward._attn_fwd", "hopper._hopper_fwd"),
    "keys": ("backward._bwd_dkdv", "hopper._hopper_dkdv"),
    "queries": ("backward._bwd_dq", "hopper._hopper_dq"),
}
INSTRUCTIONS = {
    "hgmma": r"\bHGMMA\b",
    "hmma": r"\bHMMA\b",
    "exp2": r"\bMUFU\.EX2\b",
    "async_copies": r"\b(?:LDGSTS|UTMALDG)\b",
    "local": r"\b(?:STL|LDL)\b",
}


@dataclass(frozen=True)
class Limits:
    """The resources of one multiprocessor.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """

    shared_kib: int
    warps: int
    programs: int
    registers: int = 65_536

    def fitting(self, registers: int, shared_bytes: int, warps: int) -> int:
        """Programs that fit together: each takes 1 KiB of shared memory beyond its own."""
        # A warp gets its registers, in lots of 256, from a quarter of the multiprocessor.
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


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--capability", type=some_of(map(str, LIMITS)), default=["80", "90"],
        help="times ten: 90 is 9.0")  # fmt: skip
    add("--head-dim", type=numbers, default=[64, 128, 256])
    add("--dtype", type=some_of(TYPES), default=["bfloat16", "float32"])
    add("--kernel", type=some_of(KERNELS), default=list(KERNELS),
        help="keys: dK and dV; queries: dQ")  # fmt: skip
    add("--causal", action="store_true", help="with a causal mask")
    add("--hopper", action="store_true",
        help="Hopper's kernels: capability 90, half precision, head_dim 64 or 128")  # fmt: skip


def measure(
    options: argparse.Namespace, tilings: Sequence[KernelConfig] | None = None
) -> pd.DataFrame:
    """Compile kernels and count what they need; no GPU is used. One to three seconds a row.

    Args:
        options: those of the command.
        tilings: these instead of the ones of `config.py`.

    Returns:
        A row for each kernel: its own columns (capability, kernel, ..., warps, stages), status,
        reason, registers a thread, spilled_bytes a thread, shared_kib a program, programs a
        multiprocessor, and the counts of `INSTRUCTIONS`.
    """
    if find_spec("triton") is None:
        raise SystemExit("Triton is not installed: pip install 'labsupport[triton]' (Linux)")
    if options.hopper and (
        options.capability != ["90"]
        or not {64, 128}.issuperset(options.head_dim)
        or "float32" in options.dtype
    ):
        raise SystemExit("--hopper needs --capability 90, half precision, head_dim 64 or 128")
    jobs: list[dict[str, Any]] = []
    for capability, dtype, kernel, head_dim in itertools.product(
        options.capability, options.dtype, options.kernel, options.head_dim
    ):
        torch_dtype = getattr(torch, dtype)
        chosen = tiling(kernel, head_dim, torch_dtype, interpreted=False, hopper=options.hopper)
        shared = {"capability": int(capability), "kernel": kernel, "head_dim": head_dim}
        shared |= {"dtype": dtype, "causal": options.causal, "hopper": options.hopper}
        jobs += [shared | asdict(plan) for plan in tilings or [chosen]]
    # In processes of their own: without a GPU, this one interprets its kernels. Each takes seconds
    # to start.
    count = max(1, min(-(-len(jobs) // 4), os.cpu_count() or 1, 12))
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compiled, job) for job in jobs]
        cases = [Trial(job, future.result) for job, future in zip(jobs, futures, strict=True)]
        return run(cases, torch.device("cpu"))


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    """Return the table as text, without the columns that say the same everywhere."""
    optional = ("causal", "hopper", "status", "reason")
    shown = [name for name in table if name not in optional or table[name].nunique() > 1]
    return table[shown].to_string(index=False, na_rep="-", float_format="{:g}".format)


def _compiled(job: dict[str, Any]) -> dict[str, Any]:
    os.environ[VARIABLE] = "0"  # before Triton is imported
    import triton

    target = import_module("triton.backends.compiler").GPUTarget("cuda", job["capability"], 32)
    options = {"num_warps": job["warps"], "num_stages": job["stages"]}
    try:
        built = triton.compile(_source(job), target=target, options=options)
    except (RuntimeError, triton.errors.TritonError) as error:
        first: Any = error
        while first.__cause__ is not None:  # the others say where
            first = first.__cause__
        return {"status": "failed", "reason": refusal(first)["reason"][-200:]}
    registers, stack, text = machine_code(built)
    shared = built.metadata.shared
    return {
        "registers": registers,
        "spilled_bytes": stack,  # the kernels have no other use for a stack
        "shared_kib": shared / 1024,
        "programs": LIMITS[job["capability"]].fitting(registers, shared, job["warps"]),
        **{name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()},
    }


def machine_code(built: Any) -> tuple[int, int, str]:
    """Registers and bytes of stack of a compiled kernel, and its text in the GPU's assembly."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(built.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text[:500]
    return int(found[1]), int(found[2]), text


def _source(job: dict[str, Any]) -> Any:
    """The kernel with the types of its arguments, as Triton finds them in such a call."""
    file, name = KERNELS[job["kernel"]][job["hopper"]].split(".")
    kernel = getattr(import_module(f"labsupport.attention.kernels.{file}"), name)
    constants = {
        "HEAD_DIM": job["head_dim"], "D": padded(job["head_dim"]), "BLOCK_Q": job["block_q"],
        "BLOCK_K": job["block_k"], "LEFT": False, "RIGHT": job["causal"], "ALIBI": False,
        "PACKED": False, "WIDE": job["dtype"] == "float32", "PRECISION": "ieee",
        "slopes": None, "cu_q": None, "cu_k": None, "group": 1,
    }  # fmt: skip
    descriptors = {}
    if job["hopper"]:
        rows = dict.fromkeys(("Q", "O", "dO", "dQ"), job["block_q"])
        rows |= dict.fromkeys(("K", "V", "dK", "dV"), job["block_k"])
        element = TYPES[job["dtype"]]
        descriptors = {
            n: f"tensordesc<{element}[1,1,{r},{job['head_dim']}]>" for n, r in rows.items()
        }
        descriptors["Rows"] = f"tensordesc<fp32[1,1,1,{job['block_q']}]>"
    return source_of(kernel, constants, TYPES[job["dtype"]], descriptors)


def source_of(
    kernel: Any, constants: dict[str, Any], element: str, types: dict[str, str] | None = None
) -> Any:
    """A kernel as Triton's compiler takes it, for contiguous tensors of an `element` type.

    Constants that the kernel does not have are ignored; `types` are those of other parameters.
    """
    from triton.compiler import ASTSource

    # An integer that is 1 is a constant to Triton.
    constants |= {name: 1 for name in kernel.arg_names if re.fullmatch(r"stride_\w+d", name)}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    float32 = ("LSE", "Shift", "Delta", "M", "O_s", "LSE_s", "slopes")
    known = dict.fromkeys(float32, "*fp32") | {"scale": "fp32", "cache_seqlens": "*i32"}
    known |= dict.fromkeys(constants, "constexpr") | (types or {})
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        tensor = name.lstrip("d")[0].isupper()
        signature[name] = known.get(name, f"*{element}" if tensor else "i32")
        # Addresses and strides are multiples of 16, which allows wide loads.
        aligned = name.startswith("stride") and name not in constants
        if signature[name].startswith("*") or aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
