"""The tuner's parts: candidate tilings, calls to time them on, and processes that compile.

    forward   64 rows for each group of 4 warps, which is what a Hopper tensor-core instruction
              takes, or 128; as many keys as shared memory holds two to four times
    keys      a block of keys stays, blocks of queries pass: five tiles are alive at once (S, P, dP,
              dS and the outputs dK, dV), so that they have to be smaller
    queries   a block of queries stays, blocks of keys pass
    decode    memory sets the pace: how many keys are on their way at once

float32 numbers take twice the room, and no tensor cores: half as many of everything.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.resources import LIMITS, compile_report
from labsupport.attention.kernels import launch_decode, mode
from labsupport.attention.kernels.autograd import backward, forward
from labsupport.attention.kernels.config import HOPPER, Geometry, Tiling, override, padded, tiling
from labsupport.profiling.timing import now, resolve_device

KERNELS = {"forward": ("forward",), "backward": ("keys", "queries"), "decode": ("decode",)}
TOLERATED_SPILL = 128  # bytes a thread: some numbers outside of the inner loop's way; a GPU decides
PATIENCE_S = 180  # for one process
Plans = dict[str, Tiling]


@dataclass(frozen=True)
class Shape:
    """A call to time: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen, kv_heads, …).

    seqlen_q is seqlen, and 1 for "decode".
    """

    direction: str
    head_dim: int
    dtype: str
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    causal: bool


def shapes_for(direction: str, head_dim: int, dtype: str) -> list[Shape]:
    """Representative ones: 16,384 tokens of hidden size 2048; caches of 0.25 to 2 GiB."""
    if direction == "decode":
        sizes = [(1, 65_536), (1, 262_144), (8, 32_768), (64, 4096)]
        return [Shape(direction, head_dim, dtype, b, n, 32, 8, False) for b, n in sizes]
    heads = 2048 // head_dim
    return [
        Shape(direction, head_dim, dtype, 16_384 // n, n, heads, heads, causal)
        for n in (1024, 4096, 16_384)
        for causal in (False, True)
    ]


def current(kernel: str, head_dim: int, dtype: torch.dtype) -> Tiling:
    """What the tables say now, on a GPU."""
    if kernel == "decode":
        return launch_decode.tiling(4, head_dim, dtype)
    hopper = torch.cuda.is_available() and _for_hopper(
        head_dim, dtype, 10 * torch.cuda.get_device_capability()[0]
    )
    return tiling(kernel, head_dim, dtype, interpreted=False, hopper=hopper)


def _for_hopper(head_dim: int, dtype: torch.dtype, capability: int) -> bool:
    """Whether the kernels for Hopper run such a call."""
    return capability == 90 and dtype != torch.float32 and head_dim in HOPPER["forward"]


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> list[Tiling]:
    """Tilings worth a try: the current one first, then what the text above says."""
    wide = 2 if max(64, padded(head_dim)) > 128 else 1
    grids: dict[str, Iterable[tuple[tuple[int, int, int], int]]] = {
        "forward": itertools.product(
            ((q, k, w) for q, w in ((64, 4), (128, 8), (128, 4)) for k in (32, 64, 128)), (2, 3, 4)
        ),
        "keys": itertools.product(
            (
                *((32, 64, 4), (32, 128, 4), (32, 128, 8), (64, 64, 4), (64, 64, 8)),
                *((64, 128, 8), (128, 64, 8), (128, 128, 8)),
            ),
            (1, 2, 3),
        ),
        "queries": itertools.product(
            (
                *((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 32, 8)),
                *((128, 64, 8), (128, 128, 8)),
            ),
            (2, 3, 4),
        ),
        "decode": itertools.product(((16, k, w) for k in (32, 64, 128) for w in (4, 8)), (2, 3, 4)),
    }
    plans = [current(kernel, head_dim, dtype)]
    for (q, k, warps), stages in grids[kernel]:
        if dtype == torch.float32:
            q, k, stages = max(16, q // 2), max(16, k // 2), max(1, stages - 1)
        plans.append(Tiling(q, max(16, k // wide), warps, stages))
    return list(dict.fromkeys(plans))


def what_does_not_fit(
    kernel: str, plans: Sequence[Tiling], shape: Shape, capability: tuple[int, int]
) -> dict[Tiling, str]:
    """Why a plan is not worth timing, by the compiler's account: shared memory, registers.

    Plans that spill much are kept where all do. Nothing is known about "decode", or about GPUs that
    `resources` does not know: there every plan is tried.
    """
    number, dtype = 10 * capability[0] + capability[1], getattr(torch, shape.dtype)
    if kernel == "decode" or number not in LIMITS:
        return {}
    table = compile_report(
        capabilities=[number],
        kernels=[kernel],
        head_dims=[shape.head_dim],
        dtypes=[dtype],
        tilings=plans,
        hopper=_for_hopper(shape.head_dim, dtype, number),
        progress=False,
    )
    reasons, spilled = {}, {}
    for plan, row in zip(plans, table.to_dict("records"), strict=True):
        if row["status"] != "ok":
            reasons[plan] = row["reason"]
        elif not row["programs"]:
            reasons[plan] = f"needs {row['shared_kib']:.0f} KiB of shared memory"
        else:
            spilled[plan] = row["spilled_bytes"]
    much = {plan: n for plan, n in spilled.items() if n > TOLERATED_SPILL}
    if len(much) < len(spilled):
        reasons |= {plan: f"spills {n:.0f} bytes a thread" for plan, n in much.items()}
    return reasons


def make_call(shape: Shape, device: torch.device) -> Callable[[], Any]:
    """The call, on unit-normal inputs of its own; gradients are computed by themselves."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, shape.dtype), "device": device}
    seqlen_q = 1 if shape.direction == "decode" else shape.seqlen
    q, dout = (
        torch.randn(
            shape.batch, seqlen_q, shape.heads, shape.head_dim, generator=generator, **options
        )
        for _ in range(2)
    )
    cache = shape.batch, shape.seqlen, shape.kv_heads, shape.head_dim
    k, v = (torch.randn(cache, generator=generator, **options) for _ in range(2))
    if shape.direction == "decode":
        return lambda: launch_decode.decode(q, k, v)
    geometry = Geometry(shape.head_dim**-0.5, right=0 if shape.causal else -1)
    if shape.direction == "forward":
        return lambda: forward(q, k, v, geometry)
    out, lse = forward(q, k, v, geometry)
    return lambda: backward(dout, q, k, v, out, lse, geometry)


