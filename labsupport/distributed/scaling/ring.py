"""Ring attention's time, predicted from its plan.

In each step a rank computes with the keys that it holds, while those of the next step travel. A
message begins when both ends have come to the step, and a step ends when its compute and its
messages have:

    begin[rank, step + 1] = max(begin[rank, step] + compute[rank, step], messages of this step)

`Plan` says which pairs a rank computes in a step and what it sends: imbalance under a causal mask
and hops that are left out are exact. Compute is proportional to pairs: for each and each head 4 d
FLOPs forward, 10 d backward (two and five products; Dao, FlashAttention-2, arXiv 2307.08691,
section 4.1). A hop carries K and V; in the backward also dK and dV, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.scaling.links import LINKS

Direction = Literal["forward", "backward", "forward+backward"]
LAYOUTS = ("contiguous", "zigzag")
PRODUCTS = {"forward": 2, "backward": 5, "forward+backward": 7}
ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class RingPrediction:
    """Ring attention of one call, in milliseconds.

    total_ms: until the last rank is done. compute_ms: the busiest rank's compute, in all steps.
    exposed_ms: by how much the total exceeds what it would be if messages took no time.
    waiting_ms: the rest: ranks that wait for busier ones. hop_ms: the longest message of a step.
    sent_bytes: by the rank that sends most. efficiency: world * single_ms / total_ms.
    """

    total_ms: float
    compute_ms: float
    exposed_ms: float
    waiting_ms: float
    hop_ms: float
    sent_bytes: int
    efficiency: float


def predict_ring(
    world: int,
    seqlen_per_rank: int,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    causal: bool = True,
    layout: Literal["contiguous", "zigzag"] = "zigzag",
    direction: Direction = "forward",
    single_ms: float | None = None,
    tflops: float | None = None,
    gb_s: float = LINKS[0].gb_s,
    latency_us: float = 0.0,
    memory_gb_s: float | None = None,
) -> RingPrediction:
    """Predict a ring's time from one device's.

    Args:
        world, seqlen_per_rank, heads, kv_heads, head_dim, batch, dtype, causal, layout: the call.
        direction: "forward+backward" is one after the other.
        single_ms: what the kernel needs on one device for `seqlen_per_rank` tokens, same direction.
        tflops: in its place, what it achieves.
        gb_s, latency_us: of a link, each way; a message takes latency_us + bytes / gb_s.
        memory_gb_s: of a device; adding a step's result to the result so far reads and writes it in
            float32 and reads the new part. None: that is free.

    Raises:
        ValueError: not exactly one of single_ms and tflops; sizes that do not fit; a layout, dtype
            or direction that does not exist.

    >>> one = predict_ring(8, 32768, heads=32, kv_heads=8, head_dim=128, single_ms=23.0)
    >>> round(one.efficiency, 2)
    1.0
    """
    kv_heads = kv_heads or heads
    if (single_ms is None) == (tflops is None):
        raise ValueError("give either single_ms or tflops")
    if world < 1 or seqlen_per_rank < 1 or heads % kv_heads:
        raise ValueError(
            f"no ring: {world} ranks, {seqlen_per_rank} tokens, {heads}/{kv_heads} heads"
        )
    _check_known("direction", direction, PRODUCTS)
    _check_known("dtype", dtype, ELEMENT)
    plan = Plan.of(world, seqlen_per_rank, causal=causal, zigzag=_is_zigzag(layout))
    one = Plan.of(1, seqlen_per_rank, causal=causal).pairs(0)[0]
    if single_ms is None:
        single_ms = one * batch * heads * 2 * head_dim * PRODUCTS[direction] / (tflops or 1) / 1e9
    passes = ("forward", "backward") if direction == "forward+backward" else (direction,)
    token_bytes = batch * head_dim * ELEMENT[dtype], batch * head_dim * 4
    totals = []
    for name in passes:
        pair_ms = single_ms * PRODUCTS[name] / PRODUCTS[direction] / one
        row_ms = col_ms = 0.0  # what it costs to add a row, or a key, of a part to the result
        if memory_gb_s is not None:
            added = (token_bytes[0] + 2 * token_bytes[1]) / memory_gb_s / 1e6
            row_ms, col_ms = added * heads, added * 2 * kv_heads * (name == "backward")
        schedule = _Schedule(
            plan,
            pair_ms,
            row_ms,
            col_ms,
            hop_bytes=seqlen_per_rank * 2 * kv_heads * token_bytes[0],
            gradient_bytes=seqlen_per_rank * 2 * kv_heads * token_bytes[1],
            byte_ms=1e-6 / gb_s,
            latency_ms=latency_us / 1e3,
            backward=name == "backward",
        )
        totals.append(schedule.run())
    total, compute, free = (sum(numbers) for numbers in zip(*(t[:3] for t in totals), strict=True))
    hop = max(schedule[3] for schedule in totals)
    sent = sum(schedule[4] for schedule in totals)
    return RingPrediction(
        total, compute, total - free, free - compute, hop, sent, world * single_ms / total
    )


@dataclass(frozen=True)
class _Schedule:
    """One pass around the ring: what takes how long."""

    plan: Plan
    pair_ms: float
    row_ms: float
    col_ms: float
    hop_bytes: int
    gradient_bytes: int
    byte_ms: float
    latency_ms: float
    backward: bool

    def run(self) -> tuple[float, float, float, float, int]:
        """Total, busiest rank's compute, total if messages took no time, longest message; bytes."""
        ranks = range(self.plan.world_size)
        steps = (*self.plan.route, None) if self.backward else self.plan.route
        compute = [[self._compute(rank, distance) for distance in steps] for rank in ranks]
        messages = [self._messages(step) for step in range(len(steps))]
        times = [
            {way: self.latency_ms + nbytes * self.byte_ms for way, nbytes in step.items()}
            for step in messages
        ]
        nothing = [dict.fromkeys(step, 0.0) for step in messages]
        longest = max((ms for step in times for ms in step.values()), default=0.0)
        sent = [
            sum(
                nbytes
                for step in messages
                for (sender, _), nbytes in step.items()
                if sender == rank
            )
            for rank in ranks
        ]
        busiest = max(sum(row) for row in compute)
        return self._end(compute, times), busiest, self._end(compute, nothing), longest, max(sent)

    def _end(self, compute: list[list[float]], times: list[dict[tuple[int, int], float]]) -> float:
        """When the last rank is done."""
        begin = [0.0] * self.plan.world_size
        for step, messages in enumerate(times):
            ends = [at + compute[rank][step] for rank, at in enumerate(begin)]
            for (sender, receiver), ms in messages.items():
                there = max(begin[sender], begin[receiver]) + ms
                ends[sender], ends[receiver] = max(ends[sender], there), max(ends[receiver], there)
            begin = ends
        return max(begin)

    def _compute(self, rank: int, distance: int | None) -> float:
        if distance is None:
            return 0.0
        pieces = self.plan.table[rank][self.plan.owner(rank, distance)]
        return sum(
            piece.pairs * self.pair_ms
            + (piece.rows.stop - piece.rows.start) * self.row_ms
            + (piece.cols.stop - piece.cols.start) * self.col_ms
            for piece in pieces
        )

    def _messages(self, step: int) -> dict[tuple[int, int], int]:
        """Bytes of a step by (sender, receiver)."""
        sent: dict[tuple[int, int], int] = {}
        for what, sender, receiver in self.plan.messages[step]:
            if what == "keys" or self.backward:
                nbytes = self.hop_bytes if what == "keys" else self.gradient_bytes
                sent[sender, receiver] = sent.get((sender, receiver), 0) + nbytes
        return sent


