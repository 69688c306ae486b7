"""The schedule of a ring: how far each rank's keys travel, known to all before anything is sent.

Keys and values travel around the ring, one hop a step. `route` lists how far what a rank holds has
come, step by step: (0, 1, 2, 3) is one full round of four ranks. Under a window a rank needs its
neighbours only, and the route is short: (0, 1) when each rank needs the keys of the one before, and
(0, 1, -1) when it also needs those of the one after, which come the other way round.

A hop that no later rank needs is left out. Under a causal mask the keys of rank r go up to the
last rank and never on to rank 0: half of all the traffic.

A plan is a function of sizes and options alone. So all ranks come to the same one, and each knows
without asking what its neighbours will send.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from labsupport.distributed.ring.blocks import BlockPair, joined, visible_pairs
from labsupport.distributed.ring.zigzag import check_even, chunks_of


class Message(NamedTuple):
    """One message of a step, by ranks.

    what: "keys", K and V for the next step; "sums", dK and dV so far, following their keys; "home",
    dK and dV that are complete, to the keys' owner.
    """

    what: Literal["keys", "sums", "home"]
    sender: int
    receiver: int


@dataclass(frozen=True)
class Plan:
    """Schedule of a ring. Build one with `Plan.of`.

    Attributes:
        world_size: W, the number of ranks.
        length: of one rank's shard.
        left, right: the window in the whole sequence; None means no limit. Causal is right = 0.
        zigzag: each rank holds chunks r and 2W - 1 - r, not one run of the sequence.
        alibi: block pairs are cut for ALiBi.

    >>> Plan.of(8, 1024, causal=True, window_size=(1500, 0)).route
    (0, 1, 2)
    """

    world_size: int
    length: int
    left: int | None = None
    right: int | None = None
    zigzag: bool = False
    alibi: bool = False

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        world_size: int,
        length: int,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        zigzag: bool = False,
        alibi: bool = False,
    ) -> Plan:
        """Return the plan of flash-attn's options; `length` is that of one rank's shard.

        Raises:
            AttentionInputError: zigzag with an odd length.
        """
        check_even(length, zigzag=zigzag)
        total = world_size * length
        left, right = (None if not 0 <= side < total - 1 else side for side in window_size)
        return Plan(world_size, length, left, 0 if causal else right, zigzag, alibi)

    @cached_property
    def table(self) -> list[list[list[BlockPair]]]:
        """Block pairs by [rank of the queries][rank that owns the keys]."""
        ranks = range(self.world_size)
        return [[self._block_pairs(rank, owner) for owner in ranks] for rank in ranks]

    def _block_pairs(self, rank: int, owner: int) -> list[BlockPair]:
        queries, keys = (chunks_of(r, self.world_size, zigzag=self.zigzag) for r in (rank, owner))
        size = self.length // len(queries)
        pairs = [
            pair.moved(row * size, col * size)
            for row, mine in enumerate(queries)
            for col, other in enumerate(keys)
            for pair in visible_pairs(
                size, (mine - other) * size, self.left, self.right, alibi=self.alibi
            )
        ]
        return pairs if self.alibi else joined(pairs)

    def pairs(self, rank: int) -> list[int]:
        """Return the visible (query, key) pairs that a rank computes, by step: its work."""
        return [
            sum(pair.pairs for pair in self.table[rank][self.owner(rank, distance)])
            for distance in self.route
        ]

    # --- how far keys travel ----------------------------------------------------------------------

    @cached_property
    def route(self) -> tuple[int, ...]:
        """Ranks that what is held has come, by step; negative: against the ring's direction."""
        ranks = range(self.world_size)
        needed = sorted(
            {
                (r - owner) % self.world_size
                for r in ranks
                for owner in ranks
                if self.table[r][owner]
            }
            - {0}
        )
        # The first `cut` of these distances are reached forwards, the rest backwards.
        ways = [
            (
                needed[cut - 1] if cut else 0,
                self.world_size - needed[cut] if cut < len(needed) else 0,
            )
            for cut in range(len(needed), -1, -1)
        ]
        forwards, backwards = min(ways, key=sum)
        return (0, *range(1, forwards + 1), *range(-1, -backwards - 1, -1))

    @property
    def hops(self) -> int:
        """Steps that wait for a hop: W - 1 for a full round."""
        return len(self.route) - 1

    def owner(self, rank: int, distance: int) -> int:
        """Return whose keys a rank holds when they have come `distance` ranks."""
        return (rank - distance) % self.world_size

    def _uses(self, owner: int, distance: int) -> list[int]:
        """Distances, in the direction of `distance`, at which the keys of `owner` are needed."""
        return [
            abs(far)
            for far in self.route
            if far * distance > 0 and self.table[(owner + far) % self.world_size][owner]
        ]

    def travels(self, owner: int, distance: int) -> bool:
        """True if the keys of `owner` make the hop to `distance`: needed there, or further on."""
        return abs(distance) <= max(self._uses(owner, distance), default=0)

    def goes_on(self, owner: int, distance: int) -> bool:
        """True if dK and dV of `owner` leave the rank at `distance` for the next one."""
        uses = self._uses(owner, distance)
        return bool(uses) and min(uses) <= abs(distance) < max(uses)

    def goes_home(self, owner: int, distance: int) -> bool:
        """True if dK and dV of `owner` are complete at `distance`: no later rank adds to them."""
        return abs(distance) == max(self._uses(owner, distance), default=None)

    # --- what is sent -----------------------------------------------------------------------------

    @cached_property
    def messages(self) -> tuple[tuple[Message, ...], ...]:
        """Messages that travel while a step computes, by step; keys come before gradients.

        A forward sends the keys only. A backward has one step more: the last gradients go home.
        """
        return tuple(
            (*self._keys_sent(step), *self._gradients_sent(step))
            for step in range(len(self.route) + 1)
        )

    def _keys_sent(self, step: int) -> Iterator[Message]:
        """The hop that the next step needs."""
        for coming in self.route[step + 1 : step + 2]:
            way = 1 if coming > 0 else -1
            for rank in range(self.world_size):
                if self.travels(self.owner(rank, coming - way), coming):
                    yield Message("keys", rank, (rank + way) % self.world_size)

    def _gradients_sent(self, step: int) -> Iterator[Message]:
        """Sums that the step before added to: one step after the keys."""
        before = self.route[step - 1] if step else 0
        for rank in range(self.world_size) if before else ():
            owner = self.owner(rank, before)
            if self.goes_on(owner, before):
                way = 1 if before > 0 else -1
                yield Message("sums", rank, (rank + way) % self.world_size)
            elif self.goes_home(owner, before):
                yield Message("home", rank, owner)
