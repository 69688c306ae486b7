"""Exercise 1-5: the backward pass of FlashAttention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks import ex_1_4_tiled_forward as forward
from labsupport.checks.ex_1_4_tiled_forward import EDGES, judge_memory, rising_scores
from labsupport.checks.row_watch import by_hand
from labsupport.checks.verdict import Student, draw, judge_call, mistakes, passed

NAMES = ("dq", "dk", "dv")


### BEGIN SOLUTION
def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of FlashAttention's backward pass."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(dim=-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for j in range(0, seqlen_k, block_k):
        cols = slice(j, min(j + block_k, seqlen_k))
        for i in range(0, seqlen_q, block_q):
            rows = slice(i, min(i + block_q, seqlen_q))
            s = q[..., rows, :] @ k[..., cols, :].mT * scale
            if is_causal:
                query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                key = torch.arange(cols.start, cols.stop, device=q.device)
                s = s.masked_fill(key > query + seqlen_k - seqlen_q, -torch.inf)
            p = torch.exp(s - lse[..., rows, None])
            dv[..., cols, :] += p.mT @ dout[..., rows, :]
            dp = dout[..., rows, :] @ v[..., cols, :].mT
            ds = p * (dp - delta[..., rows, None])
            dq[..., rows, :] += ds @ k[..., cols, :] * scale
            dk[..., cols, :] += ds.mT @ q[..., rows, :] * scale
    return dq, dk, dv


MISTAKES = mistakes(r"""
The causal mask is shifted the wrong way: query i sees keys up to i + seqlen_k - seqlen_q.
    query + seqlen_k - seqlen_q -> query + seqlen_q - seqlen_k
dq and dk are still zeros, as in step 1: add up their parts, tile by tile.
    return dq, dk, dv -> return 0 * dq, 0 * dk, dv
The three gradients come back in another order: return dq, dk, dv.
    return dq, dk, dv -> return dv, dk, dq
The gradients come back in another order: return dq, dk, dv.
    return dq, dk, dv -> return dk, dq, dv
D is missing: dS = P * (dP - D).
    - delta[..., rows, None] ->
dS = P * (dP - D): the factor P is missing.
    ds = p * -> ds =
D is the sum of dO * O over the last dimension, head_dim: this one runs over the queries.
    delta[..., rows, None] -> (dout[..., rows, :] * out[..., rows, :]).sum(-2, keepdim=True)
D was taken from one tile, but its sum runs over the whole row: take it from dO and O.
    delta[..., rows, None] -> (p * dp).sum(-1, keepdim=True)
P is a softmax of the tile alone. It must be normalised over the whole row: exp(S - lse).
    torch.exp(s - lse[..., rows, None]) -> s.softmax(-1)
P is not normalised: it is exp(S - lse), with the log-sum-exp, not the maximum.
    s - lse[..., rows, None] -> s - s.amax(-1, keepdim=True)
    block_k): -> seqlen_k):
    j + block_k -> j + seqlen_k
dQ = scale * dS K: the scale is missing in dQ.
    ds @ k[..., cols, :] * scale -> ds @ k[..., cols, :]
dK = scale * dS^T Q: the scale is missing in dK.
    q[..., rows, :] * scale -> q[..., rows, :]
The recomputed scores lack the scale, 1 / sqrt(head_dim).
    .mT * scale -> .mT
P is recomputed without the causal mask.
    if is_causal -> if False
The mask is applied although is_causal is False.
    if is_causal -> if True
The last, shorter block of keys is left out: loop to seqlen_k.
    range(0, seqlen_k, block_k) -> range(0, seqlen_k // block_k * block_k, block_k)
Hidden scores are 0, but exp(0 - lse) is not: set them to -inf.
    - seqlen_q, -torch.inf) -> - seqlen_q, 0.0)
Tiles are skipped too early: the last query of a block sees more keys than the first. Skip a tile
only if the last one sees none of its keys.
    s = q -> if is_causal and j > i + seqlen_k - seqlen_q: continue\n            s = q
Tiles are skipped one key too early: the last query of a block sees this tile's first key.
    s = q -> if is_causal and j >= rows.stop - 1 + seqlen_k - seqlen_q: continue\n            s = q
Tiles are skipped as if the mask were aligned top-left: query i sees keys up to
i + seqlen_k - seqlen_q.
    s = q -> if is_causal and j >= i + block_q: continue\n            s = q
The causal mask is aligned top-left; it must be bottom-right, as in the forward.
    query + seqlen_k - seqlen_q -> query
