"""Predictions for ring attention on several devices, from compute and links.

A prediction combines the time of one device and the bandwidth of a link, with the schedule of
`Plan`. It ignores latencies, starting kernels, links that share a switch, and clocks that fall
when all devices work: so it is a bound on efficiency. Theory chapter 11 derives it.

A ring. In each step a rank computes with the keys that it holds, while those of the next step, and
its last share of dK and dV, travel. For each pair and head, compute is 4 d FLOPs forward, 10 d
backward (Dao, FlashAttention-2, arXiv 2307.08691, section 4.1).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from labsupport.distributed.ring.plan import Plan

Layout = Literal["contiguous", "zigzag"]
Direction = Literal["forward", "backward", "forward+backward"]
PRODUCTS = {"forward": 2, "backward": 5, "forward+backward": 7}
ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
Messages = Counter[tuple[int, int]]  # bytes by sender and receiver


@dataclass(frozen=True)
class Link:
    """Connection of two devices: GB/s each way, as its maker promises, and the source."""

    name: str
    gb_s: float
    source: str


LINKS = (
    Link("NVLink, H100 and H200", 450, "NVIDIA H200 page: 900 GB/s, both ways together"),
    Link("PCIe 5.0, 16 lanes", 64, "NVIDIA H200 page: 128 GB/s, both ways together"),
    Link("InfiniBand, 200 Gb/s", 25, "NVIDIA ConnectX-6 page: 200 Gb/s a port"),
    Link("Ethernet, 10 Gb/s", 1.25, "IEEE 802.3ae"),
)


@dataclass(frozen=True)
class ScalingPrediction:
    """Ring attention of one call on several devices.

    Attributes:
        total_ms: until the last rank is done.
        exposed_ms: the part in which a rank only waits for messages.
        sent_bytes: by the rank that sends most.
        efficiency: the speed of all ranks, over that of as many independent ones.
    """

    total_ms: float
    exposed_ms: float
    sent_bytes: float
    efficiency: float


def predict_ring(
    world: int,
    seqlen_per_rank: int,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    dtype: str = "bfloat16",
    causal: bool = True,
    layout: Layout = "zigzag",
    direction: Direction = "forward",
    single_ms: float,
    gb_s: float = LINKS[0].gb_s,
    memory_gb_s: float | None = None,
) -> ScalingPrediction:
    """Predict a ring's time from one device's, batch 1.

    Args:
        world, seqlen_per_rank, heads, kv_heads, head_dim, dtype, causal, layout: the call.
        direction: "forward+backward" is one after the other.
        single_ms: the kernel's time on one device for `seqlen_per_rank` tokens, same direction.
        gb_s: of a link, each way.
        memory_gb_s: of a device; adding a step's result to the result so far reads and writes it in
            float32 and reads the new part. None: that is free.

    Raises:
        ValueError: sizes that do not fit; no such layout, dtype or direction.

    >>> one = predict_ring(8, 32768, heads=32, kv_heads=8, head_dim=128, single_ms=23.0)
    >>> round(one.efficiency, 2)
    1.0
    """
    kv_heads = kv_heads or heads
    if world < 1 or seqlen_per_rank < 1 or heads % kv_heads:
        raise ValueError(
            f"no ring: {world} ranks, {seqlen_per_rank} tokens, {heads}/{kv_heads} heads"
        )
    for what, name, known in (("dtype", dtype, ELEMENT), ("direction", direction, PRODUCTS)):
        if name not in known:
            raise ValueError(f"no {what} {name!r}; there are: {', '.join(known)}")
    plan = Plan.of(world, seqlen_per_rank, causal=causal, layout=layout)
    one = Plan.of(1, seqlen_per_rank, causal=causal).pairs(0)[0]
    narrow, wide = head_dim * ELEMENT[dtype], head_dim * 4  # bytes of a token's head
    add_ms = 0.0 if memory_gb_s is None else (narrow + 2 * wide) / memory_gb_s / 1e6
    whole, sent = slice(0, seqlen_per_rank), 0
    total = free = 0.0
    for name in direction.split("+"):
        backward = name == "backward"
        pair_ms = single_ms * PRODUCTS[name] / PRODUCTS[direction] / one
        row_ms, col_ms = add_ms * heads, add_ms * 2 * kv_heads * backward
        work = [
            [
                sum(
                    pair.pairs * pair_ms
                    + (pair.rows.stop - pair.rows.start) * row_ms
                    + (pair.cols.stop - pair.cols.start) * col_ms
                    for pair in plan.table[rank][plan.owner(rank, distance)]
                )
                for distance in plan.route
            ]
            for rank in range(world)
        ]
        size = 2 * kv_heads * narrow  # of a token's K and V, or dK and dV
        steps, by_rank = list[Messages](), Counter[int]()
        for messages in plan.messages[: len(plan.route) + backward]:
            steps.append(Messages())
            for what, sender, receiver, _ in messages:
                if what == "keys" or backward:
                    part = plan.shared(sender, receiver) if what == "gradients" else whole
                    steps[-1][sender, receiver] += size * (part.stop - part.start)
                    by_rank[sender] += size * (part.stop - part.start)
        total += _end(work, steps, gb_s)
        free += _end(work, steps, math.inf)
        sent += max(by_rank.values(), default=0)
    return ScalingPrediction(total, total - free, sent, world * single_ms / total)


def _end(work: list[list[float]], steps: list[Messages], gb_s: float) -> float:
    """Return the time of the last rank: `work` in ms by [rank][step], messages by step."""
    begin = [0.0] * len(work)
    for step, messages in enumerate(steps):
        ends = [
            at + sum(row[step : step + 1])  # in a backward's last step nothing is computed
            for at, row in zip(begin, work, strict=True)
        ]
        sent, received = Counter[int](), Counter[int]()
        for (sender, receiver), size in messages.items():
            sent[sender] += size
            received[receiver] += size
        for sender, receiver in messages:
            size = max(sent[sender], received[receiver])
            there = max(begin[sender], begin[receiver]) + size / gb_s / 1e6
            ends[sender], ends[receiver] = max(ends[sender], there), max(ends[receiver], there)
        begin = ends
    return max(begin)


def hides_from(
    tflops: float,
    gb_s: float,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    dtype: str = "bfloat16",
    direction: Literal["forward", "backward"] = "forward",
) -> float:
    """Return the fewest tokens of a rank whose step of compute is as long as its messages.

    The ring is zigzag: a step of n queries and n keys computes half of the pairs, which takes a
    n^2, its messages c n; theory chapter 11 derives both. Without a mask, half of that n.

    >>> round(hides_from(600, 25, heads=32, kv_heads=8, head_dim=128))
    12000
    """
    a = PRODUCTS[direction] * head_dim * heads / (tflops * 1e12)
    travels = ELEMENT[dtype] * (2 if direction == "backward" else 1)
    return 2 * (kv_heads or heads) * head_dim * travels / (gb_s * 1e9) / a
