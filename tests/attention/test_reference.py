"""The mathematics: the textbook and the error rule, the running softmax, the visible pairs."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from labsupport.attention import (
    AttentionInputError,
    compare_with_oracle,
    merge_attention,
    online_softmax,
    oracle_attention,
    standard_attention,
)
from labsupport.attention.accuracy import max_error, relative_error
from labsupport.attention.masks import AttentionMask
from tests.attention.cases import make_qkv


def test_agrees_with_pytorchs_own_attention():
    q, k, v = make_qkv(2, 3, seqlen_q=10, seqlen_k=10, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    output, weights = standard_attention(q, k, v, causal=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 10).double())
    _, weights = standard_attention(q[..., :4, :], k[..., :7, :], v[..., :7, :], causal=True)
    assert (weights[..., 0, 4:] == 0).all()
    assert (weights[..., 0, :4] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_say_the_same_and_a_fully_masked_query_gives_zero_and_no_nan(dtype, additive):
    q, k, v = make_qkv(seqlen_q=3, seqlen_k=3, dtype=dtype)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    if additive:
        mask = torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    with pytest.raises(AttentionInputError, match=r"Pass mask\.bool\(\)"):
        standard_attention(q, k, v, (mask == 0).to(dtype))
    output, weights = standard_attention(q, k, v, mask)
    assert (weights > 0).tolist() == [[True] * 3, [False] * 3, [True, False, True]]
    assert (output[1] == 0).all()
    output.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[1] == 0).all()


def test_the_oracles_log_sum_exp_follows_its_definition_in_float64():
    q, k, v = make_qkv(seqlen_q=5, seqlen_k=2, dtype=torch.float16)
    output, lse = oracle_attention(q, k, v, softmax_scale=0.3)
    assert output.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(lse, (q.double() @ k.double().mT * 0.3).exp().sum(-1).log())
    slopes, distance = torch.tensor([0.5]), torch.tensor([[3, 4], [2, 3], [1, 2], [0, 1], [1, 0]])
    biased, _ = oracle_attention(q[None], k[None], v[None], alibi_slopes=slopes)
    expected, _ = oracle_attention(q, k, v, -0.5 * distance.double())
    torch.testing.assert_close(biased[0], expected)
    output, lse = oracle_attention(q, k, v, causal=True)
    assert (lse[:3] == -torch.inf).all()
    assert lse[3:].isfinite().all()
    assert (output[:3] == 0).all()


def test_the_error_rule_allows_twice_the_textbooks_error_and_no_more():
    oracle = torch.zeros(4)
    textbook = torch.full((4,), 1e-3)
    assert compare_with_oracle(torch.full((4,), 2.0e-3), textbook, oracle).ok
    assert not compare_with_oracle(torch.full((4,), 2.1e-3), textbook, oracle).ok
    assert compare_with_oracle(torch.full((4,), 3.0e-3), textbook, oracle, gradient=True).ok
    assert not compare_with_oracle(torch.full((4,), torch.nan), textbook, oracle).ok


def test_error_measures_follow_their_definitions_and_refuse_to_broadcast():
    result, oracle = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert max_error(result, oracle) == 4.0
    assert relative_error(result, oracle) == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="one shape"):
        compare_with_oracle(torch.zeros(4, 1), torch.zeros(4), torch.zeros(4))


# --- online softmax -------------------------------------------------------------------------------


def test_blocks_of_any_size_give_the_softmax():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 37, dtype=torch.float64, generator=generator) * 20
    scores[1, :20], scores[2] = -torch.inf, torch.arange(37)  # hidden, rising
    scores[3] += 10_000  # exp would overflow
    scores[4] = -torch.inf
    for block_size in (1, 16, 37, 100):
        probabilities, lse = online_softmax(scores, block_size)
        torch.testing.assert_close(probabilities[:4], scores[:4].softmax(-1))
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        assert (probabilities[4] == 0).all()
    with pytest.raises(ValueError, match="block_size"):
        online_softmax(scores, 0)


def parts_and_whole(seqlen_k=24, cut=10):
    q, k, v = make_qkv(2, seqlen_q=6, seqlen_k=seqlen_k, dtype=torch.float64)
    left = oracle_attention(q, k[:, :cut], v[:, :cut])
    right = oracle_attention(q, k[:, cut:], v[:, cut:])
    return left, right, oracle_attention(q, k, v)


def test_merging_two_sets_of_keys_is_attention_over_both():
    left, right, whole = parts_and_whole()
    empty = torch.zeros_like(left[0]), torch.full_like(left[1], -torch.inf)
    for a, b, expected in ((left, right, whole), (left, empty, left), (empty, left, left)):
        for got, right_one in zip(merge_attention(*a, *b), expected, strict=True):
            torch.testing.assert_close(got, right_one)


def test_merging_is_differentiable_even_where_both_parts_are_empty():
    out, lse = torch.zeros(3, 4, requires_grad=True), torch.full((3,), -torch.inf)
    merged, merged_lse = merge_attention(out, lse.requires_grad_(), out, lse)
    assert (merged == 0).all()
    assert (merged_lse == -torch.inf).all()
    merged.sum().backward()
    assert out.grad.isfinite().all()
    assert lse.grad.isfinite().all()
    left, right, _ = parts_and_whole()
    inputs = [t.detach()[:, :2].requires_grad_() for t in (*left, *right)]
    assert torch.autograd.gradcheck(merge_attention, inputs, fast_mode=True)


def test_low_precision_statistics_are_used_in_float32():
    left, right, _ = parts_and_whole()
    halves = left[0].float(), left[1].bfloat16(), right[0].float(), right[1].bfloat16()
    merged, lse = merge_attention(*halves)
    exact, _ = merge_attention(*(t.double() for t in halves))
    assert (merged.dtype, lse.dtype) == (torch.float32, torch.bfloat16)
    assert (merged - exact).abs().max() < 1e-6
    out, _ = merge_attention(*(t.bfloat16() for t in left), *(t.bfloat16() for t in right))
    assert out.dtype == torch.bfloat16


# --- masks ----------------------------------------------------------------------------------------

BANDS = [
    AttentionMask.of(n_q, n_k, causal=causal, window_size=window)
    for (n_q, n_k), causal, window in itertools.product(
        [(1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)],
        [False, True],
        [(-1, -1), (0, 0), (2, -1), (-1, 1), (1, 2), (20, 20)],
    )
]


def by_definition(band):
    """The mask straight from the definition, without any of the class's arithmetic."""
    rows, cols = torch.arange(band.seqlen_q)[:, None], torch.arange(band.seqlen_k)
    distance = cols - (rows + band.seqlen_k - band.seqlen_q)
    left_ok = distance >= (-99 if band.left is None else -band.left)
    return left_ok & (distance <= (99 if band.right is None else band.right))


