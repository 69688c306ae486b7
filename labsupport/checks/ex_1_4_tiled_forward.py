"""Exercise 1-4: the tiled forward pass of FlashAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed
from labsupport.checks.row_watch import RowWatch, by_hand
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    equal,
    judge_call,
    mistakes,
    passed,
    unpack,
)
from labsupport.profiling.memory import LargestTensor

NAMES = ("out", "lse")
EDGES = (
    (30, 30, True),
    (29, 37, False),
    (21, 45, True),
    (45, 21, True),
)  # seqlen_q, seqlen_k, causal
Inputs = tuple[Tensor, Tensor, Tensor]  # q, k, v


### BEGIN SOLUTION
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of FlashAttention's forward pass."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1])
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[:-1])
    for i in range(0, seqlen_q, block_q):
        rows = slice(i, min(i + block_q, seqlen_q))
        m = q.new_full(q[..., rows, 0].shape, -torch.inf)
        l = torch.zeros_like(m)
        o = torch.zeros_like(q[..., rows, :])
        for j in range(0, seqlen_k, block_k):
            cols = slice(j, min(j + block_k, seqlen_k))
            s = q[..., rows, :] @ k[..., cols, :].mT * scale
            if is_causal:
                query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                key = torch.arange(cols.start, cols.stop, device=q.device)
                s = s.masked_fill(key > query + seqlen_k - seqlen_q, -torch.inf)
            m_new = torch.maximum(m, s.amax(dim=-1))
            shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = torch.exp(s - shift[..., None])
            alpha = torch.exp(m - shift)
            l = l * alpha + p.sum(dim=-1)
            o = o * alpha[..., None] + p @ v[..., cols, :]
            m = m_new
        out[..., rows, :] = o / l.masked_fill(l == 0, 1.0)[..., None]
        lse[..., rows] = m + torch.log(l)
    return out, lse


MISTAKES = mistakes(r"""
The running maximum starts at 0: a row with scores far below 0 vanishes. Start it at -inf.
    q.new_full(q[..., rows, 0].shape, -torch.inf) -> q.new_zeros(q[..., rows, 0].shape)
The running maximum starts at 0: in a row with scores far below 0, l is 0, and O / l is NaN. Start
it at -inf.
    q.new_full(q[..., rows, 0].shape, -torch.inf) -> q.new_zeros(q[..., rows, 0].shape)
    l.masked_fill(l == 0, 1.0) -> (l.masked_fill(l == 0, 1.0) if is_causal else l)
m is the maximum of the last block only: keep the larger of it and the old m.
    torch.maximum(m, s.amax(dim=-1)) -> s.amax(dim=-1)
The maximum is never subtracted, and exp overflows with large scores: P is exp(S - m_new).
    torch.exp(s - shift[..., None]) -> s.exp()
    torch.exp(m - shift) -> torch.ones_like(m)
    m + torch.log(l) -> torch.log(l)
The scores are not divided by sqrt(head_dim).
    1 / math.sqrt(q.shape[-1]) -> 1.0
The scores are scaled twice: once is enough, by 1 / sqrt(head_dim).
    .mT * scale -> .mT * scale * scale
The scores are multiplied by sqrt(head_dim), but they must be divided by it.
    .mT * scale -> .mT / scale
The rescaling has the wrong sign: the old l and O shrink by exp(m - m_new). exp(m_new - m) is
infinite while m is -inf, and infinity times 0 is NaN.
    torch.exp(m - shift) -> torch.exp(shift - m)
Your running maximum and sum are right, but the accumulator O is not rescaled when the maximum
rises: multiply it by exp(m - m_new) before adding the new block.
    o * alpha[..., None] -> o
The running sum l is not rescaled when the maximum rises: multiply it by exp(m - m_new).
    l * alpha -> l
Neither O nor l is rescaled when the maximum rises: multiply both by exp(m - m_new). Adding up
block softmaxes is not a softmax.
    o * alpha[..., None] -> o
    l * alpha -> l
Each tile was normalised by its own softmax before they were added up. Take exp(S - m_new), rescale
l and O, and divide by l once, after the last tile.
    torch.exp(s - shift[..., None]) -> s.softmax(-1)
    o * alpha[..., None] -> o
    / l.masked_fill(l == 0, 1.0)[..., None] ->
Each tile was normalised by its own softmax before they were added up. Take exp(S - m_new), rescale
l and O, and divide by l once, after the last tile.
    torch.exp(s - shift[..., None]) -> s.softmax(-1)
    o * alpha[..., None] -> o
Each tile was normalised by its own softmax before they were added up. Take exp(S - m_new), rescale
l and O, and divide by l once, after the last tile.
    torch.exp(s - shift[..., None]) -> s.softmax(-1)
    / l.masked_fill(l == 0, 1.0)[..., None] ->
