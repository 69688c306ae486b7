"""Models with labsupport's attention compute what Transformers' own textbook path computes."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertLMHeadModel,
    DynamicCache,
    StaticCache,
    masking_utils,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.architectures import build
from labsupport.attention import available_backends
from labsupport.models.integration import (
    AttentionRefusedError,
    attention_used,
    set_attention,
)
from labsupport.models.integration.mask_description import describe_mask, visible_pairs
from tests.models.tiny import padding, tiny, tokens

# Those that compile or interpret take seconds a shape: they get one test of their own.
RUNS = [status.name for status in available_backends(device="cpu") if status.runs]
BACKENDS = [name for name in RUNS if name not in ("flex", "flash_triton")]
SIDES = ["none", "right", "lengths", "holes", "empty"]  # empty: a row of nothing but padding
LENGTH = 9
# Float32 logits of size 1 after two layers; a wrong mask changes them by 0.1 and more.
BOUND = 2e-5

model_of = cache(tiny)


def run(
    model: Any, side: str, steps: list[int] | None = None, cache_kind: str = "dynamic"
) -> torch.Tensor:
    """Logits (3, LENGTH, vocabulary), from one call, or from one call a step with a cache."""
    ids, mask = tokens(3, LENGTH), padding(3, LENGTH, side)
    with torch.no_grad():
        if steps is None:
            return model(ids, attention_mask=mask).logits
        past: Any = DynamicCache(config=model.config)
        if cache_kind == "static":
            past = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
        parts, seen = [], 0
        for length in steps:
            new, seen = ids[:, seen : seen + length], seen + length
            valid = None if mask is None else mask[:, :seen]
            parts.append(model(new, attention_mask=valid, past_key_values=past).logits)
    return torch.cat(parts, dim=1)


@cache
def expected(family: str, side: str) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return run(tiny(family), side)


def error(logits: torch.Tensor, family: str, side: str) -> float:
    """The largest difference at valid positions; infinite if anything anywhere is not finite."""
    mask = padding(3, LENGTH, side)
    valid = torch.ones(3, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    if not logits.isfinite().all():
        return float("inf")
    return float((logits - expected(family, side))[valid].abs().max())


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("gpt2", "sdpa_flash"), ("llama", "flash_torch"), ("llama", "sdpa_math"),
        ("bert", "auto"), ("bert", "standard"),
    ],
)  # fmt: skip
def test_a_forward_gives_the_logits_of_the_eager_path(family, backend):
    model = model_of(family)
    set_attention(model, backend)
    for side in SIDES:
        assert error(run(model, side), family, side) < BOUND, side
    assert {use.layer for use in attention_used(model)} == {0, 1}
    if backend in BACKENDS:
        assert {use.backend for use in attention_used(model)} == {backend}


@pytest.mark.parametrize(
    ("family", "backend", "steps", "cache_kind"),
    [
        ("gpt2", "flash_torch", [5, 1, 3], "static"),
        ("llama", "sdpa_flash", [4, 3, 2], "static"),
        ("llama", "standard", [5, 1, 3], "dynamic"),
    ],
)
def test_prefill_chunks_and_decode_give_the_same_as_one_forward(family, backend, steps, cache_kind):
    model = model_of(family)
    set_attention(model, backend)
    for side in ("none", "left", "lengths"):
        assert error(run(model, side, steps, cache_kind), family, side) < BOUND, side


# --- training -------------------------------------------------------------------------------------


def gradients(model: Any, side: str) -> dict[str, torch.Tensor]:
    ids, mask = tokens(3, LENGTH), padding(3, LENGTH, side)
    model.zero_grad(set_to_none=True)
    labels = ids
    if mask is not None:
        # The first token of a left-padded row is predicted from padding: no target either.
        before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        labels = ids.masked_fill((mask == 0) | (before == 0), -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "backend", "side"),
    [
        ("llama", "sdpa_flash", "lengths"),
        ("bert", "flash_torch", "none"),
    ],
)
def test_gradients_are_those_of_the_eager_path(family, backend, side):
    model = tiny(family)
    wanted = gradients(model, side)
    set_attention(model, backend)
    found = gradients(model, side)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * (1 + gradient.abs().max()), name


def test_gradient_checkpointing_changes_nothing():
    model = tiny("llama").train()
    set_attention(model, "flash")
    wanted = gradients(model, "left")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model, "left")
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def test_autocast_gives_the_accuracy_of_its_dtype():
    model = model_of("llama")
    with torch.autocast("cpu", torch.bfloat16):
        model.set_attn_implementation("eager")
        theirs = error(run(model, "left"), "llama", "left")
        set_attention(model, "flash")
        found = error(run(model, "left"), "llama", "left")
    assert BOUND < found <= 2 * theirs


def test_sinks_have_no_gradient():
    model = build("gpt_oss")
    set_attention(model, "flash")
    with pytest.raises(AttentionRefusedError, match=r"sinks.*have no gradient"):
        model(tokens(1, 5)).logits.sum().backward()


# --- generation -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss", "cohere2"])
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"cache_implementation": "static"}])
def test_a_model_with_windows_generates_the_same_tokens(name, options):
    model = build(name, windowed=True)
    options = options | {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    inputs = {"inputs": tokens(2, 7), "attention_mask": padding(2, 7, "left")}
    wanted = model.generate(**inputs, **options)
    set_attention(model, "flash")
    assert torch.equal(model.generate(**inputs, **options), wanted)


# --- options of models ----------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_sees_all_valid_keys_of_the_encoder(padded):
    config = tiny("bert").config
    config.is_decoder, config.add_cross_attention = True, True
    torch.manual_seed(0)
    decoder: Any = BertLMHeadModel(config).eval()
    states = torch.randn(2, 6, 32)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]) if padded else None

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return decoder(
                tokens(2, 6), encoder_hidden_states=states, encoder_attention_mask=mask
            ).logits

    wanted = logits()
    set_attention(decoder, "flash")
    assert (logits() - wanted).abs().max() < BOUND
    states[1, 5] += 100  # the padded key, if there is padding
    assert ((logits() - wanted).abs().max() < BOUND) == padded


# --- masks: a description says what Transformers' mask tensors say, or refuses --------------------

causal = masking_utils.causal_mask_function
both_ways = masking_utils.bidirectional_mask_function


def test_a_description_holds_no_memory_and_an_edit_of_it_is_refused():
    mask = describe_mask(4, 1000, 5000, q_offset=3000)
    assert tuple(mask.shape) == (4, 1, 1000, 5000)
    assert mask.contiguous() is mask  # generate asks for it
    assert mask.data_ptr() == 0
    assert "causal" in str(mask)
    assert "keys below 4000, 0 padded, 4 sequences" in str(mask)
    for edit in (
        lambda: mask[:, :, :2],
        lambda: torch.where(mask, 0.0, -1.0),
        lambda: torch.zeros(4, 4).masked_fill(mask, 1.0),
    ):
        with pytest.raises(AttentionRefusedError, match="masks have no entries"):
            edit()


WINDOWED = masking_utils.sliding_window_causal_mask_function(3)
CHUNKED = masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 1, 2]))
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 1, 1], [0] * 8])
PACKED = masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(DOCUMENTS))
CASES: list[tuple[Any, dict[str, Any]]] = [
    (causal, {"q_length": 8, "kv_length": 8}),
    (causal, {"q_length": 3, "kv_length": 8, "q_offset": 5}),
    (causal, {"q_length": 1, "kv_length": 8, "q_offset": 7}),
    (causal, {"q_length": 3, "kv_length": 12, "q_offset": torch.tensor(5)}),
    (both_ways, {"q_length": 8, "kv_length": 8}),
    (both_ways, {"q_length": 5, "kv_length": 8}),
    (CHUNKED, {"q_length": 8, "kv_length": 8}),
    (CHUNKED, {"q_length": 3, "kv_length": 12, "q_offset": 3}),
    (PACKED, {"q_length": 8, "kv_length": 8}),
]
WINDOWS: list[tuple[Any, dict[str, Any]]] = [
    (WINDOWED, {"q_length": 8, "kv_length": 8}),
    (WINDOWED, {"q_length": 1, "kv_length": 8, "q_offset": 7}),
    (WINDOWED, {"q_length": 2, "kv_length": 4, "q_offset": 6, "kv_offset": 4}),
    (masking_utils.sliding_window_bidirectional_mask_function(2), {"q_length": 8, "kv_length": 8}),
    (masking_utils.and_masks(PACKED, WINDOWED), {"q_length": 8, "kv_length": 8}),
]
CASES += WINDOWS


@pytest.mark.parametrize(
    ("function", "sizes", "side"),
    [
        (*case, side)
        for case in CASES
        for side in ("none", "lengths", "holes")
        if side != "holes" or case not in WINDOWS
    ],
)
def test_the_description_allows_and_the_function_uses_the_pairs_of_transformers(
    function, sizes, side
):
    mask_2d = padding(3, 8, side)
    valid: Any = None if mask_2d is None else mask_2d.bool()
    inputs: dict[str, Any] = {"batch_size": 3, "mask_function": function, "attention_mask": valid}
    mask = describe_mask(**inputs, **sizes)
    theirs: Any = masking_utils.sdpa_mask(**inputs, **sizes, allow_is_causal_skip=False)
    assert not theirs[..., mask.end :].any()
    pairs = visible_pairs(mask)
    asked = torch.ones(3, sizes["q_length"], dtype=torch.bool)
    if mask.segments is not None and mask.own_keys:
        asked = mask.segments[:, -sizes["q_length"] :] >= 0  # a query of padding may see anything
    assert torch.equal(pairs[:, 0][asked], theirs[:, 0, :, : mask.end][asked])

    torch.manual_seed(0)
    q = torch.randn(3, 4, sizes["q_length"], 8)
    k, v = (torch.randn(3, 2, sizes["kv_length"], 8) for _ in range(2))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=theirs, enable_gqa=True)
    attend = ALL_ATTENTION_FUNCTIONS["lab_fa_torch"]
    found, _ = attend(torch.nn.Identity(), q, k, v, mask)
    assert ((found - wanted.transpose(1, 2))[asked].abs() < 1e-5).all()


def test_a_window_over_holes_is_refused_unless_it_hides_nothing():
    holes = padding(3, 8, "holes").bool()
    inputs = {"batch_size": 3, "q_length": 8, "kv_length": 8, "attention_mask": holes}
    describe_mask(mask_function=masking_utils.sliding_window_causal_mask_function(8), **inputs)
    with pytest.raises(AttentionRefusedError, match="hides tokens between others"):
        describe_mask(mask_function=WINDOWED, **inputs)


# --- refused --------------------------------------------------------------------------------------

BLOCKWISE = masking_utils.or_masks(causal, masking_utils.blockwise_overlay(torch.zeros(1, 8)))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (BLOCKWISE, "a part or_masks"),
        (masking_utils.and_masks(causal, lambda b, h, q, k: k != 3), "a part tests.models"),
        (lambda b, h, q, k: k <= q, "a part tests.models"),
    ],
)
def test_a_mask_that_is_not_known_is_refused_by_name(function, named):
    with pytest.raises(AttentionRefusedError, match=named):
        describe_mask(1, 8, 8, mask_function=function)


def test_going_on_with_one_of_several_cached_documents_is_refused():
    model = tiny("llama")
    set_attention(model, "flash")
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    cache = model(tokens(1, 8), position_ids=packed, use_cache=True).past_key_values
    with pytest.raises(AttentionRefusedError, match="go on from 3, but the cache has 8"):
        model(tokens(1, 1), position_ids=torch.tensor([[3]]), past_key_values=cache)


def test_inputs_that_a_model_s_attention_cannot_take_are_refused():
    model = tiny("llama")
    set_attention(model, "flash")
    past = StaticCache(config=model.config, max_cache_len=8)
    model(tokens(2, 6), past_key_values=past, attention_mask=torch.ones(2, 6))
    short = {"past_key_values": past, "attention_mask": torch.ones(2, 2)}
    packed = {"position_ids": torch.tensor([[0, 0]]), "past_key_values": past}
    offsets = {"cu_seq_lens_q": torch.tensor([0, 2, 5])}
    for ids, options, message in (
        (tokens(2, 2), short, "covers 2 tokens, but the model has seen 8"),
        (tokens(2, 3), {"past_key_values": past}, "end at slot 9, and the cache has 8"),
        (tokens(1, 4), {"attention_mask": torch.ones(1, 1, 4, 4).bool()}, "got a mask of shape"),
        (tokens(2, 2), packed, "already has 6 tokens"),
        (tokens(1, 4), offsets, r"rise from 0 to 4.*\[0, 2, 5\]"),
        (tokens(1, 5), offsets | {"cu_seq_lens_k": torch.tensor([0, 3, 5])}, "must be the same"),
        (tokens(2, 3), offsets | {"cu_seq_lens_q": torch.tensor([0, 6])}, "lie in two rows"),
        (tokens(1, 4), {"attention_mask": torch.ones(1, 4, 4)}, r"has shape \(1, 4, 4\)"),
        (tokens(1, 4), {"output_attentions": True}, "output_attentions=True"),
    ):
        with pytest.raises(AttentionRefusedError, match=message):
            model(ids, **options)
    model(tokens(1, 6), position_ids=torch.arange(3, 9)[None], use_cache=False)  # not packed
