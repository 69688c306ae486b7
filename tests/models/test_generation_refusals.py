"""What generate refuses of models, tokenizers and texts that do not fit each other."""

import math

import pytest
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from labsupport.models.generation.compare import compare_attention
from labsupport.models.generation.generate import generate
from labsupport.models.generation.prompts import encode
from tests.models.test_generation import TEXTS, lively, words
from tests.models.tiny import tiny

SMALL = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def test_tokens_beyond_the_embedding_are_refused_also_those_of_the_padding():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"a token 70, and the model's embedding has 61 rows"):
        generate(model, words(80), "w05 w70")
    assert generate(model, words(80), "w05 w60", max_new_tokens=1).new_tokens == 1
    with pytest.raises(ValueError, match=r"a token 79, .* does not belong to this model"):
        generate(model, words(80, pad_token="w79"), TEXTS)
    for cache in ("static", "graphed"):
        with pytest.raises(ValueError, match="embedding has 61 rows"):
            generate(model, words(80), "w70", cache=cache)


def test_a_text_that_gives_no_token_is_no_empty_text():
    """Without an unknown token, a tokenizer drops what it does not know."""
    table = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2}, []))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=table, bos_token="<s>")
    assert encode(tokenizer, ["ab", ""], "cpu").ids.tolist() == [[0, 1], [0, 2]]
    with pytest.raises(ValueError, match="makes no token of the text 'xyz'"):
        encode(tokenizer, ["ab", "xyz"], "cpu")


@pytest.mark.parametrize(
    "model",
    [
        hf.BertModel(tiny("bert").config),
        tiny("bert"),
        tiny("llama").model,
        hf.T5ForConditionalGeneration(hf.T5Config(**SMALL)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_that_do_not_continue_texts_are_refused(model):
    for run in (generate, compare_attention):
        with pytest.raises(ValueError, match=f"{type(model).__name__} does not continue texts"):
            run(model.eval(), words(), "w05")


@pytest.mark.parametrize("temperature", [math.nan, math.inf])
def test_a_temperature_is_a_finite_number(temperature):
    with pytest.raises(ValueError, match=f"and finite, got {temperature}"):
        generate(lively("llama"), words(), "w05", temperature=temperature)
