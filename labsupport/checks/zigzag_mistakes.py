"""What typical wrong solutions of exercise 3-5 compute, and what to say of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK_MISTAKES: dict[str, tuple[str, Callable[[int, int], tuple[int, int]]]] = {
    "r and r + W": (
        "Rank r holds chunk r and chunk r + world: the late ranks still hold the late chunks of "
        "each half. Count the second one from the end, 2 * world - 1 - rank.",
        lambda r, w: (r, r + w),
    ),
    "contiguous": (
        "Those are neighbours, 2 * rank and 2 * rank + 1: one contiguous shard, with the work as "
        "unequal as before.",
        lambda r, w: (2 * r, 2 * r + 1),
    ),
    "one too far": (
        "The second chunk is one too far: the last chunk is number 2 * world - 1, and rank 0 holds "
        "it.",
        lambda r, w: (r, 2 * w - r),
    ),
    "within the first half": (
        "The second chunk is counted from the end of the first half. There are 2 * world chunks.",
        lambda r, w: (r, w - 1 - r),
    ),
    "late first": (
        "The chunks are right, but in the other order: the early one comes first.",
        lambda r, w: (2 * w - 1 - r, r),
    ),
    "from the middle": (
        "The ranks are the other way round: rank 0 holds the first and the last chunk.",
        lambda r, w: (w - 1 - r, w + r),
    ),
    "from 1": ("Chunks count from 0.", lambda r, w: (r + 1, 2 * w - r)),
}

POSITION_MISTAKES: dict[str, tuple[str, Callable[[int, int, int], Tensor]]] = {
    "local": (
        "Those are places within the rank's own shard. RoPE needs places in the whole sequence.",
        lambda n, r, w: torch.arange(n // w),
    ),
    "contiguous": (
        "Those are the positions of contiguous shards, rank * seqlen // world and on.",
        lambda n, r, w: torch.arange(r * (n // w), (r + 1) * (n // w)),
    ),
    "stripes": (
        "Those are stripes, every world-th token. That balances the work too, but here a rank "
        "holds two chunks of neighbouring tokens.",
        lambda n, r, w: torch.arange(r, n, w),
    ),
    "r and r + W": (
        "The second chunk is rank + world; it is 2 * world - 1 - rank.",
        lambda n, r, w: _positions(n, w, (r, r + w)),
    ),
    "chunk size": (
        "The chunks are twice as long as they should be: there are 2 * world of them.",
        lambda n, r, w: torch.cat(
            [torch.arange(c * (n // w), (c + 1) * (n // w)) for c in (r, 2 * w - 1 - r)]
        ),
    ),
    "late backwards": (
        "The second chunk's tokens are in falling order. The ranks go back and forth; within a "
        "chunk tokens keep their order.",
        lambda n, r, w: torch.cat(
            (_positions(n, w, (r,)), _positions(n, w, (2 * w - 1 - r,)).flip(0))
        ),
    ),
    "late first": (
        "The late chunk comes first; the early one does.",
        lambda n, r, w: _positions(n, w, (2 * w - 1 - r, r)),
    ),
    "early only": (
        "The second chunk is missing.",
        lambda n, r, w: _positions(n, w, (r,)),
    ),
    "from 1": (
        "Positions start at 0.",
        lambda n, r, w: _positions(n, w, (r, 2 * w - 1 - r)) + 1,
    ),
    "numbers of chunks": (
        "Those are the numbers of the chunks. A chunk c holds positions c * size ... "
        "(c + 1) * size - 1.",
        lambda n, r, w: torch.tensor((r, 2 * w - 1 - r)).repeat_interleave(n // (2 * w)),
    ),
}

INVERSE_MISTAKES: dict[str, tuple[str, Callable[[Sequence[Tensor]], Tensor]]] = {
    "concatenated": (
        "The shards stand one behind the other, as if they were contiguous: each of them holds two "
        "chunks from different places.",
        lambda shards: torch.cat(list(shards), 1),
    ),
    "the same permutation": (
        "You applied the order of the shards once more, instead of undoing it: index by "
        "order.argsort(), not by order.",
        lambda shards: torch.cat(list(shards), 1)[:, _order(shards)],
    ),
    "late ones not reversed": (
        "The early halves are right. The late ones come in the order of the ranks, but rank 0 "
        "holds the LAST chunk: they go from the last rank to the first.",
        lambda shards: torch.cat([_half(s, 0) for s in shards] + [_half(s, 1) for s in shards], 1),
    ),
    "late tokens reversed": (
        "The late half is reversed token by token. Reverse the order of the chunks, not of the "
        "tokens within them.",
        lambda shards: torch.cat(
            [_half(s, 0) for s in shards] + [torch.cat([_half(s, 1) for s in shards], 1).flip(1)], 1
        ),
    ),
    "late half first": (
        "The late half comes first.",
        lambda shards: torch.cat(
            [_half(s, 1) for s in reversed(shards)] + [_half(s, 0) for s in shards], 1
        ),
    ),
    "stripes": (
        "The tokens of the ranks take turns: that undoes stripes, not zigzag.",
        lambda shards: torch.stack(list(shards), 2).flatten(1, 2),
    ),
    "backwards": (
        "The whole sequence stands in reversed order of its chunks.",
        lambda shards: torch.cat(
            [_half(s, 1) for s in shards] + [_half(s, 0) for s in reversed(shards)], 1
        ),
    ),
    "along the batch": (
        "The shards were joined along the batch. The sequence is dimension 1.",
        lambda shards: torch.cat(list(shards), 0),
    ),
}


def _positions(seqlen: int, world: int, chunks: Sequence[int]) -> Tensor:
    size = seqlen // (2 * world)
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])


def _half(shard: Tensor, which: int) -> Tensor:
    return shard.chunk(2, 1)[which]


def _order(shards: Sequence[Tensor]) -> Tensor:
    world, seqlen = len(shards), len(shards) * shards[0].shape[1]
    return torch.cat([_positions(seqlen, world, (r, 2 * world - 1 - r)) for r in range(world)])
