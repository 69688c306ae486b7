"""One token through a Llama, written over the weights of Transformers' own model.

A step is called as

    logits = step(token, position, attend)

with `token` (batch,), `position` (batch,) and a function `attend(layer, q, k, v)` that keeps the
cache: it takes q (batch, heads, head_dim) and the token's own k and v (batch, kv_heads, head_dim),
and gives the attention output (batch, heads * head_dim). The logits are (batch, vocabulary).

Nothing here depends on a value on the GPU, and all shapes are fixed: so a step can be compiled as
one graph. Matrices that multiply the same vector (Q, K, V; gate and up) are stacked into one, a
second copy of about half of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LlamaStep:
    """Llama (Touvron et al., 2023): RMSNorm, rotary positions, SwiGLU, no biases.

    Weights are as in `LlamaForCausalLM` when it was given; later changes of it are not seen. The
    logits are for positions below `length`.

    Raises:
        ValueError: the model is no Llama, or has an option that the step does not know.
    """

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        config: Any = model.config
        body: Any = model.get_decoder()
        if not self.fits(model):
            raise ValueError(
                f"there is no decode step for this {type(model).__name__}, only for a Llama with "
                "SwiGLU, without biases, and with rotary positions that do not change with the "
                'length: use cache="static" or "dynamic"'
            )
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        self.layers = [_llama_weights(layer) for layer in body.layers]
        heads = (config.num_attention_heads, self.kv_heads, self.kv_heads)
        self.sizes = [count * self.head_dim for count in heads]
        self.eps = config.rms_norm_eps
        self.embedding = body.embed_tokens.weight.detach()  # (vocabulary, dim)
        self.norm = body.norm.weight.detach()
        classifier: Any = model.get_output_embeddings()
        self.head = classifier.weight.detach()  # (vocabulary, dim)
        # The model's own table of angles, so that scaled variants come out right.
        positions = torch.arange(length, device=model.device)[None]
        cos, sin = body.rotary_emb(self.embedding[:1], positions)
        self.cos, self.sin = cos[0].detach(), sin[0].detach()  # (length, head_dim)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Return whether this step computes what the model computes."""
        config: Any = model.config
        known = type(model).__name__ == "LlamaForCausalLM" and config.hidden_act == "silu"
        known = known and not config.attention_bias and not config.mlp_bias
        return known and config.rope_parameters["rope_type"] in ("default", "linear", "llama3")

    def __call__(self, token: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """(batch,), (batch,) -> logits (batch, vocabulary)."""
        x = F.embedding(token, self.embedding)  # (batch, dim)
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        for index, weights in enumerate(self.layers):
            h = self._normalized(x, weights["norm_1"])
            q, k, v = (
                part.unflatten(-1, (-1, self.head_dim))  # (batch, heads, head_dim)
                for part in F.linear(h, weights["qkv"]).split(self.sizes, dim=-1)
            )
            mixed = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + F.linear(mixed, weights["out"])
            h = self._normalized(x, weights["norm_2"])
            gate, up = F.linear(h, weights["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, weights["down"])
        return F.linear(self._normalized(x, self.norm), self.head)

    def _normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle (rotary positions, Su et al., 2021).

    Args:
        x: (..., head_dim).
        cos, sin: of the angles, broadcast against `x`; both halves hold the same angles.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@torch.no_grad()
def _llama_weights(layer: Any) -> dict[str, Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return {
        "norm_1": layer.input_layernorm.weight.detach(),
        "qkv": torch.cat(qkv),
        "out": attention.o_proj.weight.detach(),
        "norm_2": layer.post_attention_layernorm.weight.detach(),
        "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight.detach(),
    }
