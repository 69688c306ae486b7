"""A ring sends only what is needed, while it computes, and counts what it sends."""

import threading
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from labsupport.distributed.ring import (
    Plan,
    last_ring_call,
    ring_flash_attn_func,
)
from labsupport.distributed.ring.algorithm import RingCall, ring_backward, ring_forward
from labsupport.distributed.ring.attention import all_ring_calls
from labsupport.distributed.ring.kernels import KERNELS
from labsupport.distributed.ring.transport import Ring, Traffic
from tests.attention.cases import make_model_qkv
from tests.distributed.rings import (
    MASKS,
    distributed,
    shards_of,
)


@pytest.mark.parametrize(
    ("mask", "hops", "forward", "gradients"),
    [
        # A full round: each rank sends its own keys and passes on those of two others.
        ({}, 3, [3, 3, 3, 3], [3, 3, 3, 3]),
        # Keys go up only. Gradients: each rank but the first sends one for each earlier rank.
        ({"causal": True}, 3, [1, 2, 3, 0], [0, 1, 2, 3]),
        # 5 tokens back reach the shard before, 6 tokens the one before that.
        ({"causal": True, "window_size": (5, 0)}, 1, [1, 1, 1, 0], [0, 1, 1, 1]),
        ({"causal": True, "window_size": (6, 0)}, 2, [1, 2, 2, 0], [0, 1, 2, 2]),
        # Both neighbours, from both sides.
        ({"window_size": (2, 2)}, 2, [1, 2, 2, 1], [1, 2, 2, 1]),
        # Nobody needs another's keys.
        ({"window_size": (0, 0)}, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=["full", "causal", "window 5", "window 6", "two-sided window", "window 0"],
)
def test_only_keys_that_somebody_needs_are_sent(workers, mask, hops, forward, gradients):
    inputs = make_model_qkv(1, 20, 20, 2, 2, 8)
    _, reports = distributed(workers, 4, inputs, torch.ones(1, 20, 2, 8), **mask)
    assert [report["hops"] for report in reports] == [hops] * 4
    assert [report["forward"] for report in reports] == forward
    assert [report["both"] for report in reports] == [2 * count for count in forward]
    assert [report["gradients"] for report in reports] == gradients


@pytest.mark.parametrize(
    ("mask", "zigzag", "ranks"),
    [
        ("full", True, 3),
        ("causal", False, 4),
        ("causal", True, 4),
        ("short window", True, 3),
        ("window on both sides", False, 3),
    ],
)
def test_a_plan_says_what_each_rank_sends(workers, mask, zigzag, ranks):
    """Counted by the plan beside what really went out: messages and bytes."""
    options = MASKS[mask]
    inputs = make_model_qkv(1, 4 * ranks, 4 * ranks, 2, 1, 8)
    dout = torch.ones(1, 4 * ranks, 2, 8)
    function = "zigzag" if zigzag else "ring"
    _, reports = distributed(workers, ranks, inputs, dout, function, **options)
    plan = Plan.of(ranks, 4, zigzag=zigzag, **options)
    assert plan.hops > 0
    for rank, report in enumerate(reports):
        keys = sum(m.what == "keys" and m.sender == rank for step in plan.messages for m in step)
        sums = sum(m.what != "keys" and m.sender == rank for step in plan.messages for m in step)
        assert (report["forward"], report["both"], report["gradients"]) == (keys, 2 * keys, sums)
        assert report["bytes"] == (2 * keys + sums) * 2 * 4 * 8 * 4


def computed_again(rank, group):
    """Reports after a layer that its backward, in another thread as on a GPU, computes again."""
    q, k, v = (x.detach().requires_grad_() for x in shards_of(4))
    before = all_ring_calls().traffic if last_ring_call() else Traffic()

    def layer(q):
        return ring_flash_attn_func(q, k, v, group=group, kernel="native")

    out = checkpoint(layer, q, use_reentrant=False)
    first = last_ring_call()
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    total = all_ring_calls().traffic
    in_all = {name: n - getattr(before, name) for name, n in vars(total).items()}
    return first is last_ring_call(), vars(first.traffic), vars(last_ring_call().traffic), in_all


def test_what_a_layer_sends_when_it_is_computed_again_is_counted(workers):
    for same, first, last, in_all in workers.run(computed_again, ranks=2):
        assert not same, "the report is the process's, not the thread's"
        assert (first["kv_messages"], first["gradient_messages"]) == (2, 1)
        assert (last["kv_messages"], last["gradient_messages"]) == (1, 0)
        assert in_all == {name: first[name] + last[name] for name in first}


class Watched(Ring):
    """A ring that writes down when messages are posted and awaited."""

    diary: list[str]

    def post(self, sends, receives):
        wait = super().post(sends, receives)
        if sends or receives:
            self.diary.append("post")

        def noted():
            if sends or receives:
                self.diary.append("wait")
            wait()

        return noted


def diary_of(rank, group, q, k, v):
    """What a rank does in the forward, and in the backward, in order."""
    ring = Watched(group)
    ring.diary = []

    def noted(compute):
        def call(*args):
            ring.diary.append("compute")
            return compute(*args)

        return call

    torch_kernel = next(kernel for kernel in KERNELS if kernel.name == "flash_torch")
    kernel = replace(
        torch_kernel,
        forward=noted(torch_kernel.forward),
        backward=noted(torch_kernel.backward),
    )
    call = RingCall(ring, Plan.of(ring.size, q.shape[1]), kernel, 1.0)
    out, lse = ring_forward(call, q, k, v)
    forward, ring.diary = ring.diary, []
    ring_backward(call, out, q, k, v, out, lse)
    return forward, ring.diary


def test_hops_are_posted_before_the_compute_and_awaited_after_it(workers):
    overlapped = ["post", "compute", "wait"]
    for forward, backward in workers.run(diary_of, *map(torch.detach, shards_of(4)), ranks=3):
        # No hop is left for the last keys; the last gradients still have to go home.
        assert forward == [*overlapped, *overlapped, "compute"]
        assert backward == [*overlapped, *overlapped, *overlapped, "post", "wait"]
