"""Weights from and to Transformers' GPT2LMHeadModel and LlamaForCausalLM.

Both families compute what `Decoder` computes, but name and store it otherwise. GPT-2 keeps its
matrices transposed, (in, out), and queries, keys and values in one. Llama's rotary pairs are half a
head apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.attention.rotary import permute_rotary_rows
from labsupport.training.config import DecoderConfig, MemoryOptions
from labsupport.training.decoder import Decoder

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

# Their layer: ours, of which several lie below one another in theirs. {} is the block's number.
_GPT2 = {
    "transformer.wte": ("embedding",),
    "transformer.wpe": ("position_embedding",),
    "transformer.h.{}.ln_1": ("blocks.{}.attention_norm",),
    "transformer.h.{}.attn.c_attn": tuple(
        f"blocks.{{}}.attention.{name}" for name in ("query", "key", "value")
    ),
    "transformer.h.{}.attn.c_proj": ("blocks.{}.attention.out",),
    "transformer.h.{}.ln_2": ("blocks.{}.mlp_norm",),
    "transformer.h.{}.mlp.c_fc": ("blocks.{}.mlp.up",),
    "transformer.h.{}.mlp.c_proj": ("blocks.{}.mlp.down",),
    "transformer.ln_f": ("norm",),
    "lm_head": ("head",),
}
_LLAMA = {
    "model.embed_tokens": ("embedding",),
    "model.layers.{}.input_layernorm": ("blocks.{}.attention_norm",),
    "model.layers.{}.self_attn.q_proj": ("blocks.{}.attention.query",),
    "model.layers.{}.self_attn.k_proj": ("blocks.{}.attention.key",),
    "model.layers.{}.self_attn.v_proj": ("blocks.{}.attention.value",),
    "model.layers.{}.self_attn.o_proj": ("blocks.{}.attention.out",),
    "model.layers.{}.post_attention_layernorm": ("blocks.{}.mlp_norm",),
    "model.layers.{}.mlp.gate_proj": ("blocks.{}.mlp.gate",),
    "model.layers.{}.mlp.up_proj": ("blocks.{}.mlp.up",),
    "model.layers.{}.mlp.down_proj": ("blocks.{}.mlp.down",),
    "model.norm": ("norm",),
    "lm_head": ("head",),
}


def from_transformers(
    model: GPT2LMHeadModel | LlamaForCausalLM, *, savings: MemoryOptions | None = None
) -> Decoder:
    """Return a decoder with copies of the model's weights, in their dtype and on their device.

    A Decoder has no dropout, and GPT-2 has 0.1 unless told otherwise: compare in eval mode.

    Raises:
        ValueError: the model is of another family, or computes what a Decoder cannot.
    """
    config = _our_config(model)
    with torch.device("meta"):  # draws no weights that would be thrown away
        decoder = Decoder(config, savings)
    theirs: dict[str, Tensor] = model.state_dict()
    state = {}
    for name, names, turned in _pairs(config):
        if names[0] in decoder.state_dict():
            whole = theirs[name].T if turned else theirs[name]
            state |= zip(names, (part.clone() for part in whole.chunk(len(names))), strict=True)
    decoder.load_state_dict(
        {name: tensor.contiguous() for name, tensor in state.items()}, assign=True
    )
    if config.tied:
        decoder.head.weight = decoder.embedding.weight
    return decoder.train(model.training)


def to_transformers(decoder: Decoder) -> GPT2LMHeadModel | LlamaForCausalLM:
    """Return a Transformers model with copies of the decoder's weights, in eval mode.

    Learned positions make GPT-2, rotary ones Llama; interleaved pairs are permuted, as Llama's are
    half a head apart.

    Raises:
        ValueError: Transformers' family computes something else than this decoder.
    """
    config = decoder.config
    with torch.device("meta"):
        model = _their_model(config)
    ours, state = decoder.state_dict(), {}
    for name, names, turned in _pairs(config):
        if names[0] in ours:
            parts = [ours[own] for own in names]
            if config.rope_interleaved and ".attention.query." in names[0]:
                parts = [permute_rotary_rows(parts[0], config.heads, to_interleaved=False)]
            if config.rope_interleaved and ".attention.key." in names[0]:
                parts = [permute_rotary_rows(parts[0], config.key_heads, to_interleaved=False)]
            whole = torch.cat(parts)  # a copy, also of one part
            state[name] = whole.T.contiguous() if turned else whole
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    if config.positions == "rotary":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        # Its frequencies are in no state dict, and on the meta device they are nothing.
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(ours["norm.weight"].device)
    return model.eval()


def _pairs(config: DecoderConfig) -> Iterator[tuple[str, list[str], bool]]:
    """Yield their tensor, ours that make it up, and whether theirs is stored transposed."""
    gpt2 = config.positions == "learned"
    for theirs, ours in (_GPT2 if gpt2 else _LLAMA).items():
        for layer in range(config.layers if "{}" in theirs else 1):
            for kind in ("weight", "bias"):
                name = f"{theirs.format(layer)}.{kind}"
                turned = gpt2 and kind == "weight" and ".c_" in name
                yield name, [f"{own.format(layer)}.{kind}" for own in ours], turned


# --- configurations -------------------------------------------------------------------------------

# Our field: theirs.
_COMMON = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}
_OWN = {
    "gpt2": {"mlp_width": "n_inner", "norm_eps": "layer_norm_epsilon"},
    "llama": {
        "kv_heads": "num_key_value_heads",
        "mlp_width": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "bias": "mlp_bias",
    },
}


def _our_config(model: Any) -> DecoderConfig:
    theirs = model.config
    family = theirs.model_type if hasattr(model, "lm_head") else None
    if family not in _OWN:
        raise ValueError(
            f"a {type(model).__name__} was given, but only GPT2LMHeadModel and LlamaForCausalLM "
            "can become a Decoder."
        )
    config: dict[str, Any] = {
        ours: getattr(theirs, name) for ours, name in (_COMMON | _OWN[family]).items()
    }
    config["tied"] = model.lm_head.weight is model.get_input_embeddings().weight
    if family == "gpt2":
        _require(theirs, "activation_function", ("gelu_new", "gelu_pytorch_tanh"))
        _require(theirs, "scale_attn_weights", (True,))
        _require(theirs, "scale_attn_by_inverse_layer_idx", (False,))
        _require(theirs, "add_cross_attention", (False,))
        return DecoderConfig(positions="learned", **config)
    _require(theirs, "hidden_act", ("silu", "swish"))
    _require(theirs, "head_dim", (None, theirs.hidden_size // theirs.num_attention_heads))
    _require(theirs, "attention_bias", (theirs.mlp_bias,))
    rope: dict[str, Any] = {"rope_type": "default"} | dict(theirs.rope_parameters or {})
    if rope["rope_type"] not in ("default", "linear"):
        raise ValueError(f"a Decoder cannot compute this model: its rope_type {rope['rope_type']}")
    base, scaling = rope["rope_theta"], rope.get("factor", 1.0)
    return DecoderConfig(norm="rms", mlp="swiglu", rope_base=base, rope_scaling=scaling, **config)


def _require(theirs: Any, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(theirs, name, None)
    if value not in allowed:
        raise ValueError(
            f"a Decoder cannot compute this model: its {name} is {value}, not {allowed[-1]}."
        )


def _their_model(config: DecoderConfig) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    gpt2 = config.positions == "learned"
    wanted: dict[str, Any] = {"norm": "rms", "mlp": "swiglu"}
    if gpt2:
        wanted = {"norm": "layer", "mlp": "gelu", "bias": True, "key_heads": config.heads}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"with {config.positions} positions, Transformers has "
                f"{'GPT-2' if gpt2 else 'Llama'}, but {name} is {getattr(config, name)!r} and not "
                f"{value!r}. To keep this decoder, save its state_dict()."
            )
    fields = _COMMON | _OWN["gpt2" if gpt2 else "llama"]
    theirs: dict[str, Any] = {name: getattr(config, ours) for ours, name in fields.items()}
    theirs |= {"tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None}
    if gpt2:
        theirs |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**theirs))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_scaling != 1:
        rope |= {"rope_type": "linear", "factor": config.rope_scaling}
    theirs |= {"num_key_value_heads": config.key_heads, "intermediate_size": config.inner_width}
    theirs |= {"rope_parameters": rope, "attention_bias": config.bias}
    return LlamaForCausalLM(LlamaConfig(**theirs))
