"""A model with a sharded sequence: each rank's part of the loss, and the sum of the gradients.

The loss of a step is the mean over all N labels. Rank r has n_r of them, with the mean m_r, so

    loss = Σ_r  m_r · n_r / N            each rank returns its own term

and runs the backward pass of its term. Where the terms depend on other ranks' tokens, that is
through K and V only, the ring's backward brings dK and dV home. So the ranks' gradients of the
weights are summed, once a step (not averaged as in data parallelism: the terms are divided by N).
A ring needs all ranks: one without labels computes too, with a term of 0.

Only attention looks at other tokens. So a model computes a shard when its attention goes around the
ring and its positions are those in the whole sequence: each `Decoder` block's `attention` becomes a
`RingAttention` with the same layers; Transformers' GPT-2 and Llama get the attention function
"lab_ring". The names of the parameters stay the same, so that checkpoints fit both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.distributed.ring.attention import RingOptions, ring_attention
from labsupport.distributed.ring.transport import Ring
from labsupport.distributed.sequence_parallel.sharding import Shard, shard_batch
from labsupport.precision.losses import compute_loss
from labsupport.training.data import IGNORED
from labsupport.training.decoder import Attention, Decoder, Turn
from labsupport.training.memory import chunked_cross_entropy

FAMILIES = ("gpt2", "llama")  # of Transformers: causal attention and nothing else in each layer
_NAME = "lab_ring"


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
        kernel: of the ring, "auto" or a name in `ring.kernels.KERNELS`.
        loss_chunk: tokens at a time through the classifier, for a Transformers model (a Decoder has
            it in its savings).
        group: the ranks that share the sequence; None: all.

    Raises:
        RuntimeError: no process group. ValueError: another kind of model, or one that is sharded.

    >>> with shard_model(Decoder(config).to(info.device)) as sharded:
    ...     part = sharded(sharded.shard(batch))  # of this rank; the sum over ranks is the loss
    ...     part.backward()
    ...     sharded.sum_gradients()
    """
    layout = "zigzag" if zigzag else "contiguous"
    # Ranks were given the same batch; to check that in each layer would stop a GPU each time.
    ring = RingOptions(layout, kernel, causal=True, group=group, check_ranks=False)
    return SequenceParallel(model, ring, loss_chunk)


