import pytest
import torch

from labsupport.attention import merge_attention, online_softmax, oracle_attention
from tests.attention.cases import make_qkv


@pytest.mark.parametrize("block_size", [1, 16, 37, 100])
def test_blocks_of_any_size_give_the_softmax(block_size):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 37, dtype=torch.float64, generator=generator) * 20
    scores[1, :20], scores[2] = -torch.inf, torch.arange(37)  # hidden, rising
    probabilities, lse = online_softmax(scores, block_size)
    torch.testing.assert_close(probabilities, scores.softmax(-1))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_scores_that_overflow_exp_do_not_overflow_here():
    probabilities, _ = online_softmax(torch.tensor([10_000.0, 10_000.0]), block_size=1)
    assert probabilities.tolist() == [0.5, 0.5]


def test_a_row_without_entries_is_zero_and_minus_infinity():
    probabilities, lse = online_softmax(torch.full((2, 4), -torch.inf), block_size=2)
    assert (probabilities == 0).all()
    assert (lse == -torch.inf).all()


def test_a_block_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="block_size"):
        online_softmax(torch.zeros(3), 0)


def parts_and_whole(seqlen_k=24, cut=10):
    q, k, v = make_qkv(2, seqlen_q=6, seqlen_k=seqlen_k, dtype=torch.float64)
    left = oracle_attention(q, k[:, :cut], v[:, :cut])
    right = oracle_attention(q, k[:, cut:], v[:, cut:])
    return left, right, oracle_attention(q, k, v)


def test_merging_two_sets_of_keys_is_attention_over_both():
    left, right, (out, lse) = parts_and_whole()
    merged_out, merged_lse = merge_attention(*left, *right)
    torch.testing.assert_close(merged_out, out)
    torch.testing.assert_close(merged_lse, lse)


def test_an_empty_part_changes_nothing():
    (out, lse), _, _ = parts_and_whole()
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge_attention(out, lse, *nothing), merge_attention(*nothing, out, lse)):
        torch.testing.assert_close(merged[0], out)
        torch.testing.assert_close(merged[1], lse)


def test_two_empty_parts_give_zero_and_minus_infinity_with_finite_gradients():
    out = torch.zeros(3, 4, requires_grad=True)
    lse = torch.full((3,), -torch.inf, requires_grad=True)
    merged_out, merged_lse = merge_attention(out, lse, out, lse)
    assert (merged_out == 0).all()
    assert (merged_lse == -torch.inf).all()
    merged_out.sum().backward()
    assert out.grad.isfinite().all()
    assert lse.grad.isfinite().all()


def test_merging_is_differentiable():
    left, right, _ = parts_and_whole()
    inputs = [t.detach()[:, :2].requires_grad_() for t in (*left, *right)]
    assert torch.autograd.gradcheck(merge_attention, inputs)


def test_layouts_that_do_not_fit_are_refused():
    out, lse = torch.zeros(1, 6, 2, 4), torch.zeros(1, 2, 6)
    with pytest.raises(ValueError, match=r"transpose\(1, 2\)"):
        merge_attention(out, lse, out, lse)


def test_low_precision_statistics_are_used_in_float32():
    left, right, _ = parts_and_whole()
    halves = left[0].float(), left[1].bfloat16(), right[0].float(), right[1].bfloat16()
    merged, lse = merge_attention(*halves)
    exact, _ = merge_attention(*(t.double() for t in halves))
    assert (merged.dtype, lse.dtype) == (torch.float32, torch.bfloat16)
    assert (merged - exact).abs().max() < 1e-6
    out, _ = merge_attention(*(t.bfloat16() for t in left), *(t.bfloat16() for t in right))
    assert out.dtype == torch.bfloat16