The causal mask is the triangle of the tile itself: count queries and keys from the start of the
sequence, not of the tile.
    torch.arange(rows.start, rows.stop -> torch.arange(rows.stop - rows.start
    torch.arange(cols.start, cols.stop -> torch.arange(cols.stop - cols.start
The causal mask hides the query's own position too.
    key > query -> key >= query
Each block overwrites the contribution of the one before: it must be added up (+=).
    :] += -> :] =
A query that sees no key gives NaN: its lse is -inf, and exp(s - lse) is exp(-inf + inf). Replace
such an lse by +inf, so that its P is 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf) -> pass
""")


def score_gradient(p: Tensor, dout: Tensor, out: Tensor, v: Tensor) -> Tensor:
    """Return dS of one tile, from its P, its rows of dO and O, and its rows of V."""
    delta = (dout * out).sum(dim=-1, keepdim=True)
    return p * (dout @ v.mT - delta)


SCORE_MISTAKES = mistakes("""
D was taken from this tile, but its sum runs over the whole row, and the other columns are not here.
Insert dP = dO V^T into the sum, and look for O in it.
    (dout * out).sum(dim=-1, keepdim=True) -> (p * (dout @ v.mT)).sum(-1, keepdim=True)
D is missing: dS = P * (dP - D).
    - delta ->
The factor P is missing: dS = P * (dP - D).
    p * (dout @ v.mT - delta) -> dout @ v.mT - delta
D belongs inside of the brackets: dS = P * (dP - D), not P * dP - D.
    p * (dout @ v.mT - delta) -> p * (dout @ v.mT) - delta
D is added, but it must be subtracted.
    - delta -> + delta
D is one number for each query: the sum over the row of dO * O, not its mean.
    .sum(dim=-1 -> .mean(dim=-1
D is the sum of dO * O over the last dimension, head_dim: this one runs over the queries.
    .sum(dim=-1, keepdim=True) -> .sum(dim=-2, keepdim=True).mean(-1, keepdim=True)
D is the sum of dO * O over the last dimension, head_dim: this one runs over the queries.
    .sum(dim=-1, keepdim=True) -> .sum(dim=-2, keepdim=True)
dS is the gradient of the scaled scores S: the scale comes later, in dQ and dK.
    p * ( -> v.shape[-1] ** -0.5 * p * (
""")
### END SOLUTION


def check_backward_dv(student: Student, seed: int = 0) -> None:
    """Exercise 1-5, step 1: dV without a mask; dq and dk may still hold anything."""
    _judge_backward(student, 32, 48, False, seed, judged=("dv",))
    passed("dV agrees with the textbook's in float64", seed)


def check_score_gradient(student: Student, seed: int = 0) -> None:
    """Exercise 1-5, step 2: dS of one tile, which is only a part of its rows."""
    q, k, v = rising_scores(2, n_q=32, n_k=48, seed=seed)
    dout = draw(*q.shape, seed=seed + 7)
    out, lse = forward.flash_forward(q, k, v, False, 8, 16)
    rows, cols = slice(8, 16), slice(16, 32)
    s = q[:, rows] @ k[:, cols].mT / q.shape[-1] ** 0.5
    arguments = torch.exp(s - lse[:, rows, None]), dout[:, rows], out[:, rows], v[:, cols]
    judge_call(student, score_gradient, SCORE_MISTAKES, arguments, ("ds",), factor=3)
    passed("dS of a tile agrees with the textbook's in float64", seed)


def check_backward_values(student: Student, seed: int = 0) -> None:
    """Exercise 1-5, step 3: dQ, dK and dV without a mask."""
    _judge_backward(student, 32, 48, False, seed)
    passed("dQ, dK and dV agree with the textbook's in float64", seed)


def check_backward_edges(student: Student, seed: int = 0) -> None:
    """Exercise 1-5, step 3: causal masks, partial blocks, unequal lengths, empty rows."""
    for n_q, n_k, is_causal in (*EDGES, (20, 29, True), (29, 20, True)):
        blocks = (16, 8) if 20 in (n_q, n_k) else (8, 16)
        lengths = f"seqlen_q {n_q}, seqlen_k {n_k}, causal {is_causal}"
        where = f"({lengths}, blocks {blocks[0]} x {blocks[1]}) "
        _judge_backward(student, n_q, n_k, is_causal, seed, where, blocks=blocks)
    passed("gradients are right for causal and partial blocks, unequal lengths, empty rows", seed)


def check_backward_memory(student: Student) -> None:
    """Exercise 1-5: P is recomputed tile by tile, never stored whole.

    Raises:
        CheckFailed: names the shape of the largest tensor and the operator that made it; or no
            gradient depends on an input, so that a stub that computes nothing cannot pass.
    """
    inputs = rising_scores(1, n_q=256, n_k=256, seed=0)
    dout = torch.ones_like(inputs[0])

    def arguments(is_causal: bool) -> Any:
        return dout, *inputs, *forward.flash_forward(*inputs, is_causal, 32, 32)

    judge_memory(student, arguments, NAMES)


def _judge_backward(
    student: Student,
    n_q: int,
    n_k: int,
    is_causal: bool,
    seed: int,
    where: str = "",
    judged: Sequence[str] = (),
    blocks: tuple[int, int] = (8, 16),
) -> None:
    inputs = rising_scores(2, n_q=n_q, n_k=n_k, seed=seed)
    dout = draw(*inputs[0].shape, seed=seed + 7)
    known = forward.flash_forward(*inputs, is_causal, *blocks)
    arguments = (dout, *inputs, *known, is_causal, *blocks)
    options: Any = {"judged": judged, "where": where, "factor": 3}
    judge_call(by_hand(student), flash_backward, MISTAKES, arguments, NAMES, **options)
