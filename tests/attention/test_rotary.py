"""Rotary positions turn pairs of numbers, in two conventions, exactly at any position."""

import pytest
import torch

from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.rotary import (
    apply_rotary_emb,
    permute_rotary_rows,
    rotary_angles,
    scaled_base,
)
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
    f = base ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    angles = positions.double()[..., None] * f
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    pairs = torch.view_as_complex(x.unflatten(-1, (head_dim // 2, 2)).contiguous())
    out = torch.view_as_real(pairs * turn)
    return (out if interleaved else out.transpose(-1, -2)).flatten(-2)


def assert_same(a, b):
    """Equal but for the last bit, which depends on where a number stands in a vector register."""
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@both_conventions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_pair_is_turned_by_position_times_frequency(interleaved, dtype):
    # Angles in float32 would be wrong by 0.1 at the million.
    # The numbers after the turned ones stay.
    whole, positions = normal(BATCH, SEQLEN, HEADS, 12, dtype=dtype), torch.arange(5, 5 + SEQLEN)
    positions[-1] = 1_000_000
    with torch.autocast("cpu", torch.bfloat16):  # does not reach inside
        out = apply_rotary_emb(whole, *rotary_angles(positions, HEAD_DIM), interleaved=interleaved)
    assert out.dtype == dtype
    assert torch.equal(out[..., HEAD_DIM:], whole[..., HEAD_DIM:])
    x, out = whole[..., :HEAD_DIM], out[..., :HEAD_DIM]
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


def test_permuted_weights_give_the_same_scores_in_the_other_convention():
    width, kv_heads = 16, 1
    x = normal(1, SEQLEN, width)
    wq, wk = normal(HEADS * HEAD_DIM, width, seed=1), normal(kv_heads * HEAD_DIM, width, seed=2)
    angles = rotary_angles(torch.arange(SEQLEN), HEAD_DIM)

    def scores_with(wq, wk, interleaved):
        q, k = ((x @ w.T).unflatten(-1, (-1, HEAD_DIM)) for w in (wq, wk))
        q, k = (apply_rotary_emb(each, *angles, interleaved=interleaved) for each in (q, k))
        return torch.einsum("bqhd,bkhd->bhqk", q, k.expand(-1, -1, HEADS, -1))

    right = scores_with(wq, wk, False)
    assert (scores_with(wq, wk, True) - right).abs().max() > 1
    moved = [
        permute_rotary_rows(w, n, to_interleaved=True) for w, n in ((wq, HEADS), (wk, kv_heads))
    ]
    torch.testing.assert_close(scores_with(*moved, True), right, rtol=0, atol=1e-4)
    assert torch.equal(permute_rotary_rows(moved[0], HEADS, to_interleaved=False), wq)


# --- angles ---------------------------------------------------------------------------------------


def test_longer_sequences_by_interpolation_and_by_another_base():
    longer = rotary_angles(torch.arange(0, 40, 4), HEAD_DIM, scaling=4.0)
    assert_same(torch.stack(longer), torch.stack(rotary_angles(torch.arange(10), HEAD_DIM)))
    # "NTK-aware": the slowest pair turns 8 times as slowly, the fastest as before.
    base = scaled_base(10_000, 64, 8)
    longer, same = (
        torch.stack(rotary_angles(torch.tensor([n]), 64, base=base)) for n in (800, 100)
    )
    known = torch.stack(rotary_angles(torch.tensor([100]), 64))
    torch.testing.assert_close(longer[..., -1], known[..., -1], rtol=0, atol=1e-6)
    assert_same(same[..., 0], known[..., 0])


# --- partial rotation, gradients, memory ----------------------------------------------------------


@both_conventions
def test_gradients_are_those_of_the_definition(interleaved):
    x = normal(1, 3, 2, 6, dtype=torch.float64).requires_grad_()
    angles = rotary_angles(torch.arange(3), 4)
    turn = lambda x: apply_rotary_emb(x, *angles, interleaved=interleaved)  # noqa: E731
    assert torch.autograd.gradcheck(turn, x, fast_mode=True)


def test_the_backward_keeps_cosines_and_sines_and_x_is_not_copied_as_a_whole():
    angles, x = rotary_angles(torch.arange(1024), 64), normal(1, 1024, 4, 64)
    extra = measure_peak_memory(lambda: apply_rotary_emb(x, *angles), device="cpu")
    assert extra.peak_bytes <= 1.5 * x.nbytes  # the result, and one of the two halves
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        apply_rotary_emb(x.requires_grad_() * 1, *angles)
    assert {tensor.data_ptr() for tensor in kept} <= {table.data_ptr() for table in angles}


# --- flash-attn's further arguments ---------------------------------------------------------------


@both_conventions
def test_longer_tables_offsets_and_packed_sequences_pick_each_tokens_angles(interleaved):
    x, table = normal(BATCH, SEQLEN, HEADS, HEAD_DIM), rotary_angles(torch.arange(40), HEAD_DIM)

    def expected(x, positions):
        return by_definition(x, positions, interleaved).float()

    steps = torch.arange(SEQLEN)
    for offsets in (0, 7, torch.tensor([0, 29]), torch.tensor([5, 5], dtype=torch.int32)):
        start = torch.as_tensor(offsets).expand(BATCH)[:, None]
        out = apply_rotary_emb(x, *table, interleaved, False, offsets)
        torch.testing.assert_close(out, expected(x, start + steps), rtol=0, atol=1e-5)
    ends, packed = torch.tensor([0, 3, 3, SEQLEN]), x[0]
    within = torch.cat([torch.arange(3), torch.arange(SEQLEN - 3)])
    for offsets, shift in ((2, 2), (torch.tensor([4, 0, 9]), torch.tensor([4] * 3 + [9] * 8))):
        out = apply_rotary_emb(
            packed, *table, interleaved, seqlen_offsets=offsets, cu_seqlens=ends, max_seqlen=SEQLEN
        )
        torch.testing.assert_close(out, expected(packed, within + shift), rtol=0, atol=1e-5)


@both_conventions
def test_in_place_gives_the_same_values_and_gradients(interleaved):
    x, weights = normal(1, 3, 2, 6, dtype=torch.float64).requires_grad_(), normal(1, 3, 2, 6)
    angles = rotary_angles(torch.arange(3), 4)
    out = apply_rotary_emb(x, *angles, interleaved)
    (expected,) = torch.autograd.grad((out * weights).sum(), x)
    copied = x.clone()
    assert apply_rotary_emb(copied, *angles, interleaved, inplace=True) is copied
    assert_same(copied, out)
    assert_same(torch.autograd.grad((copied * weights).sum(), x)[0], expected)
    with pytest.raises(AttentionInputError, match="leaf that requires gradients"):
        apply_rotary_emb(x, *angles, inplace=True)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "options", "said"),
    [
        (torch.arange(4.0), {}, r"torch.float32 of shape \(4,\).*torch.arange"),
        (torch.arange(4), {"head_dim": 7}, "even.*head_dim 7"),
        (torch.arange(4), {"base": 0.0, "scaling": -1.0}, "base 0.0, scaling -1.0"),
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
        (normal(BATCH, SEQLEN + 1, HEADS, HEAD_DIM), COS, SIN, "11 positions.*needs 12"),
        (normal(SEQLEN, HEAD_DIM), COS, SIN, "heads, head_dim"),
        (normal(1, SEQLEN, HEADS, 6), COS, SIN, "1 to 3 pairs"),
        ([[[1.0]]], COS, SIN, "x must be a tensor, but a list"),
        (normal(1, SEQLEN, HEADS, 8), COS, SIN.numpy(), "sin must be a tensor, but a ndarray"),
        (normal(1, SEQLEN, HEADS, HEAD_DIM), COS.repeat(1, 2), SIN.repeat(1, 2), "not doubled"),
        (normal(1, SEQLEN, HEADS, HEAD_DIM), COS, SIN.double(), "one shape and dtype"),
        (normal(1, SEQLEN, HEADS, HEAD_DIM), COS.clone().requires_grad_(), SIN, "constants on x"),
    ],
)
def test_what_does_not_fit_together_is_refused(x, cos, sin, said):
    with pytest.raises(AttentionInputError, match=said):
        apply_rotary_emb(x, cos, sin)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seqlen_offsets": -1}, "from -1.*Negative offsets"),
        ({"seqlen_offsets": 1}, "11 positions.*needs 12"),
        ({"seqlen_offsets": torch.tensor([-1, 0])}, "from -1"),
        ({"seqlen_offsets": torch.tensor([0, 1])}, "needs 12"),
        ({"seqlen_offsets": [0, 0]}, "seqlen_offsets must be an integer tensor"),
        ({"seqlen_offsets": torch.tensor([0])}, r"shape \(2,\)"),
        ({"seqlen_offsets": True}, "seqlen_offsets.*True"),
        ({"seqlen_offsets": 0.0}, "seqlen_offsets"),
        ({"cu_seqlens": torch.tensor([0, 11])}, "packs a batch"),
        ({"max_seqlen": 10}, "max_seqlen must be the longest length, here 11"),
        ({"interleaved": torch.arange(2)}, "interleaved"),
        ({"inplace": 1}, "inplace"),
    ],
)
def test_arguments_that_do_not_fit_x_are_refused(options, said):
    with pytest.raises(AttentionInputError, match=said):
        apply_rotary_emb(normal(BATCH, SEQLEN, HEADS, HEAD_DIM), COS, SIN, **options)


