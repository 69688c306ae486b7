"""Python's share of a call: microseconds of each backend on tiny tensors, beside SDPA's.

    python -m benchmarks overhead                      every backend that runs here
    python -m benchmarks overhead --backends sdpa_flash,flash_triton

On a GPU the calls are issued without waiting for the device, so what counts is the time until the
kernel is launched. The kernels of an interpreter are no launch: they are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from benchmarks.runner import Case, names, not_measured, run
from labsupport.attention import attention
from labsupport.profiling.bench import measurable_backends
from labsupport.profiling.timing import resolve_device

if TYPE_CHECKING:
    import pandas as pd

SDPA = "F.scaled_dot_product_attention"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backends", type=names, help="default: every compiled backend that runs, but flex")
    add("--calls", type=int, default=500, help="in one round")
    add("--rounds", type=int, default=7, help="the fastest one is reported")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Return backend, grad, us (a call) and above_sdpa: SDPA is what PyTorch itself chooses."""
    device = resolve_device(options.device)
    backends = options.backends or [n for n in measurable_backends(device) if n != "flex"]
    cases = [
        Case({"backend": name, "grad": grad}, partial(_measure, name, grad, device, options))
        for grad in (False, True)
        for name in (SDPA, *backends)
    ]
    table = run(cases, device)
    if "us" in table:
        sdpa = table.us.where(table.backend == SDPA).groupby(table.grad).transform("min")
        table["above_sdpa"] = table.us - sdpa
    return table


def _measure(
    name: str, grad: bool, device: torch.device, options: argparse.Namespace
) -> dict[str, float]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # SDPA's own layout has heads before seqlen.
    shape = (1, 2, 16, 64) if name == SDPA else (1, 16, 2, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=grad) for _ in "qkv")
    call: Callable[[], Any] = partial(attention, q, k, v, backend=name)
    if name == SDPA:
        call = partial(F.scaled_dot_product_attention, q, k, v)
    times = []
    for _ in range(options.rounds + 1):  # the first one warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(options.calls):
            call()
        times.append((time.perf_counter() - start) / options.calls * 1e6)
    return {"us": min(times[1:])}


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    columns = [name for name in ("backend", "grad", "us", "above_sdpa") if name in table]
    shown = table.loc[table.status == "ok", columns].round(1).to_string(index=False)
    about = table.attrs["provenance"]["device"]
    return "\n".join([about, shown, *not_measured(table, "backend")])