class SequenceParallel:
    """A model whose sequence is sharded; `shard_model` makes it.

    Attributes:
        model: the model that was given.
        ring: the options of its attention.
        rank, world: of this process in the group.
    """

    def __init__(self, model: nn.Module, ring: RingOptions, loss_chunk: int | None = None) -> None:
        if loss_chunk is not None and isinstance(model, Decoder):
            raise ValueError(
                "a Decoder has its loss_chunk in its savings: MemoryOptions(loss_chunk=...)"
            )
        around = Ring(ring.group)
        self.rank, self.world = around.rank, around.size
        self.model, self.ring, self.loss_chunk = model, ring, loss_chunk
        self.restore = _install(model, ring)

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
        config: Any = self.model.config
        if isinstance(self.model, Decoder):
            learned = config.max_positions if config.positions == "learned" else None
        else:
            learned = config.n_positions if config.model_type == "gpt2" else None
        if learned is not None and shard.farthest >= learned:
            raise ValueError(
                f"position {shard.farthest:,} was asked for, but this model has learned "
                f"{learned:,}. Shorten the sequence, or take a model with rotary positions"
            )
        return shard

    def __call__(self, shard: Shard, total: int | None = None) -> Tensor:
        """Return this rank's part of the mean loss, a scalar; the sum over the ranks is the loss.

        Args:
            shard: of this rank, on the model's device; all ranks call with theirs.
            total: N, the labels that the mean is over; None: those of this micro-batch.

        Raises:
            ValueError: dropout that is on. AttentionInputError, BackendUnavailableError: the kernel
                cannot compute it.
        """
        if self.model.training:
            _check_no_dropout(self.model)
        if total is None:
            total = int((shard.all_labels != IGNORED).sum())
        own = (shard.labels != IGNORED).sum()
        mean = self._mean_loss(shard)  # of no labels it is 0, with gradients of 0
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
        return mean * (own.to(mean.dtype) / max(total, 1))

    def sum_gradients(self) -> None:
        """Add up the parameters' gradients over the ranks, in place; all ranks call it."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                dist.all_reduce(parameter.grad, group=self.ring.group)

    def _mean_loss(self, shard: Shard) -> Tensor:
        model: Any = self.model
        if isinstance(model, Decoder):
            positions = shard.positions[0] if len(shard.positions) == 1 else shard.positions
            return model(shard.tokens, shard.labels, positions=positions)
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


def _check_no_dropout(model: nn.Module) -> None:
    """Raise ValueError if a layer of the model drops out."""
    for name, module in model.named_modules():
        rate = getattr(module, "p" if isinstance(module, nn.Dropout) else "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{name} drops out with {rate}, and the ring has no dropout. Load the model "
                "without (attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0; attention_dropout=0.0), "
                "or call model.eval()"
            )


# --- attention around the ring --------------------------------------------------------------------


class RingAttention(nn.Module):
    """A block's attention with the same projections, around the ring."""

    def __init__(self, attention: Attention, ring: RingOptions) -> None:
        super().__init__()
        self.config, self.ring = attention.config, ring
        self.query, self.key = attention.query, attention.key
        self.value, self.out = attention.value, attention.out

    def forward(self, x: Tensor, turn: Turn, cu_seqlens: Tensor | None, backend: str) -> Tensor:
        """(batch, seqlen_local, width) to the same; `backend` is one device's business."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim))
            for project in (self.query, self.key, self.value)
        )
        if turn is not None:
            q, k = turn(q), turn(k)
        return self.out(ring_attention(q, k, v, **vars(self.ring)).reshape(x.shape))


def _install(model: Any, ring: RingOptions) -> Callable[[], None]:
    """Let a model's attention go around the ring until the returned function is called."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    twice = ValueError("the model's attention goes around a ring already: restore() it first")
    if isinstance(model, Decoder):
        blocks: list[Any] = list(model.blocks)
        before = [block.attention for block in blocks]
        if any(isinstance(attention, RingAttention) for attention in before):
            raise twice
        for block in blocks:
            block.attention = RingAttention(block.attention, ring)

        def restore() -> None:
            for block, attention in zip(blocks, before, strict=True):
                block.attention = attention

        return restore
    if family not in FAMILIES or not hasattr(model, "lm_head"):
        raise ValueError(
            f"a {type(model).__name__} was given, but only a Decoder, a GPT2LMHeadModel or a "
            "LlamaForCausalLM can be computed with a sharded sequence"
        )
    implementation = model.config._attn_implementation
    if implementation == _NAME:
        raise twice
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(
            f"this model's rotary positions ({rope['rope_type']}) depend on the sequence's length"
        )
    _register()
    model.set_attn_implementation(_NAME)
    layers: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    ]
    for layer in layers:
        layer.ring = ring

    def restore_transformers() -> None:
        model.set_attn_implementation(implementation)
        for layer in layers:
            del layer.ring

    return restore_transformers


def _register() -> None:
    """Make the ring known to Transformers, once; imported here, since that takes seconds."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    from labsupport.models.integration.functions import layer_function
    from labsupport.models.integration.masks import MaskDescription, describe_mask

    def compute(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskDescription,
        scaling: float | None,
        _: dict[str, Any],
    ) -> tuple[Tensor, None]:
        q, k, v = (_in_one_dtype(tensor).transpose(1, 2) for tensor in (query, key, value))
        ring = replace(module.ring, softmax_scale=scaling)
        return ring_attention(q, k, v, **vars(ring)), None

    def causal_mask(*sizes: Any, **options: Any) -> MaskDescription:
        # Where positions jump, as between a zigzag shard's chunks, Transformers believes that
        # another sequence begins, and would mask it. The two families know causal masks only.
        options["mask_function"] = masking_utils.causal_mask_function
        return describe_mask(*sizes, **options)

    AttentionInterface.register(_NAME, layer_function(compute))
    AttentionMaskInterface.register(_NAME, causal_mask)


def _in_one_dtype(tensor: Tensor) -> Tensor:
    """In autocast's dtype where it is on: rotary positions leave q and k in float32 beside v."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
