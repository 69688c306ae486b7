"""Predictions of scaling: closed forms where there are some, and what real rings send."""

import pytest
import torch

from labsupport.distributed.ring import last_ring_call, ring_attention
from labsupport.distributed.scaling import (
    PRODUCTS,
    hides_from,
    predict_ring,
)

HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 64}
N = 1024


def ring(world=4, **options):
    return predict_ring(world, N, **(HEADS | {"single_ms": 7.0} | options))


# --- the ring -------------------------------------------------------------------------------------


def test_without_a_mask_a_slow_link_costs_what_a_hop_takes_longer_than_a_block():
    hop_ms = 5.0  # a block takes as long as one device alone: 7 ms
    nbytes = N * 2 * 2 * 64 * 2
    hidden = ring(causal=False, layout="contiguous", gb_s=nbytes / hop_ms / 1e6)
    assert hidden.total_ms == pytest.approx(4 * 7)
    assert (hidden.exposed_ms, hidden.efficiency) == pytest.approx((0, 1))
    hop_ms = 9.0
    slow = ring(causal=False, layout="contiguous", gb_s=nbytes / hop_ms / 1e6)
    assert slow.total_ms == pytest.approx(3 * 9 + 7)  # nothing travels in the last step
    assert slow.exposed_ms == pytest.approx(6)


def test_contiguous_causal_shards_last_as_long_as_the_last_rank_and_zigzag_ones_are_balanced():
    diagonal, block = N * (N + 1) / 2, N * N
    fair, unfair = (ring(8, layout=layout, gb_s=1e9) for layout in ("zigzag", "contiguous"))
    assert unfair.total_ms == pytest.approx(7.0 * (7 * block + diagonal) / diagonal)
    whole = 8 * N * (8 * N + 1) / 2
    assert fair.total_ms == pytest.approx(7.0 * whole / 8 / diagonal)
    assert unfair.exposed_ms == pytest.approx(0, abs=1e-3)


def test_a_pass_of_both_directions_is_one_after_the_other():
    both = ring(direction="forward+backward", gb_s=1)
    parts = [ring(direction=d, gb_s=1, single_ms=ms) for d, ms in (("forward", 2), ("backward", 5))]
    assert both.total_ms == pytest.approx(sum(part.total_ms for part in parts))
    assert both.exposed_ms > 0
    # Adding results up costs what is read and written.
    free, added = (ring(2, causal=False, layout="contiguous", memory_gb_s=x) for x in (None, 10.0))
    nbytes = N * 8 * 64 * (2 + 4 + 4)  # the part; the result read and written
    assert added.total_ms - free.total_ms == pytest.approx(2 * nbytes / 10e9 * 1e3)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_hop_hides_from_the_length_on_that_the_closed_form_says(direction):
    call = HEADS | {"direction": direction, "gb_s": 5.0}
    least = hides_from(10, **call)
    for factor, hidden in ((0.9, False), (1.1, True)):
        n = 2 * round(least * factor / 2)
        single_ms = PRODUCTS[direction] * 64 * 8 * n * (n + 1) / 10e9
        found = predict_ring(8, n, single_ms=single_ms, **call).exposed_ms
        # dK and dV of the last keys go home when nothing is left to compute.
        last = n * 2 * 2 * 64 * 2 / 5e6 if direction == "backward" else 0
        assert (found == pytest.approx(last, abs=1e-9)) is hidden
        assert hidden or found > 1.02 * last


# --- what a real ring sends -----------------------------------------------------------------------


def sent(rank, group, options):
    """Bytes that this rank sends forward, and forward and backward."""
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(2))
    out = ring_attention(q, k, v, group=group, **options)
    traffic = last_ring_call().traffic
    forward = traffic.kv_bytes + traffic.gradient_bytes
    out.sum().backward()
    return forward, traffic.kv_bytes + traffic.gradient_bytes


@pytest.mark.parametrize(
    ("world", "layout", "causal"),
    [(3, "contiguous", True), (4, "contiguous", False), (4, "zigzag", True), (1, "zigzag", True)],
)
def test_predicted_bytes_are_those_of_a_real_ring(workers, world, layout, causal):
    call = {"layout": layout, "causal": causal}
    by_rank = workers.run(sent, call, ranks=world)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    for both, direction in enumerate(("forward", "forward+backward")):
        guess = predict_ring(world, 8, **sizes, **call, direction=direction, single_ms=1)
        assert guess.sent_bytes == max(rank[both] for rank in by_rank), direction


def test_what_does_not_fit_or_exist_is_refused():
    for wrong in ({"kv_heads": 3}, {"world": 0}):
        with pytest.raises(ValueError, match="no ring"):
            ring(**wrong)
    with pytest.raises(ValueError, match="layout 'zigzagg'"):
        ring(layout="zigzagg")
    for wrong in ({"direction": "backwards"}, {"dtype": "fp16"}):
        with pytest.raises(ValueError, match=f"no {next(iter(wrong))}"):
            ring(**wrong)
    with pytest.raises(ValueError, match="two chunks of one length"):
        predict_ring(4, 7, **HEADS, single_ms=1)
