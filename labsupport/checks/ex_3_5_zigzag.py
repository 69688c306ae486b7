"""Exercise 3-5: the chunks of a rank, the positions of its tokens, and the way back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import (
    Mistake,
    Student,
    call,
    explain,
    judge,
    mistakes,
    passed,
    results,
    tensor,
)


### BEGIN SOLUTION
def zigzag_chunks(rank: int, world: int) -> tuple[int, int]:
    """Return the numbers of a rank's two chunks, of 2 * world."""
    return rank, 2 * world - 1 - rank


CHUNK_MISTAKES = mistakes("""
Rank r has chunk r and chunk r + world: the late ranks still have the late chunks of each half.
Count the second one from the end, 2 * world - 1 - rank.
    rank, 2 * world - 1 - rank -> rank, rank + world
Those are neighbours, a contiguous shard: the work is as unequal as before.
    rank, 2 * world - 1 - rank -> 2 * rank, 2 * rank + 1
The second chunk is one too far: rank 0 has the last one, number 2 * world - 1.
    2 * world - 1 - rank -> 2 * world - rank
The chunks are right, but in the other order: the early one comes first.
    rank, 2 * world - 1 - rank -> 2 * world - 1 - rank, rank
The number of a chunk is an int. If you divide, use //: / makes a float, even of whole numbers.
    2 * world - 1 - rank -> (4 * world - 2 - 2 * rank) / 2
""")


def zigzag_positions(seqlen: int, rank: int, world: int) -> Tensor:
    """Return the positions of a rank's tokens in the whole sequence."""
    size, chunks = seqlen // (2 * world), zigzag_chunks(rank, world)
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])


POSITION_MISTAKES = mistakes("""
Those are places within the rank's own shard. RoPE needs places in the whole sequence.
    in chunks -> in (0, 1)
Those are the positions of contiguous shards, from rank * seqlen // world on.
    in chunks -> in (2 * rank, 2 * rank + 1)
Those are stripes, every world-th token. That balances the work too, but here a rank has two chunks
of neighbouring tokens.
    return torch.cat -> return torch.arange(rank, seqlen, world) if world else torch.cat
The second chunk is rank + world; it is 2 * world - 1 - rank.
    in chunks -> in (rank, rank + world)
The late chunk comes first; the early one should.
    in chunks -> in chunks[::-1]
The tokens of the late chunk are reversed: in a chunk they stay in order.
    (c + 1) * size) -> (c + 1) * size).flip(() if c < world else 0)
""")


def unzigzag(shards: Sequence[Tensor]) -> Tensor:
    """Return the whole sequence from all ranks' shards, (batch, seqlen // world, ...) each."""
    early, late = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
    return torch.cat([*early, *reversed(late)], dim=1)


INVERSE_MISTAKES = mistakes(r"""
The shards follow one another, but each of them has two chunks from different places.
    [*early, *reversed(late)] -> shards
The late chunks are in order, but the tokens in each are reversed: reverse the list, not the tensor.
    *reversed(late)] -> torch.cat(late, dim=1).flip(1)]
You applied the order of the shards again. To undo it, index by order.argsort().
    [*early, *reversed(late)], dim=1) -> shards, dim=1)
    dim=1)\n -> dim=1)[:, _order(len(shards) * shards[0].shape[1], len(shards))]\n
The early halves are right. The late ones come in the order of the ranks, but rank 0 has the LAST
chunk: they go from the last rank to the first.
    *reversed(late) -> *late
The shards were joined along the batch. The sequence is dimension 1.
    [*early, *reversed(late)], dim=1 -> shards
The order is right, but the chunks were joined along the batch: pass dim=1, the sequence.
    [*early, *reversed(late)], dim=1 -> [*early, *reversed(late)]
""")
### END SOLUTION


def check_zigzag_chunks(student: Student, seed: int = 0) -> None:
    """Exercise 3-5 (a): an early chunk and a late one, so that all ranks have equal work."""
    for world in (4, 3, 8, 2, 5 + seed % 7, 1):
        cases = [(rank, world) for rank in range(world)]
        given = [_pair(call(student, *case)) for case in cases]
        run = lambda f, cases=cases: [f(*case) for case in cases]  # noqa: E731
        right = run(zigzag_chunks)
        known = results(zigzag_chunks, CHUNK_MISTAKES, run)
        wrong = [rank for rank in range(world) if repr(given[rank]) != repr(right[rank])]
        if not wrong:
            continue
        rank, say = wrong[0], explain(given, known, lambda a, b: repr(a) == repr(b))
        ours = f"They should be {right[rank]}: its own number, and the one as far from the end."
        raise CheckFailed(f"(world {world}) rank {rank} has chunks {given[rank]}. {say or ours}")
    passed("each rank holds an early chunk and a late one", seed)


def check_zigzag_positions(student: Student, seed: int = 0) -> None:
    """Exercise 3-5 (b): the positions of a rank's tokens in the whole sequence."""
    for seqlen, world in ((40, 5), (64, 4), (6 * (2 + seed % 5), 1), (4096, 8), (12, 2)):
        # The last rank first: on rank 0 several mistakes look alike.
        for rank in reversed(range(world)):
            where = f"(seqlen {seqlen}, rank {rank} of {world}) the tensor of positions"
            case = (seqlen, rank, world)
            right = zigzag_positions(*case)
            _judge(student, case, right, zigzag_positions, POSITION_MISTAKES, where)
    passed("positions in the whole sequence", seed)


def check_unzigzag(student: Student, seed: int = 0) -> None:
    """Exercise 3-5 (c): the shards of all ranks as one sequence, in order."""
    rng = torch.Generator().manual_seed(seed)
    # Of the first, batch and ranks are the same number; the last are labels.
    for world, shape in ((4, (4, 32, 3)), (3, (1, 24, 2, 4)), (1, (2, 6, 5)), (5, (2, 60))):
        whole = torch.randint(1000, shape, generator=rng)
        whole = whole if len(shape) == 2 else whole.float()
        shards = list(whole[:, _order(shape[1], world)].chunk(world, dim=1))
        where = f"({world} rank{'s' * (world > 1)}, a sequence {shape}) the result"
        _judge(student, (shards,), whole, unzigzag, INVERSE_MISTAKES, where)
    passed("the shards are put together in order", seed)


def _judge(
    student: Student,
    arguments: tuple[Any, ...],
    right: Tensor,
    solution: Callable[..., Tensor],
    known: Sequence[Mistake],
    name: str,
) -> None:
    """Judge a tensor that must be right in every entry."""
    given = tensor(call(student, *arguments), name)
    mistaken = results(solution, known, lambda f: f(*arguments))
    judge(name, given, right, allowed=0.0, mistakes=mistaken, dtype=right.dtype)


def _order(seqlen: int, world: int) -> Tensor:
    """Return the positions of all tokens, shard after shard."""
    ranks = range(world)
    return torch.cat([zigzag_positions(seqlen, r, world) for r in ranks])


def _pair(given: Any) -> tuple[Any, ...]:
    """Return a student's two numbers: whole numbers of any kind as int, others as they are."""
    if isinstance(given, Tensor):
        given = given.tolist()
    if not isinstance(given, tuple | list | range) or len(given) != 2:
        raise CheckFailed(f"return two numbers of chunks, a tuple of two, not {given!r}.")
    return tuple(operator.index(one) if hasattr(one, "__index__") else one for one in given)
