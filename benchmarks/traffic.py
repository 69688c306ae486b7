"""Bytes that the lab's Triton kernels move, counted by Nsight Compute (`ncu`), and the theory's.

python -m benchmarks traffic --three --save traffic-h200

Bytes are counted in three places, on their way from left to right:

    multiprocessors  --(1)--  request coalescer  --(2)--  L2  --(3)--  large memory

(1) is what theorem 2 and `kernel_bytes` speak of: the tiles that a kernel's programs ask for.

    forward   a program: Q_i once, then K_j, V_j for each tile; writes O_i, L_i
    rows      dO, O, L; writes two numbers a query (shift and D)
    keys      a program: K_j, V_j once, then Q_i, dO_i and the two numbers; writes dK_j, dV_j
    queries   a program: Q_i, dO_i, the two numbers once, then K_j, V_j; writes dQ_i

Between (1) and (2) the coalescer joins reads of
the same bytes that come from several multiprocessors at about the same time, so (2) may be smaller.
(3) is compared with the compulsory bytes: ncu empties the caches before a kernel.

Source: NVIDIA, Nsight Compute documentation, Profiling Guide, "Metrics Decoder" (units l1tex, lrc,
lts, dram) and "Cache Control".
"""

import math
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch

from benchmarks import runner
from labsupport.analysis.nsight import BYTES, INSTALL, ncu_command, read_ncu, run
from labsupport.analysis.traffic import Sizes
from labsupport.attention.kernels.config import tiling
from labsupport.profiling.grids import ITEMSIZE, Case
from labsupport.profiling.timing import resolve_device

SHAPES = (  # plain, causal with another head_dim, grouped heads
    Case("flash_triton", 4096, 4, 16, head_dim=128, dtype="bfloat16"),
    Case("flash_triton", 4096, 4, 16, head_dim=64, dtype="bfloat16", causal=True),
    Case("flash_triton", 8192, 2, 32, 8, head_dim=128, dtype="bfloat16"),
)
NUMBER = 4  # bytes of a float32: L, shift, D
KERNELS = {  # the pass that each computes, and whether it is a version for Hopper
    "_attn_fwd": ("forward", False),
    "_bwd_preprocess": ("rows", False),
    "_bwd_dkdv": ("keys", False),
    "_bwd_dq": ("queries", False),
    "_hopper_fwd": ("forward", True),
    "_hopper_dkdv": ("keys", True),
    "_hopper_dq": ("queries", True),
}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--three", action="store_true", help="three shapes, not the first one only")


def measure(options: Namespace) -> pd.DataFrame:
    if shutil.which("ncu") is None:
        raise SystemExit(f"ncu not found: {INSTALL['ncu']}")
    cases = []
    for case in SHAPES if options.three else SHAPES[:1]:
        row: dict[str, Any] = asdict(case)
        del row["backend"], row["direction"]
        cases.append(runner.Trial(row, partial(count, case)))
    return runner.run(cases, resolve_device(options.device), metrics=list(BYTES))


def show(table: pd.DataFrame, options: Namespace) -> str:
    title = "ratios: moved and l2 to counted, dram to compulsory"
    return f"{title}\n{table.round(3).to_string(index=False)}"


def count(case: Case) -> list[dict[str, Any]]:
    """Run the case's forward and backward under ncu, and compare."""
    code = (
        "import torch; from labsupport.profiling import Case; "
        "from labsupport.profiling.grids import call_of, make_inputs; "
        f"case = {replace(case, direction='forward+backward')}; "
        "call_of(case, make_inputs(case, torch.device('cuda')))(); torch.cuda.synchronize()"
    )
    kernels = "--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(KERNELS)})$"
    command = ncu_command("--clock-control", "none", *kernels, "--metrics", ",".join(BYTES))
    return compare(read_ncu(run([*command, sys.executable, "-c", code])), case)


def compare(launches: Sequence[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    """Compare the bytes counted on the GPU with those that the tiles ask for.

    Returns:
        A row a launch of a kernel that is known: kernel, block_q, block_k; counted (bytes by
        `kernel_bytes`), moved (1), l2 (2), dram (3), compulsory; and the ratios moved_ratio =
        moved / counted, l2_ratio = l2 / counted, dram_ratio = dram / compulsory; NaN where a
        metric is missing.
    """
    rows = []
    for launch in launches:
        name = launch["kernel"].split("(")[0]
        if name not in KERNELS:
            continue
        kernel, hopper = KERNELS[name]
        block_q, block_k = 1, 1
        if kernel != "rows":
            dtype = getattr(torch, case.dtype)
            plan = tiling(kernel, case.head_dim, dtype, False, hopper=hopper, keys=case.kv_seqlen)
            block_q, block_k = plan.block_q, plan.block_k
        expected = kernel_bytes(kernel, case, block_q, block_k)
        counted = expected.read + expected.written
        to, fro, l2, read, written = (launch.get(name, math.nan) for name in BYTES)
        rows.append(
            {
                "kernel": f"{'hopper_' * hopper}{kernel}_kernel",
                "block_q": block_q, "block_k": block_k,
                "counted": counted, "moved": to + fro, "l2": l2, "dram": read + written,
                "compulsory": expected.compulsory, "moved_ratio": (to + fro) / counted,
                "l2_ratio": l2 / counted, "dram_ratio": (read + written) / expected.compulsory,
            }
        )  # fmt: skip
    return rows


class KernelBytes(NamedTuple):
    """read, written: between L2 and the multiprocessors; compulsory: each tensor's bytes once."""

    read: int
    written: int
    compulsory: int


def kernel_bytes(kernel: str, case: Case, block_q: int, block_k: int) -> KernelBytes:
    """Bytes of one launch of a Triton kernel of the lab, or of its version for Hopper.

    Args:
        kernel: "forward", "rows", "keys" or "queries".
        case: gives shape, mask and dtype; its backend and direction do not matter.
        block_q, block_k: the tile's sides.
    """
    sizes = Sizes(case.seqlen, case.kv_seqlen, case.head_dim, block_q, block_k, case.causal)
    heads, row = case.batch * case.heads, case.head_dim * ITEMSIZE[case.dtype]
    q = heads * case.seqlen * row  # bytes of Q, of O, of dO, of dQ
    k = case.batch * case.kv_heads * case.kv_seqlen * row
    numbers = heads * case.seqlen * NUMBER
    if kernel == "rows":
        return KernelBytes(2 * q + numbers, 2 * numbers, 2 * q + 3 * numbers)
    if kernel == "keys":
        passing = sum(_length(sizes.rows_seeing(cols)) for cols in sizes.all_cols())
        read = 2 * k + heads * passing * (2 * row + 2 * NUMBER)
        return KernelBytes(read, 2 * k, 2 * q + 2 * numbers + 4 * k)
    passing = sum(_length(sizes.cols_seen(rows)) for rows in sizes.all_rows())
    passing *= heads * 2 * row
    if kernel == "forward":
        return KernelBytes(q + passing, q + numbers, 2 * q + numbers + 2 * k)
    staying = 2 * q + 2 * numbers
    return KernelBytes(staying + passing, q, staying + q + 2 * k)


def _length(blocks: list[slice]) -> int:
    return sum(block.stop - block.start for block in blocks)
