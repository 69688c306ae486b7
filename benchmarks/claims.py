"""The lab's own claims, measured here and now: `make benchmark`.

One head of 8192 tokens, head_dim 64, float32.  The lab's FlashAttention (flash_torch) against the
textbook version and against PyTorch's fused kernel, forward and forward plus backward: times taken
in turns in one run, and peak extra memory.  And what a PrecisionTracker adds to a forward pass of
GPT-2.  Targets stand beside the ratios; times
depend on the machine, so missing one is reported, not an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from labsupport.attention.backends import attention
from labsupport.attention.flash_torch import FlashAttentionFunction
from labsupport.attention.reference import standard_attention
from labsupport.profiling.memory import MemoryUse, measure_peak_memory
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import Ratio, Timing, measure_interleaved, measure_ratio, ratio_of
from labsupport.profiling.units import format_bytes

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The N x N matrices written out."""
    return standard_attention(q, k, v)[0]


def flash_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The lab's FlashAttention in plain PyTorch."""
    return FlashAttentionFunction.apply(q, k, v, False)


def fused(backend: str) -> Forward:
    """One of PyTorch's fused kernels."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = cast(Tensor, attention(*rows, backend=backend))  # a pair only with return_lse
        return out.transpose(1, 2)

    return forward


def calls(
    forwards: dict[str, Forward], inputs: tuple[Tensor, ...], gradient: Tensor, backward: bool
) -> dict[str, Callable]:
    """One call without arguments per implementation."""

    def one(forward: Forward) -> Callable[[], Any]:
        if not backward:

            def run() -> Tensor:
                with torch.no_grad():
                    return forward(*inputs)

        else:

            def run() -> tuple[Tensor, ...]:
                return torch.autograd.grad(forward(*inputs), inputs, gradient)

        return run

    return {name: one(forward) for name, forward in forwards.items()}


def tracker_overhead(device: torch.device, max_seconds: float) -> Ratio:
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

    return measure_ratio(watched, bare, device=device, max_seconds=max_seconds, max_repeats=50)


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def ratio_row(table: Table, claim: str, ratio: Ratio, target: float, at_least: bool) -> None:
    met = ratio.median >= target if at_least else ratio.median <= target
    table.add_row(
        claim,
        f"{ratio.median:.2f} ({ratio.q1:.2f}-{ratio.q3:.2f}, n={len(ratio.samples)})",
        f"{'at least' if at_least else 'at most'} {target:g}",
        verdict(met),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-seconds", type=float, default=30.0, help="per direction")
    options = parser.parse_args()

    device = torch.device(options.device)
    torch.manual_seed(0)
    shape = (1, 1, options.seqlen, options.head_dim)
    q, k, v, gradient = (
        torch.randn(shape, device=device, dtype=getattr(torch, options.dtype)) for _ in range(4)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_(True)

    # On GPUs, FlashAttention's kernels take half precision only.
    wide_on_gpu = device.type == "cuda" and q.dtype.itemsize > 2
    library = "sdpa_efficient" if wide_on_gpu else "sdpa_flash"
    forwards = {"textbook": textbook, "flash_torch": flash_torch, library: fused(library)}

    record = provenance(device)
    console = Console()
    console.print(
        f"{record['device']}, torch {record['versions']['torch']}, {record['date']}\n"
        f"N = {options.seqlen}, 1 head, head_dim {options.head_dim}, {options.dtype}"
    )
    times: dict[str, dict[str, Timing]] = {}
    memories: dict[str, dict[str, MemoryUse]] = {}
    for direction in ("forward", "forward+backward"):
        functions = calls(forwards, (q, k, v), gradient, direction == "forward+backward")
        times[direction] = measure_interleaved(
            functions, device=device, max_seconds=options.max_seconds, max_repeats=50
        )
        memories[direction] = {
            name: measure_peak_memory(fn, device=device) for name, fn in functions.items()
        }

    measured = Table(title="Measured", title_justify="left")
    for column in ("implementation", "direction", "time", "peak extra memory"):
        measured.add_column(column)
    for direction, timings in times.items():
        for name, timing in timings.items():
            memory = format_bytes(memories[direction][name].peak_bytes)
            measured.add_row(name, direction, str(timing), memory)
    console.print(measured)

    claims = Table(title="Against the targets", title_justify="left")
    for column in ("ratio", "median (IQR)", "target", ""):
        claims.add_column(column)
    for direction, target in (("forward", 2.0), ("forward+backward", 1.5)):
        t = times[direction]
        ratio = ratio_of(t["textbook"], t["flash_torch"])
        ratio_row(claims, f"time textbook / flash_torch, {direction}", ratio, target, True)
    for direction, timings in times.items():
        ratio = ratio_of(timings["flash_torch"], timings[library])
        ratio_row(claims, f"time flash_torch / {library}, {direction}", ratio, 3.0, False)
    both = memories["forward+backward"]
    share = both["flash_torch"].peak_bytes / both["textbook"].peak_bytes
    claims.add_row(
        "memory flash_torch / textbook, forward+backward",
        f"1/{1 / share:.1f}",
        "under 1/20",
        verdict(share < 1 / 20),
    )
    overhead = tracker_overhead(device, options.max_seconds)
    ratio_row(claims, "GPT-2 forward, watched without ranges / bare", overhead, 1.1, False)
    console.print(claims)


if __name__ == "__main__":
    main()
