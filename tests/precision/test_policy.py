import copy
import io
import math

import pytest
import torch

from labsupport.precision import FlashAttentionConfig, apply_precision_policy
from labsupport.precision.dtypes import unit_roundoff
from tests.precision.policy_models import (
    MODELS,
    ROUNDINGS,
    SeenByKernels,
    gpt2,
    llama,
    no_mode_is_left,
    relative_error,
    tokens,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Each policy with one of the two models.
CASES = pytest.mark.parametrize(
    ("make", "config"),
    [
        (gpt2, FlashAttentionConfig()),
        (llama, FlashAttentionConfig(residual="float32")),
        (gpt2, FlashAttentionConfig(embedding="float32", residual="float32")),
        (llama, FlashAttentionConfig(attention="float16", mlp="float32")),
        (llama, FlashAttentionConfig.float16()),
    ],
    ids=["bfloat16", "wide-stream", "wide-table", "mixed", "float16"],
)


# --- the configuration ----------------------------------------------------------------------------


def test_dtypes_may_be_given_by_name():
    config = FlashAttentionConfig(attention="torch.float16", mlp="fp32", residual="BF16")
    assert (config.attention, config.mlp, config.residual) == (F16, F32, BF16)


@pytest.mark.parametrize("nonsense", [torch.int8, "int8", "float99", None, 16, torch.float8_e4m3fn])
def test_what_is_no_floating_dtype_is_refused_with_the_list_of_those_that_are(nonsense):
    with pytest.raises(ValueError, match=r"mlp cannot be .*float16, bfloat16, float32"):
        FlashAttentionConfig(mlp=nonsense)


@pytest.mark.parametrize("field", ["norm_statistics", "loss", "optimizer"])
def test_what_should_be_float32_may_be_16_bits_but_not_silently(field):
    with pytest.warns(UserWarning, match=field):
        assert getattr(FlashAttentionConfig(**{field: F16}), field) == F16


def test_losses_are_scaled_where_any_gradient_passes_through_float16():
    assert FlashAttentionConfig.float16().needs_loss_scaling
    assert FlashAttentionConfig(attention="float16").needs_loss_scaling
    assert not FlashAttentionConfig().needs_loss_scaling


# --- models of Transformers -----------------------------------------------------------------------


@CASES
def test_logits_differ_from_float32_by_roundings_only(make, config):
    right = make()(tokens()).logits
    model = make()
    apply_precision_policy(model, config)
    logits = model(tokens()).logits
    assert logits.dtype == config.head
    # Independent errors add up as the root of their number.
    u = max(unit_roundoff(dtype) for dtype in vars(config).values())
    assert 0 < relative_error(logits, right) <= math.sqrt(ROUNDINGS) * u


def test_a_wider_stream_is_more_exact():
    right, errors = llama()(tokens()).logits, []
    for config in (FlashAttentionConfig(), FlashAttentionConfig(residual=F32, head=F32)):
        model = llama()
        apply_precision_policy(model, config)
        errors.append(relative_error(model(tokens()).logits, right))
    assert errors[1] < errors[0]


def test_a_float32_policy_changes_no_bit_of_the_output():
    right = llama()(tokens()).logits
    model = llama()
    apply_precision_policy(model, FlashAttentionConfig.float32())
    assert torch.equal(model(tokens()).logits, right)


@CASES
def test_q_k_and_v_enter_the_kernel_in_one_dtype(make, config):
    model = make()
    apply_precision_policy(model, config)
    with SeenByKernels() as seen:
        model(tokens())
    assert seen.dtypes == [(config.attention,) * 3] * 2


@CASES
def test_the_stream_between_the_blocks_keeps_its_dtype(make, config):
    model = make()
    apply_precision_policy(model, config)
    seen = []
    for block in model.transformer.h if make is gpt2 else model.model.layers:
        block.register_forward_hook(lambda _, args, out: seen.extend((args[0].dtype, out.dtype)))
    model(tokens())
    assert seen == [config.residual] * 4


@CASES
def test_twice_is_as_good_as_once(make, config):
    model = make()
    first = apply_precision_policy(model, config)
    logits = model(tokens()).logits
    second = apply_precision_policy(model, config)
    assert len(first) > 0
    assert len(second) == 0
    assert "nothing changed" in str(second)
    assert second.notes == first.notes
    assert torch.equal(model(tokens()).logits, logits)


def test_another_policy_replaces_the_first():
    rounded, model = gpt2(), gpt2()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(BF16).to(F32)
    apply_precision_policy(model, FlashAttentionConfig())
    apply_precision_policy(model, FlashAttentionConfig.float32())
    assert torch.equal(model(tokens()).logits, rounded(tokens()).logits)


@pytest.mark.parametrize("table", ["float32", "bfloat16"])
def test_a_tied_head_stays_tied_in_the_tables_dtype_and_computes_in_its_own(table):
    model = llama(tie_word_embeddings=True)
    report = apply_precision_policy(model, FlashAttentionConfig(embedding=table))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == getattr(torch, table)
    assert model(tokens()).logits.dtype == BF16
    assert any("tied" in note and "lm_head.weight" in note for note in report.notes)
    assert any("copy" in note for note in report.notes) == (table == "float32")


@MODELS
def test_checkpointed_gradients_are_the_same_bit_for_bit(make):
    model = make()
    apply_precision_policy(model, FlashAttentionConfig(residual="float32"))
    other = copy.deepcopy(model)
    if hasattr(other, "activation_checkpointing_enable"):  # the newer name
        other.activation_checkpointing_enable()
    else:
        other.gradient_checkpointing_enable()
    for each in (model.train(), other.train()):
        each(tokens(), labels=tokens(), use_cache=False).loss.backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert no_mode_is_left()


def test_a_model_under_a_policy_is_copied_saved_and_loaded():
    config = FlashAttentionConfig(residual="float32")
    model = llama()
    apply_precision_policy(model, config)
    logits = model(tokens()).logits
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, logits)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = llama().apply(lambda m: [p.data.zero_() for p in m.parameters(recurse=False)])
    apply_precision_policy(other, config)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(tokens()).logits, logits)


def test_a_forward_that_raises_leaves_no_mode_behind():
    model = llama()
    apply_precision_policy(model)
    attention = model.model.layers[1].self_attn
    for when in ({"prepend": True}, {}):
        hook = attention.register_forward_pre_hook(lambda *_: 1 / 0, **when)
        with pytest.raises(ZeroDivisionError):
            model(tokens())
        hook.remove()
        assert no_mode_is_left()
    assert model(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("config", [FlashAttentionConfig(), FlashAttentionConfig.float16()])
def test_padding_and_both_caches_work(config):
    model = llama().eval()
    apply_precision_policy(model, config)
    mask = torch.ones_like(tokens())
    mask[0, :5] = 0
    assert model(tokens(), attention_mask=mask).logits.isfinite().all()
    generated = [
        model.generate(
            tokens(), max_new_tokens=3, do_sample=False, cache_implementation=cache
        ).tolist()
        for cache in ("dynamic", "static")
    ]
    assert generated[0] == generated[1]
