"""A training step to be measured: the lab's decoder, or Transformers' GPT-2 as its users write it.

Weights, gradients and AdamW's states are float32 in both. Batch 1, random tokens, seed 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.training.model import Decoder, DecoderConfig
from labsupport.training.planner.fits import Rung

WARM_UP_TOKENS = 1024


@dataclass(frozen=True)
class Step:
    """A model with its optimizer, ready to do steps on the same random tokens."""

    run: Callable[[], float]  # one step; returns its loss
    warm_up: Callable[[], float]  # the same of the first tokens only
    standing_bytes: int  # weights and AdamW's states, which are there between steps


@dataclass(frozen=True)
class PlainTransformers:
    """GPT-2 of the Transformers library, with nothing of the lab's."""

    name: str
    attention: str
    checkpoint: bool = False
    autocast: torch.dtype = torch.bfloat16


PLAIN = (
    PlainTransformers("Transformers, eager attention", "eager"),
    PlainTransformers("Transformers, SDPA", "sdpa"),
    PlainTransformers("Transformers, SDPA, gradient checkpointing", "sdpa", checkpoint=True),
)


def training_step(
    config: DecoderConfig, how: Rung | PlainTransformers, seqlen: int, device: torch.device
) -> Step:
    """A training step on `device`: forward, backward, AdamW.

    Args:
        config: the shape. Transformers' GPT-2 takes its sizes, with learned positions for `seqlen`
            tokens, and keeps its own defaults else, dropout among them.
        how: a rung of the ladder, or one of `PLAIN`.
        seqlen: tokens.
        device: where.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model, loss_of = (
            _decoder(config, how) if isinstance(how, Rung) else _plain(config, how, seqlen)
        )
        tokens = torch.randint(config.vocab_size, (1, seqlen))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for weight in model.parameters():  # the states are made by a first step
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    def run(tokens: Tensor) -> float:
        try:
            with torch.autocast(device.type, how.autocast, enabled=how.autocast is not None):
                loss = loss_of(tokens)
            loss.backward()
            optimizer.step()
            return float(loss.detach())
        finally:
            optimizer.zero_grad(set_to_none=True)

    standing = 3 * sum(weight.nbytes for weight in model.parameters())
    first = tokens[:, :WARM_UP_TOKENS]
    return Step(partial(run, tokens), partial(run, first), standing)


def _decoder(config: DecoderConfig, rung: Rung) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = Decoder(config, rung.savings)
    return model, lambda tokens: model(tokens, tokens.roll(-1, dims=1))


def _plain(
    config: DecoderConfig, how: PlainTransformers, seqlen: int
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": config.width, "n_layer": config.layers}
    sizes |= {"n_head": config.heads, "vocab_size": config.vocab_size, "n_positions": seqlen}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}  # theirs may lie outside of the vocabulary
    sizes |= {"attn_implementation": how.attention, "use_cache": False}
    settings = GPT2Config(**sizes)
    model: Any = GPT2LMHeadModel(settings).train()
    if how.checkpoint:
        # The new name of gradient_checkpointing_enable.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss
