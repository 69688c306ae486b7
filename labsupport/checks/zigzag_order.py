"""Checks of exercise 3-5: which chunks a rank holds, where its tokens stand, and the way back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.merging import Named
from labsupport.checks.verdict import CheckFailed, call, passed
from labsupport.checks.zigzag_mistakes import (
    CHUNK_MISTAKES,
    INVERSE_MISTAKES,
    POSITION_MISTAKES,
)
from labsupport.distributed.ring.zigzag import positions_of, shard_sequence


def check_zigzag_chunks(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-5 (a): an early chunk and a late one, so that all ranks have equal work.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    worlds = (4, 3, 8, 2, 5 + seed % 7, 1)
    for world in worlds:
        given = [_pair(call(student, rank, world), rank, world) for rank in range(world)]
        right = [(rank, 2 * world - 1 - rank) for rank in range(world)]
        if given == right:
            continue
        for said, wrong in CHUNK_MISTAKES.values():
            if given == [wrong(rank, world) for rank in range(world)]:
                raise CheckFailed(f"(world {world}) {said}")
        rank = next(r for r in range(world) if given[r] != right[r])
        raise CheckFailed(
            f"(world {world}) rank {rank} has chunks {given[rank]}: it should hold the chunk with "
            f"its own number, and the one as far from the end, {right[rank]}."
        )
    passed("each rank holds an early chunk and a late one", seed)


def check_zigzag_positions(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-5 (b): where a rank's tokens stand in the whole sequence.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    for seqlen, world in ((24, 3), (64, 4), (6 * (2 + seed % 5), 1), (4096, 8), (12, 2)):
        # The last rank first: on rank 0 several mistakes look alike.
        for rank in reversed(range(world)):
            where = f"(seqlen {seqlen}, rank {rank} of {world}) "
            given = _tensor(call(student, seqlen, rank, world), where)
            right = positions_of(seqlen // world, rank, world, zigzag=True)
            if given.dtype != torch.int64:
                raise CheckFailed(f"{where}positions are {given.dtype}, and should be int64.")
            if torch.equal(given, right):
                continue
            said = _diagnosis(given, POSITION_MISTAKES, seqlen, rank, world)
            if said is None and given.shape != right.shape:
                said = f"There are {tuple(given.shape)} positions, but a rank holds {len(right)}."
            if said is None:
                first = int((given != right).nonzero()[0])
                said = f"Number {first} is {int(given[first])}, and should be {int(right[first])}."
            raise CheckFailed(where + said)
    passed("positions in the whole sequence", seed)


def check_unzigzag(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-5 (c): the shards of all ranks as one sequence, in order.

    Raises:
        CheckFailed: naming the likely mistake.
    """
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
        said = _diagnosis(given, INVERSE_MISTAKES, shards)
        if said is None and given.shape != whole.shape:
            said = f"The result has shape {tuple(given.shape)}."
        if said is None:
            wrong = (given != whole).flatten(2).any(-1) if given.ndim > 2 else given != whole
            place = int(wrong.any(0).nonzero()[0])
            said = f"The first token in a wrong place stands at {place}."
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
            "take //: / makes a float, even of whole numbers."
        ) from None


def _tensor(given: Any, where: str) -> Tensor:
    if not isinstance(given, Tensor):
        raise CheckFailed(f"{where}return one tensor, not {type(given).__name__}.")
    return given


def _diagnosis(given: Tensor, mistakes: dict[str, Any], *args: Any) -> str | None:
    for said, wrong in mistakes.values():
        expected = wrong(*args)
        if expected.shape == given.shape and torch.equal(expected, given):
            return said
    return None
