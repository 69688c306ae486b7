"""A dtype for each component of a model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch

from labsupport.precision.dtypes import short

_DTYPES = {
    **{short(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)},
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FlashAttentionConfig:
    """A dtype for each component; a torch dtype or its name.

    Attributes:
        attention: in which q, k and v enter the attention kernel, all three. The softmax weights P
            are not a choice: inside a fused kernel they are float32 in registers, and rounded to
            this dtype for the product with V.
        attention_weights: the projections W_q, W_k, W_v, W_o, and their matmuls.
        mlp: the weights of the MLP, and its matmuls.
        norm_statistics: mean and variance of LayerNorm, mean square of RMSNorm.
        norm_weights: their weights.
        embedding: the table. A head that shares it keeps sharing it: this dtype holds for both.
        residual: the stream between the blocks, which begins as the embedding's output. (A model
            that is fed vectors instead of tokens has the stream that it is fed.) Llama rotates q
            and k in this dtype, if it is the wider one, and caches the keys in it.
        head: the matmul that makes the logits, and its weight unless that is shared.
        loss: loss modules inside of the model, and for you to give to `compute_loss`.
        optimizer: master weights and the optimizer's state (`MixedPrecisionOptimizer`).

    The default is what large models are trained in: bfloat16, with float32 where sums are long or
    changes small. `float16()` keeps the residual stream in float32 as well, for its range: float16
    ends at 65,504.

    Raises:
        ValueError: not a floating dtype of 16, 32 or 64 bits.

    Warns:
        UserWarning: norm_statistics, loss or optimizer in 16 bits. Allowed, to see what goes wrong.
    """

    attention: torch.dtype = torch.bfloat16
    attention_weights: torch.dtype = torch.bfloat16
    mlp: torch.dtype = torch.bfloat16
    norm_statistics: torch.dtype = torch.float32
    norm_weights: torch.dtype = torch.bfloat16
    embedding: torch.dtype = torch.bfloat16
    residual: torch.dtype = torch.bfloat16
    head: torch.dtype = torch.bfloat16
    loss: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _dtype(field.name, getattr(self, field.name)))
        for name, why in (
            ("norm_statistics", "squares overflow from 256 in float16, and sums lose their end"),
            ("loss", "a loss of 10 moves in steps of 1/16 in bfloat16, 1/128 in float16"),
            ("optimizer", "an update below half a unit in the last place vanishes"),
        ):
            if getattr(self, name) in _HALF:
                dtype = short(getattr(self, name))
                warnings.warn(f"{name} in {dtype}: {why}. float32 is usual.", stacklevel=3)

    @classmethod
    def bfloat16(cls, **changes: Any) -> FlashAttentionConfig:
        """The default policy, with changes: bfloat16(embedding="float32")."""
        return cls(**changes)

    @classmethod
    def float16(cls, **changes: Any) -> FlashAttentionConfig:
        """float16, for GPUs without bfloat16: the residual stream in float32, losses scaled."""
        half = ("attention", "attention_weights", "mlp", "norm_weights", "embedding", "head")
        settings: dict[str, Any] = dict.fromkeys(half, torch.float16) | {"residual": torch.float32}
        return cls(**(settings | changes))

    @classmethod
    def float32(cls, **changes: Any) -> FlashAttentionConfig:
        """Everything in float32: the yardstick."""
        settings: dict[str, Any] = dict.fromkeys((f.name for f in fields(cls)), torch.float32)
        return cls(**(settings | changes))

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether gradients pass through float16, where they are lost below 2^-25 (3e-8)."""
        return any(
            getattr(self, field.name) == torch.float16
            for field in fields(self)
            if field.name != "optimizer"
        )

    def weights_of(self, component: str | None) -> torch.dtype | None:
        """The dtype of a component's parameters; None: they are left as they are."""
        return {
            "attention": self.attention_weights,
            "mlp": self.mlp,
            "norm": self.norm_weights,
            "embedding": self.embedding,
            "head": self.head,
        }.get(component or "")


def _dtype(field: str, value: Any) -> torch.dtype:
    dtype = _DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        known = ", ".join(short(d) for d in dict.fromkeys(_DTYPES.values()))
        hint = (
            "; float8 needs scaling factors that no policy here keeps" if "8" in str(dtype) else ""
        )
        raise ValueError(f"{field} cannot be {value!r}: give one of {known}{hint}.")
    return dtype