def as_mask(mask, rows, cols):
    return torch.ones(rows, cols, dtype=torch.bool) if mask is None else mask


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_question_agrees_with_the_definition(band):
    expected = by_definition(band)
    full = as_mask(band.full_mask(), band.seqlen_q, band.seqlen_k)
    assert torch.equal(full, expected)
    assert band.visible_pairs() == expected.sum()
    assert band.unlimited == bool(expected.all())
    assert band.leading_empty_rows == int((~expected.any(dim=1)).sum())
    assert expected[band.leading_empty_rows :].any(dim=1).all()
    # Skipped tiles are empty, and tiles without a mask are full.
    for start in range(0, band.seqlen_q, 2):
        rows = slice(start, min(start + 2, band.seqlen_q))
        first, last = band.keys_seen(rows.start, rows.stop)
        assert not expected[rows, :first].any()
        assert not expected[rows, last:].any()
        for col in range(0, band.seqlen_k, 3):
            cols = slice(col, min(col + 3, band.seqlen_k))
            tile = as_mask(band.mask(rows, cols), rows.stop - rows.start, cols.stop - cols.start)
            assert torch.equal(tile, expected[rows, cols])
    for start in range(band.seqlen_k):
        first, last = band.queries_seeing(start, start + 1)
        assert not expected[:first, start].any()
        assert not expected[last:, start].any()


def test_causal_wins_over_a_window_that_looks_right():
    assert AttentionMask.of(4, 4, causal=True, window_size=(2, 3)).right == 0
