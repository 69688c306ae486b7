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

import itertools
import random
from typing import Any

import torch

from labsupport.checks.errors import CheckFailed, readable
from labsupport.checks.verdict import Student, call, judge_numbers, mistakes, passed, values

COST, ROOF = ("flops", "moved"), ("intensity", "least_ms", "bound_by")
ARITHMETIC, MEMORY = "arithmetic", "memory"


### BEGIN SOLUTION
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
    """Return FLOPs and compulsory bytes of one pass; see the top of this file.

    >>> sizes = {"batch": 1, "seqlen_q": 128, "seqlen_k": 128, "heads": 2, "kv_heads": 2}
    >>> options = {"head_dim": 64, "dtype": torch.float16, "causal": False, "backward": False}
    >>> attention_cost(**sizes, **options)
    (8388608, 132096)
    """
    pairs = seqlen_q * seqlen_k
    if causal:
        pairs -= seqlen_q * (seqlen_q - 1) // 2
    flops = (10 if backward else 4) * batch * heads * pairs * head_dim
    q = batch * seqlen_q * heads * head_dim * dtype.itemsize
    k = batch * seqlen_k * kv_heads * head_dim * dtype.itemsize
    lse = batch * heads * seqlen_q * 4
    moved = 4 * q + 2 * k + 2 * k + lse if backward else 2 * q + 2 * k + lse
    return flops, moved


FLOP_MISTAKES = mistakes("""
It is half: a multiply-add counts as 2 FLOPs, and the forward has two products, the backward five.
    10 if backward else 4 -> 5 if backward else 2
Every query head computes its own scores: count heads, not kv_heads.
    batch * heads * pairs -> batch * kv_heads * pairs
The batch is missing: each of its sequences has its own products.
    batch * heads * pairs -> heads * pairs
`causal` is ignored: hidden pairs are not computed.
    if causal -> if False
The mask hides fewer than half of the pairs. The diagonal is visible, N (N + 1) / 2 of N^2 are left,
and with fewer queries than keys every query also sees all the keys before the queries.
    pairs -= seqlen_q * (seqlen_q - 1) // 2 -> pairs /= 2
The mask hides N (N - 1) / 2 of N^2 pairs, not N (N + 1) / 2: the diagonal is visible.
    (seqlen_q - 1) // 2 -> (seqlen_q + 1) // 2
That mask is aligned top-left. The queries are the last tokens (bottom-right): query i sees
seqlen_k - seqlen_q + i + 1 keys.
    pairs -= seqlen_q * (seqlen_q - 1) // 2 -> pairs = seqlen_q * (seqlen_q + 1) // 2
`backward` is ignored: that pass has five products, not two.
    10 if -> 4 if
The backward has five products: S again, because nobody stored it, dV, dP, dQ, dK.
    10 if -> 8 if
With backward=True the backward pass alone is meant: the forward is not in it.
    10 if -> 14 if
The two values are swapped: return flops, moved.
    return flops, moved -> return moved, flops
""")
BYTE_MISTAKES = mistakes("""
That counts numbers; a number of Q takes dtype.itemsize bytes.
    dtype.itemsize -> 1
    seqlen_q * 4 -> seqlen_q
`dtype` is ignored: you always count 4 bytes a number.
    dtype.itemsize -> 4
`dtype` is ignored: you always count 2 bytes a number.
    dtype.itemsize -> 2
`dtype` is ignored for the tensors of Q's size: a number of them takes dtype.itemsize bytes.
    seqlen_q * heads * head_dim * dtype.itemsize -> seqlen_q * heads * head_dim * 2
K and V have seqlen_k rows, not seqlen_q.
    seqlen_k * kv_heads -> seqlen_q * kv_heads
K and V have kv_heads heads: a group of query heads shares one, and it moves once.
    seqlen_k * kv_heads -> seqlen_k * heads
L is missing: float32, one number for each query of each head.
    seqlen_q * 4 -> seqlen_q * 0
L is float32 whatever dtype is: 4 bytes a number.
    seqlen_q * 4 -> seqlen_q * dtype.itemsize
L is counted twice: the forward only writes it, the backward only reads it.
    seqlen_q * 4 -> seqlen_q * 8
L has one number for each query of each head, not head_dim of them.
    seqlen_q * 4 -> seqlen_q * head_dim * 4
O is missing: it passes too.
    2 * q -> q
    4 * q -> 3 * q
That counts S and P as well, but a fused kernel keeps them in fast memory.
    + lse -> + lse + 2 * batch * heads * seqlen_q * seqlen_k * dtype.itemsize
A causal mask hides pairs, but no key from every query: all of K and V still has to move.
    * kv_heads * head_dim -> * kv_heads * head_dim / (2 if causal else 1)
`backward` is ignored: that pass reads O, dO and writes dQ, dK, dV too.
    if backward else 2 -> if False else 2
In the backward pass one tensor of Q's size is missing: Q, O, dO and dQ all pass.
    4 * q + 2 * k -> 3 * q + 2 * k
dK and dV have kv_heads heads, as K and V do.
    2 * k + 2 * k + lse -> 2 * k + 2 * k * heads // kv_heads + lse
In the backward pass the results are missing: dQ, dK and dV are written.
    4 * q + 2 * k + 2 * k -> 3 * q + 2 * k
With backward=True the backward pass alone is meant: the forward is not in it.
    4 * q + 2 * k + 2 * k + lse -> 6 * q + 6 * k + 2 * lse
""")


