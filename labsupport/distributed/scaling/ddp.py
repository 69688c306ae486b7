"""DDP's time, predicted.

Gradients become ready at an even rate during the backward, in buckets; each is all-reduced when it
is ready and the one before is done (Li et al., PyTorch Distributed, arXiv 2006.15704, section 3.2).
What is not done when the backward ends is exposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from labsupport.distributed.data_parallel.costs import ddp_bytes_sent
from labsupport.distributed.scaling.links import LINKS


@dataclass(frozen=True)
class DdpPrediction:
    """A step under DDP, in ms: all-reduces together, those after the backward's end; efficiency."""

    step_ms: float
    communication_ms: float
    exposed_ms: float
    efficiency: float


def predict_ddp(
    parameters: int,
    world: int,
    *,
    step_ms: float,
    backward_ms: float | None = None,
    gb_s: float = LINKS[0].gb_s,
    latency_us: float = 0.0,
    bucket_mib: float = 25.0,
    gradient_bytes: int = 4,
) -> DdpPrediction:
    """Predict a DDP step with one micro-batch from one device's step.

    Args:
        parameters, gradient_bytes: what is all-reduced.
        step_ms, backward_ms: of one device alone; a backward takes two thirds of a step unless said
            (twice the forward's FLOPs; the optimizer's time is neglected).
        gb_s, latency_us: of a link, each way; a ring all-reduce has 2 (world - 1) messages.
        bucket_mib: as DDP's bucket_cap_mb.

    >>> predict_ddp(355_000_000, 8, step_ms=30, gb_s=450).exposed_ms < 0.2
    True
    """
    backward = 2 / 3 * step_ms if backward_ms is None else backward_ms
    nbytes = gradient_bytes * parameters
    buckets = max(1, math.ceil(nbytes / (bucket_mib * 2**20)))
    one = ddp_bytes_sent(nbytes, world) / buckets / gb_s / 1e6
    one += 2 * (world - 1) * latency_us / 1e3
    done = 0.0
    for bucket in range(buckets):
        done = max(done, backward * (bucket + 1) / buckets) + one
    exposed = done - backward
    return DdpPrediction(step_ms + exposed, buckets * one, exposed, step_ms / (step_ms + exposed))
