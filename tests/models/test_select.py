"""set_attention: what may be chosen or is refused, a function of your own, and what really ran."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AttentionMaskInterface,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    StaticCache,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.architectures import build
from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    available_backends,
    flash_torch,
)
from labsupport.models.integration import (
    AttentionRefusedError,
    attention_used,
    register_attention,
    set_attention,
    trace,
)
from labsupport.models.integration.mask_description import MaskDescription
from labsupport.models.integration.select import VARIABLE, choices, registered_name
from labsupport.profiling import largest_tensor
from tests.models.tiny import own, padding, tiny, tokens


def test_every_backend_is_registered_under_a_legal_name_with_a_mask_function():
    names = [registered_name(choice) for choice in choices()]
    assert len(set(names)) == len(names) > len(available_backends(device="cpu"))
    assert set(names) <= set(ALL_ATTENTION_FUNCTIONS)
    assert not any("flash" in name for name in names)
    for name in names:  # without one a model passes no mask, and padding is silently ignored
        made = AttentionMaskInterface()[name](batch_size=1, q_length=4, kv_length=4)
        assert isinstance(made, MaskDescription)


def test_the_choice_comes_from_the_argument_else_the_environment_else_auto(monkeypatch):
    model = tiny("llama")
    wanted = model(tokens(2, 5)).logits
    for variable, argument, expected in [
        ("", None, "lab_auto"),
        ("standard", None, "lab_standard"),
        ("standard", "flash_torch", "lab_fa_torch"),
    ]:
        monkeypatch.setenv(VARIABLE, variable)
        set_attention(model, argument)
        assert model.config._attn_implementation == expected
    model.set_attn_implementation("eager")  # the way back
    assert torch.equal(model(tokens(2, 5)).logits, wanted)
    assert len(attention_used(model)) == 0
    with pytest.raises(AttentionInputError, match=r"Did you mean 'sdpa_flash'.*standard, flash"):
        set_attention(model, "sdpa_flsh")
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(AttentionInputError, match=f"'fast' in the environment variable {VARIABLE}"):
        set_attention(model)
    assert model.config._attn_implementation == "eager"


def test_a_backend_that_cannot_run_here_is_refused_at_the_call_with_every_reason():
    model = tiny("llama").double()
    set_attention(model, "fa2")
    with pytest.raises(BackendUnavailableError) as caught:
        model(tokens(1, 4))
    assert len(caught.value.reasons["fa2"]) >= 2  # no float64, and on most machines no package


def test_models_whose_attention_cannot_be_replaced_are_refused():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2))
    for model, error, message in (
        (torch.nn.Linear(2, 2), AttentionInputError, "a Linear was given"),
        (bloom, AttentionRefusedError, "in its own code"),
        (tiny("gpt2", reorder_and_upcast_attn=True), AttentionRefusedError, "upcast_attn=False"),
    ):
        with pytest.raises(error, match=message):
            set_attention(model, "flash")
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    mixing = Lfm2ForCausalLM(Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"]))
    set_attention(mixing, "flash")
    with pytest.raises(AttentionRefusedError, match="one document in a row"):
        mixing(tokens(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))
    model = tiny("gpt2", attn_pdrop=0.25).train()
    set_attention(model, "flash")
    with pytest.raises(AttentionRefusedError, match=r"0.25.*attn_pdrop"):
        model(tokens(1, 4))
    model.eval()(tokens(1, 4))  # dropout is zero there


def test_a_layer_that_asks_for_what_is_not_certain_or_not_computed_is_refused():
    attend = ALL_ATTENTION_FUNCTIONS["lab_fa"]
    layer = tiny("llama").model.layers[0].self_attn  # says is_causal = True
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8)
    out, _ = attend(layer, k, k, k, None, use_cache=True, softcap=None)
    wanted = F.scaled_dot_product_attention(k, k, k, is_causal=True).transpose(1, 2)
    assert torch.allclose(out, wanted, atol=1e-6)
    attend(layer, q, k, k, None, is_causal=False)
    for queries, options, message in (
        (q, {}, "3 queries and 5 keys"),
        (k, {"sliding_window": 2}, "the option sliding_window"),
        (k, {"position_bias": torch.zeros(4)}, "layer 0 asks for the option position_bias"),
    ):
        with pytest.raises(AttentionRefusedError, match=message):
            attend(layer, queries, k, k, None, **options)


# --- your own function ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_your_own_function_runs_in_every_family(family):
    model, ids = tiny(family), tokens(3, 9)
    for side in ("none", "lengths", "empty"):
        mask = padding(3, 9, side)
        model.set_attn_implementation("eager")
        wanted = model(ids, attention_mask=mask).logits
        set_attention(model, register_attention("own", own))
        valid = torch.ones(3, 9).bool() if mask is None else mask.bool()
        found = model(ids, attention_mask=mask).logits
        assert found.isfinite().all()
        assert (found - wanted)[valid].abs().max() < 2e-5
    used = {(use.backend, use.kernel, use.io_aware) for use in attention_used(model)}
    assert used == {("own", "own", None)}


def test_your_own_function_gets_windows_and_documents_as_a_mask():
    model, ids = tiny("mistral"), tokens(1, 9)
    wanted = torch.cat([model(part).logits for part in ids.split([6, 3], dim=1)], dim=1)
    set_attention(model, register_attention("own", own))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
    assert (model(ids, position_ids=positions).logits - wanted).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("backend", "refusal"),
    [("flash", "flash_torch: cannot do softcap"), ("sdpa_flash", "sdpa_flash: cannot do softcap")],
)
def test_a_soft_cap_is_refused_by_name_where_no_kernel_has_it(backend, refusal):
    model = build("gemma2")
    set_attention(model, backend)
    with pytest.raises(BackendUnavailableError, match=refusal):
        model(tokens(1, 5))
    model = build("gemma2", attn_logit_softcapping=None)
    wanted = model(tokens(1, 5)).logits
    set_attention(model, backend)
    assert (model(tokens(1, 5)).logits - wanted).abs().max() < 2e-5


def test_your_own_function_gets_a_mask_only_where_causality_does_not_say_it_all():
    seen = []

    def watching(module, query, key, value, attention_mask, scaling, is_causal, **kwargs):
        shape = None if attention_mask is None else tuple(attention_mask.shape)
        seen.append((query.shape[2], key.shape[2], shape, is_causal))
        return own(module, query, key, value, attention_mask, scaling, is_causal)

    model = tiny("llama", num_hidden_layers=1)
    set_attention(model, register_attention("watching", watching))
    past = StaticCache(config=model.config, max_cache_len=32)
    for length in (5, 3, 1):
        model(tokens(2, length), past_key_values=past)
    model(tokens(2, 5), attention_mask=padding(2, 5, "left"))
    assert seen == [
        (5, 5, None, True),
        (3, 8, None, True),
        (1, 9, None, True),
        (5, 5, (2, 1, 5, 5), False),
    ]


def test_a_forgotten_transpose_and_a_name_that_cannot_be_used_are_found():
    def forgets(module, query, key, value, attention_mask, **kwargs):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    model = tiny("llama")
    set_attention(model, register_attention("forgets", forgets))
    with pytest.raises(AttentionInputError, match=r"Is out.transpose\(1, 2\) missing"):
        model(tokens(2, 5))
    for name, reason in {
        "my_flash": "write 'fa'",
        "me/mine": "from its hub",
        "eager": "it is taken",
        "standard": "it is taken",
    }.items():
        with pytest.raises(AttentionInputError, match=reason):
            register_attention(name, own)


# --- what ran -------------------------------------------------------------------------------------


def lines(model) -> list[tuple]:
    return [(use.layer, use.backend, use.io_aware, use.calls) for use in attention_used(model)]


def test_the_log_says_once_for_each_layer_what_it_uses(caplog, capfd):
    model = tiny("llama")
    set_attention(model, "flash")
    model(tokens(1, 4))
    assert trace.log.getEffectiveLevel() > logging.INFO
    assert capfd.readouterr().err == ""  # nothing is printed unasked
    caplog.set_level(logging.INFO, "labsupport.models")
    set_attention(model, "flash_torch")
    assert str(attention_used(model)) == "labsupport's attention has not run in this model"
    for _ in range(3):
        model(tokens(1, 4))
    assert lines(model) == [(0, "flash_torch", True, 3), (1, "flash_torch", True, 3)]
    assert lines(copy.deepcopy(model)) == []
    set_attention(model, "standard")
    model(tokens(1, 4))
    assert attention_used(model)[0].module == "model.layers.0.self_attn"
    printed = str(attention_used(model))
    assert printed.startswith("standard attention (standard: labsupport.attention.")
    assert printed.endswith(" in layers 0-1, calls a layer: 1")
    assert [record.getMessage() for record in caplog.records] == [
        "Using FlashAttention for layer 0 (flash_torch)",
        "Using FlashAttention for layer 1 (flash_torch)",
        "Using standard attention for layer 0 (standard)",
        "Using standard attention for layer 1 (standard)",
    ]


def test_a_fused_kernel_with_a_stored_mask_is_not_called_flash(caplog):
    """On a CPU, PyTorch's flash kernel stores the mask of a chunk of a prompt."""
    model = tiny("llama", num_hidden_layers=1)
    caplog.set_level(logging.INFO, "labsupport.models")
    set_attention(model, "sdpa_flash")
    past = DynamicCache(config=model.config)
    for length in (4, 3, 1, 1):
        model(tokens(1, length), past_key_values=past)
    assert lines(model) == [(0, "sdpa_flash", True, 3), (0, "sdpa_flash", False, 1)]
    kinds = ["FlashAttention", "a fused kernel with a stored mask"]
    assert [record.getMessage() for record in caplog.records] == [
        f"Using {kind} for layer 0 (sdpa_flash)" for kind in kinds
    ]
    reported = [line.partition(" (")[0] for line in str(attention_used(model)).splitlines()]
    assert reported == kinds


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "backend", "side"),
    [
        ("llama", "sdpa_flash", "lengths"),
        ("bert", "flash_torch", "left"),
    ],
)
def test_no_tensor_of_n_by_n_is_made_padded_or_not(monkeypatch, family, backend, side):
    # Tiles that are small beside a short sequence's N x N.
    monkeypatch.setattr(flash_torch, "LARGEST_BLOCKS", {"cpu": (64, 64)})
    length = 300
    model, ids, mask = tiny(family), tokens(2, length), padding(2, length, side)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stored = largest_tensor(lambda: model(ids, attention_mask=mask))
        set_attention(model, backend)
        made = largest_tensor(lambda: model(ids, attention_mask=mask))
    assert stored.numel >= 2 * 4 * length * length
    assert made.numel < length * length
    assert all(use.io_aware for use in attention_used(model))
    if family == "llama":
        labels = {"attention_mask": mask, "labels": ids}
        made = largest_tensor(lambda: model(ids, **labels).loss.backward())
        assert made.numel < length * length
