"""Settings as data: the shape of a decoder, its options to save memory, a training run's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch

from labsupport.precision import FlashAttentionConfig
from labsupport.precision.dtypes import short

IGNORED = -100  # the label of a token that does not count
Positions = Literal["rotary", "learned"]
Norm = Literal["layer", "rms"]
Mlp = Literal["gelu", "swiglu"]


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder: by default GPT-2's, but with rotary positions, which have no end.

    Attributes:
        vocab_size: rows of the embedding.
        width: numbers of a token between blocks; `heads` times an even head_dim (even: if rotary).
        kv_heads: key/value heads, of which `heads` is a multiple; None means as many as heads.
        mlp_width: numbers of a token inside the MLP; None means 4 · width, for gelu only.
        positions: "rotary", or "learned": a table of `max_positions` rows, and no token beyond
            them.
        max_positions: rows of that table; with rotary positions without effect.
        rope_base, rope_scaling, rope_interleaved: see `labsupport.attention.rotary`.
        norm: "layer" (mean and variance) or "rms" (mean square only, and no bias).
        mlp: "gelu" (tanh approximation, as GPT-2), or "swiglu" (a gate, as Llama; Shazeer, arXiv
            2002.05202).
        bias: in all projections and layer norms; the classifier has none.
        tied: the classifier is the embedding again (Press and Wolf, arXiv 1608.05859).
        norm_eps: added to variances and mean squares.

    Raises:
        ValueError: sizes or names that do not fit together; numbers that are not finite.

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
            if (value := getattr(self, field)) not in get_args(kinds):
                raise ValueError(f"{field} is {value!r}, but must be one of {get_args(kinds)}.")
        sizes = (self.vocab_size, self.width, self.layers, self.heads, self.key_heads)
        sizes += (self.inner_width, self.max_positions)
        if any(size < 1 or size % 1 for size in sizes):
            raise ValueError(f"sizes must be at least 1: {self}")
        numbers = (self.rope_base, self.rope_scaling, self.norm_eps)
        if not (all(map(math.isfinite, numbers)) and min(numbers[:2]) > 0 <= self.norm_eps):
            raise ValueError(f"rope_base, rope_scaling and norm_eps must be positive: {self}")
        if self.width % self.heads or self.heads % self.key_heads:
            raise ValueError(
                f"width {self.width} must be a multiple of {self.heads} heads, and these of "
                f"{self.key_heads} kv_heads."
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary positions turn pairs.")
        if self.mlp_width is None and self.mlp == "swiglu":
            raise ValueError(
                "a swiglu MLP needs its mlp_width, so that its three matrices are as large as "
                f"gelu's two: about {8 * self.width // 3}."
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DecoderConfig:
        """Return a shape by its name (`PRESETS`), or GPT-2's as LAYERSxWIDTH; with changes.

        >>> DecoderConfig.preset("gpt2-small", positions="learned").parameters
        124439808
        >>> DecoderConfig.preset("48x1600").heads  # GPT-2 XL's size; heads of 64
        25

        Raises:
            ValueError: there is no such preset.
        """
        layers, x, width = name.partition("x")
        if x and layers.isdigit() and width.isdigit():
            heads = max(1, int(width) // 64)
            gpt2 = cls(layers=int(layers), width=int(width), heads=heads)
            return replace(gpt2, **changes)
        if name not in PRESETS:
            raise ValueError(
                f"there is no preset {name!r}; there are {', '.join(PRESETS)}, and LAYERSxWIDTH."
            )
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
    def parameters_by_part(self) -> dict[str, int]:
        """Number of parameters of the tables, of the attention and MLP of a block, of a norm.

        Those of attention and MLP include the norm before them; tied tables count once.
        """
        width, inner, key_width = self.width, self.inner_width, self.key_heads * self.head_dim
        norm = width * (2 if self.norm == "layer" and self.bias else 1)
        into_mlp = 2 if self.mlp == "swiglu" else 1
        attention = 2 * width * (width + key_width) + self.bias * 2 * (width + key_width)
        mlp = (into_mlp + 1) * width * inner + self.bias * (into_mlp * inner + width)
        rows = self.vocab_size * (1 if self.tied else 2)
        rows += self.max_positions if self.positions == "learned" else 0
        parts = {"tables": rows * width, "attention": norm + attention, "mlp": norm + mlp}
        return parts | {"norm": norm}

    @property
    def parameters(self) -> int:
        """Number of parameters; tied weights count once."""
        parts = self.parameters_by_part
        return parts["tables"] + self.layers * (parts["attention"] + parts["mlp"]) + parts["norm"]


PRESETS: dict[str, DecoderConfig] = {
    "gpt2-small": DecoderConfig(),
    "gpt2-medium": DecoderConfig(width=1024, layers=24, heads=16),
    # The largest of llama2.c's models of children's stories.
    "llama-110m": DecoderConfig(
        32_000, mlp_width=2048, rope_interleaved=True, norm="rms", mlp="swiglu", bias=False
    ),
    # Bytes, and one number for the end of a document: trains on a laptop.
    "tiny": DecoderConfig(vocab_size=257, width=128, layers=4, heads=4),
}


@dataclass(frozen=True)
class MemoryOptions:
    """Options that lower a decoder's memory and change no result beyond rounding.

    Attributes:
        attention: a backend's name, as for `labsupport.attention.attention`.
        checkpoint: keep only each block's input, and compute the block again in the backward pass
            (Chen et al., arXiv 1604.06174).
        mlp_chunk: tokens at a time through the norm and the MLP; None means all of them.
        loss_chunk: tokens at a time through the classifier; None makes all the logits.
        head_chunk: key/value heads at a time, each with its query heads, through the norm, their
            projections and attention, which the backward pass computes again; None means all.
        offload: with `checkpoint`: move what it stores to host memory, and back one block ahead of
            the backward pass (`labsupport.training.savings.HostStore`). With `head_chunk`, the
            results of attention move there, too, and attention is not computed again.
        residual: dtype of the residual stream, and so of what `checkpoint` keeps. None leaves it as
            the embedding returns it: in its weights' dtype, or a precision policy's.

    >>> savings = MemoryOptions(checkpoint=True, loss_chunk=512)
    >>> model = Decoder(DecoderConfig.preset("tiny"), savings)
    """

    attention: str = "auto"
    checkpoint: bool = False
    mlp_chunk: int | None = None
    loss_chunk: int | None = None
    residual: torch.dtype | None = None
    head_chunk: int | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        for name in ("mlp_chunk", "loss_chunk", "head_chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}: at least 1, or None.")
        if self.residual is not None and not self.residual.is_floating_point:
            raise ValueError(f"residual is {self.residual}, and must be a floating dtype.")
        if self.offload and not self.checkpoint:
            raise ValueError("offload moves what checkpoint stores: use checkpoint=True, too.")

    @classmethod
    def named(cls, names: str | Iterable[str], *, attention: str = "auto") -> MemoryOptions:
        """Return options by short names, some with a number of tokens or heads; a string is one.

        >>> MemoryOptions.named(["checkpoint", "mlp=8192", "loss"]).mlp_chunk
        8192

        Raises:
            ValueError: an unknown name.
        """
        # The numbers are used where none is given.
        numbered = {"mlp": ("mlp_chunk", 4096), "loss": ("loss_chunk", 1024)}
        numbered["heads"] = ("head_chunk", 1)
        plain = {"checkpoint": True, "offload": True, "residual": torch.bfloat16}
        chosen: dict[str, Any] = {}
        for entry in [names] if isinstance(names, str) else names:
            name, equals, number = entry.partition("=")
            if name in plain and not equals:
                chosen[name] = plain[name]
            elif name in numbered and (not equals or number.isdigit()):
                field, usual = numbered[name]
                chosen[field] = int(number) if equals else usual
            else:
                raise ValueError(
                    f"{entry!r} saves no memory; known: {', '.join([*plain, *numbered])}, the last "
                    "three perhaps with a number, as mlp=8192"
                )
        return cls(attention, **chosen)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    The defaults are those of GPT-3's smallest model, of 125M parameters (Brown et al., Language
    Models are Few-Shot Learners, 2020, table 2.1 and appendix B), apart from its batch size.

    Args:
        steps: optimizer steps of the whole run.
        learning_rate: its maximum.
        warmup_steps: steps that rise to it in a straight line.
        decay_steps: the step at which the learning rate has come down to `final_fraction` of it,
            along a cosine. Default: `steps`. Give it to be able to add steps to a run later.
        weight_decay: of matrices; biases and norm weights are not decayed.
        betas: AdamW's.
        max_grad_norm: gradients of a larger total norm are scaled down to it; None: they are not.
        gradient_accumulation_steps: micro-batches of each step (of each rank, at most), whose
            gradients add up.
        autocast: the dtype of matrix products (bfloat16, float16); None: that of the weights.
            Weights stay float32, and are rounded for each use.
        policy: a dtype for each component, in place of autocast's rules: weights are stored in the
            policy's dtypes, and float32 masters take the updates (`labsupport.precision`).
        seed: of the random numbers during training (dropout). Weights are made before.
        checkpoint_every: steps between evaluations and checkpoints; None: once, at the end.
        keep: number of checkpoints to keep, the newest ones.

    Where gradients pass through float16, the loss is scaled, and steps whose gradients overflow are
    left out.

    Raises:
        ValueError: a count below 1, more warm-up than steps, a rate, a decay or a limit of the norm
            that is not finite or has the wrong sign, both autocast and policy.

    >>> TrainConfig(steps=100, warmup_steps=10, learning_rate=1e-3).steps
    100
    """

    steps: int
    learning_rate: float = 6e-4
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0
    gradient_accumulation_steps: int = 1
    autocast: torch.dtype | None = None
    policy: FlashAttentionConfig | None = None
    seed: int = 0
    checkpoint_every: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        counts = "steps gradient_accumulation_steps keep checkpoint_every decay_steps"
        for name in counts.split():
            if (value := getattr(self, name)) is not None and (value < 1 or value % 1):
                raise ValueError(f"{name} is {value}, and must be a whole number, at least 1")
        if not 0 <= self.warmup_steps <= self.last_step:
            raise ValueError(f"warmup_steps is {self.warmup_steps}: 0 to {self.last_step} steps")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}: above 0, and finite")
        if not 0 <= self.weight_decay < math.inf or not 0 <= self.final_fraction <= 1:
            raise ValueError(
                f"weight_decay is {self.weight_decay} and final_fraction {self.final_fraction}: "
                "at least 0, and the fraction at most 1"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}: above 0, or None")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: two numbers from 0 to below 1")
        if not 0 <= self.seed < 2**32 or self.seed % 1:
            raise ValueError(f"seed is {self.seed}: a whole number from 0 to below 2^32")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast is {self.autocast}: bfloat16, float16, or None for float32")
        if self.autocast is not None and self.policy is not None:
            raise ValueError(f"autocast is {self.autocast}, and there is a policy: choose one")

    @property
    def last_step(self) -> int:
        """The step from which on the learning rate stays at its lowest."""
        return self.steps if self.decay_steps is None else self.decay_steps

    def saves_after(self, step: int) -> bool:
        """Return whether an evaluation and a checkpoint follow a step."""
        done = step + 1
        return done == self.steps or done % (self.checkpoint_every or self.steps) == 0

    def run_config(self) -> dict[str, Any]:
        """Return everything that the weights after each step depend on, as plain data.

        `steps` is not part of it, but `decay_steps`, which the schedule follows.
        """
        free = ("steps", "checkpoint_every", "keep")
        values = {name: value for name, value in asdict(self).items() if name not in free}
        dtype = None if self.autocast is None else short(self.autocast)
        policy = values["policy"] and {part: short(of) for part, of in values["policy"].items()}
        return values | {"decay_steps": self.last_step, "autocast": dtype, "policy": policy}
