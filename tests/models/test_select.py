"""set_attention: what may be chosen, what is refused, and a function of your own."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from labsupport.attention import AttentionInputError, BackendUnavailableError, available_backends
from labsupport.models.integration import (
    AttentionRefusedError,
    attention_used,
    register_attention,
    set_attention,
)
from labsupport.models.integration.select import VARIABLE, choices, registered_name
from tests.models.tiny import padding, tiny, tokens


def test_every_backend_is_registered_under_a_legal_name():
    names = [registered_name(choice) for choice in choices()]
    assert len(set(names)) == len(names) > len(available_backends(device="cpu"))
    for name in names:
        assert name in ALL_ATTENTION_FUNCTIONS
        assert "flash" not in name


def test_the_choice_comes_from_the_argument_else_the_environment_else_auto(monkeypatch):
    model = tiny("llama")
    wanted = model(tokens(2, 5)).logits
    for variable, argument, expected in [
        (None, None, "lab_auto"),
        ("standard", None, "lab_standard"),
        ("standard", "flash_torch", "lab_fa_torch"),
        ("", None, "lab_auto"),
    ]:
        monkeypatch.delenv(VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(VARIABLE, variable)
        set_attention(model, argument)
        assert model.config._attn_implementation == expected
    model.set_attn_implementation("eager")  # the way back
    assert torch.equal(model(tokens(2, 5)).logits, wanted)
    assert len(attention_used(model)) == 0


def test_an_unknown_name_is_an_error_that_lists_the_names(monkeypatch):
    model = tiny("llama")
    with pytest.raises(AttentionInputError, match=r"Did you mean 'sdpa_flash'.*standard, flash"):
        set_attention(model, "sdpa_flsh")
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(AttentionInputError, match=f"'fast' in the environment variable {VARIABLE}"):
        set_attention(model)
    assert model.config._attn_implementation == "eager"


def test_flash_never_runs_the_textbook():
    model = tiny("llama")
    set_attention(model, "flash")
    for mask in (None, padding(2, 6, "left")):
        model(tokens(2, 6), attention_mask=mask)
    assert all(use.io_aware for use in attention_used(model))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_backend_that_cannot_run_here_is_refused_with_every_reason():
    with pytest.raises(BackendUnavailableError, match=r"fa2: .*runs on cuda, not on cpu") as caught:
        set_attention(tiny("llama"), "fa2")
    assert "4 heads, 2 for keys and values, head_dim 8, float32 on cpu" in str(caught.value)
    assert "sdpa_flash" in str(caught.value)
    assert len(caught.value.reasons["fa2"]) >= 2  # not installed, and no GPU


def test_gradients_count_in_training_mode_only():
    if not available_backends(device="cpu")["flex"].runs:
        pytest.skip("FlexAttention does not compile here")
    model = tiny("llama")
    set_attention(model, "flex")
    with pytest.raises(BackendUnavailableError, match=r"training mode(.|\n)*gradients on a CPU"):
        set_attention(model.train(), "flex")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors are for the interpreter")
def test_under_autocast_a_model_is_judged_by_autocasts_dtype():
    model = tiny("llama")
    set_attention(model, "flash_triton")  # float32: the interpreter takes it
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(BackendUnavailableError, match="bfloat16"),
    ):
        set_attention(model, "flash_triton")


def test_models_whose_attention_cannot_be_replaced_are_refused():
    with pytest.raises(AttentionInputError, match="a Linear was given"):
        set_attention(torch.nn.Linear(2, 2), "flash")
    bloom = BloomForCausalLM(BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(AttentionRefusedError, match="in its own code"):
        set_attention(bloom, "flash")
    with pytest.raises(AttentionRefusedError, match="reorder_and_upcast_attn=False"):
        set_attention(tiny("gpt2", reorder_and_upcast_attn=True), "flash")


@pytest.mark.parametrize(
    ("family", "option"), [("gpt2", "attn_pdrop"), ("llama", "attention_dropout")]
)
def test_attention_dropout_is_refused_in_training_and_zero_in_eval(family, option):
    model = tiny(family, **{option: 0.25}).train()
    set_attention(model, "flash")
    with pytest.raises(AttentionRefusedError, match=f"0.25.*{option}"):
        model(tokens(1, 4))
    model.eval()(tokens(1, 4))
    zero = tiny(family, **{option: 0.0}).train()
    set_attention(zero, "flash")
    zero(tokens(1, 4))


@pytest.mark.parametrize(
    ("option", "value"),
    [("softcap", 30.0), ("s_aux", torch.zeros(4)), ("tomorrows_option", 3)],
)
def test_an_option_that_changes_the_result_is_refused_by_name(option, value):
    attend = ALL_ATTENTION_FUNCTIONS["lab_fa"]
    layer = tiny("llama").model.layers[0].self_attn
    q = torch.randn(1, 4, 4, 8)
    attend(layer, q, q, q, None, is_causal=False, use_cache=True, **{option: None})
    with pytest.raises(AttentionRefusedError, match=f"layer 0 asks for the option {option}"):
        attend(layer, q, q, q, None, is_causal=False, **{option: value})


def test_attention_without_a_mask_is_causal_only_where_the_alignment_is_certain():
    attend = ALL_ATTENTION_FUNCTIONS["lab_fa"]
    layer = tiny("llama").model.layers[0].self_attn  # says is_causal = True
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8)
    out, _ = attend(layer, k, k, k, None)
    wanted = F.scaled_dot_product_attention(k, k, k, is_causal=True).transpose(1, 2)
    assert torch.allclose(out, wanted, atol=1e-6)
    attend(layer, q, k, k, None, is_causal=False)
    with pytest.raises(AttentionRefusedError, match="3 queries and 5 keys"):
        attend(layer, q, k, k, None)
    with pytest.raises(AttentionRefusedError, match="a window of 2"):
        attend(layer, k, k, k, None, sliding_window=2)


def test_use_flash_attn_in_a_config_has_no_effect():
    """A claim that many tutorials make."""
    options: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    plain, asked = GPT2Config(**options), GPT2Config(**(options | {"use_flash_attn": True}))
    assert asked.to_dict()["use_flash_attn"] is True  # accepted
    one, two = GPT2LMHeadModel(plain), GPT2LMHeadModel(asked)
    assert one.config._attn_implementation == two.config._attn_implementation == "sdpa"


def test_a_saved_model_runs_in_another_process_and_the_package_is_light(tmp_path):
    model = tiny("llama")
    set_attention(model, "flash")
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, labsupport.models; assert 'transformers' not in sys.modules\n"
        "import torch, labsupport.models.integration\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(float(model(torch.arange(9)[None]).logits.detach().sum()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = float(model(torch.arange(9)[None]).logits.detach().sum())
    assert float(done.stdout) == pytest.approx(expected, abs=1e-3), done.stderr


def test_two_models_of_one_config_object_share_the_choice():
    one = tiny("llama")
    two = LlamaForCausalLM(one.config).eval()
    set_attention(one, "flash_torch")
    assert two.config._attn_implementation == "lab_fa_torch"


# --- your own function ----------------------------------------------------------------------------


def own(module, query, key, value, attention_mask, scaling, is_causal, **kwargs):
    mask = attention_mask
    if mask is None and is_causal:
        mask = causal_lower_right(query.shape[2], key.shape[2])
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert"])
def test_your_own_function_runs_in_every_family(family):
    for side in ("none", "left", "lengths", "empty"):
        model, ids, mask = tiny(family), tokens(3, 9), padding(3, 9, side)
        wanted = model(ids, attention_mask=mask).logits
        set_attention(model, register_attention("own", own))
        valid = torch.ones(3, 9).bool() if mask is None else mask.bool()
        found = model(ids, attention_mask=mask).logits
        assert found.isfinite().all()
        assert (found - wanted)[valid].abs().max() < 2e-5
        used = {(use.backend, use.kernel, use.io_aware) for use in attention_used(model)}
        assert used == {("own", "own", None)}


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


def test_a_forgotten_transpose_is_found():
    def forgets(module, query, key, value, attention_mask, **kwargs):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    model = tiny("llama")
    set_attention(model, register_attention("forgets", forgets))
    with pytest.raises(AttentionInputError, match=r"Is out.transpose\(1, 2\) missing"):
        model(tokens(2, 5))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_flash", "write 'fa'"),
        ("me/mine", "from its hub"),
        ("my_flex_attention", "flex_attention"),
        ("sdpa", "it is taken"),
        ("eager", "it is taken"),
        ("standard", "it is taken"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_the_reason(name, reason):
    with pytest.raises(AttentionInputError, match=reason):
        register_attention(name, own)
