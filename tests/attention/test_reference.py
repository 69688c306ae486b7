import pytest
import torch
import torch.nn.functional as F

from labsupport.attention import compare_with_oracle, oracle_attention, standard_attention
from labsupport.attention.accuracy import max_error, relative_error
from tests.attention.cases import make_qkv


def test_agrees_with_pytorchs_own_attention():
    q, k, v = make_qkv(2, 3, seqlen_q=10, seqlen_k=10, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    output, _ = standard_attention(q, k, v, causal=True)
    torch.testing.assert_close(output, expected)


def test_weights_are_a_distribution_over_the_visible_keys():
    q, k, v = make_qkv(2, seqlen_q=4, seqlen_k=7)
    _, weights = standard_attention(q, k, v, causal=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4))
    assert (weights[:, 0, 4:] == 0).all()


def test_boolean_and_additive_masks_say_the_same():
    q, k, v = make_qkv(2, seqlen_q=4, seqlen_k=6)
    hide = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.4
    additive = torch.zeros(4, 6).masked_fill(hide, -torch.inf)
    by_bool, _ = standard_attention(q, k, v, ~hide)
    by_float, _ = standard_attention(q, k, v, additive)
    assert torch.equal(by_bool, by_float)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_fully_masked_query_gives_zero_and_no_nan_gradient(dtype):
    q, k, v = make_qkv(seqlen_q=3, seqlen_k=3, dtype=dtype)
    mask = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    output, weights = standard_attention(q, k, v, mask)
    assert (output[1] == 0).all()
    assert (weights[1] == 0).all()
    output.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[1] == 0).all()


def test_the_oracles_log_sum_exp_follows_its_definition():
    q, k, v = make_qkv(seqlen_q=3, seqlen_k=5, dtype=torch.float64)
    _, lse = oracle_attention(q, k, v, softmax_scale=0.3)
    torch.testing.assert_close(lse, (q @ k.mT * 0.3).exp().sum(-1).log())


def test_the_oracle_is_float64_whatever_it_is_given():
    q, k, v = make_qkv(seqlen_q=3, seqlen_k=5, dtype=torch.float16)
    output, lse = oracle_attention(q, k, v)
    assert output.dtype == lse.dtype == torch.float64


def test_the_oracle_says_minus_infinity_of_a_query_without_keys():
    q, k, v = make_qkv(seqlen_q=5, seqlen_k=2)
    output, lse = oracle_attention(q, k, v, causal=True)
    assert (lse[:3] == -torch.inf).all()
    assert lse[3:].isfinite().all()
    assert (output[:3] == 0).all()


def test_alibi_lowers_the_score_by_the_distance_from_the_diagonal():
    q, k, v = make_qkv(2, seqlen_q=2, seqlen_k=3, dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.25])
    distance = torch.tensor([[1.0, 0, 1], [2, 1, 0]])
    bias = -slopes[:, None, None] * distance
    biased, _ = oracle_attention(q, k, v, alibi_slopes=slopes)
    expected, _ = oracle_attention(q, k, v, bias)
    torch.testing.assert_close(biased, expected)


def test_the_error_rule_allows_twice_the_textbooks_error_and_no_more():
    oracle = torch.zeros(4)
    textbook = torch.full((4,), 1e-3)
    assert compare_with_oracle(torch.full((4,), 2.0e-3), textbook, oracle).ok
    assert not compare_with_oracle(torch.full((4,), 2.1e-3), textbook, oracle).ok
    assert compare_with_oracle(torch.full((4,), 3.0e-3), textbook, oracle, gradient=True).ok
    assert not compare_with_oracle(torch.full((4,), torch.nan), textbook, oracle).ok


def test_the_error_rule_refuses_to_broadcast():
    with pytest.raises(ValueError, match="one shape"):
        compare_with_oracle(torch.zeros(4, 1), torch.zeros(4), torch.zeros(4))


def test_error_measures_follow_their_definitions():
    result, oracle = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert max_error(result, oracle) == 4.0
    assert relative_error(result, oracle) == pytest.approx(4 / 3)


def test_a_row_hidden_by_an_additive_mask_has_a_zero_gradient_too():
    q, k, v = make_qkv(seqlen_q=2, seqlen_k=3)
    mask = torch.zeros(2, 3)
    mask[0] = -torch.inf
    standard_attention(q, k, v, mask)[0].sum().backward()
    assert (q.grad[0] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
