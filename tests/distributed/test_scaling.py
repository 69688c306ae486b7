"""Predictions of scaling: closed forms where there are some, and what real rings send."""

import pytest
import torch

from labsupport.distributed.data_parallel.costs import ddp_bytes_sent
from labsupport.distributed.ring import last_ring_call, ring_attention
from labsupport.distributed.scaling import (
    PRODUCTS,
    hides_from,
    predict_ddp,
    predict_fsdp,
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


# --- DDP ------------------------------------------------------------------------------------------


def test_the_part_of_an_all_reduce_that_the_backward_cannot_cover_is_exposed():
    """100 Mi parameters are 16 buckets of 25 MiB; the first can go when it is complete."""
    nbytes = 4 * 100 * 2**20
    fast = predict_ddp(100 * 2**20, 4, step_ms=90, gb_s=450)
    last = ddp_bytes_sent(nbytes, 4) / 16 / 450e9 * 1e3
    assert fast.exposed_ms == pytest.approx(last)
    assert fast.efficiency == pytest.approx(90 / (90 + last))
    slow = predict_ddp(100 * 2**20, 4, step_ms=90, gb_s=1.25)
    assert slow.sent_bytes == ddp_bytes_sent(nbytes, 4)
    assert slow.exposed_ms == pytest.approx(slow.sent_bytes / 1.25e6 - 60 * 15 / 16)
    alone = predict_ddp(100 * 2**20, 1, step_ms=90, gb_s=1.25)
    assert (alone.exposed_ms, alone.efficiency) == pytest.approx((0, 1))
    bucket = predict_ddp(10**6, 2, step_ms=9, gb_s=1)  # one cannot overlap
    assert bucket.exposed_ms == pytest.approx(4)


def test_under_fsdp_the_first_gather_and_the_last_reduction_are_exposed():
    call = {"step_ms": 300, "blocks": 10, "gb_s": 100}
    alone = predict_fsdp(10**9, 1, **call)
    assert (alone.exposed_ms, alone.efficiency) == pytest.approx((0, 1))
    gather, reduce = 2 * 10, 4 * 10  # ms: three quarters of the parameters, a GB in 10 ms
    found = predict_fsdp(4 * 10**9 // 3, 4, **call)
    assert found.exposed_ms == pytest.approx((gather + reduce) / 10)
    assert found.sent_bytes == pytest.approx((2 * gather + reduce) * 100e6)
    slow = predict_fsdp(4 * 10**9 // 3, 4, **call | {"gb_s": 10})
    assert slow.total_ms == pytest.approx((2 * 200 + 400) + 200 / 10 + 400 / 10)
    offloaded = predict_fsdp(10**9, 1, **call, cpu_offload=True, host_gb_s=1000, cpu_gb_s=50)
    assert offloaded.exposed_ms == pytest.approx(40 / 50 * 1000 + 2 * 4 / 10)


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
