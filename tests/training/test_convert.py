"""With Transformers' weights a decoder computes what GPT-2 and Llama compute, and back."""

import pytest
import torch
import torch.nn.functional as F

from labsupport.training import from_transformers
from tests.models.tiny import tiny
from tests.training.decoders import assert_same_step, loss_and_gradients, shifted

INTERPOLATED = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
FAMILIES = {
    "gpt2": ("gpt2", {}),
    "gpt2, a classifier of its own": ("gpt2", {"tie_word_embeddings": False, "n_inner": 56}),
    "llama with grouped heads and biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "llama, interpolated": ("llama", {"rope_parameters": INTERPOLATED}),
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


def test_converted_weights_are_copies_in_the_models_dtype():
    hf = tiny("gpt2", dtype=torch.bfloat16)
    decoder = from_transformers(hf)
    before = decoder.embedding.weight.clone()
    with torch.no_grad():
        hf.get_input_embeddings().weight.zero_()
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    assert torch.equal(decoder.embedding.weight, before)
    assert decoder.head.weight is decoder.embedding.weight


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("mistral", {}, "MistralForCausalLM was given"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is relu"),
        ("llama", {"head_dim": 16}, "head_dim is 16"),
        ("llama", {"mlp_bias": True}, "attention_bias is False"),
        ("llama", {"rope_parameters": INTERPOLATED | {"rope_type": "dynamic"}}, "type dynamic"),
    ],
)
def test_models_that_a_decoder_cannot_compute_are_refused(family, options, said):
    with pytest.raises(ValueError, match=said):
        from_transformers(tiny(family, **options))
