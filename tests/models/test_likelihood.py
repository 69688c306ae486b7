"""The likelihood of a text, chunk by chunk, against the model's own loss."""

import math

import pytest
import torch
import transformers as hf

from labsupport.models.likelihood import negative_log_likelihood
from labsupport.models.sources.text import python_topics, source_text, tokens_of
from tests.models.tiny import DECODERS, VOCABULARY, tiny, tokens


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


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
DECODER = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Gemma2ForCausalLM", DECODER | {"head_dim": 8}),  # caps its logits
        ("GraniteForCausalLM", DECODER | {"logits_scaling": 2.0}),
        ("CohereForCausalLM", DECODER),  # scales them
        ("BertLMHeadModel", SIZES | {"num_attention_heads": 4, "is_decoder": True}),  # two layers
    ],
)
def test_a_model_whose_head_is_more_than_one_matrix_is_refused(name, sizes):
    model_class = getattr(hf, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, pad_token_id=0)).eval()
    with pytest.raises(ValueError, match=f"{name} does more than one matrix product"):
        negative_log_likelihood(model, torch.arange(5)[None])


def test_a_model_without_a_head_or_with_an_encoder_is_refused():
    t5 = hf.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    for model in (tiny("llama").model, hf.T5ForConditionalGeneration(t5)):
        with pytest.raises(ValueError, match="is no causal language model"):
            negative_log_likelihood(model.eval(), torch.arange(5)[None])


def test_texts_beyond_the_positions_or_the_vocabulary_are_refused():
    model = tiny("gpt2", n_positions=16)
    negative_log_likelihood(model, torch.arange(16)[None])
    with pytest.raises(ValueError, match="the text has 17 tokens, and the model has 16 positions"):
        negative_log_likelihood(model, torch.arange(17)[None])
    with pytest.raises(ValueError, match="a token 61, and the model's embedding has 61 rows"):
        negative_log_likelihood(model, torch.tensor([[3, 61]]))


def test_dropout_that_is_active_is_refused():
    ids = torch.arange(9)[None]
    with pytest.raises(ValueError, match=r"its dropout is active: model.eval\(\)"):
        negative_log_likelihood(tiny("gpt2").train(), ids)
    assert negative_log_likelihood(tiny("llama").train(), ids) == pytest.approx(
        negative_log_likelihood(tiny("llama"), ids)
    )


def test_the_model_runs_once():
    from labsupport.models import attention_used, set_attention

    model = tiny("llama")
    set_attention(model, "flash")
    negative_log_likelihood(model, torch.arange(9)[None], chunk=2)
    assert [use.calls for use in attention_used(model)] == [1, 1]
    assert not model.base_model._forward_hooks
    assert not model.lm_head._forward_hooks


def test_a_model_without_dropout_is_evaluated_in_training_mode_too():
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = tiny("gpt2", **none)
    ids = tokens(1, 12)
    assert negative_log_likelihood(model.train(), ids) == negative_log_likelihood(model.eval(), ids)
