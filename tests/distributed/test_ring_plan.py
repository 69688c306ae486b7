"""A ring's plan of computing and sending, checked against whole masks."""

import itertools

import pytest
import torch

from labsupport.attention import AttentionInputError
from labsupport.attention.masks import AttentionMask
from labsupport.distributed.ring import Plan, positions_of, shard_sequence, unshard_sequence
from labsupport.distributed.ring.plan import LAYOUTS


def kernels_view(pair):
    """The pairs that a kernel sees in a block pair."""
    rows, cols = (part.stop - part.start for part in (pair.rows, pair.cols))
    visible = AttentionMask.of(rows, cols, window_size=pair.window).full_mask()
    return torch.ones(rows, cols, dtype=torch.bool) if visible is None else visible


WINDOWS = [(-1, -1), (0, 0), (3, 0), (6, 2), (7, -1), (-1, 7), (20, 20)]
PLANS = [
    Plan.of(ranks, 6, causal=causal, window_size=window, layout=layout)
    for (causal, layout, window), ranks in zip(
        itertools.product((False, True), LAYOUTS, WINDOWS * 2), itertools.cycle((4, 3, 8, 2, 1))
    )
]


def test_every_rank_gets_the_keys_it_needs_exactly_once_and_gradients_go_home():
    for plan in PLANS:
        held = [[rank] for rank in range(plan.world_size)]
        for messages, distance in zip(plan.messages, plan.route[1:], strict=False):
            for message in messages:
                if message.what == "keys":
                    held[message.receiver].append(plan.owner(message.receiver, distance))
        for rank, owners in enumerate(held):
            assert len(owners) == len(set(owners)), plan
            needed = {owner for owner in range(plan.world_size) if plan.table[rank][owner]}
            assert needed <= set(owners), plan
        # Each share of an owner's gradients goes to it, once.
        shares = [m for messages in plan.messages for m in messages if m.what == "gradients"]
        for owner in range(plan.world_size):
            users = {rank for rank in range(plan.world_size) if plan.table[rank][owner]} - {owner}
            assert sorted(m.sender for m in shares if m.receiver == owner) == sorted(users), plan


def test_a_message_arrives_in_a_slot_that_nothing_else_uses():
    for plan in PLANS:
        for rank in range(plan.world_size):
            keys = [None]  # the slot of those that each step computes with
            for step, messages in enumerate(plan.messages):
                slots = {m.what: m.slot for m in messages if m.receiver == rank}
                used = [keys[step], *slots.values()]
                assert len(used) == len(set(used)) <= 4, plan
                assert max(slots.values(), default=0) < max(plan.slots, 1)
                keys.append(slots.get("keys"))


def test_the_block_pairs_of_all_ranks_make_up_the_whole_mask():
    for plan in PLANS:
        total = plan.world_size * plan.length
        seen = torch.zeros(total, total, dtype=torch.int64)
        ranks, zigzag = range(plan.world_size), plan.layout == "zigzag"
        places = [positions_of(plan.length, r, plan.world_size, zigzag=zigzag) for r in ranks]
        if plan.layout == "striped":
            places = [torch.arange(rank, total, plan.world_size) for rank in ranks]
        for rank, owner in itertools.product(range(plan.world_size), repeat=2):
            for pair in plan.table[rank][owner]:
                rows, cols = places[rank][pair.rows, None], places[owner][None, pair.cols]
                visible = kernels_view(pair)
                seen[rows, cols] += visible
                assert visible.any(dim=1).all(), "a query without a key"
                assert pair.pairs == visible.sum()
        mask = AttentionMask(total, total, plan.left, plan.right).full_mask()
        mask = torch.ones(total, total, dtype=torch.bool) if mask is None else mask
        assert torch.equal(seen, mask.long()), plan


def test_zigzag_shares_causal_work_equally_in_every_step():
    plan = Plan.of(4, 8, causal=True, layout="zigzag")
    assert len({tuple(plan.pairs(rank)) for rank in range(4)}) == 1
    assert sum(sum(plan.pairs(rank)) for rank in range(4)) == 32 * 33 // 2
    assert {len(pairs) for row in plan.table for pairs in row} == {1}, "one call of a kernel"
    contiguous = Plan.of(4, 8, causal=True)
    assert [sum(contiguous.pairs(rank)) for rank in range(4)] == [36, 100, 164, 228]
    with pytest.raises(AttentionInputError, match="two chunks of one length, but 3"):
        Plan.of(2, 3, causal=True, layout="zigzag")
    for left, steps in ((1024, 2), (1025, 3), (1500, 3), (100_000, 8)):
        assert Plan.of(8, 1024, causal=True, window_size=(left, 0)).route == tuple(range(steps))


@pytest.mark.parametrize(("ranks", "zigzag"), [(1, True), (2, False), (3, True)])
def test_shards_go_together_again_and_say_their_positions(ranks, zigzag):
    x = torch.randn(2, 4 * ranks, 3)
    shards = [shard_sequence(x, rank, ranks, zigzag=zigzag) for rank in range(ranks)]
    assert torch.equal(unshard_sequence(shards, zigzag=zigzag), x)
    for rank, shard in enumerate(shards):
        assert torch.equal(x[:, positions_of(4, rank, ranks, zigzag=zigzag)], shard)
    with pytest.raises(AttentionInputError, match=f"no rank {ranks}"):
        positions_of(4, ranks, ranks)
    with pytest.raises(AttentionInputError, match="pad it by 2, to 12"):
        shard_sequence(torch.zeros(1, 10, 1), 0, 3 if zigzag else 4, zigzag=zigzag)


@pytest.mark.parametrize(
    "call",
    [
        lambda: positions_of(-4, 0, 2),
        lambda: positions_of(0, 0, 2),
        lambda: positions_of(4.0, 0, 2),
        lambda: positions_of(True, 0, 2),
        lambda: positions_of(4, 0, 2, zigzag="no"),
        lambda: positions_of(4, -1, 2),
        lambda: shard_sequence(torch.arange(8), 0, 0, dim=0),
        lambda: shard_sequence(torch.arange(8), 0, 2.0, dim=0),
        lambda: shard_sequence(torch.arange(8), 0, 2, dim=0, zigzag=1),
        lambda: unshard_sequence([torch.arange(4), torch.arange(2)], dim=0),
        lambda: unshard_sequence([torch.arange(4), torch.arange(4.0)], dim=0),
        lambda: unshard_sequence([]),
        lambda: Plan.of(-1, 4),
        lambda: Plan.of(2, 0),
        lambda: Plan.of(2, 4, window_size=(-5, 3)),
        lambda: Plan.of(2, 4, layout="stripes"),
    ],
)
def test_what_is_no_shard_rank_or_plan_is_refused_by_an_error_of_the_lab(call):
    with pytest.raises(AttentionInputError):
        call()
