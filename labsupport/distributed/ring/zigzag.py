"""Sharding of a sequence over ranks, and the positions that a rank holds.

Under a causal mask contiguous shards are unfair: the last rank's queries see all keys, the first
rank's only themselves. Zigzag cuts the sequence into 2W chunks, and gives rank r an early one and a
late one, r and 2W - 1 - r; so each rank computes two full blocks in each step with another's keys:

    W = 4        contiguous                 zigzag
    rank 0       0 1                        0             7
    rank 1           2 3                      1         6
    rank 2               4 5                    2     5
    rank 3                   6 7                  3 4

Source: Llama Team, "The Llama 3 Herd of Models" (2024), section 3.3.2. Besides attention, only
positions ask where a token stands: give `positions_of` to RoPE.
"""

from __future__ import annotations

from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.attention.inputs import AttentionInputError
from labsupport.distributed.process_group import all_gather_object


def chunks_of(rank: int, world_size: int, *, zigzag: bool = False) -> tuple[int, ...]:
    """Return the chunks that a rank holds, in their order.

    Raises:
        AttentionInputError: there is no such rank; `zigzag` is not a bool.
    """
    if not (
        isinstance(rank, Integral) and isinstance(world_size, Integral) and 0 <= rank < world_size
    ):
        raise AttentionInputError(f"there is no rank {rank} among {world_size}.")
    if not isinstance(zigzag, bool):
        raise AttentionInputError(f"zigzag must be True or False, but {zigzag!r} was given.")
    return (rank, 2 * world_size - 1 - rank) if zigzag else (rank,)


def positions_of(
    seqlen_local: int,
    rank: int,
    world_size: int,
    *,
    zigzag: bool = False,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the positions of a rank's tokens in the whole sequence: (seqlen_local,), int64.

    Raises:
        AttentionInputError: no such length (zigzag: an odd one) or rank.

    >>> positions_of(4, rank=0, world_size=2, zigzag=True)
    tensor([0, 1, 6, 7])
    """
    chunks = chunks_of(rank, world_size, zigzag=zigzag)
    check_length(seqlen_local, zigzag=zigzag)
    size = seqlen_local // len(chunks)
    return torch.cat([torch.arange(c * size, (c + 1) * size, device=device) for c in chunks])


def shard_sequence(
    x: Tensor, rank: int, world_size: int, *, zigzag: bool = False, dim: int = 1
) -> Tensor:
    """Return a rank's shard of a sequence: tokens, hidden states, labels. Differentiable.

    Args:
        x: any tensor whose dimension `dim` is the sequence.
        rank, world_size: whose shard, of how many.

    Raises:
        AttentionInputError: the length is not a multiple of `world_size` (zigzag: of twice it).

    >>> shard_sequence(torch.arange(8), 0, 2, zigzag=True, dim=0)
    tensor([0, 1, 6, 7])
    """
    parts = world_size * len(chunks_of(rank, world_size, zigzag=zigzag))
    if x.shape[dim] == 0 or x.shape[dim] % parts:
        short = -x.shape[dim] % parts or parts
        raise AttentionInputError(
            f"a sequence of length {x.shape[dim]} cannot be cut into {parts} equal chunks: pad it "
            f"by {short}, to {x.shape[dim] + short}."
        )
    length = x.shape[dim] // world_size
    return x.index_select(
        dim, positions_of(length, rank, world_size, zigzag=zigzag, device=x.device)
    )


def unshard_sequence(shards: list[Tensor], *, zigzag: bool = False, dim: int = 1) -> Tensor:
    """Return the whole sequence from the shards of all ranks, in their order. Differentiable.

    Raises:
        AttentionInputError: shards of different shapes or dtypes, or none.

    >>> unshard_sequence([torch.tensor([0, 3]), torch.tensor([1, 2])], zigzag=True, dim=0)
    tensor([0, 1, 2, 3])
    """
    kinds = {(tuple(shard.shape), shard.dtype) for shard in shards}
    if len(kinds) != 1:
        listed = ", ".join(f"{tuple(shard.shape)} {shard.dtype}" for shard in shards)
        raise AttentionInputError(
            f"the shards of all ranks have one shape and dtype, but these were given: "
            f"{listed or 'none'}."
        )
    world_size = len(shards)
    positions = torch.cat(
        [
            positions_of(shard.shape[dim], rank, world_size, zigzag=zigzag, device=shard.device)
            for rank, shard in enumerate(shards)
        ]
    )
    return torch.cat(shards, dim).index_select(dim, positions.argsort())


def gather_sequence(
    x: Tensor, *, zigzag: bool = False, dim: int = 1, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the whole sequence on every rank, from this rank's shard. Not differentiable.

    Raises:
        AttentionInputError: on all ranks, if their shards have different shapes or dtypes.

    >>> info = setup_ddp()
    >>> gather_sequence(torch.arange(4), dim=0)
    tensor([0, 1, 2, 3])
    >>> cleanup_ddp()
    """
    # Of tensors that do not fit, all_gather makes a mixture, or ends the process.
    kinds = all_gather_object((x.shape, x.dtype), group)
    shards = [torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in kinds]
    if len(set(kinds)) == 1:
        dist.all_gather(shards, x.detach().contiguous(), group=group)
    return unshard_sequence(shards, zigzag=zigzag, dim=dim)


def check_length(seqlen_local: int, *, zigzag: bool) -> None:
    """Raise AttentionInputError for no length, and where a zigzag shard cannot be cut in two."""
    if isinstance(seqlen_local, bool) or not isinstance(seqlen_local, Integral) or seqlen_local < 1:
        raise AttentionInputError(f"a shard has at least 1 token, but {seqlen_local!r} was given.")
    if zigzag and seqlen_local % 2:
        raise AttentionInputError(
            f"a zigzag shard is two chunks of one length, but {seqlen_local} tokens were given: "
            "pad the sequence to a multiple of twice the number of ranks."
        )
