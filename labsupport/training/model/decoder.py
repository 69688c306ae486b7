"""A decoder in GPT-2's or Llama's shape: tokens to hidden states, to logits or to a loss.

    x = embedding(tokens)                          (+ learned positions)
    for each block:   x = x + attention(norm(x))   queries and keys turned by their positions
                      x = x + mlp(norm(x))
    hidden = norm(x)
    logits = hidden · head^T

x, the residual stream, is (batch, seqlen, width). A block only ever adds to it (Vaswani et al.,
arXiv 1706.03762; with the norms in front, as in GPT-2). `Savings` says how to hold less memory at a
time, for the same result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labsupport.attention.rotary import rotary_angles
from labsupport.precision.losses import compute_loss
from labsupport.training.model.config import DecoderConfig, Savings
from labsupport.training.model.layers import Angles, Block, norm
from labsupport.training.saving.cross_entropy import chunked_cross_entropy


class Decoder(nn.Module):
    """Predicts each token's successor.

    Weights are float32, drawn as GPT-2's (Radford et al., 2019, section 2.3): normal with 0.02, the
    projections that end in the residual stream divided by sqrt(2 · layers). Seed before you build.
    For mixed precision call it under `torch.autocast`. `savings` may be exchanged at any time.
    """

    def __init__(self, config: DecoderConfig, savings: Savings | None = None) -> None:
        super().__init__()
        self.config, self.savings = config, savings or Savings()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.max_positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self._draw_weights()

    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                shrink = math.sqrt(2 * self.config.layers) if into_stream else 1
                nn.init.normal_(parameter, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def hidden(
        self, tokens: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """The hidden states after the last norm.

        Args:
            tokens: (batch, seqlen) int64.
            positions: (seqlen,) or (batch, seqlen) integers; 0 ... seqlen - 1 unless given, and
                with `cu_seqlens` from 0 in each document.
            cu_seqlens: (documents + 1,) integers, on any device, batch 1 only: where each document
                begins, and seqlen last. No token sees another document.

        Returns:
            (batch, seqlen, width), in the dtype of the projections (autocast's, if it is on).

        Raises:
            ValueError, TypeError: tokens, positions or cu_seqlens of another shape or dtype; a
                token outside of the vocabulary (looked for on a CPU only: a GPU would have to
                wait); a position behind the last learned one.
        """
        self._check_tokens(tokens)
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.cpu()  # read here once; each layer would wait for a GPU again
            _check_cu_seqlens(cu_seqlens, tokens)
        positions = self._positions(tokens, positions, cu_seqlens)
        x = self.embedding(tokens)
        angles: Angles = None
        if self.config.positions == "learned":
            x = x + self.position_embedding(positions)
        else:
            angles = rotary_angles(
                positions,
                self.config.head_dim,
                base=self.config.rope_base,
                scaling=self.config.rope_scaling,
            )
        if self.savings.residual is not None:
            x = x.to(self.savings.residual)
        for block in self.blocks:
            if self.savings.checkpoint and torch.is_grad_enabled():
                # Nothing in a block is random: no generator's state to keep.
                x = checkpoint(
                    block,
                    x,
                    angles,
                    cu_seqlens,
                    self.savings,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                x = block(x, angles, cu_seqlens, self.savings)
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits, or the mean loss.

        Args:
            labels: (batch, seqlen) integers, ALREADY SHIFTED: labels[i] is the token that follows
                tokens[i], so that a shard of a sequence needs no neighbour. -100 does not count.
            tokens, positions, cu_seqlens: as in `hidden`.

        Returns:
            Without labels: (batch, seqlen, vocab_size). With labels: the mean cross-entropy over
            those that count, a float32 scalar (float64 from a float64 decoder).

        Raises: as `hidden`, and for labels that do not fit.
        """
        if labels is not None and labels.shape != tokens.shape:
            raise ValueError(
                f"labels {tuple(labels.shape)} must have the shape of tokens "
                f"{tuple(tokens.shape)}: labels[:, i] is the token after tokens[:, i], and -100 "
                "where there is none."
            )
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
        return chunked_cross_entropy(hidden, weight, labels, chunk=self.savings.loss_chunk)

    def _positions(
        self, tokens: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        seqlen, given = tokens.shape[1], positions is not None
        if positions is None:
            positions = torch.arange(seqlen, device=tokens.device)
            if cu_seqlens is not None:
                starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
                first = starts.repeat_interleave(lengths, output_size=seqlen)
                positions = positions - first.to(tokens.device)
        elif positions.is_floating_point():
            raise TypeError(f"positions must be integers, but {positions.dtype} was given.")
        elif tuple(positions.shape) not in ((seqlen,), tuple(tokens.shape)):
            raise ValueError(
                f"positions {tuple(positions.shape)} must be ({seqlen},) or {tuple(tokens.shape)}, "
                f"one for each of the tokens {tuple(tokens.shape)}."
            )
        if self.config.positions == "learned":
            farthest = int(positions.max()) if given or cu_seqlens is not None else seqlen - 1
            if farthest >= self.config.max_positions:
                raise ValueError(
                    f"position {farthest} was asked for, but this model has learned "
                    f"{self.config.max_positions}: 0 ... {self.config.max_positions - 1}. Shorten "
                    'the sequence, or take a model with positions="rotary".'
                )
        return positions

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens must be integers (int64), but {tokens.dtype} was given.")
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(
                f"tokens must be (batch, seqlen), at least one of each, but {tuple(tokens.shape)} "
                "was given: tokens.unsqueeze(0) makes a batch of one."
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            least, most = (int(value) for value in torch.aminmax(tokens))
            if least < 0 or most >= self.config.vocab_size:
                raise ValueError(
                    f"tokens reach from {least} to {most}, but the vocabulary from 0 to "
                    f"{self.config.vocab_size - 1}: is the tokenizer the model's?"
                )


def _check_cu_seqlens(cu_seqlens: Tensor, tokens: Tensor) -> None:
    batch, seqlen = tokens.shape
    if batch != 1:
        raise ValueError(
            f"cu_seqlens cuts one packed sequence into documents, but tokens {tuple(tokens.shape)} "
            "hold several: pack them into one, tokens.reshape(1, -1), with the offsets to match."
        )
    whole = not (cu_seqlens.is_floating_point() or cu_seqlens.is_complex())
    steps = cu_seqlens.tolist() if whole and cu_seqlens.ndim == 1 else []
    if len(steps) < 2 or steps[0] != 0 or steps[-1] != seqlen or steps != sorted(steps):
        raise ValueError(
            f"cu_seqlens must be a 1-D integer tensor that starts at 0, never falls and ends at "
            f"seqlen {seqlen}, but {cu_seqlens} was given. For documents of 3 and 5 tokens it is "
            "[0, 3, 8]."
        )
