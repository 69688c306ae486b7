"""One token through a Llama, in the lab's kernels over the weights of Transformers' own model.

    embed                                  the rows' lengths grow by 1
    for each layer
        qkv       norm, Q K V, rotary      writes q, and k, v into the cache
        decode    attention over the cache
        linear    output projection        added to x
        linear    norm, gate, up, SwiGLU
        linear    down projection          added to x
    linear        norm, logits

The matrices that multiply the same vector are stacked into one: a second copy of about half of the
weights. Nothing depends on a value on the CPU, so that a CUDA graph can hold the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LlamaStep:
    """Llama (Touvron et al., 2023): RMSNorm, rotary positions, SwiGLU, no biases.

    Weights are as in `LlamaForCausalLM` when it was given; later changes of it are not seen.

    Attributes:
        token: (batch,) int64, the newest token of each row.
        seqlens: (batch,) int32, tokens of each row in the cache; a call adds `token`.
        prompts: (batch,) int32, the part of them that was not generated.
        keys, values: a tensor (batch, length, kv_heads, head_dim) for each layer.
        output: (batch, length) int64, the tokens that calls have added.

    Raises:
        ValueError: the model is no Llama, or has an option that the step does not know.
    """

    def __init__(self, model: PreTrainedModel, batch: int, length: int) -> None:
        config: Any = model.config
        body: Any = model.get_decoder()
        if not self.fits(model):
            raise ValueError(
                f"there is no decode step for this {type(model).__name__}, only for a Llama with "
                "SwiGLU, without biases, and with rotary positions that do not change with the "
                'length: use cache="static" or "dynamic"'
            )
        self.eps, head_dim = config.rms_norm_eps, config.head_dim
        self.layers = [_llama_weights(layer, head_dim) for layer in body.layers]
        self.embedding = body.embed_tokens.weight.detach()  # (vocabulary, width)
        self.norm = body.norm.weight.detach()
        classifier: Any = model.get_output_embeddings()
        self.head = classifier.weight.detach()  # (vocabulary, width)
        # The model's own table of angles, so that scaled variants come out right.
        positions = torch.arange(length, device=model.device)[None]
        angles = body.rotary_emb(torch.zeros(1, device=model.device), positions)  # cos, sin
        self.cos, self.sin = (x[0, :, : head_dim // 2].float().contiguous() for x in angles)

        def zeros(*size: int, dtype: torch.dtype = model.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=model.device)

        self.token, self.output = (
            zeros(*size, dtype=torch.int64) for size in ((batch,), (batch, length))
        )
        self.seqlens, self.prompts = (zeros(batch, dtype=torch.int32) for _ in range(2))
        cache = len(self.layers), batch, length, config.num_key_value_heads, head_dim
        self.keys, self.values = zeros(*cache), zeros(*cache)
        self.x = zeros(batch, self.embedding.shape[1])
        self.q = zeros(batch, 1, config.num_attention_heads, head_dim)
        self.hidden = zeros(batch, config.intermediate_size)
        self.logits = zeros(batch, len(self.head))

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Return whether this step computes what the model computes."""
        config: Any = model.config
        known = type(model).__name__ == "LlamaForCausalLM" and config.hidden_act == "silu"
        known = known and not (config.attention_bias or config.mlp_bias)
        known = known and model.dtype != torch.float64
        return known and config.rope_parameters["rope_type"] in ("default", "linear", "llama3")

    def __call__(self) -> Tensor:
        """Take the newest tokens into the cache, and return the logits (batch, vocabulary)."""
        from labsupport.attention.kernels.decode import decode  # both define kernels
        from labsupport.models.generation.linear import embed, linear, qkv

        x, eps = self.x, self.eps
        embed(self.token, self.embedding, x, self.seqlens, self.prompts, self.output)
        for weights, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            norm, matrix = weights["norm_1"], weights["qkv"]
            qkv(x, matrix, norm, self.cos, self.sin, self.q, keys, values, self.seqlens, eps)
            mixed: Any = decode(self.q, keys, values, cache_seqlens=self.seqlens)
            linear(mixed, weights["out"], x, add=True)
            linear(x, weights["gate_up"], self.hidden, weights["norm_2"], eps, swiglu=True)
            linear(self.hidden, weights["down"], x, add=True)
        linear(x, self.head, self.logits, self.norm, eps)
        return self.logits


@torch.no_grad()
def _llama_weights(layer: Any, head_dim: int) -> dict[str, Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    halves = torch.cat(qkv).unflatten(0, (-1, 2, head_dim // 2))  # (heads, 2, head_dim / 2, width)
    pairs = torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight], dim=1)
    return {
        "norm_1": layer.input_layernorm.weight.detach(),
        "qkv": halves.transpose(1, 2).flatten(0, 2),
        "out": attention.o_proj.weight.detach(),
        "norm_2": layer.post_attention_layernorm.weight.detach(),
        "gate_up": pairs.flatten(0, 1),
        "down": mlp.down_proj.weight.detach(),
    }