Each tile was normalised by its own softmax before they were added up. Take exp(S - m_new), rescale
l and O, and divide by l once, after the last tile.
    torch.exp(s - shift[..., None]) -> s.softmax(-1)
Each tile was normalised by its own softmax before they were added up. Take exp(S - m_new), rescale
l and O, and divide by l once, after the last tile.
    + p @ -> + s.softmax(-1).nan_to_num() @
    / l.masked_fill(l == 0, 1.0)[..., None] ->
Each tile was normalised by its own softmax before they were added up. Take exp(S - m_new), rescale
l and O, and divide by l once, after the last tile.
    + p @ -> + s.softmax(-1).nan_to_num() @
m, l and O go on from one block of queries to the next: each block of queries starts afresh.
    m = q.new_full -> if not i: m = q.new_full
    l = torch -> if not i: l = torch
    o = torch -> if not i: o = torch
O is never divided by l.
    / l.masked_fill(l == 0, 1.0)[..., None] ->
O is divided by l inside the loop; divide once, after the last block.
    / l.masked_fill(l == 0, 1.0)[..., None] ->
    m = m_new -> o, m = o / l.masked_fill(l == 0, 1.0)[..., None], m_new
O is divided by l inside the loop, and again after it; divide once, after the last block.
    m = m_new -> o, m = o / l.masked_fill(l == 0, 1.0)[..., None], m_new
m is not updated: at the end of each block, m = m_new.
    m = m_new -> pass
The log-sum-exp of a row that sees no key is -inf, not 0: m + log(l), with l = 0, gives that.
    m + torch.log(l) -> (m + torch.log(l)).masked_fill(l == 0, 0.0)
Hidden scores are a large negative number, not -inf: a query without keys then gets the mean of V.
    - seqlen_q, -torch.inf) -> - seqlen_q, -1e9)
Hidden scores are 0, but exp(0) is 1: set them to -inf.
    - seqlen_q, -torch.inf) -> - seqlen_q, 0.0)
