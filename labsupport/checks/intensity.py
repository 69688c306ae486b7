"""Exercise 4-1: the FLOPs and the bytes of attention, and the roof above them.

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

from labsupport.checks.counting_numbers import compare, kind, number, numbers, values
from labsupport.checks.verdict import CheckFailed, Mistake, call, passed

Shape = dict[str, Any]
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
) -> tuple[int, int]:
    """Return FLOPs and compulsory bytes of one pass; see the top of this file."""
    pairs = seqlen_q * seqlen_k
    if causal:
        pairs -= seqlen_q * (seqlen_q - 1) // 2
    flops = (10 if backward else 4) * batch * heads * pairs * head_dim
    q = batch * seqlen_q * heads * head_dim * dtype.itemsize
    k = batch * seqlen_k * kv_heads * head_dim * dtype.itemsize
    lse = batch * heads * seqlen_q * 4
    moved = 4 * q + 2 * k + 2 * k + lse if backward else 2 * q + 2 * k + lse
    return flops, moved


def roof(flops: float, moved: float, tflops: float, gb_s: float) -> tuple[float, float, str]:
    """Return intensity, least time in ms, and what bounds it; see the top of this file."""
    arithmetic, memory = flops / tflops / 1e9, moved / gb_s / 1e6
    by = ARITHMETIC if arithmetic >= memory else MEMORY
    return flops / moved, max(arithmetic, memory), by


_HIDDEN = "pairs -= seqlen_q * (seqlen_q - 1) // 2"
FLOP_MISTAKES = (
    Mistake(
        ("10 if backward else 4", "5 if backward else 2"),
        "A multiply-add counts as 2 FLOPs: 2 * head_dim for each visible pair and product.",
    ),
    Mistake(
        ("else 4)", "else 2)"),
        "The forward pass has two products, Q K^T and P V: 4 * head_dim for each visible pair.",
    ),
    Mistake(
        ("batch * heads * pairs", "batch * kv_heads * pairs"),
        "Every query head computes scores of its own: count heads, not kv_heads.",
    ),
    Mistake(
        ("batch * heads * pairs", "batch * pairs"),
        "Every head has scores of its own: multiply by heads.",
    ),
    Mistake(("batch * heads * pairs", "heads * pairs"), "Multiply by batch."),
    Mistake(("if causal", "if False"), "`causal` is ignored: hidden pairs are not computed."),
    Mistake(("if causal", "if True"), "Pairs are hidden only with causal=True."),
    Mistake(
        (_HIDDEN, "pairs /= 2"),
        "The mask does not hide half of the pairs. The diagonal is visible: N (N + 1) / 2 of N^2. "
        "And with fewer queries than keys, every query sees all the keys before the queries too.",
    ),
    Mistake(
        (_HIDDEN, "pairs -= seqlen_q**2 / 2"),
        "The diagonal is visible: N (N + 1) / 2 pairs are left of N^2, not N^2 / 2.",
    ),
    Mistake(
        ("(seqlen_q - 1)", "(seqlen_q + 1)"), "A query sees its own position: the diagonal counts."
    ),
    Mistake(
        (_HIDDEN, "pairs = seqlen_q * (seqlen_q + 1) // 2"),
        "That mask is aligned top-left. The queries are the last tokens (bottom-right): query i "
        "sees seqlen_k - seqlen_q + i + 1 keys.",
    ),
    Mistake(
        ("seqlen_q * seqlen_k", "seqlen_q**2"),
        "There are seqlen_q * seqlen_k pairs, not seqlen_q**2.",
    ),
    Mistake(
        ("seqlen_q * seqlen_k", "seqlen_k**2"),
        "There are seqlen_q * seqlen_k pairs, not seqlen_k**2.",
    ),
    Mistake(("10 if", "4 if"), "`backward` is ignored: that pass has five products, not two."),
    Mistake(
        ("10 if", "8 if"),
        "The backward has five products: S again, because nobody stored it, dV, dP, dQ, dK.",
    ),
    Mistake(
        ("10 if", "14 if"),
        "With backward=True the backward pass alone is meant: the forward is not in it.",
    ),
    Mistake(
        ("flops, moved\n", "moved, flops\n"), "The two values are swapped: return flops, moved."
    ),
)
_FORWARD, _BACKWARD = "else 2 * q + 2 * k + lse", "4 * q + 2 * k + 2 * k + lse"
BYTE_MISTAKES = (
    Mistake(
        ("dtype.itemsize", "1", "seqlen_q * 4", "seqlen_q"),
        "That counts numbers; a number of Q takes dtype.itemsize bytes.",
    ),
    Mistake(("dtype.itemsize", "4"), "`dtype` is ignored: you always count 4 bytes a number."),
    Mistake(("dtype.itemsize", "2"), "`dtype` is ignored: you always count 2 bytes a number."),
    Mistake(
        ("seqlen_k * kv_heads", "seqlen_k * heads"),
        "K and V have kv_heads heads: a group of query heads shares one, and it moves once.",
    ),
    Mistake(
        ("seqlen_q * heads *", "seqlen_q * kv_heads *"), "Q and O have heads heads, not kv_heads."
    ),
    Mistake(("batch * seqlen_k", "batch * seqlen_q"), "K and V have seqlen_k rows, not seqlen_q."),
    Mistake(("batch * seqlen_q", "batch * seqlen_k"), "Q and O have seqlen_q rows, not seqlen_k."),
    Mistake(
        ("seqlen_q * 4", "seqlen_q * 0"),
        "L is missing: float32, one number for each query of each head.",
    ),
    Mistake(
        ("seqlen_q * 4", "seqlen_q * dtype.itemsize"),
        "L is float32 whatever dtype is: 4 bytes a number.",
    ),
    Mistake(
        ("seqlen_q * 4", "seqlen_q * 4 * head_dim"),
        "L has one number for each query of each head, not head_dim.",
    ),
    Mistake(("2 * q", "q", "4 * q", "3 * q"), "O is missing: it passes too."),
    Mistake(
        (_FORWARD, "else 2 * q + k + lse", "2 * k + 2 * k", "k + 2 * k"),
        "V is missing: K and V are two tensors.",
    ),
    Mistake(
        (
            "    return",
            "    moved += 2 * batch * heads * seqlen_q * seqlen_k * dtype.itemsize\n    return",
        ),
        "That counts S and P as well, but a fused kernel keeps them in fast memory.",
    ),
    Mistake(
        ("    lse", "    k = k / 2 if causal else k\n    lse"),
        "A causal mask hides pairs, but no key from every query: all of K and V still has to move.",
    ),
    Mistake(
        ("q = batch *", "q =", "k = batch *", "k =", "lse = batch *", "lse ="), "Multiply by batch."
    ),
    Mistake(
        ("if backward else 2", "if False else 2"),
        "`backward` is ignored: that pass reads O, dO and writes dQ, dK, dV too.",
    ),
    Mistake(
        ("4 * q", "3 * q"),
        "In the backward dO is missing, the incoming gradient, or O, which rowsum(dO * O) needs.",
    ),
    Mistake(
        ("4 * q + 2 * k + 2 * k", "3 * q + 2 * k"),
        "In the backward pass the results are missing: dQ, dK and dV are written.",
    ),
    Mistake(
        ("2 * k + 2 * k", "2 * k"), "In the backward pass dK and dV are missing: they are written."
    ),
    Mistake(
        ("2 * k + 2 * k", "2 * k + 2 * k * heads // kv_heads"),
        "dK and dV have the shape of K and V: kv_heads heads. (What the query heads of a group "
        "contribute is added up before it is written.)",
    ),
    Mistake(
        (_BACKWARD, "6 * q + 6 * k + 2 * lse"),
        "With backward=True the backward pass alone is meant: the forward is not in it.",
    ),
)
INTENSITY_MISTAKES = (
    Mistake(("flops / moved", "moved / flops"), "That is bytes a FLOP: turn it over."),
)
_LONGER = "max(arithmetic, memory)"
TIME_MISTAKES = (
    Mistake(
        (_LONGER, "arithmetic + memory"),
        "You added the two times. They overlap: the longer one is the bound.",
    ),
    Mistake(
        (_LONGER, "min(arithmetic, memory)"),
        "That is the shorter of the two times. Both must be over: take the longer one.",
    ),
    Mistake(
        (_LONGER, "arithmetic"),
        "The time for the bytes is ignored: it is the longer one sometimes.",
    ),
    Mistake(
        (_LONGER, "memory"), "The time for the FLOPs is ignored: it is the longer one sometimes."
    ),
    Mistake((_LONGER, _LONGER + " / 1e3"), "That is in seconds; return milliseconds."),
    Mistake((_LONGER, _LONGER + " * 1e3"), "That is in microseconds; return milliseconds."),
    Mistake(("gb_s / 1e6", "gb_s / 2**30 * 1e3"), "A GB is 10^9 bytes here, not 2^30."),
)


def check_cost_flops(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-1 (a): FLOPs: masks, grouped heads, decoding, both passes."""
    _judge_cost(student, _shapes(seed), 0, "flops", FLOP_MISTAKES)
    passed("FLOPs of the forward and of the backward pass", seed)


