"""Attention by the ring, inside models that were written for one device.

Only attention looks at other tokens. So a model computes a shard of a sequence when its attention
goes around the ring, and its positions are those in the whole sequence; nothing else changes. Two
kinds of models, and where their attention is exchanged:

    Decoder             each block's `attention` becomes a `RingAttention` with the same layers
    Transformers'       the attention function of GPT-2 or Llama, under the name "lab_ring"
                        (labsupport.models.integration says how that works)

The names of the parameters stay the same, so that checkpoints fit both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.attention.rotary import apply_rotary_emb
from labsupport.distributed.ring.functions import (
    ring_flash_attn_func,
    zigzag_ring_flash_attn_func,
)
from labsupport.training.decoder import Angles, Attention, Decoder

FAMILIES = ("gpt2", "llama")  # of Transformers: causal attention and nothing else in each layer
_NAME = "lab_ring"


@dataclass(frozen=True)
class RingOptions:
    """How attention goes around: the shards' layout, the kernel, the ranks (None: all)."""

    zigzag: bool = True
    kernel: str = "auto"
    group: dist.ProcessGroup | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Causal attention of this rank's shards, (batch, seqlen_local, heads, head_dim)."""
        function = zigzag_ring_flash_attn_func if self.zigzag else ring_flash_attn_func
        out = function(
            q,
            k,
            v,
            causal=True,
            softmax_scale=scale,
            group=self.group,
            kernel=self.kernel,
            check_ranks=False,  # they were given the same batch; asking would stop a GPU each time
        )
        assert isinstance(out, Tensor)
        return out


class RingAttention(nn.Module):
    """A block's attention with the same projections, around the ring."""

    def __init__(self, attention: Attention, ring: RingOptions) -> None:
        super().__init__()
        self.config, self.ring = attention.config, ring
        self.query, self.key = attention.query, attention.key
        self.value, self.out = attention.value, attention.out

    def forward(self, x: Tensor, angles: Angles, cu_seqlens: Tensor | None, backend: str) -> Tensor:
        """(batch, seqlen_local, width) to the same; `backend` is one device's business."""
        if cu_seqlens is not None:
            raise ValueError("the ring knows no documents: cu_seqlens must be None")
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim))
            for project in (self.query, self.key, self.value)
        )
        if angles is not None:
            q, k = (
                apply_rotary_emb(each, *angles, interleaved=self.config.rope_interleaved)
                for each in (q, k)
            )
        return self.out(self.ring.attend(q, k, v).reshape(x.shape))


def install(model: nn.Module, ring: RingOptions) -> Callable[[], None]:
    """Let a model's attention go around the ring, from now until the returned function is called.

    Raises:
        ValueError: a model that is neither a Decoder nor Transformers' GPT-2 or Llama with a head;
            whose positions depend on the length; whose attention goes around a ring already.
    """
    if isinstance(model, Decoder):
        return _install_in_decoder(model, ring)
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family in FAMILIES and hasattr(model, "lm_head"):
        return _install_in_transformers(model, ring)
    raise ValueError(
        f"a {type(model).__name__} was given, but only a Decoder, a GPT2LMHeadModel or a "
        "LlamaForCausalLM can be computed with a sharded sequence"
    )


def _install_in_decoder(model: Decoder, ring: RingOptions) -> Callable[[], None]:
    blocks: list[Any] = list(model.blocks)
    before = [block.attention for block in blocks]
    if any(isinstance(attention, RingAttention) for attention in before):
        raise ValueError("the model's attention goes around a ring already: restore() it first")
    for block in blocks:
        block.attention = RingAttention(block.attention, ring)

    def restore() -> None:
        for block, attention in zip(blocks, before, strict=True):
            block.attention = attention

    return restore


def _install_in_transformers(model: Any, ring: RingOptions) -> Callable[[], None]:
    before = model.config._attn_implementation
    if before == _NAME:
        raise ValueError("the model's attention goes around a ring already: restore() it first")
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(
            f"this model's rotary positions ({rope['rope_type']}) depend on the length of the "
            "sequence, and a rank would take its shard's"
        )
    layers = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    ]
    _register()
    model.set_attn_implementation(_NAME)
    for layer in layers:
        layer.ring = ring

    def restore() -> None:
        model.set_attn_implementation(before)
        for layer in layers:
            del layer.ring

    return restore


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
        q, k, v = (in_one_dtype(tensor).transpose(1, 2) for tensor in (query, key, value))
        return module.ring.attend(q, k, v, scaling), None

    def causal_mask(*sizes: Any, **options: Any) -> MaskDescription:
        # Where positions jump, as between a zigzag shard's chunks, Transformers believes that
        # another sequence begins, and would mask it. The two families know causal masks only.
        options["mask_function"] = masking_utils.causal_mask_function
        return describe_mask(*sizes, **options)

    AttentionInterface.register(_NAME, layer_function(compute))
    AttentionMaskInterface.register(_NAME, causal_mask)


def in_one_dtype(tensor: Tensor) -> Tensor:
    """In autocast's dtype where it is on: rotary positions leave q and k in float32 beside v."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
