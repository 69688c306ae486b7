"""Attention in FP8, by the float64 oracle on inputs that PyTorch rounded in the same way."""

import sys

import pytest
import torch

from benchmarks.fp8 import channels, rounded_weights
from labsupport.attention import (
    AttentionInputError,
    compare_with_oracle,
    fp8_attention,
    oracle_attention,
)
from labsupport.attention.accuracy import relative_error
from labsupport.attention.call import AttentionCall
from labsupport.attention.fp8 import _rotation, random_signs
from labsupport.checks.ex_1_7_fp8 import rotate as rotate_by_hand
from labsupport.checks.ex_1_7_fp8 import round_to_fp8
from tests.attention.cases import GPU, GROUPS, covering, make_model_qkv, to_math_layout

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels import mode
from labsupport.attention.kernels.forward_fp8 import launch, quantise, round_inputs

HOPPER = not GPU or torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="not a Hopper GPU")
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float16


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    """Round by PyTorch: Triton's interpreter loses the carry, and makes 8 of 15.9."""
    if not mode.interpreted():
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def to_fp8(x, source, target, rounding):
        if target != tl.float8e4nv:
            return convert(x, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(x)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", to_fp8)


def call(q, k, v, *, causal=False, softmax_scale=None, rotate=False):
    """`fp8_attention`, by the interpreter where there is no GPU: (out, lse), heads first."""
    if GPU:
        options = {"causal": causal, "softmax_scale": softmax_scale, "rotate": rotate}
        out, lse = fp8_attention(q, k, v, **options, return_lse=True)
    else:
        out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        rotation = _rotation(q.shape[-1], q.dtype, q.device) if rotate else None
        fixed = AttentionCall(q, k, v, causal, softmax_scale).with_positive_scale()
        launch(fixed, out, lse, rotation)
    return out.transpose(1, 2), lse


def seen(q, k, v, *, rotate=False):
    """q, k and v as the kernel reads them, scaled back: float32, heads first and repeated."""
    rotation = _rotation(q.shape[-1], q.dtype, q.device) if rotate else None
    *rounded, q_scale, k_scale, v_scale = round_inputs(q, k, v, rotation)
    # In V, keys 16 g + 8 h + 2 t + e stand at 16 g + 4 t + 2 h + e.
    rounded[2] = rounded[2].float().unflatten(1, (-1, 4, 2, 2)).transpose(2, 3).flatten(1, 4)
    pairs = zip(rounded, (q_scale, k_scale, v_scale), (q, k, v), strict=True)
    return to_math_layout(*(scaled_back(x, scale)[:, : y.shape[1]] for x, scale, y in pairs))


def scaled_back(x, scale):
    by_block = x.float().unflatten(1, (scale.shape[2], -1))
    return (by_block * scale.transpose(1, 2)[:, :, None, :, None]).flatten(1, 2)


def draw(batch, *sizes):
    return [x.detach() for x in make_model_qkv(batch, *sizes, dtype=DTYPE, device=DEVICE)]


@pytest.mark.parametrize(("head_dim", "rotate"), [(64, False), (128, True)])
def test_inputs_are_rounded_as_pytorch_rounds_them(head_dim, rotate):
    x = draw(2, 150, 1, 2, 1, head_dim)[0] * 100
    x[0, 64:128, 0] = 0  # a block of zeros
    y, scale = quantise(x, 64, _rotation(head_dim, x.dtype, x.device) if rotate else None)
    right = x.float().cpu().transpose(1, 2)
    if rotate:
        right, _ = rotate_by_hand(right, right, random_signs(head_dim))
    right = round_to_fp8(right, 64).transpose(1, 2)
    got = scaled_back(y, scale).cpu()
    # Sums in another order: now and then a number is rounded to the other side.
    assert relative_error(got[:, :150], right) < 5e-3
    assert (got[:, 150:] == 0).all()


@pytest.mark.parametrize(
    ("lengths", "head_dim", "groups", "causal", "rotate"),
    covering(
        [(70, 90), (64, 64), (90, 70), (1, 90), *([(1023, 1024), (4100, 4100)] if GPU else [])],
        (64, 128), GROUPS, (False, True), (False, True),
    ),
)  # fmt: skip
def test_the_error_is_that_of_rounded_weights(lengths, head_dim, groups, causal, rotate):
    inputs = draw(2 if GPU else 1, *lengths, *groups, head_dim)
    out, lse = call(*inputs, causal=causal, rotate=rotate)
    inputs = seen(*inputs, rotate=rotate)
    exact, exact_lse = oracle_attention(*inputs, causal=causal)
    report = compare_with_oracle(out, rounded_weights(*inputs, causal=causal), exact)
    assert report.ok, report
    # Hopper adds products of 8 bits with some 14 bits.
    torch.testing.assert_close(lse.double(), exact_lse, atol=5e-3 if GPU else 1e-5, rtol=0)


def test_values_of_very_different_size_keep_their_own_scales():
    q, k, v = draw(2, 70, 150, 1, 1, 64)
    v[:, :64] *= 1e-4
    v[:, 128:] = 0
    out, _ = call(q, k, v)
    exact, _ = oracle_attention(*seen(q, k, v))
    assert relative_error(out, exact) < 0.03


@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0])
def test_a_scale_may_be_negative_or_zero(softmax_scale):
    q, k, v = draw(1, 40, 70, 1, 1, 64)
    out, _ = call(q, k, v, softmax_scale=softmax_scale)
    exact, _ = oracle_attention(*seen(q, k, v), softmax_scale=softmax_scale)
    assert relative_error(out, exact) < 0.05


def test_a_rotation_halves_the_error_where_two_channels_are_large():
    q, k, v, scale = channels(1024 if GPU else 128, 64)
    q, k, v = (x[:, :, : 4 if GPU else 1].to(DEVICE, DTYPE) for x in (q, k, v))
    exact, _ = oracle_attention(*to_math_layout(q, k, v), softmax_scale=scale)
    plain, rotated = (
        relative_error(call(q, k, v, softmax_scale=scale, rotate=rotate)[0], exact)
        for rotate in (False, True)
    )
    print(f"relative error {plain:.4f}, rotated {rotated:.4f}")
    assert rotated < plain / 2


def test_what_the_kernel_does_not_take_is_refused():
    q = torch.zeros(1, 8, 2, 64, dtype=DTYPE, device=DEVICE)
    for wrong, said in (
        (q[..., :32], "head_dim 64 or 128, not 32"),
        (q.float(), "not torch.float32: cast"),
        (q.clone().requires_grad_(), "no backward"),
        (q.cpu(), "rounds e4m3 wrongly"),
    ):
        with pytest.raises(AttentionInputError, match=said):
            fp8_attention(wrong, wrong, wrong)
