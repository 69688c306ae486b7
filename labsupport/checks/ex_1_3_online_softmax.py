"""Exercise 1-3: the running maximum and sum of a softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed
from labsupport.checks.row_watch import RowWatch
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    judge,
    judge_call,
    mistakes,
    passed,
    unpack,
)

NAMES = ("m", "l")


### BEGIN SOLUTION
def running_max_and_sum(scores: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the softmax statistics (m, l) of each row, seen one block at a time."""
    m = torch.full(scores.shape[:-1], -torch.inf, dtype=scores.dtype, device=scores.device)
    l = torch.zeros_like(m)
    for block in scores.split(block_size, dim=-1):
        m_new = torch.maximum(m, block.amax(-1))
        shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
        l = l * (m - shift).exp() + (block - shift[..., None]).exp().sum(-1)
        m = m_new
    return m, l


MISTAKES = mistakes("""
All rows share one maximum, that of the whole block: each row has its own, amax(-1).
    block.amax(-1) -> block.max()
It is the maximum of the last block alone.
    torch.maximum(m, block.amax(-1)) -> block.amax(-1)
After a hidden block m goes on as 0, which is wrong when later scores are negative. Subtract 0 there,
but keep m = -inf.
    m = m_new -> m = shift
After a hidden block the next one is compared with 0, which is wrong when its scores are negative.
Subtract 0 while m is -inf, but go on with m = -inf.
    m = m_new -> m = shift
    return m, -> return m.masked_fill(l == 0, -torch.inf),
m starts at 0, which is wrong when all scores are negative: start at -inf.
    -torch.inf, dtype -> 0.0, dtype
The last, shorter block is left out.
    scores.split -> scores[..., : scores.shape[-1] // block_size * block_size].split
m is right, but l is not rescaled when m rises: multiply the old l by exp(m - m_new).
    l * (m - shift).exp() -> l
Each block was summed under its own maximum, and the sums were added.
    l * (m - shift).exp() -> l
    shift[..., None] -> block.amax(-1, True).nan_to_num(neginf=0)
The block's own maximum is subtracted from its scores: subtract the larger of it and m, m_new.
    shift[..., None] -> block.amax(-1, True).nan_to_num(neginf=0)
A row that is -inf throughout keeps m = -inf and l = 0, but exp(-inf - (-inf)) is NaN: subtract 0
while m is -inf.
    m_new.masked_fill(m_new == -torch.inf, 0.0) -> m_new
The old l is dropped: add the block's sum to it, after you have rescaled it.
    l * (m - shift).exp() + ->
m is not updated: at the end of each block, m = m_new.
    m = m_new -> pass
The block's sum is rescaled too: only the old l is multiplied by exp(m - m_new).
    l * (m - shift).exp() + (block - shift[..., None]).exp().sum(-1) -> (l + (block - shift[..., None]).exp().sum(-1)) * (m - shift).exp()
It is the log-sum-exp, m + log(l); return l itself.
    return m, l -> return m, m + l.log()
The two results are swapped: return m, l.
    return m, l -> return l, m
The rescaling has the wrong sign: the old l shrinks by exp(m - m_new). exp(m_new - m) is infinite
while m is -inf, and infinity times 0 is NaN.
    (m - shift).exp() -> (shift - m).exp()
m_new is not subtracted from the scores of a block, so exp overflows for large scores.
    l * (m - shift).exp() -> l
    - shift[..., None] ->
The old maximum is subtracted from the new block: subtract the new one, m_new.
    block - shift[..., None] -> block - m[..., None]
The old maximum is subtracted from the new block: subtract the new one, m_new.
    block - shift[..., None] -> block - m[..., None].nan_to_num(neginf=0)
""")  # noqa: E501
### END SOLUTION


def check_running_values(student: Student, seed: int = 0) -> None:
    """Exercise 1-3: m and l of random rows, for blocks that do and do not divide the length."""
    scores = draw(3, 4, 40, seed=seed) * 3
    scores[..., -1] += 4  # a later block holds a larger score than the first one
    for block in (8, 40, 16, 1):
        _judge(student, scores, block)
    passed("m and l agree with the whole row, whatever the block size", seed)


def check_running_extremes(student: Student, seed: int = 0) -> None:
    """Exercise 1-3: scores whose exp overflows, blocks that are all hidden, and empty rows."""
    hidden = torch.full((2,), -torch.inf)
    rng = torch.Generator().manual_seed(seed)
    few = torch.randint(64, (2,), generator=rng) / 16  # exact in float32 near 1000, too
    high = 1000 + torch.randint(64, (4,), generator=rng) / 16
    for what, scores in {
        "scores of 1000 (exp overflows unless the maximum is subtracted first)": high,
        "a first block that is hidden throughout (-inf)": torch.cat([hidden, few]),
        "a last block that is hidden throughout (-inf)": torch.cat([few, hidden]),
        "scores far below zero": -high,
        "a hidden first block, then scores far below zero": torch.cat([hidden, -high]),
        "a row that is -inf throughout": torch.full((4,), -torch.inf),
    }.items():
        where = f"With {what}: "
        m = call(student, scores[None], 2)[0] if scores.isinf().all() else None
        if isinstance(m, Tensor) and m.isfinite().all():
            raise CheckFailed(
                f"{where}m starts at the number {m.max():.4g}, and stays there: start at -inf."
            )
        # A log-sum-exp near 1000 is rounded.
        _judge(student, scores[None], 2, where=where, allowed=1e-3)
    passed("no overflow, no NaN, and an empty row keeps m = -inf, l = 0", seed)


def check_running_streams(student: Student) -> None:
    """Exercise 1-3: one block at a time, and each block once.

    Raises:
        CheckFailed: something was computed over a longer row, all maxima came before a sum, or the
            result is no maximum and sum.
    """
    scores = draw(2, 60, seed=3)
    for block in (10, 4):  # both: 10 blocks of 6 would pass for blocks of 10
        with RowWatch() as seen:
            result = call(student, scores, block)
        require_maximum(result, scores)
        if seen.longest > block:
            raise CheckFailed(
                f"{seen.operator} ran over {seen.longest} scores together, but a block has "
                f"{block}: look at one block of scores at a time, and keep only m and l between "
                "blocks."
            )
        if seen.maxima_before_exp > 1:
            raise CheckFailed(
                f"the maxima of {seen.maxima_before_exp} blocks were taken before the first exp: "
                "that reads the scores twice. Update l with each block, and rescale it when m "
                "rises."
            )
    passed("one block at a time, and each block once")


def _judge(student: Student, scores: Tensor, block: int, **options: Any) -> None:
    judge_call(student, running_max_and_sum, MISTAKES, (scores, block), NAMES, **options)


def require_maximum(result: Any, scores: Tensor) -> None:
    """Refuse a result without a look at the rows: m must be their maximum, l positive.

    Raises:
        CheckFailed: it is something else.
    """
    m, l = unpack(result, NAMES)
    judge("m", m, scores.amax(-1), allowed=0.0)
    if l.shape != m.shape or not (l.isfinite() & (l > 0)).all():
        raise CheckFailed(f"l must be a positive sum for each row, but it is {l}.")
