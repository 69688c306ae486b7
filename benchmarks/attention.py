"""The command `python -m labsupport.profiling.benchmark`: a grid from the command line.

python -m labsupport.profiling.benchmark --backends standard,sdpa_flash --seqlen 512,1024,2048
python -m labsupport.profiling.benchmark --seqlen 4096 --dtype bfloat16 --save my-run
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labsupport.profiling.benchmark import run_grid
from labsupport.profiling.cases import DIRECTIONS, DTYPES, grid
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.tables import speedup
from labsupport.profiling.timing import format_ms, resolve_device
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a grid, print its table, and save it when asked to."""
    options = _parser().parse_args(arguments)
    device = resolve_device(options.device)
    backends = options.backends or _backends_that_run(str(device))
    cases = grid(
        backends,
        options.seqlen,
        batch=options.batch,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
        causal={"no": [False], "yes": [True], "both": [False, True]}[options.causal],
        direction=options.direction,
    )
    table = run_grid(
        cases,
        device=device,
        measure_error=not options.no_error,
        max_seconds=options.max_seconds,
        seed=options.seed,
    )
    print(format_table(table))
    save_if_asked(table, options)


def format_table(table: pd.DataFrame) -> str:
    """The table as aligned text for a terminal: only axes that vary get a column."""
    if "standard" in set(table["backend"]):
        table = speedup(table)
    axes = ["batch", "heads", "kv_heads", "kv_seqlen", "head_dim", "dtype", "causal", "direction"]
    varying = [axis for axis in axes if table[axis].nunique() > 1]
    header = ["backend", "seqlen", *varying, "median ms", "IQR", "TFLOP/s", "extra memory"]
    header += ["max error", "vs standard", "kernel or reason"]
    lines = [header, *(_cells(row, varying) for _, row in table.iterrows())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    text = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]
    record = table.attrs.get("provenance", {})
    fixed = ", ".join(
        f"{axis} {table[axis].iloc[0]}" for axis in axes if axis not in varying and len(table)
    )
    return "\n".join([f"{record.get('device', '')}; {fixed}", *text])


def _cells(row: pd.Series, varying: list[str]) -> list[str]:
    start = [row["backend"], str(row["seqlen"]), *(str(row[axis]) for axis in varying)]
    if row["status"] != "ok":
        return [*start, "-", "-", "-", "-", "-", "-", f"{row['status']}: {row['reason']}"]
    ratio, error = row.get("speedup", math.nan), row["max_error"]
    return [
        *start,
        format_ms(row["median_ms"]),
        f"{format_ms(row['q1_ms'])}-{format_ms(row['q3_ms'])}",
        f"{row['tflops']:.3g}",
        format_bytes(row["peak_memory_bytes"]),
        "-" if math.isnan(error) else f"{error:.1e}",
        "-" if math.isnan(ratio) else f"{ratio:.2f}x",
        row["kernel"],
    ]


def _backends_that_run(device: str) -> list[str]:
    from labsupport.attention.backends import available_backends
    from labsupport.attention.flash_triton import mode

    names = [status.name for status in available_backends(device=device) if status.runs]
    # Interpreted kernels are there to be read, not to be timed.
    return [name for name in names if name != "flash_triton" or not mode.interpreted()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.profiling.benchmark",
        description="Time, memory and error of attention over a grid. Lists are comma-separated.",
    )
    add = parser.add_argument
    add("--backends", type=_names, help="default: every compiled backend that runs on the device")
    add("--seqlen", type=_ints, default=[512, 1024, 2048, 4096])
    add("--batch", type=_ints, default=[1])
    add("--heads", type=_ints, default=[4])
    add("--kv-heads", type=_ints, default=[0], help="0 means as many as heads")
    add("--head-dim", type=_ints, default=[64])
    add("--dtype", type=_names, default=["float32"], help=", ".join(DTYPES))
    add("--causal", choices=["no", "yes", "both"], default="no")
    add("--direction", type=_names, default=["forward"], help=", ".join(DIRECTIONS))
    add("--device", help="cpu or cuda; default: the GPU if there is one")
    add("--max-seconds", type=float, default=1.0, help="time limit for the repeats of one case")
    add("--seed", type=int, default=0)
    add("--no-error", action="store_true", help="do not compare with the float64 oracle")
    add_save_options(parser)
    return parser


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ints(text: str) -> list[int]:
    return [int(part) for part in _names(text)]
