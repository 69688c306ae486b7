"""How well several devices can do, predicted: ring attention and DDP, from compute and links.

links    what connects devices, and who says so
ring     ring attention: the plan's pairs and messages, step by step; from where hops hide
ddp      gradients in buckets, all-reduced while the backward goes on
check    predictions beside a recorded run

Nothing here is measured. A prediction takes what one device needs alone and what a link carries,
and follows the schedule. What it leaves out (starting kernels, links that share a switch, clocks
that fall when all devices work) makes the real run slower. So it is a bound on efficiency, and the
distance to it is what could be won.
"""

from labsupport.distributed.scaling.check import check_against
from labsupport.distributed.scaling.ddp import DdpPrediction, predict_ddp
from labsupport.distributed.scaling.links import LINKS, Link
from labsupport.distributed.scaling.ring import (
    RingPrediction,
    hides_from,
    imbalance,
    predict_ring,
)

__all__ = [
    "LINKS",
    "DdpPrediction",
    "Link",
    "RingPrediction",
    "check_against",
    "hides_from",
    "imbalance",
    "predict_ddp",
    "predict_ring",
]
