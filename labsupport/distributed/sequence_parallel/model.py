"""A model with a sharded sequence: each rank's part of the loss, and the sum of the gradients.

The loss of a step is the mean over all N labels. Rank r has n_r of them, with the mean m_r, so

    loss = Σ_r  m_r · n_r / N            each rank returns its own term

Each rank runs the backward pass of its term. Where the terms depend on other ranks' tokens, that is
through K and V only, and the ring's backward brings dK and dV home. So a rank ends up with the
gradient of the WHOLE loss by way of its own tokens. The weights are the same on all ranks, and
worked on all tokens: their gradients are summed over the ranks, once a step. (Summed, not averaged
as in data parallelism: the terms have been divided by N already.)

All ranks compute in the same order, layers that are computed again in the backward pass too: a ring
needs all of them. So a rank without labels computes all the same, with a term of 0.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.distributed.ring.transport import Ring
from labsupport.distributed.sequence_parallel.attention import RingOptions, install
from labsupport.distributed.sequence_parallel.sharding import Shard, shard_batch
from labsupport.precision.losses import compute_loss
from labsupport.training.data import IGNORED
from labsupport.training.decoder import Decoder
from labsupport.training.memory import chunked_cross_entropy


def shard_model(
    model: nn.Module,
    *,
    zigzag: bool = True,
    kernel: str = "auto",
    loss_chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> SequenceParallel:
    """Compute a model with its sequence sharded over a group's ranks; every rank calls this.

    Args:
        model: a `Decoder`, or Transformers' GPT2LMHeadModel or LlamaForCausalLM, on this rank's
            device, with the same weights on all ranks. Its attention goes around the ring until
            `restore()`; its weights stay whole, in place, and under their names.
        zigzag: the layout with balanced work; False: contiguous shards.
        kernel: of the ring, "auto" or a name: `ring.available_ring_kernels`.
        loss_chunk: tokens at a time through the classifier, for a Transformers model (a Decoder has
            it in its savings).
        group: the ranks that share the sequence; None: all.

    Raises:
        RuntimeError: no process group. ValueError: another kind of model, or one that is sharded.

    >>> with shard_model(Decoder(config).to(place.device)) as sharded:
    ...     part = sharded(sharded.shard(batch))  # of this rank; the sum over ranks is the loss
    ...     part.backward()
    ...     sharded.sum_gradients()
    """
    return SequenceParallel(model, RingOptions(zigzag, kernel, group), loss_chunk)


class SequenceParallel:
    """What `shard_model` returns.

    Attributes:
        model: the model that was given.
        ring: the layout, the kernel, the group.
        rank, world: of this process in the group.
    """

    def __init__(self, model: nn.Module, ring: RingOptions, loss_chunk: int | None = None) -> None:
        if loss_chunk is not None and isinstance(model, Decoder):
            raise ValueError("a Decoder has its loss_chunk in its savings: Savings(loss_chunk=...)")
        around = Ring(ring.group)
        self.rank, self.world = around.rank, around.size
        self.model, self.ring, self.loss_chunk = model, ring, loss_chunk
        self._restore = install(model, ring)

    def shard(self, batch: Any) -> Shard:
        """This rank's part of a micro-batch of whole sequences, on the CPU or wherever that is.

        Raises: as `shard_batch`, and ValueError for a position that the model has not learned; on
            all ranks alike.
        """
        shard = shard_batch(batch, self.rank, self.world, zigzag=self.ring.zigzag)
        learned = learned_positions(self.model)
        if learned is not None and shard.farthest >= learned:
            raise ValueError(
                f"position {shard.farthest:,} was asked for, but this model has learned "
                f"{learned:,}. Shorten the sequence, or take a model with rotary positions"
            )
        return shard

    def __call__(self, shard: Shard, total: int | None = None) -> Tensor:
        """This rank's part of the mean loss, a scalar; the sum over the ranks is the loss.

        Args:
            shard: of this rank, on the model's device; all ranks call with theirs.
            total: N, the labels that the mean is over; None: those of this micro-batch.

        Raises:
            ValueError: dropout that is on. AttentionInputError, BackendUnavailableError: the kernel
                cannot compute it.
        """
        if self.model.training:
            check_no_dropout(self.model)
        if total is None:
            total = int((shard.all_labels != IGNORED).sum())
        own = (shard.labels != IGNORED).sum()
        mean = self._mean_loss(shard)  # of no labels it is 0, with gradients of 0
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
        return mean * (own.to(mean.dtype) / max(total, 1))

    def sum_gradients(self) -> None:
        """Add up the parameters' gradients over the ranks, in place; all ranks call it."""
        pending = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                pending.append(
                    dist.all_reduce(parameter.grad, group=self.ring.group, async_op=True)
                )
        for work in pending:
            if work is not None:
                work.wait()

    def restore(self) -> None:
        """Give the model back the attention that it had."""
        self._restore()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def _mean_loss(self, shard: Shard) -> Tensor:
        if isinstance(self.model, Decoder):
            return self.model(shard.tokens, shard.labels, positions=_for_decoder(shard))
        model: Any = self.model
        # Not model(..., labels=...): that would shift the labels.
        hidden = model.base_model(
            input_ids=shard.tokens,
            position_ids=shard.positions.expand_as(shard.tokens),
            use_cache=False,
        ).last_hidden_state
        if self.loss_chunk is not None:
            return chunked_cross_entropy(
                hidden, model.lm_head.weight, shard.labels, chunk=self.loss_chunk
            )
        logits = model.lm_head(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return compute_loss(logits, shard.labels, dtype=wide)


def _for_decoder(shard: Shard) -> Tensor:
    return shard.positions[0] if len(shard.positions) == 1 else shard.positions


def learned_positions(model: nn.Module) -> int | None:
    """How many positions a model has learned; None if its positions have no end."""
    config: Any = model.config
    if isinstance(model, Decoder):
        return config.max_positions if config.positions == "learned" else None
    return config.n_positions if config.model_type == "gpt2" else None


def check_no_dropout(model: nn.Module) -> None:
    """Raise ValueError if a layer of the model drops out."""
    for name, module in model.named_modules():
        rate = getattr(module, "p" if isinstance(module, nn.Dropout) else "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{name} drops out with {rate}: each rank would draw other random numbers than one "
                "device does, and the ring has no dropout. Build or load the model without "
                "(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0; attention_dropout=0.0), or call "
                "model.eval()"
            )
