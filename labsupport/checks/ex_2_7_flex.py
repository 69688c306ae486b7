"""Exercise 2-7: masks and changes of the scores as functions of positions, and tiles to skip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed, short
from labsupport.checks.verdict import (
    Mistake,
    Student,
    call,
    draw,
    equal,
    explain,
    judge_call,
    judge_numbers,
    mistakes,
    passed,
    results,
    tensor,
)


### BEGIN SOLUTION
def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return whether a query may see a key: itself, and what comes before it."""
    return kv_idx <= q_idx


CAUSAL_MISTAKES = mistakes("""
It is inverted, or the two indices are swapped: a query sees keys that come before it.
    kv_idx <= q_idx -> kv_idx >= q_idx
A query must see itself, too.
    kv_idx <= q_idx -> kv_idx < q_idx
It is inverted: True means that a query may look.
    kv_idx <= q_idx -> kv_idx > q_idx
It compares heads with queries: h is the number of the head, and a mask need not use it.
    kv_idx <= q_idx -> (kv_idx <= q_idx) & (h <= q_idx)
""")


def window_mask(window: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return whether a query may see a key: itself, and the `window` keys before it."""
    return (kv_idx <= q_idx) & (q_idx - kv_idx <= window)


WINDOW_MISTAKES = mistakes("""
Put parentheses around each comparison: & binds tighter than <=.
    (kv_idx <= q_idx) & (q_idx - kv_idx <= window) -> kv_idx <= q_idx & (q_idx - kv_idx <= window)
Put parentheses around each comparison: & binds tighter than <=.
    (kv_idx <= q_idx) & (q_idx - kv_idx <= window) -> (kv_idx <= q_idx) & q_idx - kv_idx <= window
A query sees itself and `window` keys before it: window + 1 in all. Here it is one less.
    <= window -> < window
The future is not hidden: the window lies before the query, so add the causal mask.
    (kv_idx <= q_idx) & ->
The window reaches into the future as well: it lies before the query only.
    (kv_idx <= q_idx) & (q_idx - kv_idx <= window) -> (q_idx - kv_idx).abs() <= window
`window` hides nothing: that is the causal mask. A distance into the past is q_idx - kv_idx.
    & (q_idx - kv_idx <= window) ->
The window is inverted: hidden are the keys that are too far.
    - kv_idx <= window -> - kv_idx > window
A query does not see itself.
    kv_idx <= q_idx -> kv_idx < q_idx
""")


def document_mask(ids: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Return whether a query may see a key: causal, and in the same document.

    Args:
        ids: (batch, seqlen) integers, the number of the document to which each token belongs.
    """
    return (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx <= q_idx)


DOCUMENT_MISTAKES = mistakes("""
The future is not hidden: a query sees its own document, as far as itself.
    & (kv_idx <= q_idx) ->
`ids` is ignored: a query must not see another document.
    (ids[b, q_idx] == ids[b, kv_idx]) & ->
The batch is ignored: every text of the batch has its own documents, ids[b, ...].
    [b, -> [0,
The batch's number is taken from the heads: ids has (batch, seqlen).
    [b, -> [h % len(ids),
A later document is not the same one: compare numbers of documents by ==, they have no order.
    == ids[b, kv_idx] -> >= ids[b, kv_idx]
It compares positions with numbers of documents: look both positions up in `ids`.
    == ids[b, kv_idx] -> == kv_idx
""")


def soft_cap(
    cap: Tensor, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """Return the score squeezed into (-cap, cap). Source: Gemma 2, arXiv:2408.00118, section 2."""
    return cap * torch.tanh(score / cap)


CAP_MISTAKES = mistakes("""
The result ends at -1 and 1: multiply by cap after tanh.
    cap * torch -> torch
The score is not divided by cap, so that small scores change, too: they must stay
almost as they are.
    score / cap -> score
That is a hard limit: beyond cap all scores are equal. tanh bends smoothly.
    cap * torch.tanh(score / cap) -> score.clamp(-cap, cap)
cap and score have changed places.
    cap * torch.tanh(score / cap) -> score * torch.tanh(cap / score)
The score is multiplied by cap inside tanh: divide.
    score / cap -> score * cap
A sigmoid moves 0, and ends there: tanh is symmetric about it.
    torch.tanh -> torch.sigmoid
""")


def alibi(
    slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """Return the score less slope * distance. Source: Press 2022, arXiv:2108.12409, section 3.

    Args:
        slopes: (heads,), one for each head.
    """
    return score - slopes[h] * (q_idx - kv_idx).abs()


ALIBI_MISTAKES = mistakes("""
Far keys are favoured: subtract slope * distance.
    score - -> score +
All heads have the slope of the first: slopes[h].
    slopes[h] -> slopes[0]
The slope is looked up by the batch's number: slopes belong to heads, slopes[h].
    slopes[h] -> slopes[b % len(slopes)]
The score itself is lost: add the bias to it.
    score - slopes -> -slopes
The distance counts in both directions: take its absolute value, as flash-attn does.
    .abs() ->
The bias grows with the square of the distance: multiply the slope by the distance.
    .abs() -> ** 2
The score is multiplied by the bias: subtract it.
    score - slopes -> score * slopes
The bias does not depend on the distance: multiply the slope by it.
    * (q_idx - kv_idx).abs() ->
The bias is that of the key's position alone: the distance is q_idx - kv_idx.
    (q_idx - kv_idx).abs() -> kv_idx
""")


def tile_counts(mask: Tensor, block_q: int, block_k: int) -> tuple[int, int, int]:
    """Return how many tiles are skipped, computed with a mask, and computed without one.

    Args:
        mask: (seqlen_q, seqlen_k), boolean; what lies beyond its ends is hidden.
        block_q, block_k: rows and columns of a tile.
    """
    skipped = full = tiles = 0
    for rows in mask.split(block_q):
        for tile in rows.split(block_k, dim=1):
            seen = int(tile.sum())
            skipped += seen == 0
            full += seen == block_q * block_k
            tiles += 1
    return skipped, tiles - skipped - full, full


TILE_MISTAKES = mistakes("""
A tile at the end that is smaller than the others counts as "without a mask": what lies beyond the
end is hidden, so it needs one.
    seen == block_q * block_k -> seen == tile.numel()
The tiles at the end are missing: the last rows and columns count, too.
    mask.split(block_q) -> mask[: len(mask) // block_q * block_q].split(block_q)
    rows.split(block_k, dim=1) -> rows[:, : rows.shape[1] // block_k * block_k].split(block_k, 1)
block_q and block_k are swapped: rows of a tile are queries.
    mask.split(block_q) -> mask.split(block_k)
    rows.split(block_k, -> rows.split(block_q,
"With a mask" must not count the tiles in which everything is visible.
    tiles - skipped - full -> tiles - skipped
"With a mask" is the number of all tiles: subtract the skipped ones, and those without a mask.
    tiles - skipped - full -> tiles
Skipped and full are swapped: True in the mask means visible.
    return skipped, tiles - skipped - full, full -> return full, tiles - skipped - full, skipped
The counts are in another order: return skipped, masked, full.
    return skipped, tiles - skipped - full, full -> return skipped, full, tiles - skipped - full
The counts are in another order: return skipped, masked, full.
    return skipped, tiles - skipped - full, full -> return full, skipped, tiles - skipped - full
The counts are in another order: return skipped, masked, full.
    return skipped, tiles - skipped - full, full -> return tiles - skipped - full, skipped, full
The counts are in another order: return skipped, masked, full.
    return skipped, tiles - skipped - full, full -> return tiles - skipped - full, full, skipped
These are numbers of pairs, not of tiles.
    tiles += 1 -> tiles += tile.numel()
    skipped += seen == 0 -> skipped += tile.numel() - seen if seen == 0 else 0
    full += seen == block_q * block_k -> full += seen * (seen == block_q * block_k)
A tile counts as skipped unless all of it is visible: skip those in which nothing is.
    skipped += seen == 0 -> skipped += seen < block_q * block_k
""")
### END SOLUTION


def check_causal_mask(student: Student, seed: int = 0) -> None:
    """Exercise 2-7, step 1: the causal mask, at every position, head and batch."""
    _judge_mask(student, causal_mask, CAUSAL_MISTAKES)
    passed("a query sees itself, and what comes before it", seed)


def check_window_mask(student: Student, seed: int = 0) -> None:
    """Exercise 2-7, step 1: a window of keys before the query, and the query itself."""
    for window in (3, 1 + seed % 5, 0):
        _judge_mask(student, window_mask, WINDOW_MISTAKES, window)
    passed("a query sees itself, and `window` keys before it", seed)


def check_document_mask(student: Student, seed: int = 0) -> None:
    """Exercise 2-7, step 1: packed documents, other ones in each text of the batch."""
    ids = (draw(2, 9, seed=seed) > 0.3).int().cumsum(1) + torch.tensor([[0], [3]])
    ids = 5 * ids % 13  # numbers in no order
    _judge_mask(student, document_mask, DOCUMENT_MISTAKES, ids)
    passed("a query sees its own document, as far as itself", seed)


def check_soft_cap(student: Student, seed: int = 0) -> None:
    """Exercise 2-7, step 2: scores bent towards a limit, small ones hardly changed."""
    score = 10 * draw(2, 3, 9, 9, seed=seed)
    arguments = (torch.tensor(5.0 + seed % 3), score, *_indices())
    judge_call(student, soft_cap, CAP_MISTAKES, arguments, ("the score",))
    passed("small scores stay, and large ones approach the cap", seed)


def check_alibi(student: Student, seed: int = 0) -> None:
    """Exercise 2-7, step 2: a penalty for distance, with a slope for each head."""
    score, slopes = draw(2, 3, 9, 9, seed=seed), draw(3, seed=seed + 1).abs()
    with _explained():
        judge_call(student, alibi, ALIBI_MISTAKES, (slopes, score, *_indices()), ("the score",))
    passed("the penalty grows with the distance, by each head's slope", seed)


def check_tile_counts(student: Student, seed: int = 0) -> None:
    """Exercise 2-7, step 3: tiles to skip, to mask, and to compute as they are."""
    pairs = torch.ones(24, 24, dtype=torch.bool)
    window, ends = pairs.tril() & ~pairs.tril(-10), torch.ones(22, 27, dtype=torch.bool)
    spots = draw(24, 36, seed=seed) > 1.5
    cases: list[Any] = [(pairs.tril(), 8, 8), (window, 4, 8), (ends.tril(), 8, 6), (ends, 8, 6)]
    cases += [(spots, 4, 6), (~spots, 4, 3)]
    names = ("skipped", "masked", "full")
    judge_numbers(student, cases, tile_counts, TILE_MISTAKES, names)
    passed("tiles without a visible pair are skipped, full ones need no mask", seed)


def _indices() -> tuple[Tensor, ...]:
    """Return b, h, q_idx and kv_idx of 2 texts, 3 heads, 9 queries and keys, to be broadcast."""
    return tuple(torch.arange(n).view(n, *[1] * i) for n, i in ((2, 3), (3, 2), (9, 1), (9, 0)))


def _judge_mask(
    student: Student, solution: Any, known: tuple[Mistake, ...], *captured: Any
) -> None:
    arguments = (*captured, *_indices())
    with _explained():
        given = tensor(call(student, *arguments), "the mask")
    right = _everywhere(solution(*arguments))
    # Two mistakes in a mask of few entries look like others by chance: no pairs.
    run = lambda f: _everywhere(f(*arguments))  # noqa: E731
    wrong = results(solution, known, run, pairs=False)
    if given.dtype != torch.bool:
        raise CheckFailed(f"the mask is {short(given.dtype)}: return booleans, from comparisons.")
    if equal(given := _everywhere(given), right):
        return
    if say := explain(given, wrong):
        raise CheckFailed(say)
    b, h, i, j = (given != right).nonzero()[0].tolist()
    should = "see it, and yours hides it" if right[b, h, i, j] else "not see it, and yours shows it"
    raise CheckFailed(f"in text {b} of the batch, query {i} and key {j}: it should {should}.")


@contextmanager
def _explained() -> Iterator[None]:
    """Explain what `and`, or an index in the wrong place, raises."""
    try:
        yield
    except CheckFailed as failed:
        said, _, shapes = str(failed).partition("\nShapes are compared")
        if "Boolean value of Tensor" in said:
            say = (
                "`and`, or a comparison without parentheses, asks for one truth value of a whole "
                "tensor: write &, with parentheses around each comparison."
            )
        elif shapes or "out of bounds for dimension" in said:
            say = (
                "Give one index for each dimension: ids[b, q_idx] and ids[b, kv_idx], or slopes[h]."
            )
        else:
            raise
        raise CheckFailed(f"{said}\n{say}") from failed.__cause__


def _everywhere(mask: Tensor) -> Tensor:
    return mask.broadcast_to(2, 3, 9, 9)
