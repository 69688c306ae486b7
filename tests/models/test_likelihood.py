"""The likelihood of a text, chunk by chunk, against the model's own loss."""

import math

import pytest
import torch
import transformers as hf

from labsupport.models import attention_used, set_attention
from labsupport.models.likelihood import negative_log_likelihood
from labsupport.models.sources.text import python_topics, source_text, tokens_of
from labsupport.profiling import largest_tensor
from tests.models.tiny import DECODERS, VOCABULARY, tiny, tokens


def own_loss(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("family", DECODERS)
def test_it_is_the_model_s_own_loss_for_any_chunk_and_dtype(family):
    ids = torch.randint(VOCABULARY, (2, 40))
    for chunk, dtype, rel in [
        (1, torch.float32, 1e-6),
        (7, torch.float32, 1e-6),
        (512, torch.bfloat16, 1e-3),
    ]:
        model = tiny(family, dtype=dtype)
        expected = pytest.approx(own_loss(model, ids), rel=rel)
        assert negative_log_likelihood(model, ids, chunk=chunk) == expected


def test_real_text_is_likelier_than_its_words_shuffled(smollm2):
    ids = tokens_of(smollm2.tokenizer, python_topics()["assert"], 100)
    real = negative_log_likelihood(smollm2.model, ids)
    assert real == pytest.approx(own_loss(smollm2.model, ids), rel=1e-5)
    shuffled = ids[:, torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    assert real < 4 < negative_log_likelihood(smollm2.model, shuffled) < math.log(49_152)


def test_not_more_than_a_chunk_of_logits_exists_at_a_time(smollm2):
    ids = tokens_of(smollm2.tokenizer, source_text("argparse"), 200)
    largest = largest_tensor(lambda: negative_log_likelihood(smollm2.model, ids, chunk=50))
    assert largest.nbytes == 50 * 49_152 * 4


@pytest.mark.parametrize("ids", [torch.arange(5), torch.ones(1, 1).long(), torch.ones(1, 5)])
def test_ids_of_another_kind_are_refused(ids):
    with pytest.raises(ValueError, match=r"must be integers \(batch, N\), N at least 2"):
        negative_log_likelihood(tiny("llama"), ids)


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
DECODER = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Gemma2ForCausalLM", DECODER | {"head_dim": 8}),  # caps its logits
        ("GraniteForCausalLM", DECODER | {"logits_scaling": 2.0}),
        ("BertLMHeadModel", SIZES | {"num_attention_heads": 4, "is_decoder": True}),  # two layers
    ],
)
def test_a_model_whose_head_is_more_than_one_matrix_is_refused(name, sizes):
    model_class = getattr(hf, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, pad_token_id=0)).eval()
    with pytest.raises(ValueError, match=f"{name} does more than one matrix product"):
        negative_log_likelihood(model, torch.arange(5)[None])


def test_a_model_without_a_head_and_texts_beyond_its_positions_are_refused():
    with pytest.raises(ValueError, match="is no causal language model"):
        negative_log_likelihood(tiny("llama").model, torch.arange(5)[None])
    model = tiny("gpt2", n_positions=16)
    negative_log_likelihood(model, torch.arange(16)[None])
    with pytest.raises(ValueError, match=r"17 tokens of text .* 16 positions"):
        negative_log_likelihood(model, torch.arange(17)[None])
    with pytest.raises(ValueError, match="a token 61, and the model's embedding has 61 rows"):
        negative_log_likelihood(model, torch.tensor([[3, 61]]))


def test_only_dropout_that_is_active_is_refused():
    ids = tokens(1, 12)
    with pytest.raises(ValueError, match=r"its dropout is active: model.eval\(\)"):
        negative_log_likelihood(tiny("gpt2").train(), ids)
    model = tiny("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    assert negative_log_likelihood(model.train(), ids) == negative_log_likelihood(model.eval(), ids)


def test_the_model_runs_once():
    model = tiny("llama")
    set_attention(model, "flash")
    negative_log_likelihood(model, torch.arange(9)[None], chunk=2)
    assert [use.calls for use in attention_used(model)] == [1, 1]
    assert not model.base_model._forward_hooks
