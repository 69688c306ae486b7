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
from labsupport.precision.autofix import forget_warnings
from labsupport.precision.cast_hooks import KernelDtype
from labsupport.precision.dtypes import unit_roundoff
from tests.precision.policy_models import (
    HEADS,
    ROUNDINGS,
    TOKENS,
    WIDTH,
    Block,
    SeenByKernels,
    gpt2,
    hidden,
    relative_error,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


# --- hand-written modules -------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [False, True], ids=["sdpa", "labsupport"])
def test_a_hand_written_block_is_recognised_and_its_kernel_reached(ours):
    torch.manual_seed(0)
    block = Block(ours)
    right = block(hidden())
    config = FlashAttentionConfig(attention="float16", residual="float32")
    report = apply_precision_policy(block, config)
    with SeenByKernels() as seen:
        out = block(hidden())
    assert seen.dtypes == [(F16,) * 3]
    assert not any("not recognised" in note for note in report.notes)
    assert 0 < relative_error(out, right) <= math.sqrt(ROUNDINGS / 2) * unit_roundoff(BF16)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_pytorchs_encoder_runs_padded_or_not(norm_first, training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 48, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(training)
    right = model(hidden())
    apply_precision_policy(model)
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [5]])
    with torch.inference_mode():
        error = relative_error(model(hidden()), right)
        padded = model(hidden(), src_key_padding_mask=padding)
    assert 0 < error <= math.sqrt(ROUNDINGS) * unit_roundoff(BF16)
    assert padded[:, :5].isfinite().all()


def test_the_tables_dtype_rules_also_if_the_head_comes_first():
    model = nn.ModuleDict({"head": nn.Linear(4, 5, bias=False), "table": nn.Embedding(5, 4)})
    model["head"].weight = model["table"].weight
    apply_precision_policy(model, FlashAttentionConfig(embedding="float32"))
    assert model["head"].weight is model["table"].weight
    assert model["table"].weight.dtype == F32


def test_what_is_not_recognised_keeps_its_dtype_is_named_and_runs():
    model = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    report = apply_precision_policy(model)
    assert model[1].weight.dtype == F32
    assert any("not recognised" in note and " 1." in note for note in report.notes)
    assert model(torch.arange(5)).isfinite().all()


def test_a_component_can_be_said():
    model = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH))
    report = apply_precision_policy(
        model, FlashAttentionConfig(mlp="float16"), components={"1": "mlp", "0": "other"}
    )
    assert (model[0].weight.dtype, model[1].weight.dtype) == (F32, F16)
    assert {change.component for change in report} == {"mlp", "other"}


def test_a_component_that_does_not_exist_and_a_pattern_without_a_module_are_refused():
    with pytest.raises(ValueError, match="no component 'ffn'"):
        apply_precision_policy(Block(), components={"up": "ffn"})
    with pytest.raises(ValueError, match=r"'adapter\*' matches no module"):
        apply_precision_policy(Block(), components={"adapter*": "mlp"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([1],), r"nn.Module, not for \[1\]"),
        ((Block,), "not for <class .*Block"),
        ((Block(), "bfloat16"), r"FlashAttentionConfig\.bfloat16\(\), not 'bfloat16'"),
    ],
)
def test_what_is_no_module_or_no_policy_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        apply_precision_policy(*given)


def test_the_policys_dtype_for_the_kernel_is_the_last_word():
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    forget_warnings()
    with KernelDtype(BF16), pytest.warns(PrecisionWarning, match="k float16 -> float32"):
        chosen = safe_flash_attention(q, k.to(F16), v, dtypes=[F32])
    right = attention(q.to(BF16), k.to(F16).to(BF16), v.to(BF16))
    assert torch.equal(chosen, right.float())
    with SeenByKernels() as seen, KernelDtype(F16), KernelDtype(BF16):
        out = attention(q, k, v)
    assert seen.dtypes == [(F16,) * 3]
    assert out.dtype == F32


def test_a_norm_of_any_make_gets_float32_and_gives_back_its_inputs_dtype():
    class MyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            self.seen = x.dtype
            return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()

    norm = MyRMSNorm()
    apply_precision_policy(norm)
    out = norm(torch.full((2, 4), 300.0, dtype=F16))
    assert (norm.seen, out.dtype) == (F32, F16)
    assert (out == 1).all()


def test_a_loss_inside_of_a_model_gets_float32():
    model = nn.ModuleDict({"criterion": nn.CrossEntropyLoss()})
    apply_precision_policy(model)
    loss = model["criterion"](torch.randn(3, 5, dtype=BF16), torch.tensor([0, 1, 2]))
    assert loss.dtype == F32


def test_a_very_negative_mask_stays_finite_in_float16():
    q = torch.randn(1, 1, 3, 8)
    mask = torch.full((3, 3), torch.finfo(F32).min)
    mask[0, 0], mask[1] = 0, -torch.inf
    seen = []

    class Look(SeenByKernels):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention:
                seen.append(kwargs["attn_mask"])
            return func(*args, **(kwargs or {}))

    with Look(), KernelDtype(F16):
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert out.dtype == F32
    assert seen[0].dtype == F16
    assert (seen[0][1] == -torch.inf).all()
    assert (seen[0][2] == torch.finfo(F16).min).all()


# --- the report -----------------------------------------------------------------------------------


def test_the_report_names_each_change_with_its_component_and_dtypes():
    table = apply_precision_policy(gpt2()).to_dataframe()
    assert list(table.columns) == ["component", "module", "what", "from", "to"]
    row = table[(table.module == "transformer.h.1.mlp.c_fc") & (table.what == "weight")].iloc[0]
    assert (row["component"], row["from"], row["to"]) == ("mlp", "float32", "bfloat16")
    assert set(table.component) == {"attention", "mlp", "norm", "embedding", "head"}
