"""Tiny models to put under a policy or a tracker, and a way to see what a kernel is given."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from labsupport.attention import attention, flash_attention

# Roundings on the way through 2 blocks, each of relative size u at most: weights and output of
# 2 norms and 4 matmuls, P, attention's output, activation, 2 additions; and 6 outside of them.
ROUNDINGS = 2 * (2 * 2 + 4 * 2 + 3 + 2) + 6
VOCABULARY, WIDTH, HEADS, TOKENS = 97, 32, 4, 16


def gpt2(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
        "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "sdpa",
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(settings | options)))


def llama(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "pad_token_id": 0, "attn_implementation": "sdpa",
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | options)))


def tokens():
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


class SeenByKernels(TorchFunctionMode):
    """The dtypes of q, k and v of each call of an attention kernel.

    It is entered outside of the model, so it sees what a policy within hands on.
    """

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, attention, flash_attention):
            names = ("query", "key", "value")[len(args) :]
            self.dtypes.append(tuple(x.dtype for x in (*args[:3], *map(kwargs.get, names))))
        return func(*args, **kwargs)


def relative_error(out, right):
    out, right = out.detach().double(), right.detach().double()
    return float((out - right).norm() / right.norm())


def no_mode_is_left():
    return torch._C._len_torch_function_stack() == 0
