"""A decoder's block, and what it is made of: norms, attention, MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labsupport.attention import attention, attention_varlen
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.rotary import apply_rotary_emb
from labsupport.training.model.config import DecoderConfig, Savings
from labsupport.training.saving.chunks import in_chunks

# Cosines and sines of rotary positions; None where positions are learned.
Angles = tuple[Tensor, Tensor] | None


class Block(nn.Module):
    """Adds what attention and the MLP say to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config)
        self.mlp_norm, self.mlp = norm(config), Mlp(config)

    def forward(
        self, x: Tensor, angles: Angles, cu_seqlens: Tensor | None, savings: Savings
    ) -> Tensor:
        """(batch, seqlen, width) to the same, in the same dtype."""
        x = _add(x, self.attention(self.attention_norm(x), angles, cu_seqlens, savings.attention))
        if savings.mlp_chunk is None:
            return _add(x, self.mlp(self.mlp_norm(x)))
        return _add(x, in_chunks(lambda part: self.mlp(self.mlp_norm(part)), x, savings.mlp_chunk))


class Attention(nn.Module):
    """Causal attention; `heads` of queries share `kv_heads` of keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        key_width = config.key_heads * config.head_dim
        # Three projections, and not one of three times the width: q, k and v would be parts of one
        # tensor, and the values alone would keep all of it until the backward pass.
        self.query = nn.Linear(config.width, config.width, bias=config.bias)
        self.key = nn.Linear(config.width, key_width, bias=config.bias)
        self.value = nn.Linear(config.width, key_width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, angles: Angles, cu_seqlens: Tensor | None, backend: str) -> Tensor:
        """(batch, seqlen, width) to the same."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim))
            for project in (self.query, self.key, self.value)
        )
        if angles is not None:
            q, k = (
                apply_rotary_emb(each, *angles, interleaved=self.config.rope_interleaved)
                for each in (q, k)
            )
        if cu_seqlens is None:
            out = attention(q, k, v, causal=True, backend=backend)
        else:
            q, k, v = (each.flatten(0, 1) for each in (q, k, v))
            out = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True, backend=backend)
        assert isinstance(out, Tensor)  # nobody asked for the log-sum-exp
        return self.out(out.reshape(x.shape))


class Mlp(nn.Module):
    """What happens to each token by itself."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        if self.gated:
            self.gate = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.up = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.down = nn.Linear(config.inner_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        up = self.up(x)
        inner = F.silu(self.gate(x)) * up if self.gated else F.gelu(up, approximate="tanh")
        return self.down(inner)


# PyTorch's own modules by their names, so that a precision policy knows them.
class LayerNorm(nn.LayerNorm):
    """Mean and variance over the width; computed and returned as `_normalised` says."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., width) to the same, in the dtype that the next projection wants."""
        if input.device.type == "cpu" and input.dtype.itemsize == 2:
            # There PyTorch would add up the gradients of weight and bias in 16 bits.
            input = input.float()
        return _normalised(F.layer_norm, input, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """The mean square alone; computed and returned as `_normalised` says."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same, in the dtype that the next projection wants."""
        return _normalised(F.rms_norm, x, self.weight, self.eps)


def norm(config: DecoderConfig) -> LayerNorm | RMSNorm:
    """A new norm of the kind that the shape names."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return LayerNorm(config.width, config.norm_eps, bias=config.bias)


def _normalised(function: Callable[..., Tensor], x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Computed in the stream's dtype, rounded once to the projections'."""
    device = x.device.type
    wanted = weight.dtype
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        wanted = torch.get_autocast_dtype(device)
    # PyTorch adds up 16-bit inputs in float32 inside. Autocast would copy them to float32, keep
    # the copy, and have each of the projections behind make its own copy of the result.
    with autocast_off(x):
        learned = (p.to(x.dtype) if isinstance(p, Tensor) else p for p in (weight, *rest))
        return function(x, x.shape[-1:], *learned).to(wanted)


def _add(x: Tensor, change: Tensor) -> Tensor:
    # Added in the wider of the two dtypes, and rounded to the stream's.
    return (x + change).to(x.dtype)
