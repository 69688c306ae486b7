"""The count beside a GPU's own counters: Nsight Compute (`ncu`) on the lab's Triton kernels.

python -m benchmarks traffic                    measure and compare, on a GPU
python -m benchmarks traffic --three --save traffic-h200    three shapes, saved
python -m benchmarks traffic --show             only print ncu's command
python -m benchmarks traffic --read FILE        compare a CSV that this command printed

Bytes are counted in three places, on their way from left to right:

    multiprocessors  --(1)--  request coalescer  --(2)--  L2  --(3)--  large memory

(1) is what theorem 2 and `kernel_bytes` speak of: whatever tiles a kernel's programs ask for.

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

from __future__ import annotations

import math
import re
import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import runner
from labsupport.analysis.nsight import BYTES, INSTALL, ncu_command, read_ncu, run
from labsupport.analysis.traffic import Sizes
from labsupport.profiling.cases import Case
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.work import ITEMSIZE

if TYPE_CHECKING:
    import pandas as pd

SHAPES = (  # of --three: plain, causal with another head_dim, grouped heads
    Case("flash_triton", 4096, 4, 16, head_dim=128, dtype="bfloat16"),
    Case("flash_triton", 4096, 4, 16, head_dim=64, dtype="bfloat16", causal=True),
    Case("flash_triton", 8192, 2, 32, 8, head_dim=128, dtype="bfloat16"),
)
NUMBER = 4  # bytes of a float32: L, shift, D
KERNEL_NAMES = r"(hopper_)?(forward|rows|keys|queries)_kernel"  # in recorded runs
KERNELS = {
    "_attn_fwd": "forward_kernel",
    "_bwd_preprocess": "rows_kernel",
    "_bwd_dkdv": "keys_kernel",
    "_bwd_dq": "queries_kernel",
    "_hopper_fwd": "hopper_forward_kernel",
    "_hopper_dkdv": "hopper_keys_kernel",
    "_hopper_dq": "hopper_queries_kernel",
}


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    for name, default in (("batch", 4), ("heads", 16), ("seqlen", 4096), ("head-dim", 128)):
        add(f"--{name}", type=int, default=default)
    add("--kv-heads", type=int, default=0, help="default: as many as heads")
    add("--dtype", default="bfloat16")
    add("--causal", action="store_true")
    add("--three", action="store_true", help="measure three shapes in place of one")
    add("--show", action="store_true", help="print ncu's command line")
    add("--read", type=Path, help="compare a CSV of ncu's; not saved, as its device is unknown")


def measure(options: Namespace) -> pd.DataFrame:
    case = Case(
        "flash_triton", options.seqlen, options.batch, options.heads, options.kv_heads,
        options.head_dim, options.dtype, options.causal, "forward+backward",
    )  # fmt: skip
    if options.show:
        print(shlex.join(kernel_command(_program(case))))
        raise SystemExit
    if options.read:
        return compare(read_ncu(options.read.read_text(encoding="utf-8")), case)
    if shutil.which("ncu") is None:
        raise SystemExit(f"ncu not found: {INSTALL['ncu']} (--show prints the command)")
    cases = []
    for each in SHAPES if options.three else [case]:
        row: dict[str, Any] = asdict(each)
        del row["backend"], row["direction"]
        cases.append(runner.Case(row, partial(count, each)))
    return runner.run(cases, resolve_device(options.device), metrics=list(BYTES))


def show(table: pd.DataFrame, options: Namespace) -> str:
    sizes = ["counted", "moved", "l2", "dram", "compulsory"]
    if sizes[0] in table:
        table = table.assign(**{name: (table[name] / 1e6).round(1) for name in sizes})
    title = "bytes in MB; ratios: moved and l2 to counted, dram to compulsory"
    return f"{title}\n{table.round(3).to_string(index=False)}"


def kernel_command(program: Sequence[str]) -> list[str]:
    """The command line that counts the bytes of each of the lab's kernels in a program."""
    return [
        *ncu_command("--clock-control", "none", "--kernel-name-base", "function"),
        *(
            "--kernel-name",
            f"regex:^({'|'.join(KERNELS)})$",
            "--metrics",
            ",".join(BYTES),
            *program,
        ),
    ]


