import itertools

import pytest
import torch

from labsupport.attention import (
    FlashAttentionFunction,
    flash_attention_forward,
    oracle_attention,
)
from labsupport.profiling.memory import LargestTensor
from tests.attention.cases import DEVICES, assert_obeys_error_rule, covering, make_qkv

# flash-attn's own grid, cut short: odd lengths, some below and some above a tile, one query or key.
LENGTHS = [(1, 1), (1, 239), (3, 199), (113, 203), (203, 113), (256, 64)]
HEAD_DIMS = [16, 40, 64, 111, 256]
HALF = [torch.float16, torch.bfloat16]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def flash(
    is_causal=False, block_q=32, block_k=48, *,
    softmax_scale=None, window_size=(-1, -1), alibi_slopes=None,
):  # fmt: skip
    rest = is_causal, softmax_scale, window_size, alibi_slopes, block_q, block_k
    return lambda q, k, v: FlashAttentionFunction.apply(q, k, v, *rest)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "is_causal"), [(5, 7, False), (7, 5, True)])
def test_gradients_match_finite_differences(seqlen_q, seqlen_k, is_causal):
    inputs = make_qkv(2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=3, dtype=torch.float64)
    function = flash(is_causal, block_q=4, block_k=3)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    slopes = torch.tensor([0.3, 0.1], dtype=torch.float64)
    function = flash(True, 4, 3, softmax_scale=0.7, window_size=(4, -1), alibi_slopes=slopes)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@on_each_device
@pytest.mark.parametrize(
    ("lengths", "head_dim", "dtype", "is_causal"),
    covering(LENGTHS, HEAD_DIMS, HALF, [False, True]),
)
def test_lengths_and_head_dims_obey_the_error_rule(lengths, head_dim, dtype, is_causal, device):
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "head_dim": head_dim}
    inputs = make_qkv(2, **sizes, dtype=dtype, device=device)
    assert_obeys_error_rule(flash(is_causal), inputs, causal=is_causal)


@on_each_device
@pytest.mark.parametrize(
    ("dtype", "leading"),
    [(torch.float64, (2, 3)), (torch.float32, ())],
)
def test_wide_dtypes_and_any_leading_dimensions_obey_the_error_rule(dtype, leading, device):
    inputs = make_qkv(*leading, seqlen_q=65, seqlen_k=129, dtype=dtype, device=device)
    inputs = tuple(t.detach().mT.contiguous().mT.requires_grad_() for t in inputs)  # any strides
    assert_obeys_error_rule(flash(True), inputs, causal=True)


@pytest.mark.parametrize(
    ("block_q", "block_k"), [(1, 1), (7, 64), (64, 7), (500, 500), (None, None)]
)
def test_the_block_sizes_do_not_change_the_result(block_q, block_k):
    q, k, v = make_qkv(2, seqlen_q=61, seqlen_k=50, dtype=torch.float64)  # 11 see no key
    out, lse = flash_attention_forward(q, k, v, True, block_q=block_q, block_k=block_k)
    expected_out, expected_lse = oracle_attention(q, k, v, causal=True)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    assert not out.requires_grad


def test_logits_of_ten_thousand_do_not_overflow_and_nan_stays_visible():
    q, k, v = make_qkv(seqlen_q=16, seqlen_k=16)
    with torch.no_grad():
        q[:] = 1e4
        k[:, 0] = 1.0
    out = flash(True, 4, 4)(q, k, v)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    with torch.no_grad():
        q[3, 0] = torch.nan
    out = flash(block_q=4, block_k=4)(q, k, v)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4]].isfinite().all()


def test_it_saves_one_number_a_row_and_creates_nothing_of_seqlen_squared():
    q, k, v = make_qkv(seqlen_q=256, seqlen_k=256, head_dim=8)
    with LargestTensor() as largest:
        out = flash(False, 32, 32)(q, k, v)
        saved = sorted(tuple(t.shape) for t in out.grad_fn.saved_tensors)
        out.sum().backward()
    assert saved == [(256,), *[(256, 8)] * 4]
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