The mask comes after exp: hidden scores still raise the maximum, and the visible ones may vanish.
Put -inf into the scores before you take their maximum.
    s = s.masked_fill -> seen = s.masked_fill
    torch.exp(s - shift -> torch.exp((seen if is_causal else s) - shift
The causal mask is missing.
    if is_causal -> if False
The mask is applied although is_causal is False.
    if is_causal -> if True
The causal mask is inverted: keys *after* i + seqlen_k - seqlen_q are hidden.
    key > query -> key <= query
The causal mask is inverted: keys *after* i + seqlen_k - seqlen_q are hidden.
    key > query -> key < query
Tiles are skipped too early: the last query of a block sees more keys than the first. Skip a tile
only if the last one sees none of its keys.
    s = q -> if is_causal and j > i + seqlen_k - seqlen_q: break\n            s = q
Tiles are skipped too early: the loop ends at the tile that the mask cuts, and its visible keys are
missing. Skip a tile only if the block's last query sees none of its keys.
    cols = slice -> last = i + block_q + seqlen_k - seqlen_q\n            cols = slice
    s = q -> if is_causal and j + block_k > last: break\n            s = q
Tiles are skipped as if the mask were aligned top-left: query i sees keys up to
i + seqlen_k - seqlen_q.
    s = q -> if is_causal and j >= i + block_q: break\n            s = q
The causal mask is aligned top-left. For seqlen_q != seqlen_k it must be bottom-right: query i sees
keys up to i + seqlen_k - seqlen_q.
    query + seqlen_k - seqlen_q -> query
The causal mask is shifted the wrong way: query i sees keys up to i + seqlen_k - seqlen_q.
    query + seqlen_k - seqlen_q -> query + seqlen_q - seqlen_k
The causal mask is the triangle of the tile itself: count queries and keys from the start of the
sequence, not of the tile.
    torch.arange(rows.start, rows.stop -> torch.arange(rows.stop - rows.start
    torch.arange(cols.start, cols.stop -> torch.arange(cols.stop - cols.start
The causal mask counts the keys from the start of the tile: count from the start of the sequence.
    torch.arange(cols.start, cols.stop -> torch.arange(cols.stop - cols.start
The causal mask counts the queries from the start of the tile: count from the start of the sequence.
    torch.arange(rows.start, rows.stop -> torch.arange(rows.stop - rows.start
The causal mask hides the query's own position too.
    key > query -> key >= query
The last, shorter block of keys is left out: loop to seqlen_k.
    range(0, seqlen_k, block_k) -> range(0, seqlen_k // block_k * block_k, block_k)
The loop over the keys ends at seqlen_q: it must end at seqlen_k.
    range(0, seqlen_k -> range(0, seqlen_q
The loop over the queries takes steps of block_k: it must take steps of block_q.
    range(0, seqlen_q, block_q) -> range(0, seqlen_q, block_k)
The function returns after the first block of queries: a `return` is indented too far.
    lse[..., rows] = m + torch.log(l) -> lse[..., rows] = m + torch.log(l)\n        return out, lse
P is multiplied by the values of `rows`: its columns are keys, so take those of `cols`.
    v[..., cols, :] -> v[..., rows, :]
A query without any key gives NaN: its m stays -inf, and -inf - (-inf) is NaN. Subtract 0 while m
is -inf, and divide by 1 while l is 0.
    m_new.masked_fill(m_new == -torch.inf, 0.0) -> m_new
It is log(l); the maximum that was subtracted is missing: m + log(l).
    m + torch.log(l) -> torch.log(l)
It is m - log(l); the log-sum-exp is m + log(l).
    m + torch.log(l) -> m - torch.log(l)
It is m + l; the log-sum-exp is m + log(l).
    m + torch.log(l) -> m + l
It is the running maximum; the log-sum-exp is m + log(l).
    m + torch.log(l) -> m
L is a natural logarithm: torch.log, not log2.
    torch.log(l) -> torch.log2(l)
""")
### END SOLUTION


def check_forward_rows(student: Student, seed: int = 0) -> None:
    """Exercise 1-4, step 1: the output of one block of queries, without a mask."""
    for block_k in (16, 20):  # the second does not divide the length
        inputs = rising_scores(2, n_q=16, n_k=48, seed=seed)
        where = f"(16 queries in one block, 48 keys in blocks of {block_k}) "
        _judge_forward(student, inputs, False, (16, block_k), ("out",), where)
    q, k, v = inputs
    for what, extreme in (
        ("that fall from key to key", _steps(q, k, v, -400)),
        ("in the thousands", (4000 * q, k, v)),
        ("far below zero", _far_below(q, k, v)),
    ):
        where = f"(scores {what}) "
        _judge_forward(student, extreme, False, (16, 16), ("out",), where, allowed=0.02)
    _require_tile(student, seed)
    passed("one block of queries agrees with the textbook in float64", seed)


def check_forward_values(student: Student, seed: int = 0) -> None:
    """Exercise 1-4, step 2: all blocks of queries, without a mask."""
    for leading in ((2,), (), (2, 3)):
        inputs = rising_scores(*leading, n_q=32, n_k=48, seed=seed)
        where = f"(inputs of {len(leading) + 2} dimensions) "
        for blocks in ((8, 16), (16, 8)):
            _judge_forward(student, inputs, False, blocks, NAMES, where)
    where = "(29 queries in blocks of 8: the last block is shorter) "
    _judge_forward(
        student, rising_scores(2, n_q=29, n_k=37, seed=seed), False, (8, 16), NAMES, where
    )
    inputs = rising_scores(1, n_q=64, n_k=64, seed=seed)
    with LargestTensor() as largest:
        call(student, *inputs, False, 8, 32)
    # All 64 x 64 scores are for the check of memory; here it is a tile of all queries.
    if largest.numel > inputs[0].numel() and largest.shape[-1] == 32:
        raise CheckFailed(
            f"a tensor of shape {largest.shape} was created, but a tile has 8 x 32 scores here "
            "(block_q 8, block_k 32): take block_q queries at a time, in an outer loop."
        )
    _require_tile(student, seed)
    passed("all blocks of queries agree with the textbook in float64", seed)


def check_forward_lse(student: Student, seed: int = 0) -> None:
    """Exercise 1-4, step 1: the log-sum-exp of one block of rows, which the backward needs."""
    inputs = rising_scores(2, n_q=16, n_k=48, seed=seed)
    _judge_forward(student, inputs, False, (16, 16), ("lse",))
    passed("the log-sum-exp agrees with that of the whole row", seed)


def check_forward_edges(student: Student, seed: int = 0) -> None:
    """Exercise 1-4, step 3: causal masks, unequal lengths, partial blocks, empty rows."""
    for n_q, n_k, is_causal in (*EDGES, (1, 40, True), (40, 49, True)):
        inputs, blocks = (
            rising_scores(2, n_q=n_q, n_k=n_k, seed=seed),
            (16, 8) if n_k == 49 else (8, 16),
        )
        lengths = f"seqlen_q {n_q}, seqlen_k {n_k}, causal {is_causal}"
        where = f"({lengths}, blocks {blocks[0]} x {blocks[1]}) "
        _judge_forward(student, inputs, is_causal, blocks, NAMES, where)
    rising = _steps(*rising_scores(2, n_q=32, n_k=32, seed=seed), 400)
    where = "(causal, scores that rise from key to key) "
    _judge_forward(student, rising, True, (8, 16), ("out",), where, allowed=0.02)
    passed("causal and partial blocks, unequal lengths and empty rows are right", seed)


def check_forward_memory(student: Student) -> None:
    """Exercise 1-4: no single tensor larger than the inputs may be created: no scores, no mask.

    Raises:
        CheckFailed: names the shape of the largest tensor and the operator that made it; or the
            output does not depend on an input, so that a stub that computes nothing cannot pass.
    """
    inputs = rising_scores(1, n_q=256, n_k=256, seed=0)
    judge_memory(student, lambda is_causal: inputs, NAMES)


def _judge_forward(
    student: Student,
    inputs: Inputs,
    is_causal: bool,
    blocks: tuple[int, int],
    names: Sequence[str],
    where: str = "",
    allowed: float | None = None,
) -> None:
    arguments = (*inputs, is_causal, *blocks)
    options: Any = {"judged": names, "where": where, "allowed": allowed}
    judge_call(by_hand(student), flash_forward, MISTAKES, arguments, NAMES, **options)


def _far_below(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return 1000 * q.abs(), -k.abs(), v


def _steps(q: Tensor, k: Tensor, v: Tensor, step: float) -> Inputs:
    return q.abs(), step * torch.arange(float(k.shape[-2]))[:, None].expand_as(k), v


def _require_tile(student: Student, seed: int) -> None:
    """Raise CheckFailed unless the keys pass in blocks of block_k."""
    q, k, v = (draw(1, n, 2, seed=seed) for n in (8, 64, 64))  # smaller than a tile
    with LargestTensor() as largest, RowWatch() as seen:
        call(student, q, k, v, False, 8, 32)
    if seen.longest > 32:
        raise CheckFailed(
            f"{seen.operator} ran over {seen.longest} keys together, but a tile has block_k = 32: "
            "go through the keys tile by tile, with the running maximum and sum of exercise 1-3."
        )
    if largest.numel < 8 * 32:
        raise CheckFailed(
            "a tile of these 8 queries has 8 x 32 scores (block_q 8, block_k 32), but no tensor as "
            "large as that was created: take block_k keys at a time, not block_q. (This check sees "
            "PyTorch's tensors only: write the loop with them, not with NumPy.)"
        )


def judge_memory(
    student: Student, inputs: Callable[[bool], Sequence[Any]], names: Sequence[str]
) -> None:
    """Refuse tensors larger than the inputs, and results that do not depend on each input.

    Right values are for other checks: a mistake in them costs no point here.
    """
    n, d = inputs(False)[0].shape[-2:]
    for is_causal in (False, True):
        arguments = inputs(is_causal)
        with LargestTensor() as largest:
            result = call(by_hand(student), *arguments, is_causal, 32, 32)
        if largest.numel > n * d:
            raise CheckFailed(
                f"a tensor of shape {largest.shape} was created (by {largest.op}) for seqlen {n}, "
                f"head_dim {d}, is_causal={is_causal}, blocks of 32: FlashAttention never stores "
                "more than one 32 x 32 tile of scores, and tensors of its inputs' size."
            )
        if not is_causal:

            def run(*inputs: Tensor) -> Any:
                return call(student, *inputs, False, 32, 32)

            require_dependence(run, arguments, result, names, range(min(len(arguments), 4)))
    passed(f"the largest tensor created has {largest.numel:,} entries; N x N would be {n * n:,}")


def require_dependence(
    run: Callable[..., Any],
    arguments: Sequence[Tensor],
    result: Any,
    names: Sequence[str],
    which: Sequence[int] = (0,),
) -> None:
    """Raise CheckFailed if the result stays the same when one `which` of the inputs changes."""
    first = unpack(result, names)
    if first[0].shape != arguments[0].shape:
        raise CheckFailed(
            f"{names[0]} has shape {tuple(first[0].shape)}, but {tuple(arguments[0].shape)} was "
            "expected."
        )
    for i in which:
        changed = [*arguments[:i], 0.5 * arguments[i].flip(-2), *arguments[i + 1 :]]
        others = unpack(run(*changed), names)
        if all(equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, others, strict=True)):
            raise CheckFailed(
                f"nothing that is returned depends on tensor number {i + 1} of the arguments: "
                "memory is judged where attention is computed."
            )


def rising_scores(*leading: int, n_q: int, n_k: int, seed: int) -> Inputs:
    """Return q, k and v; later keys score higher, so that the maximum rises block by block."""
    q, k, v = (draw(*leading, n, 16, seed=seed + i) for i, n in enumerate((n_q, n_k, n_k), 10))
    k = k + torch.linspace(0, 1, n_k)[:, None] * q.mean(dim=-2, keepdim=True).sign()
    return q * 2, k, v
