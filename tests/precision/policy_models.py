"""Tiny models to put under a policy or a tracker, and a way to see what a kernel is given."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
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


class Block(nn.Module):
    """A hand-written block: its projections stand free, it calls the kernel itself."""

    def __init__(self, ours=False):
        super().__init__()
        self.ours = ours
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        if self.ours:
            out = attention(q, k, v, causal=True)
        else:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, value=v, is_causal=True).transpose(1, 2)
        x = x + self.proj(out.flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SeenByKernels(TorchFunctionMode):
    """The dtypes of q, k, v and the mask of each call of an attention kernel.

    It is entered outside of the model, so it sees what a policy within hands on.
    """

    def __init__(self):
        super().__init__()
        self.dtypes, self.mask = [], None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, attention, flash_attention):
            names = ("query", "key", "value")[len(args) :]
            self.dtypes.append(tuple(x.dtype for x in (*args[:3], *map(kwargs.get, names))))
            self.mask = kwargs.get("attn_mask")
        return func(*args, **kwargs)


def hidden(seed=0):
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def relative_error(out, right):
    out, right = out.detach().double(), right.detach().double()
    return float((out - right).norm() / right.norm())


def no_mode_is_left():
    return torch._C._len_torch_function_stack() == 0
