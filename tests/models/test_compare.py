"""Two kinds of attention on one prompt: agreement is said where it is, and only there."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from labsupport.models.generation import compare
from labsupport.models.generation.compare import compare_attention, oracle_logits, prompt_logits
from labsupport.models.generation.prompts import batch_of
from labsupport.models.integration import register_attention, set_attention
from tests.models.tiny import ROWS, TEXTS, lively, words


@pytest.fixture
def tokenizer():
    return words(bos_token="w01", pad_token="w00")


def faulty(by):
    """An attention function whose output is wrong by the factor 1 + `by`."""

    def function(module, query, key, value, attention_mask, scaling, is_causal, **kwargs):
        mask = causal_lower_right(query.shape[2], key.shape[2]) if is_causal else attention_mask
        options = {"attn_mask": mask, "scale": scaling, "enable_gqa": True}
        out = F.scaled_dot_product_attention(query, key, value, **options)
        return (1 + by) * out.transpose(1, 2)

    return function


@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "flash"), ("gpt2", "flash"), ("llama", "flash_torch")]
)
def test_flash_and_standard_attention_agree(family, backend, tokenizer):
    backends = ("standard", backend)
    model = lively(family)
    found = compare_attention(
        model, tokenizer, TEXTS[0], backends=backends, max_new_tokens=12, repeats=1
    )
    assert found.agree
    assert found.same_text
    assert 0 < found.table.max_error.iloc[1] <= found.bound < 1e-3
    assert found.max_difference < 1e-4
    assert list(found.table.backend) == list(backends)
    assert (found.table.prefill_peak_bytes > 0).all()
    assert (found.table.decode_tokens_per_s > 0).all()
    assert "text:   the same 12 tokens" in str(found)
    assert "is within" in str(found)


@pytest.mark.parametrize(("by", "agree"), [(0.0, True), (1e-3, False)])
def test_attention_that_is_slightly_wrong_does_not_agree(tokenizer, by, agree):
    backends = ("standard", register_attention("slightly_wrong", faulty(by)))
    found = compare_attention(
        lively("llama"), tokenizer, TEXTS[0], backends=backends, max_new_tokens=2, repeats=1
    )
    assert found.agree is found.logits_agree is agree
    assert ("OUTSIDE" in str(found)) is not agree


def test_texts_that_part_are_judged_by_the_gap_of_the_two_logits(tokenizer):
    model, name = lively("llama"), register_attention("quite_wrong", faulty(0.5))
    backends = ("standard", name)
    found = compare_attention(
        model, tokenizer, TEXTS[0], backends=backends, max_new_tokens=20, repeats=1
    )
    standard, other = (found.generations[b].token_ids[0] for b in backends)
    index = found.parted_at
    assert standard[:index] == other[:index]
    assert standard[index] != other[index]
    set_attention(model, "standard")
    with torch.no_grad():
        logits = model(torch.tensor([ROWS[0] + standard[:index]])).logits[0, -1]
    gap = float(logits[standard[index]] - logits[other[index]])
    assert found.gap == pytest.approx(gap, abs=1e-4)
    assert gap > 0
    error = found.table.max_error[0]
    assert found.near_tie == pytest.approx(2 * (error + found.bound))
    assert compare.FACTOR * error < found.bound < compare.FACTOR * error + 1e-4
    within = replace(found, bound=math.inf)
    assert replace(within, near_tie=found.gap / 2).agree is False
    assert "NOT a near-tie" in str(replace(within, near_tie=found.gap / 2))
    assert replace(within, near_tie=2 * found.gap).agree is True


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_oracle_computes_in_float64_throughout(family):
    model, batch = lively(family), batch_of(ROWS[:1], "cpu")
    truth, name = oracle_logits(model, batch)
    assert name == "the model in float64"
    torch.testing.assert_close(prompt_logits(model, batch), truth, rtol=1e-4, atol=1e-4)
    # An oracle that rounded to float32 on its way would lose most of this change of a weight.
    embedding = model.get_input_embeddings().weight
    embedding.data = embedding.data.double()
    embedding.data[:, 0] += 1e-11
    moved = (oracle_logits(model, batch)[0] - truth).abs()
    assert 1e-13 < moved.max() < 1e-8
    assert (moved > 0).double().mean() > 0.9
    assert model.config._attn_implementation == "eager"


def test_two_different_backends_are_needed(tokenizer):
    with pytest.raises(ValueError, match="two different backends"):
        compare_attention(lively("llama"), tokenizer, "w05", backends=("flash", "flash"))


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2], [1, 5], 1), ([1, 2], [1, 2, 3], 2), ([], [], None)],
)
def test_the_first_difference_of_two_rows(a, b, index):
    assert compare.first_difference(a, b) == index
