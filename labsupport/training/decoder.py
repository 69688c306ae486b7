"""A decoder in GPT-2's or Llama's shape, written to be read.

    x = embedding(tokens)                          (+ learned positions)
    for each block:   x = x + attention(norm(x))   queries and keys turned by their positions
                      x = x + mlp(norm(x))
    hidden = norm(x)
    logits = hidden · head^T

x, the residual stream, is (batch, seqlen, width). A block only ever adds to it (Vaswani et al.,
arXiv 1706.03762; with the norms before, as in GPT-2). `MemoryOptions` saves memory only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from labsupport.attention import attention, attention_varlen
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.inputs import check_offsets
from labsupport.attention.rotary import apply_rotary_emb, rotary_angles
from labsupport.precision.dtypes import short
from labsupport.precision.losses import compute_loss
from labsupport.training.chunked_loss import chunked_cross_entropy
from labsupport.training.config import DecoderConfig, MemoryOptions
from labsupport.training.savings import HostStore, in_chunks, shared_gradient

# Turns queries or keys by their tokens' positions; None where positions are learned.
Turn = Callable[[Tensor], Tensor] | None


class Decoder(nn.Module):
    """Predict each token's successor.

    Weights are float32, drawn as GPT-2's (Radford et al., 2019, section 2.3): normal with 0.02, the
    projections that end in the residual stream divided by sqrt(2 · layers). Seed before you build.
    For mixed precision call it under `torch.autocast`. `savings` may be exchanged at any time. A
    subclass may bring its own `turn` and `chunked_loss`.

    >>> model = Decoder(DecoderConfig.preset("tiny"))
    >>> model(torch.arange(16)[None]).shape
    torch.Size([1, 16, 257])
    """

    def __init__(self, config: DecoderConfig, savings: MemoryOptions | None = None) -> None:
        super().__init__()
        self.config, self.savings = config, savings or MemoryOptions()
        # positions -> cos, sin of their angles; see `turn`.
        self.angles: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(
            rotary_angles,
            head_dim=config.head_dim, base=config.rope_base, scaling=config.rope_scaling,
        )  # fmt: skip
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.max_positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                shrink = math.sqrt(2 * config.layers) if into_stream else 1
                nn.init.normal_(parameter, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or the mean loss.

        Args:
            labels: (batch, seqlen) integers, ALREADY SHIFTED: labels[i] is the token that follows
                tokens[i], so that a shard of a sequence needs no neighbour. -100 does not count.
            tokens, positions, cu_seqlens: as in `hidden`.

        Returns:
            Without labels: (batch, seqlen, vocab_size). With labels: the mean cross-entropy over
            those that count, a float32 scalar (float64 from a float64 decoder).
        """
        hidden = self.hidden(tokens, positions=positions, cu_seqlens=cu_seqlens)
        if labels is None:
            return self.head(hidden)
        if self.savings.loss_chunk is None:
            logits = self.head(hidden)
            wide = torch.promote_types(logits.dtype, torch.float32)
            return compute_loss(logits, labels, dtype=wide)
        weight = self.head.weight
        # A precision policy may have this layer compute in another dtype than its weight has.
        dtype = getattr(self.head, "compute_dtype", None)
        if dtype is not None:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        return self.chunked_loss(hidden, weight, labels)

    def turn(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function that turns queries or keys, (batch, seqlen, heads, head_dim).

        Args:
            positions: as in `hidden`.
        """
        cos, sin = self.angles(positions)
        interleaved = self.config.rope_interleaved
        return partial(apply_rotary_emb, cos=cos, sin=sin, interleaved=interleaved)

    def chunked_loss(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss, with the logits of `savings.loss_chunk` tokens at a time.

        Args:
            hidden: (batch, seqlen, width).
            weight: (vocab_size, width), of the classifier.
            labels: (batch, seqlen), as in `forward`.
        """
        return chunked_cross_entropy(hidden, weight, labels, chunk=self.savings.loss_chunk)

    def hidden(
        self, tokens: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states after the last norm.

        Args:
            tokens: (batch, seqlen) int64.
            positions: (seqlen,) or (batch, seqlen) integers; 0 ... seqlen - 1 by default, and with
                `cu_seqlens` from 0 in each document.
            cu_seqlens: (documents + 1,) integers, on any device, batch 1 only: where each document
                begins, and seqlen last. No token sees another document.

        Returns:
            (batch, seqlen, width), in the dtype of the projections (autocast's, if it is on).

        Raises:
            ValueError: tokens, positions or cu_seqlens of other shapes or dtypes, or that do not
                fit together; a token beyond the vocabulary; a position that was not learned.
        """
        cu_seqlens = self._checked(tokens, positions, cu_seqlens)
        counted = positions is None and cu_seqlens is None
        if positions is None:
            positions = _positions(tokens, cu_seqlens)
        x = self.embedding(tokens)
        turn: Turn = None
        if self.config.positions == "learned":
            for position in (tokens.shape[1] - 1,) if counted else _ends(positions):
                if not 0 <= position < self.config.max_positions:
                    raise ValueError(
                        f"position {position} is not one of the {self.config.max_positions}, from "
                        "0 on, that this model has learned: shorten the sequence, or use "
                        'positions="rotary".'
                    )
            x = x + self.position_embedding(positions)
        else:
            turn = self.turn(positions)
        if self.savings.residual is not None:
            x = x.to(self.savings.residual)
        again = self.savings.checkpoint and torch.is_grad_enabled()
        store = HostStore(x.device) if again and self.savings.offload else None
        # A block's input is all that is saved here; what is inside is computed again later.
        with nullcontext() if store is None else store.hooks():
            for block in self.blocks:
                inputs = (x, turn, cu_seqlens, self.savings, store)
                # Nothing in a block is random: no generator's state to keep.
                x = _checkpointed(block, *inputs) if again else block(*inputs)
        return self.norm(x)

    def _checked(
        self, tokens: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor | None:
        """Check the inputs against each other; return cu_seqlens on the CPU."""
        shape = tuple(tokens.shape)
        if tokens.dtype not in (torch.int64, torch.int32) or len(shape) != 2 or not all(shape):
            raise ValueError(
                f"tokens must be (batch, seqlen) integers, int64 or int32, at least one, but "
                f"{short(tokens.dtype)} {shape} were given."
            )
        # A GPU's own check ends the program, but costs nothing; this one would wait for it.
        for token in _ends(tokens) if tokens.device.type == "cpu" else ():
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(
                    f"token {token} is out of range: the vocabulary has {self.config.vocab_size} "
                    "tokens. Is it this model's tokenizer?"
                )
        if positions is not None and positions.shape not in (shape, shape[1:]):
            raise ValueError(
                f"positions {tuple(positions.shape)} must be (seqlen,) or (batch, seqlen), as "
                f"tokens {shape}."
            )
        if cu_seqlens is None:
            return None
        if len(tokens) != 1:
            raise ValueError(
                f"cu_seqlens cuts one packed sequence into documents, but tokens {shape} are "
                "several: tokens.reshape(1, -1)"
            )
        # Read here once; each layer would wait for a GPU again.
        cu_seqlens = torch.as_tensor(cu_seqlens, device="cpu")
        check_offsets("cu_seqlens", cu_seqlens, shape[1])
        return cu_seqlens


def _ends(numbers: Tensor) -> list[int]:
    """Return the smallest and the largest."""
    return torch.stack(torch.aminmax(numbers)).tolist()


_checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _positions(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Count from 0 in each document."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    if cu_seqlens is None:
        return positions
    lengths = cu_seqlens.diff()
    first = cu_seqlens[:-1].repeat_interleave(lengths, output_size=tokens.shape[1])
    return positions - first.to(tokens.device)


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(config), Attention(config)
        self.mlp_norm, self.mlp = norm(config), Mlp(config)

    def forward(
        self,
        x: Tensor,
        turn: Turn,
        cu_seqlens: Tensor | None,
        savings: MemoryOptions,
        store: HostStore | None,
    ) -> Tensor:
        """Map (batch, seqlen, width) to the same, in the same dtype."""
        if savings.head_chunk is None:
            change = self.attention(self.attention_norm(x), turn, cu_seqlens, savings.attention)
        else:
            norm, use = self.attention_norm, shared_gradient(x)
            change = self.attention.in_groups(use, norm, turn, cu_seqlens, savings, store)
            x = use()  # made last, it comes first in the backward pass
        x = _add(x, change)
        change = in_chunks(lambda part: self.mlp(self.mlp_norm(part)), x, savings.mlp_chunk)
        return _add(x, change)


class Attention(nn.Module):
    """Causal attention; `heads` of queries share `kv_heads` of keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        # (q, k, v, cu_seqlens, backend) -> (batch, seqlen, heads * head_dim)
        self.attend: Callable[..., Tensor] = attend
        key_width = config.key_heads * config.head_dim
        # Three projections, and not one of three times the width: q, k and v would be parts of one
        # tensor, and the values alone would keep all of it until the backward pass.
        self.query = nn.Linear(config.width, config.width, bias=config.bias)
        self.key = nn.Linear(config.width, key_width, bias=config.bias)
        self.value = nn.Linear(config.width, key_width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, turn: Turn, cu_seqlens: Tensor | None, backend: str) -> Tensor:
        """Map (batch, seqlen, width) to the same."""
        return self.out(self.attend(*self.project(x, turn), cu_seqlens, backend))

    def in_groups(
        self,
        use: Callable[[], Tensor],
        norm: Callable[[Tensor], Tensor],
        turn: Turn,
        cu_seqlens: Tensor | None,
        savings: MemoryOptions,
        store: HostStore | None,
    ) -> Tensor:
        """Return `self(norm(x), ...)`, with `head_chunk` key/value heads in memory at a time.

        `use()` returns x for one group.

        With a store attention itself runs once: the backward pass takes its results from there.
        """
        size, heads, keys = self.config.head_dim, self.config.heads, self.config.key_heads
        chunk, each = savings.mlp_chunk, heads // keys

        def group(first: int, last: int, x: Tensor) -> Tensor:
            rows = [slice(first * n * size, last * n * size) for n in (each, 1, 1)]

            def project(part: Tensor) -> Tensor:
                normed = norm(part)
                parts = [
                    functional_call(
                        layer, {name: p[of] for name, p in layer.named_parameters()}, normed
                    )
                    for layer, of in zip((self.query, self.key, self.value), rows, strict=True)
                ]
                return torch.cat(parts, -1)

            qkv = in_chunks(project, x, chunk)
            widths = [of.stop - of.start for of in rows]
            q, k, v = (one.unflatten(-1, (-1, size)) for one in qkv.split(widths, -1))
            if turn is not None:
                q, k = turn(q), turn(k)
            with nullcontext() if store is None else store.results((self, first)):
                return self.attend(q, k, v, cu_seqlens, savings.attention)

        step = savings.head_chunk or keys
        run = _checkpointed if torch.is_grad_enabled() else lambda function, *args: function(*args)
        parts = [run(group, n, min(n + step, keys), use()) for n in range(0, keys, step)]
        return in_chunks(self.out, torch.cat(parts, -1), chunk)

    def project(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (batch, seqlen, heads, head_dim), and k and v with kv_heads; q, k turned."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim))
            for project in (self.query, self.key, self.value)
        )
        if turn is not None:
            q, k = turn(q), turn(k)
        return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, backend: str) -> Tensor:
    """Return causal attention's output, heads side by side: (batch, seqlen, heads * head_dim)."""
    if cu_seqlens is None:
        out = attention(q, k, v, causal=True, backend=backend)
    else:
        packed_q, packed_k, packed_v = (each.flatten(0, 1) for each in (q, k, v))
        out = attention_varlen(
            packed_q, packed_k, packed_v, cu_seqlens, cu_seqlens, causal=True, backend=backend
        )
    assert isinstance(out, Tensor)  # the log-sum-exp is not returned
    return out.reshape(*q.shape[:2], -1)


class Mlp(nn.Module):
    """A function of single tokens: GELU between two matrices, or SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        if self.gated:
            self.gate = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.up = nn.Linear(config.width, config.inner_width, bias=config.bias)
        self.down = nn.Linear(config.inner_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same."""
        up = self.up(x)
        return self.down(
            F.silu(self.gate(x)) * up if self.gated else F.gelu(up, approximate="tanh")
        )


# PyTorch's own modules by their names, so that a precision policy knows them.
class LayerNorm(nn.LayerNorm):
    """Mean and variance over the width; computed and returned as `_normalised` says."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., width) to the same, in the dtype that the next projection wants."""
        if input.device.type == "cpu" and input.dtype.itemsize == 2:
            # There PyTorch would add up the gradients of weight and bias in 16 bits.
            input = input.float()
        return _normalised(F.layer_norm, input, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """The mean square alone; computed and returned as `_normalised` says."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same, in the dtype that the next projection wants."""
        return _normalised(F.rms_norm, x, self.weight, self.eps)


def norm(config: DecoderConfig) -> LayerNorm | RMSNorm:
    """Return a new norm of the kind that the shape names."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return LayerNorm(config.width, config.norm_eps, bias=config.bias)


def _normalised(function: Callable[..., Tensor], x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Compute in the stream's dtype, and round once to the projections'."""
    device = x.device.type
    wanted = weight.dtype
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        wanted = torch.get_autocast_dtype(device)
    # PyTorch adds up 16-bit inputs in float32 inside. Autocast would copy them to float32, keep
    # the copy, and have each of the next projections make its own copy of the result.
    with autocast_off(x):
        learned = (p.to(x.dtype) if isinstance(p, Tensor) else p for p in (weight, *rest))
        return function(x, x.shape[-1:], *learned).to(wanted)


def _add(x: Tensor, change: Tensor) -> Tensor:
    """Add in the wider of the two dtypes, and round to the stream's."""
    return (x + change).to(x.dtype)
