"""Checks of exercise 4-1: the FLOPs and the bytes of attention, and the roof above them.

attention_cost(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, *, dtype, causal, backward)
    -> (flops, moved)

One pass: the forward, or with backward=True the backward alone. seqlen_q <= seqlen_k; a causal
mask is aligned bottom-right, and only visible pairs count. `dtype` is a torch.dtype: float32,
float16 or bfloat16; the log-sum-exp L, (batch, heads, seqlen_q), is float32 whatever it is.
flops: a multiply-add is 2; only the matrix products count. The backward computes S again.
moved: bytes, each tensor once. Forward: Q, K, V in; O, L out. Backward: Q, K, V, O, dO, L in;
dQ, dK, dV out.

roof(flops, moved, tflops, gb_s) -> (intensity, least_ms, bound_by)

intensity: FLOPs a byte. least_ms: of a pass whose arithmetic (10^12 FLOPs a second) and whose
transfers (10^9 bytes a second) overlap perfectly. bound_by: "arithmetic" or "memory", whichever
takes longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labsupport.checks.counting_numbers import (
    Numbers,
    explanation,
    first_wrong,
    kind,
    number,
    numbers,
    same,
    values,
)
from labsupport.checks.intensity_mistakes import (
    BYTE_MISTAKES,
    FLOP_MISTAKES,
    TIME_MISTAKES,
    Shape,
    bytes_with,
    flops_with,
    time_with,
)
from labsupport.checks.verdict import CheckFailed, call, passed
from labsupport.profiling.cases import Case
from labsupport.profiling.work import passes_of

ARITHMETIC, MEMORY = "arithmetic", "memory"


def attention_cost(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    causal: bool,
    backward: bool,
) -> tuple[float, int]:
    """FLOPs and compulsory bytes of one pass; see the top of this file."""
    case = Case(
        backend="",
        seqlen=seqlen_q,
        kv_seqlen=seqlen_k,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        causal=causal,
        direction="forward+backward",
    )
    one = passes_of(case)[1 if backward else 0]
    return one.flops, one.bytes


def roof(flops: float, moved: float, tflops: float, gb_s: float) -> tuple[float, float, str]:
    """Intensity, least time in ms, and what bounds it; see the top of this file."""
    arithmetic, memory = flops / tflops / 1e9, moved / gb_s / 1e6
    by = ARITHMETIC if arithmetic >= memory else MEMORY
    return flops / moved, max(arithmetic, memory), by


def check_cost_flops(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-1 (a): FLOPs: masks, grouped heads, decoding, both passes.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    _judge_cost(student, _shapes(seed), 0, "flops", FLOP_MISTAKES, flops_with)
    passed("FLOPs of the forward and of the backward pass", seed)


def check_cost_bytes(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-1 (b): compulsory bytes: dtypes, grouped heads, both passes.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    _judge_cost(student, _shapes(seed), 1, "moved", BYTE_MISTAKES, bytes_with)
    passed("the bytes that must move in the forward and in the backward pass", seed)


def check_roof(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-1 (c): intensity, least time, and which ceiling bounds it.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    draw = random.Random(seed)
    cases = [(4e12, 2e9, 800.0, 4000.0), (1e9, 1e9, 800.0, 4000.0)]
    cases += [
        (draw.uniform(1e9, 1e13), draw.uniform(1e7, 1e10), draw.uniform(10, 999), 4000.0)
        for _ in range(6)
    ]
    given = [values(call(student, *case), ("intensity", "least_ms", "bound_by")) for case in cases]
    right = [roof(*case) for case in cases]
    where = [
        f"for {f:.3g} FLOPs, {y:.3g} bytes, {rate:.0f} TFLOP/s and {gb:.0f} GB/s "
        for f, y, rate, gb in cases
    ]
    ratios = [(number(one[0], "intensity"),) for one in given]
    if (i := first_wrong(ratios, [(one[0],) for one in right])) is not None:
        upside_down = all(same(a, (1 / b[0],)) for a, b in zip(ratios, right, strict=True))
        said = "That is bytes a FLOP: turn it over." if upside_down else "It is flops / moved."
        raise CheckFailed(f"{where[i]}the intensity is {ratios[i][0]:.4g}. {said}")
    times = [(number(one[1], "least_ms"),) for one in given]
    if (i := first_wrong(times, [(one[1],) for one in right])) is not None:
        said = explanation(times, TIME_MISTAKES, lambda m: [time_with(*case, m) for case in cases])
        raise CheckFailed(
            f"{where[i]}least_ms is {times[i][0]:.4g}. {said or f'{right[i][1]:.4g} is right.'}"
        )
    for i, (_, _, by) in enumerate(given):
        if not isinstance(by, str):
            raise CheckFailed(f'bound_by is "{ARITHMETIC}" or "{MEMORY}", not {kind(by)}.')
        if by not in (ARITHMETIC, MEMORY):
            raise CheckFailed(f'bound_by is "{ARITHMETIC}" or "{MEMORY}", not {by!r}.')
        if by != right[i][2]:
            said = "What takes longer is the bound; what takes less waits for it."
            if len({one[2] for one in given}) == 1:
                said = "You say so in every case. Compare the two times, or the intensity with the "
                said += "ridge, tflops * 1e12 / (gb_s * 1e9)."
            raise CheckFailed(f'{where[i]}bound_by is "{by}". {said}')
    passed("the intensity, the least time, and what bounds it", seed)


def _judge_cost(
    student: Callable[..., Any],
    shapes: Sequence[Shape],
    place: int,
    name: str,
    mistakes: dict[str, str],
    wrong: Callable[[Shape, str], float],
) -> None:
    """Judge one of the two values; a mistake is named if it explains every case."""
    answers = [numbers(call(student, **shape), ("flops", "moved")) for shape in shapes]
    given: list[Numbers] = [(answer[place],) for answer in answers]
    right: list[Numbers] = [(attention_cost(**shape)[place],) for shape in shapes]
    i = first_wrong(given, right)
    if i is None:
        return
    said = explanation(given, mistakes, lambda m: [(wrong(shape, m),) for shape in shapes])
    sizes = ", ".join(f"{key} {value}" for key, value in shapes[i].items())
    ours = f"{right[i][0]:,.0f} is right, {given[i][0] / right[i][0]:.4g} times that is yours."
    raise CheckFailed(f"for {sizes} {name} is {given[i][0]:,.0f}. {said or ours}")


def _shapes(seed: int) -> list[Shape]:
    """A square one, a grouped one, a decoding step, a chunk after a cache; drawn ones beside."""
    draw = random.Random(seed)
    lengths = [(512, 512), (1, 4096), (100, 700)]
    lengths += [(n, n + draw.randint(1, 900)) for n in (draw.randint(2, 900),)]
    shapes = []
    for i, (n_q, n_k) in enumerate(lengths):
        kv_heads = draw.randint(2, 5)
        for causal in (False, True):
            for backward in (False, True):
                shapes.append(
                    {
                        "batch": draw.randint(2, 5),
                        "seqlen_q": n_q,
                        "seqlen_k": n_k,
                        "heads": kv_heads * (1, 4, 3, 2)[i],
                        "kv_heads": kv_heads,
                        "head_dim": draw.choice([64, 80, 128]),
                        "dtype": (torch.float32, torch.bfloat16, torch.float16)[(i + backward) % 3],
                        "causal": causal,
                        "backward": backward,
                    }
                )
    return shapes
