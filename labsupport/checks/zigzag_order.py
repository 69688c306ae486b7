"""Exercise 3-5: the chunks of a rank, the positions of its tokens, and the way back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.merging import Named
from labsupport.checks.verdict import CheckFailed, Mistake, call, explain, passed
from labsupport.distributed.ring.zigzag import shard_sequence


def zigzag_chunks(rank: int, world: int) -> tuple[int, int]:
    """Return the numbers of a rank's two chunks, of 2 * world."""
    return rank, 2 * world - 1 - rank


def zigzag_positions(seqlen: int, rank: int, world: int) -> Tensor:
    """Return the positions of a rank's tokens in the whole sequence."""
    size, chunks = seqlen // (2 * world), zigzag_chunks(rank, world)
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])


def unzigzag(shards: Sequence[Tensor]) -> Tensor:
    """Return the whole sequence from all ranks' shards, (batch, seqlen // world, ...) each."""
    early, late = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
    return torch.cat([*early, *reversed(late)], dim=1)


_PAIR = "rank, 2 * world - 1 - rank"
CHUNK_MISTAKES = (
    Mistake(
        (_PAIR, "rank, rank + world"),
        "Rank r has chunk r and chunk r + world: the late ranks still have the late chunks of each "
        "half. Count the second one from the end, 2 * world - 1 - rank.",
    ),
    Mistake(
        (_PAIR, "2 * rank, 2 * rank + 1"),
        "Those are neighbours, a contiguous shard: the work is as unequal as before.",
    ),
    Mistake(
        ("2 * world - 1 - rank", "2 * world - rank"),
        "The second chunk is one too far: rank 0 has the last one, number 2 * world - 1.",
    ),
    Mistake(
        ("2 * world - 1", "world - 1"),
        "The second chunk is counted from the end of the first half. There are 2 * world chunks.",
    ),
    Mistake(
        (_PAIR, "2 * world - 1 - rank, rank"),
        "The chunks are right, but in the other order: the early one comes first.",
    ),
    Mistake(
        (_PAIR, "world - 1 - rank, world + rank"),
        "The ranks are the other way round: rank 0 has the first and the last chunk.",
    ),
    Mistake((_PAIR, "rank + 1, 2 * world - rank"), "Chunks count from 0."),
)

_ALL = "torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])"
POSITION_MISTAKES = (
    Mistake(
        ("in chunks", "in (0, 1)"),
        "Those are places within the rank's own shard. RoPE needs places in the whole sequence.",
    ),
    Mistake(
        ("in chunks", "in (2 * rank, 2 * rank + 1)"),
        "Those are the positions of contiguous shards, from rank * seqlen // world on.",
    ),
    Mistake(
        (_ALL, "torch.arange(rank, seqlen, world)"),
        "Those are stripes, every world-th token. That balances the work too, but here a rank has "
        "two chunks of neighbouring tokens.",
    ),
    Mistake(
        ("in chunks", "in (rank, rank + world)"),
        "The second chunk is rank + world; it is 2 * world - 1 - rank.",
    ),
    Mistake(
        ("(2 * world)", "world"),
        "The chunks are twice as long as they should be: there are 2 * world of them.",
    ),
    Mistake(
        ("size) for", "size).flip([0] * (c >= world)) for"),
        "The second chunk's tokens are in falling order; within a chunk tokens keep their order.",
    ),
    Mistake(("in chunks", "in chunks[::-1]"), "The late chunk comes first; the early one should."),
    Mistake(("in chunks", "in chunks[:1]"), "The second chunk is missing."),
    Mistake((_ALL, _ALL + " + 1"), "Positions start at 0."),
    Mistake(
        (_ALL, "torch.tensor(chunks).repeat_interleave(size)"),
        "Those are the numbers of the chunks. Chunk c starts at position c * size.",
    ),
)

_JOINED = "torch.cat([*early, *reversed(late)], dim=1)"
INVERSE_MISTAKES = (
    Mistake(
        ("[*early, *reversed(late)]", "shards"),
        "The shards follow one another, but each of them has two chunks from different places.",
    ),
    Mistake(
        (
            "return " + _JOINED,
            "seqlen, world = len(shards) * shards[0].shape[1], len(shards)\n"
            "    order = torch.cat([zigzag_positions(seqlen, r, world) for r in range(world)])\n"
            "    return torch.cat(shards, dim=1)[:, order]",
        ),
        "You applied the order of the shards again. To undo it, index by order.argsort().",
    ),
    Mistake(
        ("*reversed(late)", "*late"),
        "The early halves are right. The late ones come in the order of the ranks, but rank 0 has "
        "the LAST chunk: they go from the last rank to the first.",
    ),
    Mistake(
        ("*reversed(late)", "torch.cat(late, 1).flip(1)"),
        "The late half is reversed token by token. Reverse the order of its chunks only.",
    ),
    Mistake(("*early, *reversed(late)", "*reversed(late), *early"), "The late half comes first."),
    Mistake(
        (_JOINED, "torch.stack(shards, 2).flatten(1, 2)"),
        "The tokens of the ranks take turns: that undoes stripes, not zigzag.",
    ),
    Mistake(
        ("*early, *reversed(late)", "*late, *reversed(early)"),
        "The whole sequence is in reversed order of its chunks.",
    ),
    Mistake(
        (_JOINED, "torch.cat(shards)"),
        "The shards were joined along the batch. The sequence is dimension 1.",
    ),
)


