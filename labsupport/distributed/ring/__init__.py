"""Ring attention: a sequence that no single device holds, over any process group.

attention  ring_attention, in flash-attn's layout and with its options
drop_in    ring-flash-attention's functions
algorithm  the ring, forward and backward, as one algorithm with the kernel as a parameter
plan       how far each rank's keys travel, and what each rank computes with them
kernels    the kernels that compute a block pair
merging    how the results of steps come together; merge_kernel: the same as a Triton kernel
transport  messages that travel during the compute: by copy engines, or by send and receive
zigzag     how a sequence is sharded and put together again; balanced causal work
"""

from labsupport.distributed.ring.attention import (
    RingOptions,
    RingReport,
    last_ring_call,
    ring_attention,
)
from labsupport.distributed.ring.drop_in import (
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    triton_ring_flash_attn_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.zigzag import (
    gather_sequence,
    positions_of,
    shard_sequence,
    unshard_sequence,
)
