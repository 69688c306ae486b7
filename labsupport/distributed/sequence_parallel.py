"""A sequence that no single device holds: its tokens are sharded over the ranks, in every layer.

Attention needs the other ranks: K and V go around the ring, dK and dV return to their
own rank. All other layers compute each token separately, so activations are 1/W of the sequence's;
weights and states are whole.
Source: Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective"
(arXiv 2105.13120), section 3; with a ring of FlashAttention's blocks, arXiv 2310.01889.

SHARDS. Every rank is given the whole sequence, and cuts its shard from it. Before the cut labels
are shifted and positions counted (theory chapter 11), and fillers without labels are added at the
end, 2W - 1 at most, to a length that the ranks can share: no token sees a later one.

THE LOSS of a step is the mean over all N labels. Each rank returns its own term of it, and runs its
backward pass; where the terms depend on other ranks' tokens (through K and V) the ring's brings dK
and dV home. So the weights' gradients are summed over ranks, once a step. A ring needs all ranks:
one without labels computes too, with a term of 0.

TRAINING. `labsupport.training.train.Trainer` sees each shard as this rank's micro-batch, with the
labels of the shard. What W ranks saved, another number goes on with, and DDP or FSDP too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from labsupport.distributed.data_parallel.costs import state_bytes
from labsupport.distributed.data_parallel.ddp import ParallelRun
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.distributed.ring.attention import RingOptions, ring_attention
from labsupport.distributed.ring.transport import Ring
from labsupport.distributed.ring.zigzag import chunks_of, positions_of, shard_sequence
from labsupport.training.config import TrainConfig
from labsupport.training.data import IGNORED, tensors
from labsupport.training.decoder import Decoder, attend
from labsupport.training.train import Batches, Trainer, check_weights

_KNOWN = ("tokens", "labels", "positions", "cu_seqlens")


@dataclass(frozen=True)
class Shard:
    """One rank's part of a micro-batch.

    Attributes:
        tokens, labels: (batch, seqlen / world) int64. labels: -100 does not count.
        positions: (seqlen / world,) or (batch, seqlen / world) int64, in the whole sequence.
        total: number of labels of the whole sequence that count.
        farthest: the largest position of the whole sequence.
        fillers: number of this rank's tokens that only fill the sequence up.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    total: int
    farthest: int
    fillers: int = 0

    def to(self, device: torch.device | str) -> Shard:
        """Return the same on another device."""
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def shard_length(seqlen: int, world_size: int, *, zigzag: bool = True) -> int:
    """Return the number of tokens of each rank's shard, fillers included.

    Raises:
        ValueError: no tokens.

    >>> shard_length(1001, 2), shard_length(1001, 2, zigzag=False)
    (502, 501)
    """
    if seqlen < 1:
        raise ValueError(f"a sequence has at least 1 token, but {seqlen} were given")
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
    for name, x in given.items():
        if x.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be integers, but {x.dtype} was given: {name}.long()")
    tokens, labels = given["tokens"], given["labels"]
    if tokens.ndim != 2 or 0 in tokens.shape or labels.shape != tokens.shape:
        raise ValueError(
            f"tokens {tuple(tokens.shape)} and labels {tuple(labels.shape)} must both be "
            "(batch, seqlen), at least one of each"
        )
    rows, seqlen = tokens.shape
    offsets = given.get("cu_seqlens", torch.tensor([0])).tolist()
    if offsets != sorted(offsets) or offsets[0] != 0 or offsets[-1] > seqlen:
        raise ValueError(f"cu_seqlens must rise from 0 to at most {seqlen}, not {offsets}")
    ends = [end for end in offsets if end > 0]
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
    if int(positions.min()) < 0:
        raise ValueError(f"positions begin at 0, but {int(positions.min())} was given")
    farthest = int(positions.max())
    own_length = shard_length(seqlen, world_size, zigzag=zigzag)
    short = world_size * own_length - seqlen
    tokens, positions = F.pad(tokens, (0, short)), F.pad(positions, (0, short))
    labels = F.pad(labels, (0, short), value=IGNORED)
    total = int((labels != IGNORED).sum())
    own_tokens, own_labels, own_positions = (
        shard_sequence(x, rank, world_size, zigzag=zigzag) for x in (tokens, labels, positions)
    )
    places = positions_of(own_length, rank, world_size, zigzag=zigzag)
    fillers = rows * int((places >= seqlen).sum())
    if len(own_positions) == 1:
        own_positions = own_positions[0]
    return Shard(own_tokens, own_labels, own_positions, total, farthest, fillers)


