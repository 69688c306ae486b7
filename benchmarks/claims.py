"""The lab's own claims, measured here and now: `make benchmark`.

One head of 8192 tokens, head_dim 64, float32. The lab's FlashAttention (flash_torch) against the
textbook version and against PyTorch's fused kernel, forward and forward plus backward: times taken
in turns in one run, and peak extra memory. And what a PrecisionTracker adds to a forward pass of
GPT-2. Targets stand beside the ratios; times depend on the machine, so missing one is reported,
not an error.
"""

import argparse
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.runner import Case, not_measured, run
from labsupport.attention.backends import attention
from labsupport.attention.flash_torch import FlashAttentionFunction
from labsupport.attention.reference import standard_attention
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.timing import (
    Ratio,
    measure_interleaved,
    measure_ratio,
    ratio_of,
    resolve_device,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--max-seconds", type=float, default=30.0, help="per direction")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Measure the implementations, then the tracker.

    Returns:
        Rows of times: direction, what, median, q1, q3 (ms), repeats, peak_memory_bytes. Rows of
        claims: direction, what, median, q1, q3 (a ratio), repeats, target, met.
    """
    device = resolve_device(options.device)
    cases = [
        Case({"direction": direction}, partial(_direction, direction, options, device))
        for direction in ("forward", "forward+backward")
    ]
    tracker = Case({"direction": "GPT-2 forward"}, partial(_tracker, device, options.max_seconds))
    return run([*cases, tracker], device)


def _direction(
    direction: str, options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    backward = direction == "forward+backward"
    shape = (1, 1, options.seqlen, 64)
    *inputs, gradient = (torch.randn(shape, device=device) for _ in range(4))
    for tensor in inputs:
        tensor.requires_grad_(backward)
    # On GPUs, FlashAttention's kernels take half precision only.
    library = "sdpa_efficient" if device.type == "cuda" else "sdpa_flash"

    def fused(*inputs: Tensor) -> Any:
        return attention(*(x.transpose(1, 2) for x in inputs), backend=library)  # one head

    forwards = {
        "textbook": lambda q, k, v: standard_attention(q, k, v)[0],
        "flash_torch": lambda q, k, v: FlashAttentionFunction.apply(q, k, v, False),
        library: fused,
    }

    def call(name: str) -> Any:
        out = forwards[name](*inputs)
        return torch.autograd.grad(out, inputs, gradient.view_as(out)) if backward else out

    calls = {name: partial(call, name) for name in forwards}
    limits = {"max_seconds": options.max_seconds, "max_repeats": 50}
    times = measure_interleaved(calls, device=device, **limits)
    memory = {name: measure_peak_memory(fn, device=device).peak_bytes for name, fn in calls.items()}
    rows = [
        {"what": name, "median": time.median, "q1": time.q1, "q3": time.q3}
        | {"repeats": time.repeats, "peak_memory_bytes": memory[name]}
        for name, time in times.items()
    ]
    gained = ratio_of(times["textbook"], times["flash_torch"])
    lost = ratio_of(times["flash_torch"], times[library])
    target = 1.5 if backward else 2.0
    rows.append(_claim("time textbook / flash_torch", gained, target, at_least=True))
    rows.append(_claim(f"time flash_torch / {library}", lost, 3.0))
    if backward:
        spared = Ratio((memory["textbook"] / memory["flash_torch"],))
        rows.append(_claim("memory textbook / flash_torch", spared, 20, at_least=True))
    return rows


def _tracker(device: torch.device, max_seconds: float) -> dict[str, Any]:
    """A forward pass of a GPT-2 of 124 million random weights, 256 tokens, watched and not."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from labsupport.precision import PrecisionTracker

    model: torch.nn.Module = GPT2LMHeadModel(GPT2Config()).eval()
    model.to(device)
    tokens = torch.randint(50_257, (1, 256), device=device)

    def bare() -> None:
        with torch.no_grad():
            model(tokens)

    def watched() -> None:
        with PrecisionTracker(model, ranges=False):
            bare()

    ratio = measure_ratio(watched, bare, device=device, max_seconds=max_seconds, max_repeats=50)
    return _claim("time watched without ranges / bare", ratio, 1.1)


def _claim(what: str, ratio: Ratio, target: float, at_least: bool = False) -> dict[str, Any]:
    return {
        "what": what, "median": ratio.median, "q1": ratio.q1, "q3": ratio.q3,
        "repeats": len(ratio.samples), "target": f"at {'least' if at_least else 'most'} {target:g}",
        "met": ratio.median >= target if at_least else ratio.median <= target,
    }  # fmt: skip


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    record, ran = table.attrs["provenance"], table[table.status == "ok"]
    shown = ran.drop(columns=["status", "reason", "peak_memory_bytes"]).round(2)
    shown.insert(2, "memory, MiB", (ran.peak_memory_bytes / 2**20).round(1))
    return "\n".join(
        [
            f"{record['device']}, torch {record['versions']['torch']}, {record['date']}",
            f"N = {options.seqlen}, 1 head, head_dim 64, float32; times in ms, ratios with targets",
            shown.to_string(index=False, na_rep=""),
            *not_measured(table, "direction"),
        ]
    )
