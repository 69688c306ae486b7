"""With Transformers' weights a decoder computes what GPT-2 and Llama compute, and back."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labsupport.training import Decoder, MemoryOptions, from_transformers, to_transformers
from tests.models.tiny import tiny, tokens
from tests.training.decoders import SHAPES, assert_same_step, loss_and_gradients, model, shifted

FAMILIES = {
    "gpt2": ("gpt2", {}),
    "gpt2, a classifier of its own": ("gpt2", {"tie_word_embeddings": False, "n_inner": 56}),
    "llama with grouped heads": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, another base": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "llama, interpolated": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    ),
}


def transformers_model(name):
    family, options = FAMILIES[name]
    hf = tiny(family, **options)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 1:  # biases of 0 and norms of 1 would hide that they are lost
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return hf


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name):
    hf = transformers_model(name)
    decoder = from_transformers(hf)
    ids, labels = shifted(2, 30)
    torch.testing.assert_close(decoder(ids), hf(ids).logits, rtol=0, atol=2e-5)

    # The same model again, with its gradients for weights: they find their places in the same way.
    loss = F.cross_entropy(hf(ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    mine = loss_and_gradients(decoder, ids, labels)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(parameter.grad)
    theirs = dict(from_transformers(hf).named_parameters())
    assert_same_step(mine, (loss.detach(), theirs))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_comes_back_from_a_decoder_as_it_was(name):
    hf = transformers_model(name)
    back = to_transformers(from_transformers(hf))
    assert type(back) is type(hf)
    assert back.state_dict().keys() == hf.state_dict().keys()
    assert all(torch.equal(back.state_dict()[key], t) for key, t in hf.state_dict().items())
    ids = tokens(2, 30)
    torch.testing.assert_close(back(ids).logits, hf(ids).logits, rtol=0, atol=1e-5)
    tied = hf.config.tie_word_embeddings
    assert (back.lm_head.weight is back.get_input_embeddings().weight) == tied


def test_interleaved_pairs_are_permuted_for_transformers():
    decoder, ids = model("llama, interleaved"), tokens(1, 30)
    hf = to_transformers(decoder)
    torch.testing.assert_close(hf(ids).logits, decoder(ids), rtol=0, atol=2e-5)
    # It is the permutation that does it: without, the same weights say something else.
    decoder = Decoder(replace(decoder.config, rope_interleaved=False))
    decoder.load_state_dict(model("llama, interleaved").state_dict())
    assert (hf(ids).logits - decoder(ids)).abs().max() > 0.1


def test_converted_weights_are_copies_in_the_models_dtype():
    hf = tiny("gpt2", dtype=torch.bfloat16)
    decoder = from_transformers(hf, savings=MemoryOptions(checkpoint=True))
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    assert decoder.savings.checkpoint
    before = decoder.embedding.weight.clone()
    with torch.no_grad():
        hf.get_input_embeddings().weight.zero_()
    assert torch.equal(decoder.embedding.weight, before)
    assert decoder.head.weight is decoder.embedding.weight


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("mistral", {}, "MistralForCausalLM was given"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
        ("llama", {"head_dim": 16}, "head_dim is 16"),
        ("llama", {"mlp_bias": True}, "attention_bias is False"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type dynamic",
        ),
    ],
)
def test_models_that_a_decoder_cannot_compute_are_refused(family, options, said):
    with pytest.raises(ValueError, match=said):
        from_transformers(tiny(family, **options))


def test_decoders_that_transformers_has_no_model_for_are_refused():
    with pytest.raises(ValueError, match=r"Llama.*norm is 'layer' and not 'rms'"):
        to_transformers(model("gpt2 with rotary positions"))
    with pytest.raises(ValueError, match=r"GPT-2.*key_heads is 2 and not 4.*state_dict\(\)"):
        to_transformers(Decoder(replace(SHAPES["gpt2"], kv_heads=2)))
