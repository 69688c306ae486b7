"""Two kinds of attention on one prompt: agreement is said where it is, and only there."""

import math
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch.nn.attention.bias import causal_lower_right
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from labsupport.models.generation.compare import compare_attention, first_difference
from labsupport.models.generation.oracle import oracle_logits, prompt_logits, same_norm, widened
from labsupport.models.generation.prompts import batch_of
from labsupport.models.integration.register import register_attention
from labsupport.models.integration.select import set_attention
from tests.models.test_generation import ROWS, TEXTS, lively, words


@pytest.fixture
def tokenizer():
    return words(bos_token="w01", pad_token="w00")


def faulty(by):
    """An attention function whose output is wrong by the factor 1 + `by`."""

    def function(module, query, key, value, attention_mask, scaling, is_causal, **kwargs):
        mask = causal_lower_right(query.shape[2], key.shape[2]) if is_causal else attention_mask
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        return (1 + by) * out.transpose(1, 2)

    return function


@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "flash"), ("gpt2", "flash"), ("llama", "flash_torch")]
)
def test_flash_and_standard_attention_agree(family, backend, tokenizer):
    found = compare_attention(
        lively(family),
        tokenizer,
        TEXTS[0],
        backends=("standard", backend),
        max_new_tokens=12,
        repeats=1,
    )
    assert found.agree
    assert found.same_text
    assert 0 < found.table.max_error.iloc[1] <= found.bound < 1e-3
    assert found.max_difference < 1e-4
    assert list(found.table.backend) == ["standard", backend]
    assert (found.table.prefill_peak_bytes > 0).all()
    assert (found.table.decode_tokens_per_s > 0).all()
    assert "text:   the same 12 tokens" in str(found)
    assert "is within" in str(found)


def test_attention_that_is_slightly_wrong_does_not_agree(tokenizer):
    name = register_attention("slightly_wrong", faulty(1e-3))
    model = lively("llama")
    found = compare_attention(
        model, tokenizer, TEXTS[0], backends=("standard", name), max_new_tokens=2, repeats=1
    )
    assert not found.logits_agree
    assert not found.agree
    assert "OUTSIDE" in str(found)
    right = register_attention("just_right", faulty(0.0))
    assert compare_attention(
        model, tokenizer, TEXTS[0], backends=("standard", right), max_new_tokens=2, repeats=1
    ).agree


def test_texts_that_part_are_judged_by_the_gap_of_the_two_logits(tokenizer):
    name = register_attention("quite_wrong", faulty(0.5))
    model = lively("llama")
    found = compare_attention(
        model, tokenizer, TEXTS[0], backends=("standard", name), max_new_tokens=20, repeats=1
    )
    ours, theirs = (found.generations[b].token_ids[0] for b in found.backends)
    index = found.parted_at
    assert ours[:index] == theirs[:index]
    assert ours[index] != theirs[index]
    set_attention(model, "standard")
    with torch.no_grad():
        logits = model(torch.tensor([ROWS[0] + ours[:index]])).logits[0, -1]
    assert found.gap == pytest.approx(float(logits[ours[index]] - logits[theirs[index]]), abs=1e-4)
    assert found.gap > 0
    within = replace(found, bound=math.inf)
    assert replace(within, near_tie=found.gap / 2).agree is False
    assert "NOT a near-tie" in str(replace(within, near_tie=found.gap / 2))
    assert replace(within, near_tie=2 * found.gap).agree is True


def test_the_oracle_computes_in_float64_throughout():
    batch = batch_of(ROWS[:1], "cpu")
    for family in ("llama", "gpt2"):
        model = lively(family)
        truth, name = oracle_logits(model, batch)
        assert name == "the model in float64"
        torch.testing.assert_close(prompt_logits(model, batch), truth, rtol=1e-4, atol=1e-4)
        # An oracle that rounded to float32 on its way would keep less than this change of a weight.
        wide, kept = widened(model, torch.float64)
        assert kept == []
        before = prompt_logits(wide, batch)
        with torch.no_grad():
            wide.get_decoder().get_input_embeddings().weight[:, 0] += 1e-11
        moved = (prompt_logits(wide, batch) - before).abs()
        assert 1e-13 < moved.max() < 1e-8
        assert (moved > 0).double().mean() > 0.9
        assert model.dtype == torch.float32
        assert model.config._attn_implementation == "eager"


SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("name", ["Gemma", "Qwen3"])
def test_the_oracle_knows_norms_of_other_kinds(name, tokenizer):
    """Gemma's weight is stored less 1; Qwen3 has norms within its attention."""
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**SMALL)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    batch = batch_of(ROWS[:1], "cpu")
    truth, how = oracle_logits(model, batch)
    assert how == "the model in float64"
    torch.testing.assert_close(prompt_logits(model, batch), truth, rtol=1e-4, atol=1e-4)
    found = compare_attention(model, tokenizer, TEXTS[0], max_new_tokens=2, repeats=1)
    assert found.agree


class ClippedRMSNorm(LlamaRMSNorm):
    """A norm that PyTorch's cannot replace."""

    def forward(self, hidden_states):
        return super().forward(hidden_states).clamp(-1, 1)


def test_a_norm_that_is_not_known_is_kept_and_said_to_be(tokenizer):
    model = lively("llama")
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = ClippedRMSNorm
    batch = batch_of(ROWS[:1], "cpu")
    truth, how = oracle_logits(model, batch)
    assert how == "the model in float64 (but ClippedRMSNorm in float32)"
    torch.testing.assert_close(prompt_logits(model, batch), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["eps", "weight"])
def test_a_norm_is_replaced_by_one_that_computes_the_same(change):
    norm = LlamaRMSNorm(16, eps=1e-6)
    same = same_norm(norm)
    assert isinstance(same, torch.nn.RMSNorm)
    assert same.eps == 1e-6
    if change == "eps":
        norm.eps = 1e-6
        norm.variance_epsilon = 1e-6
        norm.forward = LlamaRMSNorm(16, eps=1e-5).forward
    else:
        norm.forward = lambda rows: LlamaRMSNorm.forward(norm, rows) * 1.001
    assert same_norm(norm) is None


def test_two_different_backends_are_needed(tokenizer):
    with pytest.raises(ValueError, match="two different backends"):
        compare_attention(lively("llama"), tokenizer, "w05", backends=("flash", "flash"))


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
    ],
)
def test_the_first_difference_of_two_rows(a, b, index):
    assert first_difference(a, b) == index
