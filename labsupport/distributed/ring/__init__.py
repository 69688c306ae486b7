"""Ring attention: a sequence that no single device holds, over any process group.

functions  the public functions, in flash-attn's layout and with its options
agreement  whether all ranks do the same; if one refuses, all raise
algorithm  the ring, forward and backward, as one algorithm with the kernel as a parameter
plan       which rank's keys travel how far, and who must see them
blocks     which pairs of one block are visible, in terms that every kernel understands
merging    how the results of steps come together; merge_kernel, the same as Triton kernels
kernel     what a ring asks of a kernel that computes a block
kernels    the table of them; kernels_lab, kernels_torch, kernels_fa4: how each is called
transport  messages between neighbours, posted before the compute and awaited after it
zigzag     how a sequence is sharded and put together again; balanced causal work
"""

from labsupport.distributed.ring.functions import (
    RingReport,
    available_ring_kernels,
    last_ring_call,
    ring_flash_attn_func,
    triton_ring_flash_attn_func,
    zigzag_ring_flash_attn_func,
)
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.zigzag import (
    gather_sequence,
    positions_of,
    shard_sequence,
    unshard_sequence,
)

__all__ = [
    "Plan",
    "RingReport",
    "available_ring_kernels",
    "gather_sequence",
    "last_ring_call",
    "positions_of",
    "ring_flash_attn_func",
    "shard_sequence",
    "triton_ring_flash_attn_func",
    "unshard_sequence",
    "zigzag_ring_flash_attn_func",
]
