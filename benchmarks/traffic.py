"""The count beside a GPU's own counters: Nsight Compute (`ncu`) on the lab's Triton kernels.

python -m benchmarks traffic                    measure and compare, on a GPU
python -m benchmarks traffic --three --save traffic-h200    three shapes, kept
python -m benchmarks traffic --show             only print ncu's command
python -m benchmarks traffic --read FILE        compare a CSV that was kept

Bytes are counted in three places, on their way from left to right:

    multiprocessors  --(1)--  request coalescer  --(2)--  L2  --(3)--  large memory

(1) is what theorem 2 and `kernel_bytes` speak of. Between (1) and (2) the coalescer joins reads of
the same bytes that come from several multiprocessors at about the same time, so (2) may be smaller.
(3) is compared with the compulsory bytes: ncu empties the caches before a kernel.

Source: NVIDIA, Nsight Compute documentation, Profiling Guide, "Metrics Decoder" (units l1tex, lrc,
lts, dram) and "Cache Control"; Command Line Interface, options --csv, --metrics, --print-units.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import runner
from labsupport.analysis.nsight_csv import read_csv
from labsupport.analysis.traffic.kernels import kernel_bytes
from labsupport.profiling.cases import Case
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd

METRICS = {
    "l1tex__m_xbar2l1tex_read_bytes.sum": "(1), to the multiprocessors",
    "l1tex__m_l1tex2xbar_write_bytes.sum": "(1), from the multiprocessors",
    "lts__t_bytes.sum": "(2), all requests that reach L2",
    "dram__bytes_read.sum": "(3), read",
    "dram__bytes_write.sum": "(3), written",
}
SHAPES = (  # of --three: plain, causal with another head_dim, grouped heads
    Case("flash_triton", 4096, 4, 16, head_dim=128, dtype="bfloat16"),
    Case("flash_triton", 4096, 4, 16, head_dim=64, dtype="bfloat16", causal=True),
    Case("flash_triton", 8192, 2, 32, 8, head_dim=128, dtype="bfloat16"),
)
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
_UNITS = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
NOT_FOUND = (
    "ncu not found: install NVIDIA Nsight Compute (it comes with the CUDA toolkit), or put its "
    "folder on the PATH. --show prints the command to run elsewhere."
)


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
        print(shlex.join(ncu_command(_program(case))))
        raise SystemExit
    if options.read:
        return compare(parse_csv(options.read.read_text(encoding="utf-8")), case)
    if shutil.which("ncu") is None:
        raise SystemExit(NOT_FOUND)
    cases = []
    for each in SHAPES if options.three else [case]:
        row: dict[str, Any] = asdict(each)
        del row["backend"], row["direction"]
        cases.append(runner.Case(row, partial(count, each)))
    return runner.run(cases, resolve_device(options.device), metrics=list(METRICS))


def show(table: pd.DataFrame, options: Namespace) -> str:
    sizes = ["counted", "moved", "l2", "dram", "compulsory"]
    if sizes[0] in table:
        table = table.assign(**{name: (table[name] / 1e6).round(1) for name in sizes})
    title = "bytes in MB; ratios: moved and l2 to counted, dram to compulsory"
    return f"{title}\n{table.round(3).to_string(index=False)}"


def ncu_command(program: Sequence[str]) -> list[str]:
    """The command line that counts the bytes of each of the lab's kernels in a program.

    Clocks are left alone (bytes do not depend on them), units are not scaled, and the table goes to
    standard output as CSV, one metric a line.
    """
    return [
        "ncu", "--csv", "--page", "details", "--print-units", "base", "--clock-control", "none",
        "--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(KERNELS)})$",
        "--metrics", ",".join(METRICS), *program,
    ]  # fmt: skip


def parse_csv(text: str) -> list[dict[str, float | str]]:
    """ncu's CSV, one metric a line, as a dictionary a launch: "kernel", and bytes by metric.

    Lines before the header (ncu's own and the program's) are skipped.

    Raises:
        ValueError: there is no table, a unit is not one of bytes, or a metric has no value.
    """
    rows = read_csv(text, "Metric Name")
    if not rows:
        told = text.splitlines()
        said = [line for line in told if line.startswith(("==ERROR==", "==WARNING=="))]
        raise ValueError(" ".join(["ncu printed no table.", *said[:3]]))
    launches: dict[str, dict[str, float | str]] = {}
    for row in rows:
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            launch[row["Metric Name"]] = _bytes(row)
    return list(launches.values())


def compare(launches: Sequence[dict[str, float | str]], case: Case) -> pd.DataFrame:
    """What was counted on the GPU beside what the tilings ask for.

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
        name = str(launch["kernel"]).split("(")[0]
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
        to, fro, l2, read, written = (float(launch.get(name, "nan")) for name in METRICS)
        rows.append(
            {
                "kernel": match[0], "block_q": block_q, "block_k": block_k,
                "counted": expected.total, "moved": to + fro, "l2": l2, "dram": read + written,
                "compulsory": expected.compulsory, "moved_ratio": (to + fro) / expected.total,
                "l2_ratio": l2 / expected.total,
                "dram_ratio": (read + written) / expected.compulsory,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def count(case: Case) -> list[Any]:
    """Run the case's forward and backward under ncu, and compare.

    Raises:
        RuntimeError: ncu could not read the counters, with what it said.
    """
    done = subprocess.run(ncu_command(_program(case)), capture_output=True, text=True)
    try:
        return compare(parse_csv(done.stdout), case).to_dict("records")
    except ValueError as error:
        raise RuntimeError(f"{error} {done.stderr.strip()[-500:]}") from error


def _program(case: Case) -> list[str]:
    code = f"from benchmarks.traffic import Case, call; call({case})"
    return [sys.executable, "-c", code]


def call(case: Case) -> None:
    """One forward and one backward of flash_triton: the program that ncu watches."""
    from labsupport.attention import attention

    def tensor(heads: int) -> torch.Tensor:
        shape = case.batch, case.seqlen, heads, case.head_dim
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)

    q, k, v = tensor(case.heads), tensor(case.kv_heads), tensor(case.kv_heads)
    out = attention(q, k, v, causal=case.causal, backend="flash_triton")
    assert isinstance(out, torch.Tensor)  # a pair only where return_lse asks for it
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


def _bytes(row: dict[str, str]) -> float:
    unit, value = row["Metric Unit"].lower(), row["Metric Value"].replace(",", "")
    if unit not in _UNITS or not re.fullmatch(r"[\d.]+(e[+-]?\d+)?", value):
        raise ValueError(f"{row['Metric Name']}: {row['Metric Value']!r} {row['Metric Unit']!r}?")
    return float(value) * _UNITS[unit]
