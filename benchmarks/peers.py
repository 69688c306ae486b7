"""One implementation compared with the best others, shape by shape.

    python -m benchmarks peers                              flash_gluon on this GPU
    python -m benchmarks peers --head-dim 64 --save NAME    a part of the grid, saved
    python -m benchmarks peers --ours exercise_4_3 --direction forward      notebook 4's solution

Each call works on the same number of tokens and the same hidden size. All implementations of a
shape are measured in turns. `median_ms` is what the kernels take: the call is replayed as a CUDA
graph. `call_ms` is the same call from Python, where a GPU may have to wait for the next launch.
"""

import argparse
import itertools
import json
import runpy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.runner import (
    Call,
    Trial,
    in_turns,
    keep_rows,
    names,
    not_measured,
    numbers,
    run,
    some_of,
)
from labsupport import paths
from labsupport.attention.backends import attention, available_backends, register_backend
from labsupport.profiling import grids
from labsupport.profiling.grids import make_inputs
from labsupport.profiling.tables import PEER_SHAPE, compare_with_peers, geometric_means
from labsupport.profiling.timing import resolve_device

PEERS = ["flash_triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "fa2", "fa4"]

EXERCISE = "exercise_4_3"
IMPORTS = """\
import math
import triton
import triton.language as tl
from labsupport.checks.guard import check_guard, guarded_zeros
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ours", default="flash_gluon")
    add("--peers", type=names, default=PEERS, help="those that run here are measured")
    add("--seqlen", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16_384])
    add("--head-dim", type=numbers, default=[64, 128])
    add("--tokens", type=int, default=16_384, help="per call")
    add("--hidden", type=int, default=2048, help="heads times head_dim")
    add("--dtype", default="bfloat16")
    add("--direction", type=some_of(grids.DIRECTIONS), default=list(grids.DIRECTIONS))
    add("--seconds", "--max-seconds", type=float, default=1.0, help="of kernels, for one row")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Measure each shape, both masks, with all backends and both directions.

    Returns:
        A row for each backend and direction: the fields of `labsupport.profiling.Case`; status and
        reason; median_ms, q1_ms, q3_ms and repeats of the kernels, tflops at the median; in_graph,
        whether they could be recorded; call_ms, the median of calls from Python (on a CPU the
        same).
    """
    device = resolve_device(options.device)
    if options.ours == EXERCISE:
        register_backend(EXERCISE, committed_solution())
    here = [n for n in options.peers if available_backends(device=device)[n].runs]
    backends = list(dict.fromkeys([options.ours, *here]))
    cases = []
    for head_dim, seqlen, causal in itertools.product(
        options.head_dim, options.seqlen, (False, True)
    ):
        shape = grids.grid(
            backends, [seqlen], batch=max(1, options.tokens // seqlen),
            heads=options.hidden // head_dim, head_dim=head_dim, dtype=options.dtype,
            causal=causal, direction=options.direction,
        )  # fmt: skip
        row = {name: getattr(shape[0], name) for name in PEER_SHAPE}
        cases.append(Trial(row, partial(_measure_shape, shape, device, options.seconds)))
    return run(cases, device, on_rows=keep_rows(options), seed=0)


def _measure_shape(
    cases: Sequence[grids.Case], device: torch.device, seconds: float
) -> list[dict[str, Any]]:
    inputs = make_inputs(cases[0], device, seed=0)
    calls = {case: call_of(case, *inputs) for case in cases}
    rows = in_turns(calls, device, seconds, min_seconds=seconds)
    ran = {case: calls[case] for case, row in rows.items() if "median_ms" in row}
    on_gpu = device.type == "cuda"
    called = in_turns(ran, device, seconds / 10, graphs=False) if on_gpu else rows
    for case in ran:
        rows[case]["call_ms"] = called[case]["median_ms"]
        rows[case]["tflops"] = case.flops() / rows[case]["median_ms"] / 1e9
    return [asdict(case) | row for case, row in rows.items()]


def committed_solution() -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    """Return the function of exercise 4-3, which launches the kernel for each batch entry.

    Its cells become a file, because Triton reads a kernel's source from one.
    """
    notebook = paths.notebooks_dir() / "04-Performance_Analysis.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    mine = [c for c in cells if c["metadata"].get("nbgrader", {}).get("solution")]
    mine = [c for c in mine if c["metadata"]["nbgrader"]["grade_id"].startswith("ex-4-3-")]
    file = Path(tempfile.mkdtemp()) / f"{EXERCISE}.py"
    file.write_text("\n\n".join([IMPORTS, *("".join(c["source"]) for c in mine)]), "utf-8")
    own = runpy.run_path(str(file))["my_triton_flash"]

    def exercise_4_3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        each = [own(*entry, causal)[0] for entry in zip(q, k, v, strict=True)]
        return each[0][None] if len(each) == 1 else torch.stack(each)

    return exercise_4_3


def call_of(
    case: grids.Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> Call:
    """Return the call of a case, as a student makes it."""
    call = partial(attention, causal=case.causal, backend=case.backend, check_layout=False)
    if case.direction == "forward":
        return partial(call, q.detach(), k.detach(), v.detach())
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(call(q, k, v), (q, k, v), gradient)


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines = [f"{table.attrs['provenance']['device']}: times as fast as the others, {options.ours}"]
    if "median_ms" in table:
        lines.append(compare_with_peers(table, options.ours).round(2).to_string(index=False))
        for column, what in (("median_ms", "kernels"), ("call_ms", "calls from Python")):
            means = geometric_means(compare_with_peers(table, options.ours, column=column))
            lines += [f"Geometric means over all shapes, {what}:"]
            lines += [means.round(2).to_string(index=False)]
        plain = table[(table.status == "ok") & (table.in_graph != table.in_graph.any())]
        if len(plain):
            lines += [f"no CUDA graph, called from Python: {', '.join(plain.backend.unique())}"]
    return "\n".join(lines + not_measured(table, "backend"))
