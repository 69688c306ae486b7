"""The order in which `backend="auto"` tries backends, printed as it stands in `preferences.py`.

    python -m benchmarks choose --save NAME       all classes of shapes, on this GPU
    python -m benchmarks choose --head-dim 64     a part of them

What counts is the time of a call from Python, without a CUDA graph: forward, or forward and
backward. `auto`, measured in the same turns, is compared with the fastest backend of each shape.
"""

import argparse
import itertools
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.peers import call_of
from benchmarks.runner import Trial, in_turns, keep_rows, not_measured, numbers, run
from labsupport.attention.backends import available_backends
from labsupport.attention.preferences import LENGTHS, NAMES
from labsupport.profiling import grids
from labsupport.profiling.grids import Case, make_inputs
from labsupport.profiling.timing import resolve_device

CLASS = ["direction", "head_dim", "causal", "seqlen", "batch"]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--head-dim", type=numbers, default=[64, 128])
    add("--seqlen", type=numbers, default=list(LENGTHS))
    add("--tokens", type=int, default=16_384, help="per call, but 1,024 in the small one")
    add("--hidden", type=int, default=2048, help="heads times head_dim; 1,024 in the small one")
    add("--seconds", type=float, default=0.3, help="of calls, for one row")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Measure a small call and each length, with and without a mask and gradients.

    Returns:
        A row for each shape and backend, "auto" included: the fields of a `Case`, status, reason,
        median_ms, q1_ms, q3_ms and repeats of calls from Python.
    """
    device = resolve_device(options.device)
    there = available_backends(device=device)
    backends = ["auto", *(name for name in NAMES.values() if there[name].runs)]
    tokens, hidden = options.tokens, options.hidden
    sizes = [(1024, 1, min(hidden, 1024))]
    sizes += [(seqlen, max(1, tokens // seqlen), hidden) for seqlen in options.seqlen]
    cases = []
    for direction, head_dim, causal, (seqlen, batch, width) in itertools.product(
        grids.DIRECTIONS, options.head_dim, (False, True), sizes
    ):
        shape = {
            "seqlen": seqlen, "batch": batch, "heads": max(1, width // head_dim),
            "head_dim": head_dim, "dtype": "bfloat16", "causal": causal, "direction": direction,
        }  # fmt: skip
        each = [Case(name, **shape) for name in backends]
        cases.append(Trial(shape, partial(_measure_shape, each, device, options.seconds)))
    return run(cases, device, on_rows=keep_rows(options))


def _measure_shape(cases: list[Case], device: torch.device, seconds: float) -> list[dict[str, Any]]:
    inputs = make_inputs(cases[0], device, seed=0)
    calls = {case: call_of(case, *inputs) for case in cases}
    rows = in_turns(calls, device, seconds, min_seconds=seconds, graphs=False)
    return [asdict(case) | row for case, row in rows.items()]


def orders(table: pd.DataFrame) -> list[str]:
    """Return the rows of `preferences.ORDERS`: backends that ran, the fastest first."""
    letters = {name: letter for letter, name in NAMES.items()}
    ran = table[(table.status == "ok") & (table.backend != "auto")].sort_values("median_ms")
    rows = []
    for (direction, head_dim, causal), group in ran.groupby(CLASS[:3], sort=False):
        key = direction == grids.DIRECTIONS[1], head_dim > 64, causal
        by_size = group.groupby(["batch", "seqlen"]).backend
        small_first = sorted(by_size, key=lambda item: (item[0] != (1, 1024), item[0][1]))
        names = " ".join("".join(letters[name] for name in backends) for _, backends in small_first)
        rows.append(f'    {key}: "{names}",')
    return sorted(rows)


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines = [f"{table.attrs['provenance']['device']}:", *not_measured(table, "backend")]
    if "median_ms" not in table:
        return "\n".join(lines)
    wide = table.pivot_table(index=CLASS, columns="backend", values="median_ms", sort=False)
    others = wide.drop(columns="auto")
    mean = np.log(wide).mean()
    single = mean.drop("auto").idxmin()
    wide["best / auto"] = ratio = others.min(axis=1) / wide.auto
    lines += [wide.round(3).to_string(), *orders(table)]
    lines += [
        f"best of each shape / auto: {np.exp(np.log(ratio).mean()):.3f}, lowest {ratio.min():.3f}"
    ]
    lines += [f"best single, {single} / auto: {np.exp(mean[single] - mean.auto):.3f}"]
    return "\n".join(lines)
