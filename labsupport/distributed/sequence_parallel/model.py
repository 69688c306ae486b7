"""A decoder with a sharded sequence: each rank's part of the loss, and the sum of the gradients.

The loss of a step is the mean over all N labels. Rank r has n_r of them, with the mean m_r, so

    loss = Σ_r  m_r · n_r / N            each rank returns its own term

and runs the backward pass of its term. Where the terms depend on other ranks' tokens, that is
through K and V only, the ring's backward brings dK and dV home. So the ranks' gradients of the
weights are summed, once a step (not averaged as in data parallelism: the terms are divided by N).
A ring needs all ranks: one without labels computes too, with a term of 0.

Only attention looks at other tokens. So a `Decoder` computes a shard when its attention goes around
the ring and its positions are those in the whole sequence. The names of its parameters stay the
same, so that checkpoints fit both ways.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labsupport.distributed.ring.attention import RingOptions, ring_attention
from labsupport.distributed.ring.transport import Ring
from labsupport.distributed.sequence_parallel.sharding import Shard, shard_batch
from labsupport.training.data import IGNORED
from labsupport.training.decoder import Angles, Attention, Decoder


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

    >>> with shard_model(Decoder(config).to(info.device)) as sharded:
    ...     part = sharded(sharded.shard(batch))  # of this rank; the sum over ranks is the loss
    ...     part.backward()
    ...     sharded.sum_gradients()
    """
    if not isinstance(model, Decoder):
        raise ValueError(
            f"a {type(model).__name__} was given, but only a Decoder can be computed with a "
            "sharded sequence: `labsupport.training.from_transformers` makes one"
        )
    layout = "zigzag" if zigzag else "contiguous"
    # Ranks were given the same batch; to check that in each layer would stop a GPU each time.
    ring = RingOptions(layout, kernel, causal=True, group=group, check_ranks=False)
    return SequenceParallel(model, ring)


class SequenceParallel:
    """A model whose sequence is sharded; `shard_model` makes it.

    Attributes:
        model: the model that was given.
        ring: the options of its attention.
        rank, world: of this process in the group.
    """

    def __init__(self, model: Decoder, ring: RingOptions) -> None:
        around = Ring(ring.group)
        self.rank, self.world = around.rank, around.size
        self.model, self.ring = model, ring
        self._attentions: list[Any] = [block.attention for block in model.blocks]
        if any("forward" in vars(attention) for attention in self._attentions):
            raise ValueError("the model's attention goes around a ring already: restore() it first")
        for attention in self._attentions:
            attention.forward = partial(_around, attention, ring)

    def restore(self) -> None:
        """Give the model its own attention back."""
        for attention in self._attentions:
            del attention.forward

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
                f"{config.max_positions:,}. Shorten the sequence, or take a model with rotary "
                "positions"
            )
        return shard

    def __call__(self, shard: Shard, total: int | None = None) -> Tensor:
        """Return this rank's part of the mean loss, a scalar; the sum over the ranks is the loss.

        Args:
            shard: of this rank, on the model's device; all ranks call with theirs.
            total: N, the labels that the mean is over; None: those of this micro-batch.

        Raises:
            AttentionInputError, BackendUnavailableError: the kernel cannot compute it.
        """
        if total is None:
            total = int((shard.all_labels != IGNORED).sum())
        positions = shard.positions[0] if len(shard.positions) == 1 else shard.positions
        # Of no labels the mean is 0, with gradients of 0.
        mean = self.model(shard.tokens, shard.labels, positions=positions)
        return mean * ((shard.labels != IGNORED).sum().to(mean.dtype) / max(total, 1))

    def sum_gradients(self) -> None:
        """Add up the parameters' gradients over the ranks, in place; all ranks call it."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=self.ring.group)


def _around(
    own: Attention,
    ring: RingOptions,
    x: Tensor,
    angles: Angles,
    cu_seqlens: Tensor | None,
    backend: str,
) -> Tensor:
    """`Attention.forward` around the ring; `backend` and `cu_seqlens` are one device's business."""
    q, k, v = own.project(x, angles)
    return own.out(ring_attention(q, k, v, **vars(ring)).reshape(x.shape))