# --- the model ------------------------------------------------------------------------------------


def shard_model(
    model: Decoder,
    *,
    zigzag: bool = True,
    kernel: str = "auto",
    group: dist.ProcessGroup | None = None,
) -> SequenceParallel:
    """Compute a model with its sequence sharded over a group's ranks; every rank calls this.

    Args:
        model: a `Decoder` on this rank's device, with the same weights on all ranks. Its attention
            goes around the ring until `restore()`; its weights stay whole, in place, and under
            their names.
        zigzag: the layout with balanced work; False: contiguous shards.
        kernel: of the ring, "auto" or a name in `ring.kernels.KERNELS`.
        group: the ranks that share the sequence; None: all.

    Raises:
        RuntimeError: no process group. ValueError: another kind of model, or one that is sharded.

    >>> from labsupport.training import Decoder, DecoderConfig, batches
    >>> info = setup_ddp()
    >>> (batch,) = batches([list(range(200))], 64, end_token=256)(0)
    >>> with shard_model(Decoder(DecoderConfig.preset("tiny")).to(info.device)) as sharded:
    ...     part = sharded(sharded.shard(batch))  # of this rank; the sum over ranks is the loss
    ...     part.backward()
    ...     sharded.sum_gradients()
    >>> cleanup_ddp()
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"a {type(model).__name__} was given, but only a Decoder can be computed with a "
            "sharded sequence: `labsupport.training.from_transformers` makes one"
        )
    chunks_of(0, 1, zigzag=zigzag)
    layout = "zigzag" if zigzag else "contiguous"
    # Ranks were given the same batch; to check that in each layer would stop a GPU each time.
    ring = RingOptions(layout, kernel, causal=True, group=group, check_ranks=False)
    return SequenceParallel(model, ring)


class SequenceParallel:
    """A model whose sequence is sharded; `shard_model` makes it.

    model, ring: what was given, the options of its attention; rank, world: in the group.
    """

    def __init__(self, model: Decoder, ring: RingOptions) -> None:
        around = Ring(ring.group)
        self.rank, self.world = around.rank, around.size
        self.model, self.ring = model, ring
        self._attentions: list[Any] = [block.attention for block in model.blocks]
        if any(attention.attend is not attend for attention in self._attentions):
            raise ValueError("the model's attention goes around a ring already: restore() it first")
        if model.savings.head_chunk is not None:
            raise ValueError("around a ring attention takes all heads: head_chunk=None")
        self.attend_around()

    def attend_around(self) -> None:
        """Let the model's attention go around the ring."""
        for attention in self._attentions:
            attention.attend = partial(_around, self.ring)

    def restore(self) -> None:
        """Give the model its own attention back."""
        for attention in self._attentions:
            attention.attend = attend

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def shard(self, batch: Any) -> Shard:
        """Return this rank's part of a micro-batch of whole sequences, on the batch's device.

        Raises: as `shard_batch`, and ValueError for a position that the model has not learned; on
            all ranks alike.
        """
        shard = shard_batch(batch, self.rank, self.world, zigzag=self.ring.layout == "zigzag")
        config = self.model.config
        if config.positions == "learned" and shard.farthest >= config.max_positions:
            raise ValueError(
                f"position {shard.farthest:,} was asked for, but this model has learned "
                f"{config.max_positions:,}. Shorten the sequence, or use a model with rotary "
                "positions"
            )
        return shard

    def __call__(self, shard: Shard, total: int | None = None) -> Tensor:
        """Return this rank's part of the mean loss, a scalar; the sum over the ranks is the loss.

        Args:
            shard: of this rank, on the model's device; all ranks call with theirs.
            total: N, the labels that the mean is over; None: those of this micro-batch.

        Raises:
            ValueError: `total` is less than the micro-batch's own labels.
            AttentionInputError, BackendUnavailableError: the kernel cannot compute it.
        """
        total = shard.total if total is None else total
        if total < shard.total:
            raise ValueError(f"total={total}, but this micro-batch alone has {shard.total} labels")
        # Of no labels the mean is 0, with gradients of 0.
        mean = self.model(shard.tokens, shard.labels, positions=shard.positions)
        return mean * ((shard.labels != IGNORED).sum().to(mean.dtype) / max(total, 1))

    def sum_gradients(self) -> None:
        """Add up the parameters' gradients over the ranks, in place; all ranks call it."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=self.ring.group)


def _around(
    ring: RingOptions, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, backend: str
) -> Tensor:
    """`labsupport.training.decoder.attend`; `backend` and `cu_seqlens` are for one device."""
    return ring_attention(q, k, v, **vars(ring)).flatten(2)


# --- the training loop ----------------------------------------------------------------------------


def train_with_ring(
    model: Decoder,
    batches: Batches,
    settings: TrainConfig,
    *,
    folder: Any = None,
    run_config: Any = None,
    zigzag: bool = True,
    kernel: str = "auto",
    validation: Iterable[Any] = (),
    sample: Callable[[nn.Module], str] | None = None,
    **options: Any,
) -> ParallelRun:
    """Train with AdamW, each sequence sharded over the group that `setup_ddp` made.

    Args:
        model: a `Decoder` (with its savings); weights become rank 0's, and are float32 (or
            float64). It is moved to this rank's device, and has its own attention back when this
            returns.
        batches: step -> WHOLE micro-batches, the same on each rank, at most
            `settings.gradient_accumulation_steps`; see `shard_batch` for what is in them.
        settings, folder, run_config: as for `train_with_ddp`.
        zigzag, kernel: as for `shard_model`.
        validation: whole micro-batches, too.
        sample: writes on each rank alone, without the ring.
        options: as for `Trainer.run`.

    Raises:
        RuntimeError: no process group.
        ValueError: what `shard_model` and `shard_batch` refuse; ranks that were given different
            micro-batches. Others as `Trainer` and `Trainer.run`.

    >>> from labsupport.training import Decoder, DecoderConfig, TrainConfig, batches
    >>> info, model = setup_ddp(), Decoder(DecoderConfig.preset("tiny"))
    >>> stream = batches([list(range(200))], 64, end_token=256)  # whole: not share_of(stream)
    >>> run = train_with_ring(model, stream, TrainConfig(steps=2), progress=False)
    >>> len(run.history)
    2
    >>> cleanup_ddp()
    """
    info = RankInfo.current()
    check_weights(model, settings.policy)
    with shard_model(model.to(info.device), zigzag=zigzag, kernel=kernel) as sharded:
        trainer = Trainer(
            model, settings, folder=folder, run_config=run_config, group=dist.group.WORLD,
            device=info.device, one_sequence=True,
        )  # fmt: skip

        def cut(step: int) -> list[Shard]:
            whole = list(batches(step))
            _check_same_batches(whole, step)
            return [sharded.shard(batch) for batch in whole]

        def write(model: nn.Module) -> str:
            assert sample is not None
            sharded.restore()
            text = sample(model)
            sharded.attend_around()
            return text

        history = trainer.run(
            cut,
            validation=[sharded.shard(batch) for batch in validation],
            sample=None if sample is None else write,
            **options,
        )
        return ParallelRun(history, state_bytes(model, trainer.optimizer.optimizer))


def _check_same_batches(whole: Iterable[Any], step: int) -> None:
    """Raise ValueError, on all ranks, unless each was given the same micro-batches."""
    checksum = 0
    for batch in whole:
        for name, tensor in sorted(tensors(batch).items()):
            data = tensor.detach().cpu().contiguous().numpy().tobytes()
            checksum = zlib.crc32(data, zlib.crc32(name.encode(), checksum))
    checksums = all_gather_object(checksum)
    if others := [rank for rank, own in enumerate(checksums) if own != checksums[0]]:
        raise ValueError(
            f"step {step}: rank {', '.join(map(str, others))} was given other micro-batches than "
            "rank 0. With a sharded sequence each rank gets all of them, whole: no share_of, and "
            "the same seed"
        )
