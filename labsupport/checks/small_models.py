"""Small models of random weights, into which a check puts a student's attention function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

NAME = "labsupport_check"


@lru_cache(maxsize=4)
def small_models(seed: int = 0) -> dict[str, Any]:
    """A GPT-2, a Llama with grouped heads and a BERT; in float64, with 31 tokens.

    GPT-2 scales the scores of its second layer by half as much as usual, so that a function that
    ignores `scaling` shows.
    """
    from transformers import (
        BertConfig,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    sizes: dict[str, Any] = {
        "vocab_size": 31,
        "initializer_range": 0.3,  # large enough that attention matters
        "attn_implementation": "eager",
    }
    usual = sizes | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models: dict[str, Any] = {
            "GPT-2": GPT2LMHeadModel(
                GPT2Config(
                    **sizes,
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    n_positions=64,
                    bos_token_id=0,
                    eos_token_id=0,
                    scale_attn_by_inverse_layer_idx=True,
                )
            ),
            "Llama": LlamaForCausalLM(LlamaConfig(**usual, num_key_value_heads=2)),
            "BERT": BertModel(BertConfig(**usual)),
        }
    return {name: model.double().eval() for name, model in models.items()}


def decode(model: Any, attention: Callable[..., Any] | str) -> Tensor:
    """Logits of ten tokens that arrive as 5, 4 and 1, with a key/value cache: (2, 10, vocab)."""
    ids = torch.arange(20).view(2, 10) * 7 % 31
    cache, logits = None, []
    with use_attention(model, attention), torch.no_grad():
        for piece in ids.split((5, 4, 1), dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
    return torch.cat(logits, dim=1)


@contextmanager
def use_attention(model: Any, attention: Callable[..., Any] | str) -> Iterator[None]:
    """Let a model compute with an attention function, or one that Transformers knows by name.

    The function gets a mask only where there is padding. Without padding it gets None, and
    causality is its own business.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = attention if isinstance(attention, str) else NAME
    if not isinstance(attention, str):
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, _padding_only)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _padding_only(**arguments: Any) -> Tensor | None:
    """The mask of a layer, or None where it is nothing but bottom-right causal, or all True."""
    from transformers.masking_utils import sdpa_mask

    skips: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(**{**arguments, **skips})
    if mask is None:
        return None
    n_q, n_k = mask.shape[-2:]
    causal = torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril(n_k - n_q)
    return None if mask.all() or torch.equal(mask, causal.expand_as(mask)) else mask
