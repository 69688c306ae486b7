"""A rank's part of a micro-batch: tokens, labels, positions, cut from whole sequences.

Every rank is given the whole sequence, and cuts its shard from it. Before the cut:

    labels      are shifted, since that of a shard's last token lies on another rank. (A model that
                shifts labels itself would lose one for each chunk, and with zigzag shards give
                chunk r's last token the first one of chunk 2W - 1 - r.)
    positions   are counted, or each rank would count from 0.
    fillers     are added at the end, 2W - 1 at most, to a length that the ranks cannot share: no
                token sees a later one, and fillers have no labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.distributed.ring.zigzag import chunks_of, positions_of, shard_sequence
from labsupport.training.data import IGNORED
from labsupport.training.train import tensors

_KNOWN = ("tokens", "labels", "positions", "cu_seqlens")


@dataclass(frozen=True)
class Shard:
    """One rank's part of a micro-batch.

    Attributes:
        tokens, labels: (batch, seqlen / world) int64. labels: -100 does not count.
        positions: (1 or batch, seqlen / world) int64, in the whole sequence.
        all_labels: (batch, seqlen) int64, those of the whole sequence, filled up.
        farthest: the largest position of the whole sequence.
        fillers: number of this rank's tokens that only fill the sequence up.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    all_labels: Tensor
    farthest: int
    fillers: int = 0

    def to(self, device: torch.device | str) -> Shard:
        """Return the same on another device."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def shard_length(seqlen: int, world_size: int, *, zigzag: bool = True) -> int:
    """Return the number of tokens of each rank's shard, fillers included.

    >>> shard_length(1001, 2), shard_length(1001, 2, zigzag=False)
    (502, 501)
    """
    chunks = len(chunks_of(0, world_size, zigzag=zigzag))
    return -(-seqlen // (world_size * chunks)) * chunks


def shard_batch(batch: Any, rank: int, world_size: int, *, zigzag: bool = True) -> Shard:
    """Cut a rank's shard of a micro-batch of whole sequences, which all ranks have.

    Args:
        batch: a mapping or dataclass with `tokens` and `labels`, (batch, seqlen) int64, labels
            already shifted as for `Decoder`; perhaps `positions`, (seqlen,) or (batch, seqlen).
            With `cu_seqlens` of several documents only the first one may have labels (a `Packed`
            with one document, and padding).
        rank, world_size: whose shard, of how many.
        zigzag: chunks r and 2W - 1 - r, so that all ranks have equally much to do under a causal
            mask; False: one run of the sequence.

    Raises:
        TypeError: no such batch. ValueError: shapes that do not fit, entries that are not known,
            several documents with labels.
    """
    given = tensors(batch)
    unknown = [name for name in given if name not in _KNOWN]
    if unknown:
        raise ValueError(
            f"a sharded sequence has {', '.join(_KNOWN)}, and the batch also {', '.join(unknown)}"
        )
    tokens, labels = given["tokens"], given["labels"]
    if tokens.ndim != 2 or 0 in tokens.shape or labels.shape != tokens.shape:
        raise ValueError(
            f"tokens {tuple(tokens.shape)} and labels {tuple(labels.shape)} must both be "
            "(batch, seqlen), at least one of each"
        )
    rows, seqlen = tokens.shape
    ends = [end for end in given.get("cu_seqlens", torch.empty(0)).tolist() if end > 0]
    # What follows the first document sees it here. Without labels it leaves no trace.
    if ends and bool((labels[:, ends[0] :] != IGNORED).any()):
        raise ValueError(
            f"the sequence holds {len(ends)} documents with labels, and the ring has no mask that "
            "separates them. Give it one document in each sequence, or let documents see those "
            "before them: leave cu_seqlens and positions out of the batch (--join-documents)"
        )
    positions = given.get("positions", torch.arange(seqlen, device=tokens.device))
    positions = positions.unsqueeze(0) if positions.ndim == 1 else positions
    if tuple(positions.shape) not in ((1, seqlen), (rows, seqlen)):
        raise ValueError(
            f"positions {tuple(positions.shape)} must be ({seqlen},) or {(rows, seqlen)}, one for "
            "each token of the whole sequence"
        )
    farthest = int(positions.max())
    own_length = shard_length(seqlen, world_size, zigzag=zigzag)
    short = world_size * own_length - seqlen
    tokens, positions = F.pad(tokens, (0, short)), F.pad(positions, (0, short))
    labels = F.pad(labels, (0, short), value=IGNORED)
    own_tokens, own_labels, own_positions = (
        shard_sequence(x, rank, world_size, zigzag=zigzag) for x in (tokens, labels, positions)
    )
    places = positions_of(own_length, rank, world_size, zigzag=zigzag)
    fillers = rows * int((places >= seqlen).sum())
    return Shard(own_tokens, own_labels, own_positions, labels, farthest, fillers)
