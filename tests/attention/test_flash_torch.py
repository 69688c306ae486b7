import itertools
from itertools import cycle

import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    FlashAttentionFunction,
    flash_attention_forward,
    oracle_attention,
)
from labsupport.profiling.memory import LargestTensor
from tests.attention.cases import (
    HALF,
    HEAD_DIMS,
    LENGTHS,
    assert_obeys_error_rule,
    make_qkv,
    on_each_device,
)


def flash(is_causal=False, block_q=32, block_k=48, **options):
    def function(q, k, v):
        return FlashAttentionFunction.apply(
            q,
            k,
            v,
            is_causal,
            options.get("softmax_scale"),
            options.get("window_size", (-1, -1)),
            options.get("alibi_slopes"),
            block_q,
            block_k,
        )

    return function


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (5, 11), (11, 5)])
def test_gradients_match_finite_differences(seqlen_q, seqlen_k, is_causal):
    inputs = make_qkv(2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(flash(is_causal, block_q=4, block_k=3), inputs)


def test_gradients_with_every_option_match_finite_differences():
    inputs = make_qkv(2, seqlen_q=7, seqlen_k=9, head_dim=3, dtype=torch.float64)
    slopes = torch.tensor([0.3, 0.1], dtype=torch.float64)
    function = flash(True, 4, 3, softmax_scale=0.7, window_size=(4, -1), alibi_slopes=slopes)
    assert torch.autograd.gradcheck(function, inputs)


@on_each_device
@pytest.mark.parametrize(
    ("lengths", "head_dim"), list(zip(LENGTHS, cycle(HEAD_DIMS), strict=False))
)
def test_lengths_and_head_dims_obey_the_error_rule(lengths, head_dim, device):
    n_q, n_k = lengths
    for dtype, is_causal in zip(HALF, [n_q % 2 == 0, n_q % 2 == 1], strict=True):
        sizes = {"seqlen_q": n_q, "seqlen_k": n_k, "head_dim": head_dim}
        inputs = make_qkv(2, **sizes, dtype=dtype, device=device)
        assert_obeys_error_rule(flash(is_causal), inputs, causal=is_causal)


@on_each_device
@pytest.mark.parametrize(
    ("dtype", "leading"),
    [(torch.float64, (2, 3)), (torch.float32, ()), (torch.float32, (2, 1, 3))],
)
def test_wide_dtypes_and_any_leading_dimensions_obey_the_error_rule(dtype, leading, device):
    inputs = make_qkv(*leading, seqlen_q=65, seqlen_k=129, dtype=dtype, device=device)
    assert_obeys_error_rule(flash(True), inputs, causal=True)


@pytest.mark.parametrize(
    ("window", "is_causal"), [((0, 0), False), ((7, -1), True), ((-1, 5), False), ((20, 3), False)]
)
def test_windows_obey_the_error_rule(window, is_causal):
    inputs = make_qkv(2, seqlen_q=70, seqlen_k=90)
    options = {"causal": is_causal, "window_size": window}
    assert_obeys_error_rule(flash(is_causal, 16, 8, window_size=window), inputs, **options)


@pytest.mark.parametrize(
    ("block_q", "block_k"), [(1, 1), (7, 64), (64, 7), (500, 500), (None, None)]
)
def test_the_block_sizes_do_not_change_the_result(block_q, block_k):
    q, k, v = make_qkv(2, seqlen_q=50, seqlen_k=61, dtype=torch.float64)
    out, lse = flash_attention_forward(q, k, v, True, block_q=block_q, block_k=block_k)
    expected_out, expected_lse = oracle_attention(q, k, v, causal=True)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_the_log_sum_exp_is_float32_at_least():
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = make_qkv(seqlen_q=5, seqlen_k=5, dtype=dtype)
        out, lse = flash_attention_forward(q, k, v, False)
        wide = torch.promote_types(dtype, torch.float32)
        assert (out.dtype, lse.dtype) == (dtype, wide)
        assert not out.requires_grad


def test_queries_without_keys_give_zero_minus_infinity_and_zero_gradient():
    q, k, v = make_qkv(2, seqlen_q=9, seqlen_k=4)
    out, lse = flash_attention_forward(q, k, v, True, block_q=4, block_k=3)
    assert (out[:, :5] == 0).all()
    assert (lse[:, :5] == -torch.inf).all()
    flash(True, 4, 3)(q, k, v).sum().backward()
    assert (q.grad[:, :5] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_logits_of_ten_thousand_do_not_overflow():
    q, k, v = make_qkv(seqlen_q=16, seqlen_k=16)
    with torch.no_grad():
        q[:] = 1e4
        k[:, 0] = 1.0
    out = flash(True, 4, 4)(q, k, v)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_nan_stays_visible():
    q, k, v = make_qkv(seqlen_q=8, seqlen_k=8)
    with torch.no_grad():
        q[3, 0] = torch.nan
    out = flash(block_q=4, block_k=4)(q, k, v)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4]].isfinite().all()


