"""The likelihood of a text, chunk by chunk, against the model's own loss."""

import math

import pytest
import torch

from labsupport.models.likelihood import negative_log_likelihood
from labsupport.models.sources.text import python_topics, source_text, tokens_of
from tests.models.tiny import DECODERS, VOCABULARY, tiny


def own_loss(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_it_is_the_model_s_own_loss_for_any_chunk(family, chunk):
    model, ids = tiny(family), torch.randint(VOCABULARY, (2, 40))
    assert negative_log_likelihood(model, ids, chunk=chunk) == pytest.approx(
        own_loss(model, ids), rel=1e-6
    )


def test_in_bfloat16_it_is_still_the_model_s_own_loss():
    model, ids = tiny("llama", dtype=torch.bfloat16), torch.randint(VOCABULARY, (1, 40))
    assert negative_log_likelihood(model, ids, chunk=16) == pytest.approx(
        own_loss(model, ids), rel=1e-3
    )


def test_real_text_is_likelier_than_its_words_shuffled(smollm2):
    ids = tokens_of(smollm2.tokenizer, python_topics()["assert"], 100)
    real = negative_log_likelihood(smollm2.model, ids)
    assert real == pytest.approx(own_loss(smollm2.model, ids), rel=1e-5)
    shuffled = ids[:, torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    assert real < 4 < negative_log_likelihood(smollm2.model, shuffled) < math.log(49_152)


def test_not_more_than_a_chunk_of_logits_exists_at_a_time(smollm2):
    from labsupport.profiling import largest_tensor

    ids = tokens_of(smollm2.tokenizer, source_text("argparse"), 200)
    largest = largest_tensor(lambda: negative_log_likelihood(smollm2.model, ids, chunk=50))
    assert largest.nbytes == 50 * 49_152 * 4


def test_ids_of_another_kind_are_refused():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"ids \(5,\) must be \(batch, N\)"):
        negative_log_likelihood(model, torch.arange(5))
    with pytest.raises(ValueError, match="at least 2"):
        negative_log_likelihood(model, torch.ones(1, 1, dtype=torch.long))
    with pytest.raises(TypeError, match="must be integers"):
        negative_log_likelihood(model, torch.ones(1, 5))


def test_a_model_that_changes_its_logits_afterwards_is_refused():
    import transformers as hf

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    config = hf.Gemma2Config(
        **sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        negative_log_likelihood(hf.Gemma2ForCausalLM(config), torch.arange(5)[None])
