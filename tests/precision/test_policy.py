import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labsupport.attention import attention
from labsupport.precision import (
    FlashAttentionConfig,
    PrecisionWarning,
    apply_precision_policy,
    safe_flash_attention,
)
from labsupport.precision.cast_hooks import KernelDtype
from labsupport.precision.dtypes import unit_roundoff
from tests.precision.policy_models import (
    HEADS,
    ROUNDINGS,
    WIDTH,
    SeenByKernels,
    gpt2,
    llama,
    no_mode_is_left,
    relative_error,
    tokens,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Each policy with one of the two models.
CASES = {
    "bfloat16": (gpt2, FlashAttentionConfig()),
    "wide-table": (gpt2, FlashAttentionConfig(embedding="float32", residual="float32")),
    "mixed": (llama, FlashAttentionConfig(attention="float16", mlp="float32")),
    "float16": (llama, FlashAttentionConfig.float16()),
}


def test_a_policy_takes_dtypes_by_name_and_knows_where_losses_are_scaled():
    config = FlashAttentionConfig(attention="float16", mlp=F32, residual="bfloat16")
    assert (config.attention, config.mlp, config.residual) == (F16, F32, BF16)
    configs = config, FlashAttentionConfig.float16(), FlashAttentionConfig()
    assert [each.needs_loss_scaling for each in configs] == [True, True, False]
    for nonsense in ("int8", None):
        with pytest.raises(ValueError, match=r"mlp cannot be .*float16, bfloat16, float32"):
            FlashAttentionConfig(mlp=nonsense)
    with pytest.warns(UserWarning, match=r"loss in float16: a loss of 10"):
        FlashAttentionConfig(loss="float16")
    course = type("Course", (), {"MLP_DTYPE": "float16", "LOSS_COMPUTE_DTYPE": F32, "LAYERS": 2})
    config = FlashAttentionConfig.from_constants(course)
    assert (config.MLP_DTYPE, config.LOSS_COMPUTE_DTYPE, config.attention) == (F16, F32, BF16)
    with pytest.raises(ValueError, match="no component for SOFTMAX_DTYPE"):
        FlashAttentionConfig.from_constants(type("Course", (), {"SOFTMAX_DTYPE": F32}))
    with pytest.raises(AttributeError, match="SOFTMAX_DTYPE"):
        _ = config.SOFTMAX_DTYPE


# --- models of Transformers -----------------------------------------------------------------------


@pytest.mark.parametrize(("make", "config"), CASES.values(), ids=CASES)
def test_a_policy_reaches_kernels_and_stream_rounds_only_and_is_idempotent(make, config):
    right = make()(tokens()).logits
    model, stream, normed = make(), [], []
    notes = apply_precision_policy(model, config)
    for block in model.transformer.h if make is gpt2 else model.model.layers:
        block.register_forward_hook(lambda _, args, out: stream.extend((args[0].dtype, out.dtype)))
        norm = block.ln_1 if make is gpt2 else block.input_layernorm
        norm.register_forward_hook(lambda _, args, out: normed.append(out.dtype))
    with SeenByKernels() as seen:
        logits = model(tokens()).logits
    assert (seen.dtypes, stream) == ([(config.attention,) * 3] * 2, [config.residual] * 4)
    assert (normed, logits.dtype) == ([config.residual] * 2, config.head)
    # Independent errors add up as the root of their number.
    u = max(unit_roundoff(dtype) for dtype in vars(config).values())
    assert 0 < relative_error(logits, right) <= math.sqrt(ROUNDINGS) * u
    again = apply_precision_policy(model, config)
    assert again == notes
    assert torch.equal(model(tokens()).logits, logits)


def test_another_policy_replaces_the_first_and_float32_changes_no_bit():
    rounded, model = gpt2(), gpt2()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(BF16).to(F32)
    apply_precision_policy(model)
    assert {parameter.dtype for parameter in model.parameters()} == {BF16}
    apply_precision_policy(model, FlashAttentionConfig.float32())
    assert torch.equal(model(tokens()).logits, rounded(tokens()).logits)


@pytest.mark.parametrize("table", ["float32", "bfloat16"])
def test_a_tied_head_stays_tied_in_the_tables_dtype_and_computes_in_its_own(table):
    model = llama(tie_word_embeddings=True)
    notes = apply_precision_policy(model, FlashAttentionConfig(embedding=table))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == getattr(torch, table)
    assert model(tokens()).logits.dtype == BF16
    assert any("tied" in note and "lm_head.weight" in note for note in notes)
    # Also if the head comes first.
    pair = nn.ModuleDict({"head": nn.Linear(4, 5, bias=False), "table": nn.Embedding(5, 4)})
    pair["head"].weight = pair["table"].weight
    apply_precision_policy(pair, FlashAttentionConfig(embedding=table))
    assert pair["head"].weight.dtype == getattr(torch, table)


def test_a_model_under_a_policy_is_checkpointed_copied_saved_and_loaded():
    config, model, file = FlashAttentionConfig(residual="float32"), llama(), io.BytesIO()
    apply_precision_policy(model, config)
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
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = llama().apply(lambda m: [p.data.zero_() for p in m.parameters(recurse=False)])
    apply_precision_policy(other, config)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)


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


# --- hand-written modules -------------------------------------------------------------------------


class Attention(nn.Module):
    """A hand-written layer: it calls a kernel of PyTorch's or of the lab's."""

    def __init__(self, ours):
        super().__init__()
        self.ours = ours
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        if self.ours:
            out = attention(q, k, v, causal=True)
        else:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, value=v, is_causal=True).transpose(1, 2)
        return self.proj(out.flatten(-2))


@pytest.mark.parametrize("ours", [False, True], ids=["sdpa", "labsupport"])
def test_a_hand_written_model_is_recognised_its_kernel_reached_and_the_rest_left_alone(ours):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, WIDTH), Attention(ours), nn.Linear(WIDTH, 2))
    ids = torch.arange(5)[None]
    right = model(ids)
    # The last layer's float32 weights get float32 inputs, whatever the stream is.
    config = FlashAttentionConfig(attention="float16", residual="bfloat16" if ours else "float32")
    notes = apply_precision_policy(model, config)
    with SeenByKernels() as seen:
        out = model(ids)
    assert seen.dtypes == [(F16,) * 3]
    assert model[2].weight.dtype == F32
    assert any("not recognised" in note and " 2." in note for note in notes)
    assert 0 < relative_error(out, right) <= math.sqrt(ROUNDINGS / 2) * unit_roundoff(BF16)


def test_the_policys_dtype_for_the_kernel_is_the_last_word():
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    with KernelDtype(BF16), pytest.warns(PrecisionWarning, match="k float16 -> float32"):
        chosen = safe_flash_attention(q, k.to(F16), v, dtypes=[F32])
    right = attention(q.to(BF16), k.to(F16).to(BF16), v.to(BF16))
    assert torch.equal(chosen, right.float())
    with SeenByKernels() as seen, KernelDtype(F16), KernelDtype(BF16):
        out = attention(q, k, v)
    assert seen.dtypes == [(F16,) * 3]
    assert out.dtype == F32
