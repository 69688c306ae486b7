"""The models that the recorded runs measure, and what bounds their speed.

Only shapes matter for speed, so the weights are random: what these models write is nonsense. Sizes
come from the device: a CPU gets models that keep the same code busy for seconds.

What a forward computes, in FLOPs (a multiplication and an addition are two), for `tokens` = batch x
seqlen, causal:

    linear layers   2 x their weights x tokens              (embedding look-ups compute nothing)
    last layer      2 x dim x vocabulary x batch            (the last position alone, in a prefill)
    attention       layers x batch x heads x 2 x seqlen^2 x head_dim
                    (two products of 2 x seqlen^2 x head_dim, of which causality needs half)

What a decode step reads: every weight once, and the keys and values so far of every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Width, MLP width, layers, query heads, key heads, vocabulary.
LLAMAS = {
    "110M": (768, 2048, 12, 12, 12, 32_000),  # stories110M (llama2.c)
    "1B": (2048, 8192, 16, 32, 8, 128_256),  # Llama 3.2 1B
    "tiny": (64, 128, 2, 4, 2, 256),  # a CPU runs it thousands of times a minute
}


def llama(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama of one of `LLAMAS`; on a CPU always the tiny one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, mlp, layers, heads, kv_heads, vocabulary = LLAMAS[
        size if device.type == "cuda" else "tiny"
    ]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with _made_on(device, dtype):
        return LlamaForCausalLM(config).eval()


def gpt2(device: torch.device, *, medium: bool, length: int) -> Any:
    """GPT-2 medium's shape (345 million weights), or a tiny one, float32, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50_257}
    if not medium:
        size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}
    # Attention dropout is not part of every backend, and the other two only add noise here.
    none: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(**size, **none, **ends, n_positions=length)
    with _made_on(device, torch.float32):
        return GPT2LMHeadModel(config)


def random_ids(model: Any, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen) tokens, the same for the same shape."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, seqlen), generator=generator)
    return ids.to(model.device)


def decode_bytes(model: Any, batch: int, cached: float) -> float:
    """Bytes that one decode step must read: the weights, and `cached` keys and values a row.

    Tied input and output embeddings are one matrix, and all of it is read for the output.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    embeddings = model.get_input_embeddings().weight
    if embeddings is not model.get_output_embeddings().weight:
        weights -= embeddings.numel()  # of these, one row is read
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return (weights + batch * cached * cache) * model.dtype.itemsize


@contextmanager
def _made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make tensors on a device and in a dtype, from a fixed seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)