@pytest.mark.parametrize(
    ("ends", "options", "said"),
    [
        ([0, 4, 10], {}, "cu_seqlens.*ends at 11"),
        ([0, -1, 11], {}, "never falls"),
        ([0, 4, 11], {"max_seqlen": 6}, "here 7"),
        ([0, 4, 11], {"seqlen_offsets": torch.tensor([0, 5])}, "needs 12"),
        ([0, 4, 11], {"seqlen_offsets": torch.tensor([0, 0, 0])}, r"shape \(2,\)"),
    ],
)
def test_packed_sequences_must_fit_their_offsets(ends, options, said):
    x = normal(SEQLEN, HEADS, HEAD_DIM)
    with pytest.raises(AttentionInputError, match=said):
        apply_rotary_emb(x, COS, SIN, cu_seqlens=torch.tensor(ends), **options)


def test_a_longer_table_without_offsets_cannot_turn_packed_tokens():
    with pytest.raises(AttentionInputError, match="angles of each token"):
        apply_rotary_emb(normal(SEQLEN - 1, HEADS, HEAD_DIM), COS, SIN)


def test_rows_that_make_no_heads_are_refused():
    with pytest.raises(AttentionInputError, match=r"does not hold 3 heads.*kv_heads"):
        permute_rotary_rows(normal(8, 4), 3, to_interleaved=True)
    with pytest.raises(AttentionInputError, match="at least 4"):
        scaled_base(10_000, 2, 4)
    assert scaled_base(10_000, 4, 4) == 160_000