def imbalance(
    world: int, seqlen_per_rank: int, *, layout: Literal["contiguous", "zigzag"] = "contiguous"
) -> float:
    """The busiest rank's pairs under a causal mask, over the mean of all ranks: 1 is balanced.

    Raises:
        ValueError: no such layout, or a zigzag shard of an odd length.

    >>> round(imbalance(8, 4096), 3), imbalance(8, 4096, layout="zigzag")
    (1.875, 1.0)
    """
    plan = Plan.of(world, seqlen_per_rank, causal=True, zigzag=_is_zigzag(layout))
    work = [sum(plan.pairs(rank)) for rank in range(world)]
    return max(work) * world / sum(work)


def _is_zigzag(layout: str) -> bool:
    _check_known("layout", layout, LAYOUTS)
    return layout == "zigzag"


def _check_known(name: str, given: str, known: Iterable[str]) -> None:
    if given not in known:
        raise ValueError(f"{name} {given!r}: there are {', '.join(known)}")


def hides_from(
    tflops: float,
    gb_s: float,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    balanced_causal: bool = True,
    direction: Literal["forward", "backward"] = "forward",
    latency_us: float = 0.0,
) -> float:
    """The fewest tokens of a rank whose step of compute is as long as its messages.

    A step of n queries and n keys (half of the pairs in a zigzag ring) takes a n^2, its messages
    c n + latency. So n = (c + sqrt(c^2 + 4 a latency)) / 2a, which is c / a without latency:

        forward, zigzag       n = b (kv_heads / heads) F / β              b bytes of a number,
        backward, zigzag      n = 2 (b + 4) / 5 (kv_heads / heads) F / β  F FLOP/s, β bytes/s

    `balanced_causal` False is no mask: all pairs, half of that n. Neither head_dim nor batch is in
    it, except with latency.

    >>> round(hides_from(600, 25, heads=32, kv_heads=8, head_dim=128))
    12000
    """
    kv_heads, element = kv_heads or heads, ELEMENT[dtype]
    pairs = 0.5 if balanced_causal else 1.0
    a = pairs * 2 * PRODUCTS[direction] * head_dim * heads * batch / (tflops * 1e12)
    travels = element + (4 if direction == "backward" else 0)
    c = 2 * kv_heads * head_dim * batch * travels / (gb_s * 1e9)
    return (c + math.sqrt(c * c + 4 * a * latency_us / 1e6)) / (2 * a)
