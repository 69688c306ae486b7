"""The lab's own claims, measured here and now: `make benchmark`.

One head of 8192 tokens, head_dim 64, float32. The lab's FlashAttention (flash_torch) against the
textbook version and against PyTorch's fused kernel, forward and forward plus backward: times taken
in turns in one run, and peak extra memory. And what a PrecisionTracker adds to a forward pass of
GPT-2. Targets stand beside the ratios; times depend on the machine, so missing one is reported,
not an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.runner import Case, run
from labsupport.attention.backends import attention
from labsupport.attention.flash_torch import FlashAttentionFunction
from labsupport.attention.reference import standard_attention
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.timing import (
    Ratio,
    Timing,
    format_ms,
    measure_interleaved,
    measure_ratio,
    ratio_of,
    resolve_device,
)
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

Forward = Callable[[Tensor, Tensor, Tensor], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seqlen", type=int, default=8192)
    add("--head-dim", type=int, default=64)
    add("--dtype", default="float32")
    add("--max-seconds", type=float, default=30.0, help="per direction")


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
    dtype, shape = getattr(torch, options.dtype), (1, 1, options.seqlen, options.head_dim)
    *inputs, gradient = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    # On GPUs, FlashAttention's kernels take half precision only.
    wide_on_gpu = device.type == "cuda" and dtype.itemsize > 2
    library = "sdpa_efficient" if wide_on_gpu else "sdpa_flash"

    def fused(*inputs: Tensor) -> Any:
        return attention(*(x.transpose(1, 2) for x in inputs), backend=library)  # one head

    forwards: dict[str, Forward] = {
        "textbook": lambda q, k, v: standard_attention(q, k, v)[0],
        "flash_torch": lambda q, k, v: FlashAttentionFunction.apply(q, k, v, False),
        library: fused,
    }
    backward = direction == "forward+backward"
    for tensor in inputs:
        tensor.requires_grad_(backward)

    def call(forward: Forward) -> Any:
        out = forward(*inputs)
        return torch.autograd.grad(out, inputs, gradient.view_as(out)) if backward else out

    calls = {name: partial(call, forward) for name, forward in forwards.items()}
    times = measure_interleaved(
        calls, device=device, max_seconds=options.max_seconds, max_repeats=50
    )
    memory = {name: measure_peak_memory(fn, device=device).peak_bytes for name, fn in calls.items()}
    rows = [
        {"what": name, **_spread(time), "repeats": time.repeats, "peak_memory_bytes": memory[name]}
        for name, time in times.items()
    ]
    gained = ratio_of(times["textbook"], times["flash_torch"])
    target = 1.5 if backward else 2.0
    rows.append(_claim("time textbook / flash_torch", gained, target, at_least=True))
    lost = ratio_of(times["flash_torch"], times[library])
    rows.append(_claim(f"time flash_torch / {library}", lost, 3.0))
    if backward:
        spared = memory["textbook"] / memory["flash_torch"]
        ratio = Ratio((spared,))
        rows.append(_claim("memory textbook / flash_torch", ratio, 20, at_least=True))
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
        with torch.no_grad(), PrecisionTracker(model, ranges=False):
            model(tokens)

    ratio = measure_ratio(watched, bare, device=device, max_seconds=max_seconds, max_repeats=50)
    return _claim("time watched without ranges / bare", ratio, 1.1)


def _claim(what: str, ratio: Ratio, target: float, at_least: bool = False) -> dict[str, Any]:
    return {
        "what": what,
        **_spread(ratio),
        "repeats": len(ratio.samples),
        "target": f"at {'least' if at_least else 'most'} {target:g}",
        "met": ratio.median >= target if at_least else ratio.median <= target,
    }


def _spread(times: Timing | Ratio) -> dict[str, float]:
    return {"median": times.median, "q1": times.q1, "q3": times.q3}


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    record = table.attrs["provenance"]
    lines = [
        f"{record['device']}, torch {record['versions']['torch']}, {record['date']}",
        f"N = {options.seqlen}, 1 head, head_dim {options.head_dim}, {options.dtype}",
    ]
    for row in table.to_dict("records"):
        if row["status"] != "ok":
            lines.append(f"{row['direction']}: {row['status']}: {row['reason']}")
            continue
        time = isinstance(row.get("target"), float)  # NaN: no target
        median, q1, q3 = (
            format_ms(row[name]) if time else f"{row[name]:.2f}" for name in ("median", "q1", "q3")
        )
        if time:
            end = f" ms, {format_bytes(row['peak_memory_bytes'])} of extra memory"
        else:
            end = f", target {row['target']}: {'met' if row['met'] else 'missed'}"
        name = f"{row['what']}, {row['direction']}"
        lines.append(f"{name:47} {median} ({q1}-{q3}, n={row['repeats']:.0f}){end}")
    return "\n".join(lines)
