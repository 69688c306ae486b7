"""A timeline of short and long attention calls, and what the warps of its kernels wait for.

    python -m benchmarks trace --save trace-h100          when each kernel ran, by torch.profiler
    python -m benchmarks trace --ncu --save stalls-h100   stall reasons, by Nsight Compute

Notebook 4 reads both. The calls are the textbook's four kernels, the same as a CUDA graph, with a
copy of the next inputs on a second stream, and PyTorch's FlashAttention.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from benchmarks.runner import Trial, lengths, run
from labsupport.analysis import nsight
from labsupport.profiling.grids import Case
from labsupport.profiling.timing import captured, now, resolve_device

CALLS = 8, 3  # so many are recorded, and the first ones left out
BATCH, HEADS, HEAD_DIM = 1, 16, 64
BACKENDS = "standard", "sdpa_flash", "flash_triton"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=lengths, default=[256, 8192])
    parser.add_argument("--ncu", action="store_true", help="stall reasons instead, at 4,096 tokens")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Record the timelines, or the stall reasons.

    Returns:
        call, tokens, and for each kernel or copy: start_us (the first begins at 0), duration_us,
        name, stream. With --ncu, backend, and for each reason of each kernel: launch (its number
        in the call), kernel, reason, cycles (that a warp waited for it, on average, between two
        instructions; "selected" is the cycle in which it issued one).
    """
    device = resolve_device(options.device)
    if options.ncu:
        if (ncu := nsight.find("ncu")) is None:
            raise SystemExit(f"ncu not found: {nsight.INSTALL['ncu']}")
        cases = [Trial({"backend": name}, partial(_stalls, ncu, name)) for name in BACKENDS]
    else:
        cases = [
            Trial({"call": name, "tokens": tokens}, partial(_timeline, prepare, tokens, device))
            for tokens in options.seqlen
            for name, prepare in PREPARED.items()
            if device.type == "cuda" or prepare is not _with_copy
        ]
    return run(cases, device, batch=BATCH, heads=HEADS, head_dim=HEAD_DIM)


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    return table.to_string(index=False, max_colwidth=48)


def _inputs(tokens: int, device: torch.device) -> list[torch.Tensor]:
    shape, dtype = (BATCH, HEADS, tokens, HEAD_DIM), torch.bfloat16
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]


def _textbook(tokens: int, device: torch.device) -> Callable[[], Any]:
    q, k, v = _inputs(tokens, device)
    return lambda: (q @ k.mT * HEAD_DIM**-0.5).softmax(-1) @ v


def _as_graph(tokens: int, device: torch.device) -> Callable[[], Any]:
    return captured(_textbook(tokens, device), device)[0]


def _with_copy(tokens: int, device: torch.device) -> Callable[[], Any]:
    """Return the textbook's call, beside which the next inputs come from the CPU's memory."""
    call, side = _textbook(tokens, device), torch.cuda.Stream()
    following = [t.cpu().pin_memory() for t in _inputs(tokens, device)]
    place = _inputs(tokens, device)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for target, source in zip(place, following, strict=True):
                target.copy_(source, non_blocking=True)
        call()
        torch.cuda.current_stream().wait_stream(side)

    return both


def _flash(tokens: int, device: torch.device) -> Callable[[], Any]:
    q, k, v = _inputs(tokens, device)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    return call


PREPARED = {
    "textbook": _textbook,
    "textbook, CUDA graph": _as_graph,
    "textbook and a copy": _with_copy,
    "FlashAttention": _flash,
}


def _timeline(
    prepare: Callable[[int, torch.device], Callable[[], Any]], tokens: int, device: torch.device
) -> list[dict[str, Any]]:
    call = prepare(tokens, device)
    for _ in range(3):
        call()
    now(device)
    activity = getattr(ProfilerActivity, device.type.upper())
    with profile(activities=[activity], acc_events=True) as seen:
        for _ in range(CALLS[0]):
            call()
        now(device)
    kind = getattr(DeviceType, device.type.upper())
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted(
        (e for e in results.events() if e.device_type() == kind), key=lambda e: e.start_ns()
    )
    events = events[len(events) * CALLS[1] // CALLS[0] :]
    return [
        {
            "start_us": (event.start_ns() - events[0].start_ns()) / 1e3,
            "duration_us": event.duration_ns() / 1e3,
            "name": short_name(event.name()),
            "stream": event.device_resource_id(),
        }
        for event in events
    ]


def _stalls(ncu: str, backend: str) -> list[dict[str, Any]]:
    """Run one call of a backend under ncu."""
    case = Case(backend, 4096, BATCH, HEADS, head_dim=HEAD_DIM, dtype="bfloat16")
    options = ["--clock-control", "none", "--profile-from-start", "off"]
    command = nsight.ncu_command(*options, "--section", "WarpStateStats", ncu=ncu)
    program = [sys.executable, "-m", "labsupport.commands.profile", json.dumps(asdict(case))]
    return reasons(nsight.read_ncu(nsight.run([*command, *program])))


def reasons(launches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the stall reasons of each launch that ncu read."""
    first, last = nsight.STALL
    return [
        {
            "launch": number,
            "kernel": short_name(launch["kernel"]),
            "reason": name.removeprefix(first).removesuffix(last),
            "cycles": round(value, 4),
        }
        for number, launch in enumerate(launches)
        for name, value in launch.items()
        if name.startswith(first) and name.endswith(last)
    ]


def short_name(kernel: str) -> str:
    """Return a kernel's name without namespaces, template arguments and parameters.

    >>> short_name("void at::native::(anonymous namespace)::softmax<4, float>(int)")
    'softmax'
    """
    named = re.sub(r"(\(anonymous namespace\)|<unnamed>)::", "", kernel)
    found = re.match(r"(?:void )?(?:\w+::)*(Mem\w+ \w+|\w+)", named)
    return found[1] if found else kernel
