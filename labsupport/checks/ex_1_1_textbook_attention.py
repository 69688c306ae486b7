"""Exercise 1-1: textbook attention with a mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labsupport.checks.verdict import Student, draw, judge_call, mistakes, passed


### BEGIN SOLUTION
def textbook_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and weights of attention with the whole score matrix in memory."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return weights @ v, weights


MISTAKES = mistakes("""
The scores are not divided by sqrt(head_dim): large head_dims then saturate the softmax.
    / math.sqrt(q.shape[-1]) ->
The scores are divided by head_dim; it must be its square root.
    math.sqrt(q.shape[-1]) -> q.shape[-1]
The scores are multiplied by sqrt(head_dim), but they must be divided by it.
    / math.sqrt -> * math.sqrt
The scores are divided by 8 whatever the inputs: that is the square root of this notebook's global
head_dim, 64. Take the function's own: q.shape[-1].
    math.sqrt(q.shape[-1]) -> 8.0
The softmax runs over the queries. Each query's weights over the keys must sum to 1: dim=-1.
    softmax(scores, dim=-1) -> softmax(scores, dim=-2)
The scores are divided by the square root of a length; it must be that of head_dim, q.shape[-1].
    math.sqrt(q.shape[-1]) -> math.sqrt(q.shape[-2])
exp overflows with large scores: subtract each row's maximum first, or call softmax.
    torch.softmax(scores, dim=-1) -> (scores.exp() / scores.exp().sum(-1, keepdim=True)).nan_to_num(0)
The mask is ignored.
    if mask is not None -> if False
The mask is inverted: True means that a query MAY look.
    (~mask, -> (mask,
The mask is applied after the softmax; put -inf into the scores before it.
    scores.masked_fill(~mask, -torch.inf) -> scores
    weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0) -> weights * mask
Hidden scores are set to 0, but exp(0) is 1: they must be -inf.
    (~mask, -torch.inf) -> (~mask, 0.0)
A softmax over -inf alone is 0 / 0: give a query that may look nowhere the weight 0.
    weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0) -> weights
A finite number instead of -inf makes an empty row a uniform average over hidden keys.
    -torch.inf -> -1e9
    weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0) -> weights
""")  # noqa: E501
### END SOLUTION


def check_textbook_values(student: Student, seed: int = 0) -> None:
    """Exercise 1-1: output and weights without a mask, with leading dimensions."""
    q, k, v = _qkv(2, 3, n_q=5, n_k=7, d=16, seed=seed)
    _judge(student, q, k, v)
    _judge(student, 4000 * q, k, v, where="(scores in the thousands) ", allowed=0.02)
    passed("output and weights agree with the reference in float64", seed)


def check_textbook_mask(student: Student, seed: int = 0) -> None:
    """Exercise 1-1: a boolean mask, True where a query may look, of shape (seqlen_q, seqlen_k)."""
    mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(seed + 1)) < 0.6
    mask[:, 2] = True  # every query sees something here
    _judge(student, *_qkv(2, n_q=6, n_k=8, d=16, seed=seed), mask)
    passed("hidden keys get weight 0, and the others share 1", seed)


def check_textbook_empty_rows(student: Student, seed: int = 0) -> None:
    """Exercise 1-1: a query that may look nowhere gives 0, in float16 too."""
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    for dtype in (torch.float32, torch.float16):
        q, k, v = (t.to(dtype) for t in _qkv(2, n_q=4, n_k=5, d=16, seed=seed))
        _judge(student, q, k, v, mask, where=f"(query 1 may look nowhere, {dtype}) ")
    passed("a query without keys gives 0, in float32 and in float16", seed)


def _judge(
    student: Student, *arguments: Tensor, where: str = "", allowed: float | None = None
) -> None:
    judge_call(
        student,
        textbook_attention,
        MISTAKES,
        arguments,
        ("output", "weights"),
        judged=("weights", "output"),  # with wrong weights the output is wrong, too
        where=where,
        allowed=allowed,
        dtype=arguments[0].dtype,
    )


def _qkv(*leading: int, n_q: int, n_k: int, d: int, seed: int) -> list[Tensor]:
    return [draw(*leading, n, d, seed=seed + i) for i, n in enumerate((n_q, n_k, n_k), 10)]