def roof(flops: float, moved: float, tflops: float, gb_s: float) -> tuple[float, float, str]:
    """Return intensity, least time in ms, and what bounds it; see the top of this file.

    >>> roof(flops=2e12, moved=1e9, tflops=100, gb_s=1000)
    (2000.0, 20.0, 'arithmetic')
    """
    arithmetic, memory = flops / tflops / 1e9, moved / gb_s / 1e6
    by = "arithmetic" if arithmetic >= memory else "memory"
    return flops / moved, max(arithmetic, memory), by


ROOF_MISTAKES = mistakes("""
That is bytes a FLOP: invert it.
    flops / moved -> moved / flops
You added the two times. They overlap: the longer one is the bound.
    max(arithmetic, memory) -> arithmetic + memory
That is the shorter of the two times. Both must be over: take the longer one.
    max(arithmetic, memory) -> min(arithmetic, memory)
The time for the bytes is ignored, or counted in another unit: sometimes it is the longer one.
    max(arithmetic, memory) -> arithmetic
least_ms is in seconds: a second has 1e3 ms.
    max(arithmetic, memory) -> max(arithmetic, memory) / 1e3
least_ms is in microseconds: a TFLOP is 1e12 FLOPs, and a second 1e3 ms.
    max(arithmetic, memory) -> max(arithmetic, memory) * 1e3
""")
### END SOLUTION


def check_cost_flops(student: Student, seed: int = 0) -> None:
    """Exercise 4-1 (a): FLOPs: masks, grouped heads, decoding, both passes."""
    judge_numbers(student, _shapes(seed), attention_cost, FLOP_MISTAKES, COST, ("flops",))
    passed("FLOPs of the forward and of the backward pass", seed)


def check_cost_bytes(student: Student, seed: int = 0) -> None:
    """Exercise 4-1 (b): compulsory bytes: dtypes, grouped heads, both passes."""
    judge_numbers(student, _shapes(seed), attention_cost, BYTE_MISTAKES, COST, ("moved",))
    passed("the bytes that must move in the forward and in the backward pass", seed)


def check_roof(student: Student, seed: int = 0) -> None:
    """Exercise 4-1 (c): intensity, least time, and which ceiling bounds it."""
    rng = random.Random(seed)
    cases = [(4e12, 2e9, 800.0, 4000.0), (1e9, 1e9, 800.0, 4000.0)]
    cases += [(4e10, 1e9, tflops, 4000.0) for tflops in (800.0, 80.0)]  # no fixed intensity decides
    for _ in range(6):
        work = rng.uniform(1e9, 1e13), rng.uniform(1e7, 1e10)
        cases.append((*work, rng.uniform(10, 999), 4000.0))
    for name in ROOF[:2]:
        judge_numbers(student, cases, roof, ROOF_MISTAKES, ROOF, (name,))
    given = [values(call(student, *case), ROOF)[2] for case in cases]
    right = [roof(*case)[2] for case in cases]
    for case, by, bound in zip(cases, given, right, strict=True):
        if by not in (ARITHMETIC, MEMORY):
            raise CheckFailed(f'bound_by is "{ARITHMETIC}" or "{MEMORY}", not {by!r}.')
        if by != bound:
            say = "The longer time is the bound; the shorter one hides in it."
            if len(set(given)) == 1:
                say = (
                    "You give the same answer in every case: compare times in one unit (TFLOP/s "
                    "means 1e12, GB/s 1e9)."
                )
            raise CheckFailed(f"for {', '.join(map(readable, case))} bound_by is {by!r}. {say}")
    passed("the intensity, the least time, and what bounds it", seed)


def _shapes(seed: int) -> list[dict[str, Any]]:
    """Return a square shape, a decoding step, a chunk after a cache, and a drawn one."""
    rng = random.Random(seed)
    n = rng.randint(2, 900)
    shapes = []
    for i, lengths in enumerate(((512, 512), (1, 4096), (100, 700), (n, n + rng.randint(1, 900)))):
        kv_heads = rng.randint(2, 5)
        for causal, backward in itertools.product((False, True), repeat=2):
            sizes = {
                "batch": rng.randint(2, 5),
                "heads": kv_heads * (1, 4, 3, 2)[i],
                "kv_heads": kv_heads,
                "head_dim": rng.choice([64, 80, 128]),
                "dtype": (torch.float32, torch.bfloat16, torch.float16)[(i + backward) % 3],
            }
            sizes["seqlen_q"], sizes["seqlen_k"] = lengths
            shapes.append(sizes | {"causal": causal, "backward": backward})
    return shapes
