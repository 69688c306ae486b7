"""Tiny models with random weights: the same each time, and small enough for every backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.attention.bias import causal_lower_right
from transformers import PreTrainedTokenizerFast

VOCABULARY = 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "max_position_embeddings": 1024,
}
_DECODER = _COMMON | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}


_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, _GPT2 | {"bos_token_id": 1, "eos_token_id": None}),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, _DECODER),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, _DECODER | {"sliding_window": 5}),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, _COMMON),
}


def tiny(family: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model of two layers, 4 heads of 8, in eval mode, on the CPU, with "eager" attention.

    Args:
        family: "gpt2"; "llama" (2 key/value heads); "mistral" (a window of 5 in each layer); "bert"
            (sees both directions).
        options: further entries of the config.
    """
    torch.manual_seed(0)
    model_class, config_class, sizes = _FAMILIES[family]
    model = model_class(config_class(**({"attn_implementation": "eager"} | sizes | options)))
    # Initial weights of 0.02 give nearly uniform attention, which hides a wrong mask.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.to(dtype).eval()


def tokens(batch: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """(batch, length) token ids, none of them the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def own(module, query, key, value, attention_mask, scaling, is_causal, by=0.0, **kwargs):
    """An attention function of one's own, whose output is wrong by the factor 1 + `by`."""
    mask = attention_mask
    if mask is None and is_causal:
        mask = causal_lower_right(query.shape[2], key.shape[2])
    options = {"attn_mask": mask, "scale": scaling, "enable_gqa": True}
    out = F.scaled_dot_product_attention(query, key, value, **options)
    return (1 + by) * out.transpose(1, 2)


def padding(batch: int, length: int, side: str) -> torch.Tensor | None:
    """An attention mask (batch, length) of 0 and 1.

    Args:
        side: "none" (None), "ones", "left", "right", "lengths" (left and right, all different),
            "holes" (zeros between ones), "empty" (the first row is nothing but padding).
    """
    row, column = torch.arange(batch)[:, None], torch.arange(length)
    valid = {
        "none": None,
        "ones": row + column >= 0,
        "left": column >= 2 * row,
        "right": column < length - 2 * row,
        "lengths": (column >= row) & (column < length - row - 1),
        "holes": (column < 2 + row) | (column >= 4 + row),
        "empty": (row > 0).expand(batch, length),
    }[side]
    return None if valid is None else valid.long()


ROWS = [[5, 9, 17, 3, 44, 21], [7, 8], [11, 2, 3, 4, 9]]
TEXTS = [" ".join(f"w{token:02}" for token in row) for row in ROWS]


def words(vocabulary: int = VOCABULARY, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose token 7 is the word 'w07'."""
    table = {f"w{n:02}": n for n in range(vocabulary)}
    made = Tokenizer(models.WordLevel(table, unk_token="w00"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w00", **special)


def lively(family: str, *, noise: float = 0.3, **options: Any) -> Any:
    """A tiny model that does not repeat itself, with trained norms and biases."""
    deep = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    model = tiny(family, **({"tie_word_embeddings": False} | deep | options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # 1 and 0 would hide a step without them
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return model
