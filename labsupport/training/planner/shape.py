"""What the planner's formulas are about: sizes by their letters, and parts of memory.

A formula is a text, as it stands in the plan, and its value is computed from that very text: what
is printed is what was added up.

    T = B · N   tokens of a batch of B sequences of N     L   blocks
    w           width of the residual stream              V   vocabulary
    H, G, d     query heads, key/value heads, head_dim    I   width inside the MLP
    c           bytes of a number in matrix products (autocast's dtype; else 4)
    r           bytes of a number in the residual stream (`Savings.residual`; else 4)
    W           weights in the model; Wb in a block, Wm of these in its MLP; Wx in the largest
    C, M        tokens at a time through the classifier (loss_chunk), through the MLP (mlp_chunk)
    K           blocks whose tensors still exist: L when the backward pass begins, then fewer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from labsupport.training.model import DecoderConfig, Savings
from labsupport.training.saving.cross_entropy import default_chunk

# The lab's backends that store S and P; the others hold tiles of them.
TEXTBOOK = ("standard",)


@dataclass(frozen=True)
class Part:
    """One part of memory: its name, the formula, and the formula's value in bytes."""

    name: str
    formula: str
    bytes: int


@dataclass(frozen=True)
class Shape:
    """A training step, as far as its memory depends on it. Arguments as of `plan_memory`."""

    config: DecoderConfig
    savings: Savings
    seqlen: int
    batch: int
    autocast: torch.dtype | None
    device: str
    optimizer: str | None
    accumulation: int
    kept_blocks: int = 0

    def at(self, kept_blocks: int) -> Shape:
        """The same step when `kept_blocks` blocks have not been through the backward pass."""
        return replace(self, kept_blocks=kept_blocks)

    def part(self, name: str, *terms: str) -> Part:
        """A part whose bytes are the sum of the terms."""
        kept = [term.removeprefix("1·") for term in terms if not term.startswith("0·")]
        formula = " + ".join(kept) or "0"
        python = formula.replace("·", "*").replace("²", "**2")
        allowed = {"__builtins__": {}, "max": max}
        return Part(name, formula, eval(python, allowed, dict(self.symbols)))

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return self.batch * self.seqlen

    @property
    def low(self) -> bool:
        """Matrix products in 16 bits, by autocast."""
        return self.autocast is not None

    @property
    def textbook(self) -> bool:
        """S and P are stored."""
        return self.savings.attention in TEXTBOOK

    @property
    def chunked_mlp(self) -> bool:
        """A sequence that is no longer than a chunk is not cut."""
        return self.savings.mlp_chunk is not None and self.savings.mlp_chunk < self.seqlen

    @cached_property
    def symbols(self) -> Mapping[str, int]:
        """The letters of the formulas."""
        config, savings = self.config, self.savings
        width, inner = config.width, config.inner_width
        into_mlp = 2 if config.mlp == "swiglu" else 1
        mlp = (into_mlp + 1) * width * inner + config.bias * (into_mlp * inner + width)
        norm = width * (2 if config.norm == "layer" and config.bias else 1)
        tables = config.vocab_size * (1 if config.tied else 2)
        tables += config.max_positions if config.positions == "learned" else 0
        return {
            "T": self.tokens,
            "B": self.batch,
            "N": self.seqlen,
            "L": config.layers,
            "w": width,
            "H": config.heads,
            "G": config.key_heads,
            "d": config.head_dim,
            "I": inner,
            "V": config.vocab_size,
            "c": self.autocast.itemsize if self.autocast else 4,
            "r": savings.residual.itemsize if savings.residual else 4,
            "W": config.parameters,
            "Wb": (config.parameters - tables * width - norm) // config.layers,
            "Wm": mlp + norm,
            "Wx": max(config.vocab_size * width, width * inner),
            "C": min(savings.loss_chunk or default_chunk(config.vocab_size), self.tokens),
            "M": self.batch * min(savings.mlp_chunk or self.seqlen, self.seqlen),
            "K": self.kept_blocks,
        }
