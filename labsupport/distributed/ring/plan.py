"""The schedule of a ring: how far each rank's keys travel, known to all before anything is sent.

`route` lists how far a rank's keys have travelled, step by step: (0, 1, 2, 3) is one full round of
four ranks. Under a window it is short: (0, 1) when each rank needs the keys of the one before, and
(0, 1, -1) when it also needs those of the one after, which come the other way round. A hop that no
later rank needs is left out: causal keys never go on to rank 0, which is half of all the traffic.

A plan is a function of sizes and options alone. So all ranks come to the same one, and each knows
without asking what its neighbours will send.

BLOCKS. A block is one chunk of n queries against one chunk of n keys. In the whole sequence, query
i of the block comes `delta` places after key i: delta = 0 on the diagonal, n for the chunk before
it, -n for the one after it. Causal masks and windows look at positions in the whole sequence, so

    query i sees key j    when    delta - left  <=  j - i  <=  delta + right

and a block's visible pairs are a range of its diagonals, low <= j - i <= high. Kernels know windows
around the main diagonal only. A range beside it (low > 0, or high < 0) is one in a smaller square:

    n = 5, left = 6, delta = 8:   2 <= j - i          the square of keys 2.. and queries ..2:
        k 0 1 2 3 4                                       k 2 3 4
    q 0   . . x x x                                   q 0   x x x
    q 1   . . . x x                                   q 1   . x x      window (0, no limit)
    q 2   . . . . x                                   q 2   . . x
    q 3   . . . . .        <- sees none of them
    q 4   . . . . .

There each query sees at least one key, so no kernel gets empty rows.

Striped shards (rank r holds tokens r, r + W, r + 2W, ...) need no chunks: query i is token
r + W * i, and key j is token s + W * j, so a window is a range of diagonals j - i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from labsupport.attention.inputs import AttentionInputError, check_window
from labsupport.attention.masks import AttentionMask
from labsupport.distributed.ring.zigzag import check_length, chunks_of

UNLIMITED = (-1, -1)
CAUSAL = (-1, 0)
LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class BlockPair:
    """One call of a kernel: a rectangle of queries and keys with a window around its diagonal.

    Attributes:
        rows, cols: of the queries and of the keys, within the ranks' shards.
        window: (left, right) as flash-attn's `window_size`; a causal mask is (-1, 0).
    """

    rows: slice
    cols: slice
    window: tuple[int, int]

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        rows, cols = (part.stop - part.start for part in (self.rows, self.cols))
        return AttentionMask.of(rows, cols, window_size=self.window).visible_pairs()

    def moved(self, rows: int, cols: int) -> BlockPair:
        """Return the same pair, that many rows and columns further on."""
        (top, bottom), (first, last) = ((x.start, x.stop) for x in (self.rows, self.cols))
        return replace(
            self, rows=slice(top + rows, bottom + rows), cols=slice(first + cols, last + cols)
        )


def visible_pairs(length: int, delta: int, left: int | None, right: int | None) -> list[BlockPair]:
    """Return the visible part of one block; [] when all of it is hidden.

    `length` is n; `delta` is 0, or at least n either way; `left` and `right` are the window in the
    whole sequence, None without a limit (causal: right = 0).
    """
    low = 1 - length if left is None else max(delta - left, 1 - length)
    high = length - 1 if right is None else min(delta + right, length - 1)
    if low > high:
        return []
    aside = max(low, 0) + min(high, 0)  # the diagonal that becomes the main one
    size = length - abs(aside)
    row, col = max(-aside, 0), max(aside, 0)
    before, after = (-1 if side >= size - 1 else side for side in (aside - low, high - aside))
    return [BlockPair(slice(row, row + size), slice(col, col + size), (before, after))]


class Message(NamedTuple):
    """One message of a step, by ranks.

    what: "keys", K and V for the next step; "gradients", a rank's share of dK and dV, to the keys'
    owner. slot: number of the receiver's buffer; no other message is in it, or being computed with.
    """

    what: Literal["keys", "gradients"]
    sender: int
    receiver: int
    slot: int


@dataclass(frozen=True)
class Plan:
    """Schedule of a ring. Build one with `Plan.of`.

    Attributes:
        world_size: W, the number of ranks.
        length: of one rank's shard.
        left, right: the window in the whole sequence; None means no limit. Causal is right = 0.
        layout: "contiguous": rank r holds run r of the sequence; "zigzag": chunks r and 2W - 1 - r;
            "striped": every W-th token from r on.

    >>> Plan.of(8, 1024, causal=True, window_size=(1500, 0)).route
    (0, 1, 2)
    """

    world_size: int
    length: int
    left: int | None = None
    right: int | None = None
    layout: str = "contiguous"

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        world_size: int,
        length: int,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        layout: str = "contiguous",
    ) -> Plan:
        """Return the plan of flash-attn's options.

        Raises:
            AttentionInputError: no such layout, window or number of ranks or tokens; zigzag shards
                of an odd length.
        """
        if layout not in LAYOUTS:
            raise AttentionInputError(f"layout {layout!r}: there are {', '.join(LAYOUTS)}.")
        check_window(window_size)
        check_length(length, zigzag=layout == "zigzag")
        chunks_of(0, world_size)
        total = world_size * length
        left, right = (None if not 0 <= side < total - 1 else side for side in window_size)
        return Plan(world_size, length, left, 0 if causal else right, layout)

    @cached_property
    def table(self) -> list[list[list[BlockPair]]]:
        """Block pairs by [rank of the queries][rank that owns the keys]."""
        ranks = range(self.world_size)
        return [[self._block_pairs(rank, owner) for owner in ranks] for rank in ranks]

    def _block_pairs(self, rank: int, owner: int) -> list[BlockPair]:
        if self.layout == "striped":
            further = owner - rank, rank - owner
            left, right = (
                None if side is None else (side + more) // self.world_size
                for side, more in zip((self.left, self.right), further, strict=True)
            )
            return visible_pairs(self.length, 0, left, right)
        zigzag = self.layout == "zigzag"
        if zigzag and self.left is None and self.right in (None, 0):
            # One call: of an earlier rank's keys the first chunk is seen, by both of this rank's; a
            # later rank's are seen by the second one only; its own two are like neighbours.
            half, masked = self.length // 2, self.right == 0
            rows = slice(half if masked and rank < owner else 0, self.length)
            cols = slice(0, half if masked and owner < rank else self.length)
            return [BlockPair(rows, cols, CAUSAL if masked and rank == owner else UNLIMITED)]
        queries, keys = (chunks_of(r, self.world_size, zigzag=zigzag) for r in (rank, owner))
        size = self.length // len(queries)
        return [
            pair.moved(row * size, col * size)
            for row, mine in enumerate(queries)
            for col, other in enumerate(keys)
            for pair in visible_pairs(size, (mine - other) * size, self.left, self.right)
        ]

    def pairs(self, rank: int) -> list[int]:
        """Return the visible (query, key) pairs that a rank computes, by step: its work."""
        return [
            sum(pair.pairs for pair in self.table[rank][self.owner(rank, distance)])
            for distance in self.route
        ]

    def owner(self, rank: int, distance: int) -> int:
        """Return the owner of the keys that `rank` has after they travelled `distance` ranks."""
        return (rank - distance) % self.world_size

    @cached_property
    def route(self) -> tuple[int, ...]:
        """Ranks that the keys have travelled, by step; negative: against the ring's direction."""
        world = self.world_size
        ranks = range(world)
        needed = {(r - owner) % world for r in ranks for owner in ranks if self.table[r][owner]}
        # The keys of distances up to a cut come forwards, the rest backwards: in fewest hops.
        near = sorted(needed | {0})
        far = [*(world - distance for distance in near[1:]), 0]
        forwards, backwards = min(reversed(list(zip(near, far, strict=True))), key=sum)
        return (0, *range(1, forwards + 1), *range(-1, -backwards - 1, -1))

    @property
    def hops(self) -> int:
        """Steps that wait for a hop: W - 1 for a full round."""
        return len(self.route) - 1

    @cached_property
    def messages(self) -> list[list[Message]]:
        """Messages that travel while a step computes, by step.

        A forward sends the keys only: what the next step needs. In a backward each rank's share of
        dK and dV goes straight to the keys' owner, in the step after its compute; so it has one
        step more.
        """
        steps: list[list[Message]] = [[] for _ in range(len(self.route) + 1)]
        last = len(self.route) - 1
        for step, distance in enumerate(self.route[1:], start=1):
            way = 1 if distance > 0 else -1
            for rank in range(self.world_size):
                owner = self.owner(rank, distance)
                further = [far for far in self.route if far * way >= distance * way]
                if any(self.table[(owner + far) % self.world_size][owner] for far in further):
                    sender, slot = (rank - way) % self.world_size, (step - 1) % 2
                    steps[step - 1].append(Message("keys", sender, rank, slot))
                if self.table[rank][owner]:
                    # Two slots are the keys': of this step, and of the next one if there is one.
                    slot = 2 if step + 1 < last else (step + 1) % 2
                    steps[step + 1].append(Message("gradients", rank, owner, slot))
        return steps

    @property
    def slots(self) -> int:
        """Number of messages that a rank must be able to hold: 3 at most."""
        return max((m.slot + 1 for messages in self.messages for m in messages), default=0)

    def shared(self, rank: int, owner: int) -> slice:
        """Return the keys of `owner` that `rank` computes with, from the first to the last."""
        cols = [pair.cols for pair in self.table[rank][owner]]
        return slice(min(c.start for c in cols), max(c.stop for c in cols))
