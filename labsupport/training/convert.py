"""Weights from Transformers' GPT2LMHeadModel and LlamaForCausalLM.

Both families compute what `Decoder` computes, but name and store it otherwise. GPT-2 keeps its
matrices transposed, (in, out), and queries, keys and values in one. Llama's rotary pairs are half a
head apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from labsupport.training.config import DecoderConfig
from labsupport.training.decoder import Decoder

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

# Their layer: ours, N the block's number. Of several, one lies below the other in theirs.
_LAYERS = {
    "gpt2": {
        "transformer.wte": "embedding",
        "transformer.wpe": "position_embedding",
        "transformer.h.N.ln_1": "blocks.N.attention_norm",
        "transformer.h.N.attn.c_attn": (
            "blocks.N.attention.query blocks.N.attention.key blocks.N.attention.value"
        ),
        "transformer.h.N.attn.c_proj": "blocks.N.attention.out",
        "transformer.h.N.ln_2": "blocks.N.mlp_norm",
        "transformer.h.N.mlp.c_fc": "blocks.N.mlp.up",
        "transformer.h.N.mlp.c_proj": "blocks.N.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    "llama": {
        "model.embed_tokens": "embedding",
        "model.layers.N.input_layernorm": "blocks.N.attention_norm",
        "model.layers.N.self_attn.q_proj": "blocks.N.attention.query",
        "model.layers.N.self_attn.k_proj": "blocks.N.attention.key",
        "model.layers.N.self_attn.v_proj": "blocks.N.attention.value",
        "model.layers.N.self_attn.o_proj": "blocks.N.attention.out",
        "model.layers.N.post_attention_layernorm": "blocks.N.mlp_norm",
        "model.layers.N.mlp.gate_proj": "blocks.N.mlp.gate",
        "model.layers.N.mlp.up_proj": "blocks.N.mlp.up",
        "model.layers.N.mlp.down_proj": "blocks.N.mlp.down",
        "model.norm": "norm",
        "lm_head": "head",
    },
}


def from_transformers(model: GPT2LMHeadModel | LlamaForCausalLM) -> Decoder:
    """Return a decoder with copies of the model's weights, in their dtype and on their device.

    A Decoder has no dropout, and GPT-2 has 0.1 by default: compare in eval mode.

    Raises:
        ValueError: the model is of another family, or computes what a Decoder cannot.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4)).eval()
    >>> tokens = torch.arange(8)[None]
    >>> torch.allclose(from_transformers(model)(tokens), model(tokens).logits, atol=1e-5)
    True
    """
    config, family = _our_config(model), model.config.model_type
    layers = {
        theirs.replace("N", str(number)): ours.replace("N", str(number))
        for number in range(config.layers)
        for theirs, ours in _LAYERS[family].items()
    }
    with torch.device("meta"):  # draws no weights that would be thrown away
        decoder = Decoder(config)
    weights, state = model.state_dict(), {}
    for theirs, ours in layers.items():
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name in ours.split()]
            if names[0] in decoder.state_dict():
                whole = weights[f"{theirs}.{kind}"]
                if kind == "weight" and ".c_" in theirs:
                    whole = whole.T  # GPT-2's are (in, out)
                for name, part in zip(names, whole.chunk(len(names)), strict=True):
                    state[name] = part.clone(memory_format=torch.contiguous_format)
    decoder.load_state_dict(state, assign=True)
    if config.tied:
        decoder.head.weight = decoder.embedding.weight
    return decoder.train(model.training)


def _our_config(model: Any) -> DecoderConfig:
    theirs: Any = model.config
    if theirs.model_type not in _LAYERS or not hasattr(model, "lm_head"):
        raise ValueError(
            f"a {type(model).__name__} was given, but only GPT2LMHeadModel and LlamaForCausalLM "
            "can become a Decoder."
        )
    config: dict[str, Any] = {
        "vocab_size": theirs.vocab_size,
        "width": theirs.hidden_size,
        "layers": theirs.num_hidden_layers,
        "heads": theirs.num_attention_heads,
        "max_positions": theirs.max_position_embeddings,
        "tied": model.lm_head.weight is model.get_input_embeddings().weight,
    }
    if theirs.model_type == "gpt2":
        config |= {"mlp_width": theirs.n_inner, "norm_eps": theirs.layer_norm_epsilon}
        _require(theirs, "activation_function", "gelu_new", "gelu_pytorch_tanh")
        _require(theirs, "scale_attn_weights", True)
        _require(theirs, "scale_attn_by_inverse_layer_idx", False)
        _require(theirs, "add_cross_attention", False)
        return DecoderConfig(positions="learned", **config)
    _require(theirs, "hidden_act", "silu", "swish")
    _require(theirs, "head_dim", None, theirs.hidden_size // theirs.num_attention_heads)
    _require(theirs, "attention_bias", theirs.mlp_bias)
    rope: dict[str, Any] = {"rope_type": "default"} | dict(theirs.rope_parameters or {})
    if rope["rope_type"] not in ("default", "linear"):
        raise ValueError(f"a Decoder cannot compute this model: its rope_type {rope['rope_type']}")
    config |= {"kv_heads": theirs.num_key_value_heads, "mlp_width": theirs.intermediate_size}
    config |= {"norm_eps": theirs.rms_norm_eps, "bias": theirs.mlp_bias}
    config |= {"rope_base": rope["rope_theta"], "rope_scaling": rope.get("factor", 1.0)}
    return DecoderConfig(norm="rms", mlp="swiglu", **config)


def _require(theirs: Any, name: str, *allowed: Any) -> None:
    value = getattr(theirs, name, None)
    if value not in allowed:
        raise ValueError(
            f"a Decoder cannot compute this model: its {name} is {value}, not {allowed[-1]}."
        )
