"""Which rank's keys travel how far, and who must see them: known to all before anything is sent.

Keys and values travel around the ring, one hop a step. `route` lists how far what a rank holds has
come, step by step: (0, 1, 2, 3) is one full round of four ranks. Under a window a rank needs its
neighbours only, and the route is short: (0, 1) when each rank needs the keys of the one before, and
(0, 1, -1) when it also needs those of the one after, which come the other way round.

A hop that nobody behind it needs is left out. Under a causal mask the keys of rank r go up to the
last rank and never on to rank 0: half of all the traffic.

A plan is a function of sizes and options alone. So all ranks come to the same one, and each knows
without asking what its neighbours will send.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from labsupport.distributed.ring.blocks import Piece, joined, visible_pieces
from labsupport.distributed.ring.zigzag import check_even, chunks_of


class Message(NamedTuple):
    """One message of a step, by ranks.

    what: "keys", K and V for the next step; "sums", dK and dV so far, behind their keys; "home",
    dK and dV that are complete, to the keys' owner.
    """

    what: Literal["keys", "sums", "home"]
    sender: int
    receiver: int


@dataclass(frozen=True)
class Plan:
    """Ring attention's schedule. Build one with `Plan.of`.

    Attributes:
        world_size: W, how many ranks there are.
        length: of one rank's shard.
        left, right: the window in the whole sequence; None means no limit. Causal is right = 0.
        zigzag: each rank holds chunks r and 2W - 1 - r, not one run of the sequence.
        alibi: pieces are cut for ALiBi.

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
        """The plan of flash-attn's options; `length` is that of one rank's shard.

        Raises:
            AttentionInputError: zigzag with an odd length.
        """
        check_even(length, zigzag=zigzag)
        total = world_size * length
        left, right = (None if not 0 <= side < total - 1 else side for side in window_size)
        return Plan(world_size, length, left, 0 if causal else right, zigzag, alibi)

    @cached_property
    def table(self) -> list[list[list[Piece]]]:
        """Pieces by [rank of the queries][rank that owns the keys]."""
        ranks = range(self.world_size)
        return [[self._pieces(rank, owner) for owner in ranks] for rank in ranks]

    def _pieces(self, rank: int, owner: int) -> list[Piece]:
        here, there = (chunks_of(r, self.world_size, zigzag=self.zigzag) for r in (rank, owner))
        size = self.length // len(here)
        found = [
            piece.moved(row * size, col * size)
            for row, mine in enumerate(here)
            for col, other in enumerate(there)
            for piece in visible_pieces(
                size, (mine - other) * size, self.left, self.right, alibi=self.alibi
            )
        ]
        return found if self.alibi else joined(found)

    def pairs(self, rank: int) -> list[int]:
        """Visible (query, key) pairs that a rank computes, by step: its work."""
        return [
            sum(piece.pairs for piece in self.table[rank][self.owner(rank, distance)])
            for distance in self.route
        ]

    # --- how far keys travel ----------------------------------------------------------------------

    @cached_property
    def route(self) -> tuple[int, ...]:
        """How many ranks what is held has come, by step; negative: against the ring's direction."""
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
        """How many steps wait for a hop: W - 1 for a full round."""
        return len(self.route) - 1

    def owner(self, rank: int, distance: int) -> int:
        """Whose keys a rank holds when they have come `distance` ranks."""
        return (rank - distance) % self.world_size

    def travels(self, owner: int, distance: int) -> bool:
        """Whether the keys of `owner` make the hop to `distance`: somebody there or on needs it."""
        return any(
            self.table[(owner + far) % self.world_size][owner]
            for far in self.route
            if far * distance > 0 and abs(far) >= abs(distance)
        )

    def has_gradient(self, owner: int, distance: int) -> bool:
        """Whether a rank has added to the travelling dK and dV up to `distance`."""
        return any(
            self.table[(owner + near) % self.world_size][owner]
            for near in self.route
            if near * distance > 0 and abs(near) <= abs(distance)
        )

    def goes_on(self, owner: int, distance: int) -> bool:
        """Whether dK and dV of `owner` leave the rank at `distance` for the next one."""
        onward = distance + direction(distance)
        return self.travels(owner, onward) and self.has_gradient(owner, distance)

    def goes_home(self, owner: int, distance: int) -> bool:
        """Whether dK and dV of `owner` are complete at `distance`: nobody further on adds to it."""
        return self.travels(owner, distance) and not self.travels(
            owner, distance + direction(distance)
        )

    # --- what is sent -----------------------------------------------------------------------------

    @cached_property
    def messages(self) -> tuple[tuple[Message, ...], ...]:
        """What travels while a step computes, by step; keys come before gradients.

        A forward sends the keys only. A backward has one step more: the last gradients go home.
        """
        return tuple(
            (*self._keys_sent(step), *self._gradients_sent(step))
            for step in range(len(self.route) + 1)
        )

    def _keys_sent(self, step: int) -> Iterator[Message]:
        """The hop that the next step needs."""
        if step + 1 >= len(self.route):
            return
        coming = self.route[step + 1]
        way = direction(coming)
        for rank in range(self.world_size):
            if self.travels(self.owner(rank, coming - way), coming):
                yield Message("keys", rank, (rank + way) % self.world_size)

    def _gradients_sent(self, step: int) -> Iterator[Message]:
        """What the step before added to: one step behind the keys."""
        before = self.route[step - 1] if step else 0
        if not before:
            return
        for rank in range(self.world_size):
            owner = self.owner(rank, before)
            if self.goes_on(owner, before):
                yield Message("sums", rank, (rank + direction(before)) % self.world_size)
            elif self.goes_home(owner, before):
                yield Message("home", rank, owner)


def direction(distance: int) -> int:
    """1 forwards, -1 backwards."""
    return 1 if distance > 0 else -1