def check_zigzag_chunks(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-5 (a): an early chunk and a late one, so that all ranks have equal work."""
    for world in (4, 3, 8, 2, 5 + seed % 7, 1):
        ranks = range(world)
        given = [_pair(call(student, rank, world), rank, world) for rank in ranks]
        right = [zigzag_chunks(rank, world) for rank in ranks]
        if given == right:
            continue
        rank = next(r for r in ranks if given[r] != right[r])
        said = explain(
            given,
            zigzag_chunks,
            CHUNK_MISTAKES,
            lambda f, w=world: [f(rank, w) for rank in range(w)],
            operator.eq,
        ) or (
            f"rank {rank} has chunks {given[rank]}: it should have the chunk with its own number, "
            f"and the one as far from the end, {right[rank]}."
        )
        raise CheckFailed(f"(world {world}) {said}")
    passed("each rank holds an early chunk and a late one", seed)


def check_zigzag_positions(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-5 (b): the positions of a rank's tokens in the whole sequence."""
    for seqlen, world in ((24, 3), (64, 4), (6 * (2 + seed % 5), 1), (4096, 8), (12, 2)):
        # The last rank first: on rank 0 several mistakes look alike.
        for rank in reversed(range(world)):
            case = seqlen, rank, world
            where = f"(seqlen {seqlen}, rank {rank} of {world}) "
            given = _tensor(call(student, *case), where)
            right = zigzag_positions(*case)
            if given.dtype != torch.int64:
                raise CheckFailed(f"{where}positions are {given.dtype}, and should be int64.")
            if torch.equal(given, right):
                continue
            said = explain(given, zigzag_positions, POSITION_MISTAKES, lambda f, c=case: f(*c))
            if not said and given.shape != right.shape:
                said = f"There are {tuple(given.shape)} positions, but a rank has {len(right)}."
            if not said:
                first = int((given != right).nonzero()[0])
                said = f"Number {first} is {int(given[first])}, and should be {int(right[first])}."
            raise CheckFailed(where + said)
    passed("positions in the whole sequence", seed)


def check_unzigzag(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-5 (c): the shards of all ranks as one sequence, in order."""
    generator = torch.Generator().manual_seed(seed)
    # Of the first, batch and ranks are the same number; the last are labels.
    for world, shape in ((4, (4, 32, 3)), (3, (1, 24, 2, 4)), (1, (2, 6, 5)), (5, (2, 40))):
        whole = torch.randint(1000, shape, generator=generator)
        whole = whole if len(shape) == 2 else whole.float()
        shards = [shard_sequence(whole, rank, world, zigzag=True) for rank in range(world)]
        where = f"({world} rank{'s' * (world > 1)}, a sequence {shape}) "
        before = [shard.clone() for shard in shards]
        given = _tensor(call(student, Named(shards)), where)
        if not all(torch.equal(a, b) for a, b in zip(before, shards, strict=True)):
            raise CheckFailed(f"{where}the shards were changed in place: make a new tensor.")
        if given.dtype != whole.dtype:
            raise CheckFailed(f"{where}the result is {given.dtype}, the shards {whole.dtype}.")
        if torch.equal(given, whole):
            continue
        said = explain(given, unzigzag, INVERSE_MISTAKES, lambda f, s=shards: f(s))
        if not said and given.shape != whole.shape:
            said = f"The result has shape {tuple(given.shape)}."
        if not said:
            wrong = (given != whole).flatten(2).any(-1) if given.ndim > 2 else given != whole
            place = int(wrong.any(0).nonzero()[0])
            said = f"The first token in a wrong place is at {place}."
        raise CheckFailed(where + said)
    passed("the shards are put together in order", seed)


def _pair(given: Any, rank: int, world: int) -> tuple[int, ...]:
    where = f"(rank {rank} of {world}) "
    if isinstance(given, Tensor):
        given = given.tolist()
    if not isinstance(given, tuple | list | range) or len(given) != 2:
        raise CheckFailed(f"{where}return two numbers of chunks, a tuple of two, not {given!r}.")
    try:
        return tuple(operator.index(chunk) for chunk in given)  # whole numbers only, as for a list
    except TypeError:
        raise CheckFailed(
            f"{where}the number of a chunk is an int, but {given!r} was returned. If you divide, "
            "use //: / makes a float, even of whole numbers."
        ) from None


def _tensor(given: Any, where: str) -> Tensor:
    if not isinstance(given, Tensor):
        raise CheckFailed(f"{where}return one tensor, not {type(given).__name__}.")
    return given