def compare(launches: Sequence[dict[str, Any]], case: Case) -> pd.DataFrame:
    """Put what was counted on the GPU beside what the tiles ask for.

    Returns:
        A row a launch of a kernel that is known: kernel, block_q, block_k; counted (bytes by
        `kernel_bytes`), moved (1), l2 (2), dram (3), compulsory; and the ratios moved_ratio =
        moved / counted, l2_ratio = l2 / counted, dram_ratio = dram / compulsory; NaN where a
        metric is missing.
    """
    import pandas as pd

    from labsupport.attention.kernels.config import tiling

    rows = []
    for launch in launches:
        name = launch["kernel"].split("(")[0]
        match = re.fullmatch(KERNEL_NAMES, KERNELS.get(name, name))
        if match is None:
            continue
        kernel, plan = match[2], None
        if kernel != "rows":
            plan = tiling(
                kernel, case.head_dim, getattr(torch, case.dtype), False,
                hopper=match[1] is not None, keys=case.kv_seqlen,
            )  # fmt: skip
        block_q, block_k = (plan.block_q, plan.block_k) if plan else (1, 1)
        expected = kernel_bytes(kernel, case, block_q, block_k)
        to, fro, l2, read, written = (launch.get(name, math.nan) for name in BYTES)
        rows.append(
            {
                "kernel": launch["kernel"], "block_q": block_q, "block_k": block_k,
                "counted": expected.total, "moved": to + fro, "l2": l2, "dram": read + written,
                "compulsory": expected.compulsory, "moved_ratio": (to + fro) / expected.total,
                "l2_ratio": l2 / expected.total,
                "dram_ratio": (read + written) / expected.compulsory,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def count(case: Case) -> list[Any]:
    """Run the case's forward and backward under ncu, and compare."""
    return compare(read_ncu(run(kernel_command(_program(case)))), case).to_dict("records")


def _program(case: Case) -> list[str]:
    """One forward and one backward of flash_triton: the program that ncu watches."""
    both = replace(case, direction="forward+backward")
    code = (
        "import torch; from labsupport.profiling import Case; "
        "from labsupport.profiling.benchmark import call_of, make_inputs; "
        f"case = {both}; call_of(case, make_inputs(case, torch.device('cuda')))(); "
        "torch.cuda.synchronize()"
    )
    return [sys.executable, "-c", code]


@dataclass(frozen=True)
class KernelBytes:
    """read, written: between L2 and the multiprocessors; compulsory: each tensor's bytes once."""

    kernel: str
    read: int
    written: int
    compulsory: int

    @property
    def total(self) -> int:
        """Bytes between L2 and the multiprocessors, both ways."""
        return self.read + self.written


def kernel_bytes(kernel: str, case: Case, block_q: int, block_k: int) -> KernelBytes:
    """Bytes of one launch of a Triton kernel of the lab, or of its version for Hopper.

    Args:
        kernel: "forward", "rows", "keys" or "queries".
        case: gives shape, mask and dtype; its backend and direction do not matter.
        block_q, block_k: the tile's sides.

    Raises:
        ValueError: no such kernel.
    """
    sizes = Sizes(case.seqlen, case.kv_seqlen, case.head_dim, block_q, block_k, case.causal)
    heads, row = case.batch * case.heads, case.head_dim * ITEMSIZE[case.dtype]
    q = heads * case.seqlen * row  # bytes of Q, of O, of dO, of dQ
    k = case.batch * case.kv_heads * case.kv_seqlen * row
    numbers = heads * case.seqlen * NUMBER
    if kernel == "rows":
        return KernelBytes(kernel, 2 * q + numbers, 2 * numbers, 2 * q + 3 * numbers)
    if kernel == "keys":
        passing = sum(_length(sizes.rows_seeing(cols)) for cols in sizes.all_cols())
        read = 2 * k + heads * passing * (2 * row + 2 * NUMBER)
        return KernelBytes(kernel, read, 2 * k, 2 * q + 2 * numbers + 4 * k)
    passing = sum(_length(sizes.cols_seen(rows)) for rows in sizes.all_rows())
    passing *= heads * 2 * row
    if kernel == "forward":
        return KernelBytes(kernel, q + passing, q + numbers, 2 * q + numbers + 2 * k)
    if kernel == "queries":
        staying = 2 * q + 2 * numbers
        return KernelBytes(kernel, staying + passing, q, staying + q + 2 * k)
    raise ValueError(f"no kernel {kernel!r}; known: forward, rows, keys, queries")


def _length(blocks: list[slice]) -> int:
    return sum(block.stop - block.start for block in blocks)