def test_it_saves_the_inputs_the_output_and_one_number_a_row():
    q, k, v = make_qkv(2, 3, seqlen_q=40, seqlen_k=56)
    out = FlashAttentionFunction.apply(q, k, v, False)
    saved = out.grad_fn.saved_tensors
    shapes = sorted(tuple(t.shape) for t in saved)
    assert shapes == sorted([q.shape, k.shape, v.shape, out.shape, (2, 3, 40)])


def test_no_tensor_of_seqlen_squared_is_ever_created():
    q, k, v = make_qkv(seqlen_q=256, seqlen_k=256, head_dim=8)
    with LargestTensor() as largest:
        flash(False, 32, 32)(q, k, v).sum().backward()
    assert largest.numel <= 256 * 8


def test_tiles_that_the_causal_mask_empties_are_skipped(monkeypatch):
    import labsupport.attention.flash_torch as module

    tiles = []
    original = module._hide

    def counting(s_ij, rows, cols, *rest):
        tiles.append((rows.start, cols.start))
        return original(s_ij, rows, cols, *rest)

    monkeypatch.setattr(module, "_hide", counting)
    q, k, v = make_qkv(seqlen_q=64, seqlen_k=64)
    out = flash(True, 16, 16)(q, k, v)
    assert sorted(tiles) == sorted(
        t for t in itertools.product(range(0, 64, 16), repeat=2) if t[1] <= t[0]
    )
    tiles.clear()
    out.sum().backward()
    assert len(tiles) == 10


def test_a_second_derivative_is_refused_not_wrong():
    q, k, v = make_qkv(seqlen_q=4, seqlen_k=4, dtype=torch.float64)
    dout = torch.ones_like(q, requires_grad=True)
    (grad,) = torch.autograd.grad(flash()(q, k, v), q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_non_contiguous_inputs_are_read_as_they_are():
    q, k, v = make_qkv(3, seqlen_q=20, seqlen_k=20)
    strided = tuple(t.detach().mT.contiguous().mT.requires_grad_() for t in (q, k, v))
    assert not strided[0].is_contiguous()
    assert_obeys_error_rule(flash(True, 8, 8), strided, causal=True)


@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_a_block_of_no_rows_is_refused(name):
    q, k, v = make_qkv(seqlen_q=4, seqlen_k=4)
    with pytest.raises(ValueError, match=name):
        flash_attention_forward(q, k, v, **{name: 0})


def test_grouped_heads_are_sent_to_the_front_door():
    q, _, _ = make_qkv(2, 4, seqlen_q=8, seqlen_k=8)
    _, k, v = make_qkv(2, 2, seqlen_q=8, seqlen_k=8)
    with pytest.raises(AttentionInputError, match=r"labsupport\.attention\.attention"):
        FlashAttentionFunction.apply(q, k, v, False)


def test_autocast_does_not_round_the_accumulation():
    inputs = make_qkv(seqlen_q=40, seqlen_k=40)
    expected = oracle_attention(*inputs)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = flash(False, 8, 8)(*inputs)
        out.sum().backward()
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() < 1e-5
