"""A ring sends only what is needed, while it computes, and counts what it sends."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from labsupport.distributed.ring import Plan, last_ring_call, ring_flash_attn_func
from labsupport.distributed.ring.algorithm import RingCall, ring_backward, ring_forward
from labsupport.distributed.ring.kernels import FLASH_TORCH
from labsupport.distributed.ring.transport import TOTAL, Ring
from tests.distributed.rings import shards_of


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
        ({"window_size": (2, 2)}, 2, [1, 2, 2, 1], [1, 2, 2, 1]),  # neighbours from both sides
        ({"window_size": (0, 0)}, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_only_keys_that_somebody_needs_are_sent(mask, hops, forward, gradients):
    plan = Plan.of(4, 5, **mask)
    sent = Counter((m.what == "keys", m.sender) for messages in plan.messages for m in messages)
    assert plan.hops == hops
    assert [sent[True, rank] for rank in range(4)] == forward
    assert [sent[False, rank] for rank in range(4)] == gradients


def computed_again(rank, group):
    """Reports after a layer that its backward computes again."""
    q, k, v = (x.detach().requires_grad_() for x in shards_of(4))
    before = replace(TOTAL)

    def layer(q):
        return ring_flash_attn_func(q, k, v, group=group, kernel="native")

    out = checkpoint(layer, q, use_reentrant=False)
    first = last_ring_call()
    out.sum().backward()
    in_all = {name: n - getattr(before, name) for name, n in vars(TOTAL).items()}
    return vars(first.traffic), vars(last_ring_call().traffic), in_all


def test_what_a_layer_sends_when_it_is_computed_again_is_counted(workers):
    for first, last, in_all in workers.run(computed_again, ranks=2):
        assert (first["kv_messages"], first["gradient_messages"]) == (2, 1)
        assert (last["kv_messages"], last["gradient_messages"]) == (1, 0)
        assert in_all == {name: first[name] + last[name] for name in first}


def diary_of(rank, group, q, k, v):
    """What a rank does in the forward, and in the backward, in order."""
    diary = []

    class Watched(Ring):
        def post(self, sends, receives):
            wait, some = super().post(sends, receives), bool(sends or receives)
            diary.extend(["post"] * some)
            return lambda: (diary.extend(["wait"] * some), wait())

    def noted(compute):
        return lambda *args: (diary.append("compute"), compute(*args))[1]

    kernel = replace(
        FLASH_TORCH, forward=noted(FLASH_TORCH.forward), backward=noted(FLASH_TORCH.backward)
    )
    ring = Watched(group)
    call = RingCall(ring, Plan.of(ring.size, q.shape[1]), kernel, 1.0)
    out, lse = ring_forward(call, q, k, v)
    forward = diary.copy()
    ring_backward(call, out, q, k, v, out, lse)
    return forward, diary[len(forward) :]


def test_hops_are_posted_before_the_compute_and_awaited_after_it(workers):
    overlapped = ["post", "compute", "wait"]
    for forward, backward in workers.run(diary_of, *map(torch.detach, shards_of(4)), ranks=3):
        # No hop is left for the last keys; the last gradients still have to go home.
        assert forward == [*overlapped, *overlapped, "compute"]
        assert backward == [*overlapped, *overlapped, *overlapped, "post", "wait"]