def with_plans(call: Callable[[], Any], plans: Plans) -> Callable[[], Any]:
    """The same call with other tilings."""

    def planned() -> Any:
        with override(**plans):
            return call()

    return planned


def compile_in_parallel(
    kernel: str, plans: Sequence[Tiling], fixed: Plans, shapes: Sequence[Shape]
) -> dict[Tiling, str]:
    """Run each plan once on each shape in other processes, which fills Triton's cache.

    They are few, since each takes seconds to start.

    Returns:
        why plans failed there; what crashes, crashes another process.
    """
    count = max(1, min(len(plans), (os.cpu_count() or 2) - 2, 12))
    parts = [plans[start::count] for start in range(count)]

    def work(some: Sequence[Tiling]) -> list[str]:
        answer = _elsewhere("_try", (kernel, some, fixed, shapes))
        return answer if isinstance(answer, list) else [answer] * len(some)

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(work, parts))
    pairs = zip(itertools.chain(*parts), itertools.chain(*answers), strict=True)
    return {plan: why for plan, why in pairs if why}


def first_calls(shape: Shape, plans: Plans, cache: str) -> dict[str, float] | str:
    """Milliseconds of first calls in a process of its own, Triton's cache being in `cache`.

    Returns:
        first: of this shape; other_length: of another one after it, whose length is no multiple of
        16, so that Triton specialises anew; again: of the first once more. Loading PyTorch and
        Triton is not counted. Or, where the process failed, what it said.
    """
    return _elsewhere("_first_calls", (shape, plans), {"TRITON_CACHE_DIR": cache})


def _elsewhere(function: str, job: Any, environment: dict[str, str] | None = None) -> Any:
    """What a function of this file returns in another process, or what it said when it failed."""
    code = (
        "import json, pickle, sys; "
        f"from {__name__} import {function} as f; "
        "print(json.dumps(f(*pickle.load(sys.stdin.buffer))))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps(job),
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            capture_output=True,
            check=False,
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        return f"the process took longer than {PATIENCE_S} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return f"the process failed: {' '.join(done.stderr.decode().split())[-300:]}"
    return json.loads(lines[-1])


def _try(kernel: str, plans: Sequence[Tiling], fixed: Plans, shapes: Sequence[Shape]) -> list[str]:
    """In another process: one call of each plan on each shape; reasons of failure."""
    device = resolve_device(None)
    reasons = [""] * len(plans)
    for shape in shapes:
        call = make_call(shape, device)
        for i, plan in enumerate(plans):
            if not reasons[i]:
                try:
                    with_plans(call, fixed | {kernel: plan})()
                    now(device)
                except Exception as error:
                    reasons[i] = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
    return reasons


def _first_calls(shape: Shape, plans: Plans) -> dict[str, float]:
    """In another process: times in milliseconds."""
    device = resolve_device(None)
    # Triton's own start, by a kernel that is not asked about.
    dtype = torch.float32 if mode.interpreted() else torch.float16
    small = torch.zeros(1, 16, 1, 16, dtype=dtype, device=device)
    forward(small, small, small, Geometry(1.0))
    odd = replace(shape, seqlen=shape.seqlen - 24)
    times = {}
    for name, of in (("first", shape), ("other_length", odd), ("again", shape)):
        call = with_plans(make_call(of, device), plans)
        start = now(device)
        call()
        times[name] = (now(device) - start) * 1e3
    return times
