"""The description of a mask says what Transformers' own mask tensors say, or refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from labsupport.models.integration import AttentionRefusedError, set_attention
from labsupport.models.integration.masks import MaskDescription, describe_mask, visible_pairs
from tests.models.tiny import padding, tiny, tokens

causal = masking_utils.causal_mask_function
windowed = masking_utils.sliding_window_causal_mask_function(3)
both_ways = masking_utils.bidirectional_mask_function
window_both_ways = masking_utils.sliding_window_bidirectional_mask_function(2)


def flash(family: str = "llama", **options: Any) -> Any:
    model = tiny(family, **options)
    set_attention(model, "flash")
    return model


def test_a_description_holds_no_memory_and_an_edit_of_it_is_refused():
    mask = describe_mask(4, 1000, 5000, q_offset=3000)
    assert tuple(mask.shape) == (4, 1, 1000, 5000)
    assert mask.contiguous() is mask  # generate asks for it
    assert mask.data_ptr() == 0
    assert "causal" in str(mask)
    assert "keys below 4000, 0 padded" in str(mask)
    for edit in (
        lambda: mask[:, :, :2],
        lambda: torch.where(mask, 0.0, -1.0),
        lambda: torch.zeros(4, 4).masked_fill(mask, 1.0),
    ):
        with pytest.raises(AttentionRefusedError, match="masks have no entries"):
            edit()


CASES: list[tuple[Any, dict[str, Any]]] = [
    (causal, {"q_length": 8, "kv_length": 8}),
    (causal, {"q_length": 3, "kv_length": 8, "q_offset": 5}),
    (causal, {"q_length": 1, "kv_length": 8, "q_offset": 7}),
    (causal, {"q_length": 3, "kv_length": 12, "q_offset": torch.tensor(5)}),
    (windowed, {"q_length": 8, "kv_length": 8}),
    (windowed, {"q_length": 3, "kv_length": 5, "q_offset": 5, "kv_offset": 3}),
    (windowed, {"q_length": 1, "kv_length": 3, "q_offset": 7, "kv_offset": 5}),
    (both_ways, {"q_length": 8, "kv_length": 8}),
    (both_ways, {"q_length": 5, "kv_length": 8}),
    (window_both_ways, {"q_length": 8, "kv_length": 8}),
]


@pytest.mark.parametrize("side", ["none", "ones", "left", "right", "lengths", "holes"])
@pytest.mark.parametrize(("function", "sizes"), CASES)
def test_the_description_allows_and_the_function_uses_the_pairs_of_transformers(
    function, sizes, side
):
    mask_2d = padding(3, 8, side)
    valid: Any = None if mask_2d is None else mask_2d.bool()
    inputs: dict[str, Any] = {"batch_size": 3, "mask_function": function, "attention_mask": valid}
    first = sizes.get("kv_offset", 0)  # what a sliding cache has dropped may have holes
    holes = side == "holes" and bool((valid[:, first:].int().diff(dim=1) < 0).any())
    if holes and function in (windowed, window_both_ways):
        with pytest.raises(AttentionRefusedError, match="holes"):
            describe_mask(**inputs, **sizes)
        return
    mask = describe_mask(**inputs, **sizes)
    theirs: Any = masking_utils.sdpa_mask(**inputs, **sizes, allow_is_causal_skip=False)
    assert not theirs[..., mask.end :].any()
    assert torch.equal(visible_pairs(mask), theirs[..., : mask.end])

    torch.manual_seed(0)
    q = torch.randn(3, 4, sizes["q_length"], 8)
    k, v = (torch.randn(3, 2, sizes["kv_length"], 8) for _ in range(2))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=theirs, enable_gqa=True)
    attend = ALL_ATTENTION_FUNCTIONS["lab_fa_torch"]
    found, _ = attend(torch.nn.Identity(), q, k, v, mask)
    error = (found - wanted.transpose(1, 2)).abs()
    if mask.padding is not None and mask.packing is not None and mask.packing.rows_q is not None:
        error[~mask.padding[:, -q.shape[2] :]] = 0  # a query of padding may give anything
    assert error.max() < 1e-5


def test_a_packing_lists_the_valid_tokens_row_after_row():
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    packing = describe_mask(3, 2, 4, q_offset=2, attention_mask=valid).packing
    assert packing is not None
    assert packing.rows_k.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert packing.columns_k.tolist() == [2, 3, 0, 1, 2, 0, 1, 2, 3]
    assert packing.cu_k.tolist() == [0, 2, 5, 9]
    assert packing.rows_q is not None
    assert packing.rows_q.tolist() == [0, 0, 1, 2, 2]  # of the two last slots
    assert packing.cu_q.tolist() == [0, 2, 3, 5]
    assert packing.cu_q.dtype == torch.int32


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (
            masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)),
            "a part chunked_overlay",
        ),
        (
            masking_utils.or_masks(causal, masking_utils.blockwise_overlay(torch.zeros(1, 8))),
            "a part or_masks",
        ),
        (masking_utils.and_masks(causal, lambda b, h, q, k: k != 3), "a part tests.models"),
        (lambda b, h, q, k: k <= q, "a part tests.models"),
    ],
)
def test_a_mask_that_is_not_known_is_refused_by_name(function, named):
    with pytest.raises(AttentionRefusedError, match=named):
        describe_mask(1, 8, 8, mask_function=function)


def test_masks_and_caches_that_do_not_cover_the_tokens_are_refused():
    model = flash()
    past = StaticCache(config=model.config, max_cache_len=8)
    model(tokens(2, 6), past_key_values=past, attention_mask=torch.ones(2, 6))
    with pytest.raises(AttentionRefusedError, match="covers 2 tokens, but the model has seen 8"):
        model(tokens(2, 2), past_key_values=past, attention_mask=torch.ones(2, 2))
    with pytest.raises(AttentionRefusedError, match="end at slot 9, and the cache has 8"):
        model(tokens(2, 3), past_key_values=past)
    with pytest.raises(AttentionRefusedError, match="got a mask of shape"):
        model(tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4).tril().bool())


def test_packed_position_ids_are_refused_and_plain_ones_are_not():
    model = flash()
    model(tokens(1, 6), position_ids=torch.arange(3, 9)[None], use_cache=False)
    with pytest.raises(AttentionRefusedError, match="several sequences packed in one row"):
        model(tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "mistral"])
def test_attention_weights_are_refused_by_each_family(family):
    with pytest.raises(AttentionRefusedError, match="output_attentions=True"):
        flash(family)(tokens(1, 4), output_attentions=True)


def test_the_length_of_a_static_cache_is_read_once_for_all_layers(monkeypatch):
    model = flash()
    past = StaticCache(config=model.config, max_cache_len=16)
    model(tokens(1, 5), past_key_values=past)
    reads, real = [], torch.Tensor.__int__
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: reads.append(1) or real(self))
    model(tokens(1, 2), past_key_values=past)
    assert len(reads) == 1


# --- why a mask function of our own ---------------------------------------------------------------


def test_without_a_mask_function_padding_is_silently_ignored():
    AttentionInterface.register("only_a_function", sdpa_attention_forward)
    model, ids, mask = tiny("llama"), tokens(3, 9), padding(3, 9, "left")
    with torch.no_grad():
        right = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("only_a_function")
        ignored = model(ids, attention_mask=mask).logits
        unpadded = model(ids).logits
    assert torch.equal(ignored, unpadded)
    assert (ignored - right)[mask.bool()].abs().max() > 0.1
    for name in ("lab_standard", "lab_fa", "lab_auto", "lab_sdpa_math"):
        made = AttentionMaskInterface()[name](batch_size=1, q_length=4, kv_length=4)
        assert isinstance(made, MaskDescription)
