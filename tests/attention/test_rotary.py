"""Rotary positions turn pairs of numbers, in two conventions, exactly at any position."""

import mpmath
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.rotary import (
    apply_rotary_emb,
    permute_rotary_rows,
    rotary_angles,
    scaled_base,
)
from labsupport.models.llama2c import halves_from_neighbours
from labsupport.profiling import measure_peak_memory

BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 11, 3, 8
both_conventions = pytest.mark.parametrize("interleaved", [False, True])


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def by_definition(x, positions, interleaved, base=10_000.0):
    """Each pair as a complex number times e^(i t f): nothing shared with the implementation."""
    *_, head_dim = x.shape
    x = x.double()
    if not interleaved:  # halves to neighbours
        x = x.unflatten(-1, (2, head_dim // 2)).transpose(-1, -2).flatten(-2)
    f = torch.tensor([base ** (-2 * i / head_dim) for i in range(head_dim // 2)]).double()
    angles = positions.double()[..., None] * f
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    pairs = torch.view_as_complex(x.unflatten(-1, (head_dim // 2, 2)).contiguous())
    out = torch.view_as_real(pairs * turn)
    return (out if interleaved else out.transpose(-1, -2)).flatten(-2)


def assert_same(a, b):
    """Equal but for the last bit, which depends on where a number stands in a vector register."""
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def scores(q, k):
    return torch.einsum("bqhd,bkhd->bhqk", q, k)


@both_conventions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_pair_is_turned_by_position_times_frequency(interleaved, dtype):
    x, positions = normal(BATCH, SEQLEN, HEADS, HEAD_DIM, dtype=dtype), torch.arange(5, 5 + SEQLEN)
    with torch.autocast("cpu", torch.bfloat16):  # does not reach inside
        out = apply_rotary_emb(x, *rotary_angles(positions, HEAD_DIM), interleaved=interleaved)
    assert out.dtype == dtype
    exact = by_definition(x, positions, interleaved)
    # Computed in float32: to 16 bits it is rounded once, by half a unit in the last place.
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-6
    assert ((out.double() - exact).abs() <= bound).all()


@both_conventions
def test_rows_shards_and_packed_tokens_are_turned_like_the_whole(interleaved):
    def turn(x, positions):
        return apply_rotary_emb(x, *rotary_angles(positions, HEAD_DIM), interleaved=interleaved)

    x = normal(BATCH, SEQLEN, HEADS, HEAD_DIM)
    positions = torch.stack([torch.arange(SEQLEN), torch.arange(SEQLEN) * 3 + 70_000])
    whole, part = turn(x, positions), slice(4, 9)
    for row in range(BATCH):  # each row of a batch may have positions of its own
        assert_same(whole[row], turn(x[row : row + 1], positions[row])[0])
        assert_same(whole[row], turn(x[row], positions[row]))  # packed
        assert_same(whole[row, part], turn(x[row, part], positions[row, part]))


@both_conventions
def test_scores_depend_on_relative_positions_only(interleaved):
    q, k = (normal(1, SEQLEN, HEADS, HEAD_DIM, seed=seed) for seed in (0, 1))

    def at(start):
        angles = rotary_angles(torch.arange(start, start + SEQLEN), HEAD_DIM)
        return scores(*(apply_rotary_emb(x, *angles, interleaved=interleaved) for x in (q, k)))

    for start in (1, 777, 1_000_000):
        torch.testing.assert_close(at(start), at(0), rtol=0, atol=1e-5)
    assert (at(0) - scores(q, k)).abs().max() > 0.1  # and they do depend on those


@both_conventions
def test_weights_for_the_other_convention_give_other_scores_until_they_are_permuted(interleaved):
    width, kv_heads = 16, 1
    x = normal(1, SEQLEN, width)
    wq, wk = normal(HEADS * HEAD_DIM, width, seed=1), normal(kv_heads * HEAD_DIM, width, seed=2)
    angles = rotary_angles(torch.arange(SEQLEN), HEAD_DIM)

    def scores_with(wq, wk, interleaved):
        q, k = ((x @ w.T).unflatten(-1, (-1, HEAD_DIM)) for w in (wq, wk))
        q, k = (apply_rotary_emb(each, *angles, interleaved=interleaved) for each in (q, k))
        return scores(q, k.expand(-1, -1, HEADS, -1))

    right = scores_with(wq, wk, interleaved)
    wrong = scores_with(wq, wk, not interleaved)
    assert (wrong - right).abs().max() > 1
    moved = (
        permute_rotary_rows(wq, HEADS, to_interleaved=not interleaved),
        permute_rotary_rows(wk, kv_heads, to_interleaved=not interleaved),
    )
    torch.testing.assert_close(scores_with(*moved, not interleaved), right, rtol=0, atol=1e-4)


def test_rows_are_permuted_as_llama2c_files_need_it_and_back():
    weight, bias = normal(HEADS * HEAD_DIM, 5), normal(HEADS * HEAD_DIM)
    neighbours = permute_rotary_rows(weight, HEADS, to_interleaved=True)
    assert torch.equal(halves_from_neighbours(neighbours, HEAD_DIM), weight)
    halves = permute_rotary_rows(weight, HEADS, to_interleaved=False)
    assert torch.equal(halves, halves_from_neighbours(weight, HEAD_DIM))
    assert torch.equal(permute_rotary_rows(neighbours, HEADS, to_interleaved=False), weight)
    moved = permute_rotary_rows(bias, HEADS, to_interleaved=True)
    assert torch.equal(moved, permute_rotary_rows(bias[:, None], HEADS, to_interleaved=True)[:, 0])


def test_halves_are_what_transformers_llama_turns():
    q, k = normal(BATCH, SEQLEN, HEADS, HEAD_DIM), normal(BATCH, SEQLEN, 1, HEAD_DIM, seed=1)
    cos, sin = rotary_angles(torch.arange(SEQLEN), HEAD_DIM)
    doubled = (torch.cat([table, table], dim=-1)[None] for table in (cos, sin))
    theirs = apply_rotary_pos_emb(q, k, *doubled, unsqueeze_dim=2)
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(apply_rotary_emb(x, cos, sin), expected, rtol=0, atol=1e-6)


# --- angles ---------------------------------------------------------------------------------------


def test_angles_at_position_1_000_000_are_right_where_float32_and_bfloat16_are_not():
    position, head_dim = 1_000_000, 128
    with mpmath.workdps(50):
        exact = [
            mpmath.mpf(position) * mpmath.power(10_000, -mpmath.mpf(2 * i) / head_dim)
            for i in range(head_dim // 2)
        ]
        cosines = torch.tensor([float(mpmath.cos(t)) for t in exact], dtype=torch.float64)
        sines = torch.tensor([float(mpmath.sin(t)) for t in exact], dtype=torch.float64)

    cos, sin = rotary_angles(torch.tensor([position]), head_dim)
    assert cos.dtype == sin.dtype == torch.float32
    half_unit = torch.finfo(torch.float32).eps / 2
    assert (cos[0].double() - cosines).abs().max() <= half_unit
    assert (sin[0].double() - sines).abs().max() <= half_unit

    f = 10_000 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    in_float32 = (torch.tensor(position).float() * f).cos()
    assert 0.01 < (in_float32.double() - cosines).abs().max() < 0.1
    rounded = torch.tensor(position).bfloat16()
    assert rounded.item() == 999_424
    assert ((rounded.float() * f).cos().double() - cosines).abs().max() > 1


def test_interpolation_brings_longer_sequences_into_the_known_angles():
    longer = rotary_angles(torch.arange(0, 40, 4), HEAD_DIM, scaling=4.0)
    known = rotary_angles(torch.arange(10), HEAD_DIM)
    assert_same(torch.stack(longer), torch.stack(known))


def test_ntk_aware_scaling_slows_the_slowest_pair_and_leaves_the_fastest():
    head_dim, factor = 64, 8
    base = scaled_base(10_000, head_dim, factor)
    longer = torch.stack(rotary_angles(torch.tensor([100 * factor]), head_dim, base=base))
    known = torch.stack(rotary_angles(torch.tensor([100]), head_dim))
    torch.testing.assert_close(longer[..., -1], known[..., -1], rtol=0, atol=1e-6)
    same = torch.stack(rotary_angles(torch.tensor([100]), head_dim, base=base))
    assert_same(same[..., 0], known[..., 0])


# --- partial rotation, gradients, memory ----------------------------------------------------------


@both_conventions
def test_numbers_behind_the_rotated_ones_stay_as_they_are(interleaved):
    x, rotated = normal(BATCH, SEQLEN, HEADS, 12), 8
    angles = rotary_angles(torch.arange(SEQLEN), rotated)
    out = apply_rotary_emb(x, *angles, interleaved=interleaved)
    assert torch.equal(out[..., rotated:], x[..., rotated:])
    front = apply_rotary_emb(x[..., :rotated], *angles, interleaved=interleaved)
    assert_same(out[..., :rotated], front)


@both_conventions
def test_gradients_are_those_of_the_definition(interleaved):
    x = normal(1, 3, 2, 6, dtype=torch.float64).requires_grad_()
    angles = rotary_angles(torch.arange(3), 4)
    turn = lambda x: apply_rotary_emb(x, *angles, interleaved=interleaved)  # noqa: E731
    assert torch.autograd.gradcheck(turn, x)
    assert torch.autograd.gradgradcheck(turn, x)


def test_the_backward_pass_keeps_cosines_and_sines_and_nothing_else():
    x = normal(1, SEQLEN, HEADS, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
    cos, sin = rotary_angles(torch.arange(SEQLEN), HEAD_DIM)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        apply_rotary_emb(x * 1, cos, sin)
    assert {tensor.data_ptr() for tensor in kept} <= {cos.data_ptr(), sin.data_ptr()}


def test_a_large_x_is_not_copied_to_float32_as_a_whole():
    angles, x = rotary_angles(torch.arange(1024), 64), normal(1, 1024, 4, 64)
    extra = measure_peak_memory(lambda: apply_rotary_emb(x, *angles), device="cpu")
    assert extra.peak_bytes <= 1.5 * x.nbytes  # the result, and one of the two halves


@both_conventions
def test_it_compiles_and_can_be_computed_again(interleaved):
    x = normal(1, SEQLEN, HEADS, HEAD_DIM).requires_grad_()
    angles = rotary_angles(torch.arange(SEQLEN), HEAD_DIM)

    def turn(x):
        return apply_rotary_emb(x, *angles, interleaved=interleaved)

    expected = turn(x)
    (gradient,) = torch.autograd.grad(expected, x, expected.detach() ** 2)
    compiled = torch.compile(turn, backend="aot_eager", fullgraph=True)
    for other in (compiled, lambda x: checkpoint(turn, x, use_reentrant=False)):
        out = other(x)
        assert_same(out, expected)
        assert_same(torch.autograd.grad(out, x, expected.detach() ** 2)[0], gradient)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "options", "said"),
    [
        (torch.arange(4.0), {}, r"torch.float32 of shape \(4,\).*torch.arange"),
        (torch.arange(4).reshape(1, 1, 4), {}, r"\(seqlen,\) or \(batch, seqlen\)"),
        ([0, 1, 2], {}, "a list was given"),
        (torch.arange(4), {"head_dim": 7}, "even.*head_dim 7"),
        (torch.arange(4), {"base": 0.0}, "base 0.0"),
        (torch.arange(4), {"scaling": -1.0}, "scaling -1.0"),
    ],
)
def test_positions_that_cannot_be_turned_by_are_refused(positions, options, said):
    with pytest.raises(AttentionInputError, match=said):
        rotary_angles(positions, **({"head_dim": 8} | options))


COS, SIN = rotary_angles(torch.arange(SEQLEN), HEAD_DIM)


@pytest.mark.parametrize(
    ("x", "cos", "sin", "said"),
    [
        (normal(BATCH, HEADS, SEQLEN, HEAD_DIM), COS, SIN, r"x.transpose\(1, 2\)"),
        (normal(BATCH, SEQLEN + 1, HEADS, HEAD_DIM), COS, SIN, r"\(12, pairs\)"),
        (normal(BATCH, SEQLEN, HEADS, HEAD_DIM), COS[:, None], SIN[:, None], "one row for each"),
        (normal(SEQLEN, HEAD_DIM), COS, SIN, "heads, head_dim"),
        (torch.ones(1, SEQLEN, HEADS, HEAD_DIM).int(), COS, SIN, "must be a floating tensor"),
        (normal(1, SEQLEN, HEADS, 6), COS, SIN, "1 to 3 pairs"),
        (normal(1, SEQLEN, HEADS, HEAD_DIM), COS.repeat(1, 2), SIN.repeat(1, 2), "not doubled"),
        (normal(1, SEQLEN, HEADS, HEAD_DIM), COS, SIN.double(), "one shape and dtype"),
        (normal(1, SEQLEN, HEADS, HEAD_DIM), COS.clone().requires_grad_(), SIN, "constants here"),
        (normal(1, SEQLEN, HEADS, HEAD_DIM), COS.to("meta"), SIN.to("meta"), "Move them"),
    ],
)
def test_what_does_not_fit_together_is_refused(x, cos, sin, said):
    with pytest.raises(AttentionInputError, match=said):
        apply_rotary_emb(x, cos, sin)


def test_rows_that_make_no_heads_are_refused():
    with pytest.raises(AttentionInputError, match=r"does not hold 3 heads.*kv_heads"):
        permute_rotary_rows(normal(8, 4), 3, to_interleaved=True)
    with pytest.raises(AttentionInputError, match="at least 4"):
        scaled_base(10_000, 2, 4)