def check_cost_bytes(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-1 (b): compulsory bytes: dtypes, grouped heads, both passes."""
    _judge_cost(student, _shapes(seed), 1, "moved", BYTE_MISTAKES)
    passed("the bytes that must move in the forward and in the backward pass", seed)


def check_roof(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-1 (c): intensity, least time, and which ceiling bounds it."""
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
    for place, name, mistakes in (
        (0, "intensity", INTENSITY_MISTAKES),
        (1, "least_ms", TIME_MISTAKES),
    ):
        found = [(number(one[place], name),) for one in given]
        wrong = compare(
            found, roof, mistakes, lambda f, place=place: [(f(*case)[place],) for case in cases]
        )
        if wrong is not None:
            i, said = wrong
            ours = f"{right[i][1]:.4g} is right." if place else "It is flops / moved."
            raise CheckFailed(f"{where[i]}{name} is {found[i][0]:.4g}. {said or ours}")
    for i, (_, _, by) in enumerate(given):
        if not isinstance(by, str):
            raise CheckFailed(f'bound_by is "{ARITHMETIC}" or "{MEMORY}", not {kind(by)}.')
        if by not in (ARITHMETIC, MEMORY):
            raise CheckFailed(f'bound_by is "{ARITHMETIC}" or "{MEMORY}", not {by!r}.')
        if by != right[i][2]:
            said = "The longer time is the bound; the shorter one hides in it."
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
    mistakes: Sequence[Mistake],
) -> None:
    """Judge one of the two values; a mistake is named if it explains every case."""
    given = [(numbers(call(student, **shape), ("flops", "moved"))[place],) for shape in shapes]
    wrong = compare(
        given, attention_cost, mistakes, lambda f: [(f(**shape)[place],) for shape in shapes]
    )
    if wrong is None:
        return
    i, said = wrong
    sizes = ", ".join(f"{key} {value}" for key, value in shapes[i].items())
    right = attention_cost(**shapes[i])[place]
    ours = f"{right:,.0f} is right, {given[i][0] / right:.4g} times that is yours."
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
