"""The shape of a decoder, its number of parameters, and what it may do to save memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

Positions = Literal["rotary", "learned"]
Norm = Literal["layer", "rms"]
Mlp = Literal["gelu", "swiglu"]


@dataclass(frozen=True)
class DecoderConfig:
    """GPT-2's shape unless told otherwise, but with rotary positions, which have no end.

    vocab_size: rows of the embedding.
    width: numbers of a token between blocks; `heads` times an even head_dim (even: if rotary).
    kv_heads: key/value heads, of which `heads` is a multiple; None means as many as heads.
    mlp_width: numbers of a token inside the MLP; None means 4 · width, for gelu only.
    positions: "rotary", or "learned": a table of `max_positions` rows, and no token behind them.
    max_positions: rows of that table; with rotary positions without effect.
    rope_base, rope_scaling, rope_interleaved: see `labsupport.attention.rotary`.
    norm: "layer" (mean and variance) or "rms" (mean square only, and no bias).
    mlp: "gelu" (tanh approximation, as GPT-2), or "swiglu" (a gate, as Llama; Shazeer, arXiv
        2002.05202).
    bias: in all projections and layer norms; the classifier has none.
    tied: the classifier is the embedding again (Press and Wolf, arXiv 1608.05859).
    norm_eps: added to variances and mean squares.

    Raises:
        ValueError: sizes or names that do not fit together.

    >>> DecoderConfig.preset("gpt2-small").parameters
    123653376
    """

    vocab_size: int = 50_257
    width: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int | None = None
    mlp_width: int | None = None
    positions: Positions = "rotary"
    max_positions: int = 1024
    rope_base: float = 10_000.0
    rope_scaling: float = 1.0
    rope_interleaved: bool = False
    norm: Norm = "layer"
    mlp: Mlp = "gelu"
    bias: bool = True
    tied: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field, kinds in (("positions", Positions), ("norm", Norm), ("mlp", Mlp)):
            if getattr(self, field) not in get_args(kinds):
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}, but must be one of {get_args(kinds)}."
                )
        for field in ("vocab_size", "width", "layers", "heads", "max_positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, but must be at least 1.")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of {self.heads} heads.")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"width {self.width} / heads {self.heads} = head_dim {self.head_dim}, but rotary "
                "positions turn pairs of numbers: head_dim must be even."
            )
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.key_heads} kv_heads evenly: heads must be "
                "a multiple of kv_heads."
            )
        if self.mlp_width is None and self.mlp == "swiglu":
            raise ValueError(
                "a swiglu MLP needs its mlp_width. Llama takes two thirds of 4 * width, so that "
                f"its three matrices hold as much as gelu's two: about {8 * self.width // 3}."
            )
        if self.inner_width < 1:
            raise ValueError(f"mlp_width is {self.mlp_width}, but must be at least 1.")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DecoderConfig:
        """A shape by its name (`PRESETS`), with changes.

        >>> DecoderConfig.preset("gpt2-small", positions="learned").parameters
        124439808

        Raises:
            ValueError: there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}.")
        return replace(PRESETS[name], **changes)

    @property
    def head_dim(self) -> int:
        """Numbers in a head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """`kv_heads`, or `heads` where that is None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inner_width(self) -> int:
        """`mlp_width`, or 4 · width where that is None."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def parameters(self) -> int:
        """How many numbers are learned. Tied weights count once."""
        width, inner, key_width = self.width, self.inner_width, self.key_heads * self.head_dim
        norm = width * (2 if self.norm == "layer" and self.bias else 1)
        into_mlp = 2 if self.mlp == "swiglu" else 1
        attention = 2 * width * width + 2 * width * key_width
        mlp = (into_mlp + 1) * width * inner
        biases = (2 * width + 2 * key_width) + (into_mlp * inner + width) if self.bias else 0
        tables = self.vocab_size * (1 if self.tied else 2)
        tables += self.max_positions if self.positions == "learned" else 0
        return self.layers * (attention + mlp + biases + 2 * norm) + norm + tables * width


PRESETS: dict[str, DecoderConfig] = {
    "gpt2-small": DecoderConfig(),
    "gpt2-medium": DecoderConfig(width=1024, layers=24, heads=16),
    # The largest of llama2.c's models of children's stories.
    "llama-110m": DecoderConfig(
        vocab_size=32_000,
        mlp_width=2048,
        rope_interleaved=True,
        norm="rms",
        mlp="swiglu",
        bias=False,
    ),
    # Bytes, and one number for the end of a document: trains on a laptop.
    "tiny": DecoderConfig(vocab_size=257, width=128, layers=4, heads=4),
}


@dataclass(frozen=True)
class Savings:
    """How a decoder computes: changes what is held in memory, and no result beyond rounding.

    attention: a backend's name, as for `labsupport.attention.attention`.
    checkpoint: keep only each block's input, and compute the block again in the backward pass
        (Chen et al., arXiv 1604.06174).
    mlp_chunk: tokens at a time through the norm and the MLP; None means all of them.
    loss_chunk: tokens at a time through the classifier; None makes all the logits.
    residual: dtype of the residual stream, and so of what `checkpoint` keeps. None leaves it as
        the embedding returns it: in its weights' dtype, or a precision policy's.
    """

    attention: str = "auto"
    checkpoint: bool = False
    mlp_chunk: int | None = None
    loss_chunk: int | None = None
    residual: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("mlp_chunk", "loss_chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(
                    f"{name} counts tokens: at least 1, or None, but {size} was given."
                )
        if self.residual is not None and not self.residual.is_floating_point:
            raise ValueError(f"residual must be a floating dtype, but is {self.residual}.")
