"""Time, memory and error of attention over a grid.

    python -m benchmarks attention --backends standard,sdpa_flash --seqlen 512,1024,2048
    python -m benchmarks attention --seqlen 4096 --dtype bfloat16 --save my-run

Lists are comma-separated.
"""

import argparse

import pandas as pd

from benchmarks.runner import names, numbers
from labsupport.profiling.bench import measurable_backends
from labsupport.profiling.benchmark import run_grid
from labsupport.profiling.cases import DIRECTIONS, DTYPES, grid
from labsupport.profiling.tables import format_table
from labsupport.profiling.timing import resolve_device


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backends", type=names, help="default: every compiled backend that runs on the device")
    add("--seqlen", type=numbers, default=[512, 1024, 2048, 4096])
    add("--batch", type=numbers, default=[1])
    add("--heads", type=numbers, default=[4])
    add("--kv-heads", type=numbers, default=[0], help="0 means as many as heads")
    add("--head-dim", type=numbers, default=[64])
    add("--dtype", type=names, default=["float32"], help=", ".join(DTYPES))
    add("--causal", choices=["no", "yes", "both"], default="no")
    add("--direction", type=names, default=["forward"], help=", ".join(DIRECTIONS))
    add("--max-seconds", type=float, default=1.0, help="time limit for the repeats of one case")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    device = resolve_device(options.device)
    named = ("batch", "heads", "kv_heads", "head_dim", "dtype", "direction")
    cases = grid(
        options.backends or measurable_backends(device), options.seqlen,
        causal={"no": [False], "yes": [True], "both": [False, True]}[options.causal],
        **{name: getattr(options, name) for name in named},
    )  # fmt: skip
    return run_grid(cases, device=device, max_seconds=options.max_seconds)


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    return format_table(table)
