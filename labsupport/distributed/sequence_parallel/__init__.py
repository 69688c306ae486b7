"""A sequence that no single device holds: its tokens are sharded over the ranks, in every layer.

sharding    a rank's tokens, their labels and their positions, cut from whole sequences
model       shard_model: a Decoder's attention around the ring, and this rank's part of its loss
run         train_with_ring: the training loop

Attention needs the other ranks: K and V go around the ring, dK and dV come home. All else computes
each token by itself, so activations are 1/W of the sequence's; weights and states are whole.
Source: Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective"
(arXiv 2105.13120), section 3; with a ring of FlashAttention's blocks, arXiv 2310.01889.
"""

from labsupport.distributed.sequence_parallel.model import SequenceParallel, shard_model
from labsupport.distributed.sequence_parallel.run import train_with_ring
from labsupport.distributed.sequence_parallel.sharding import Shard, shard_batch

__all__ = ["SequenceParallel", "Shard", "shard_batch", "shard_model", "train_with_ring"]
