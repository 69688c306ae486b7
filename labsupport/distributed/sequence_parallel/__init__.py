"""A sequence that no single device holds: its tokens are sharded over the ranks, in every layer.

sharding    a rank's tokens, their labels and their positions, cut from whole sequences
model       shard_model: the lab's Decoder, or Transformers' GPT-2 or Llama, and this rank's part of
            its loss
run         train_with_ring: the training loop

    rank 0    tokens 0 1 . . . . 6 7     embedding, norms, MLP, classifier, loss: each token by
    rank 1    tokens . . 2 3 4 5 . .     itself, so each rank computes those of its own tokens
                                         attention: the only part that needs the other ranks

                       data parallelism                  sequence parallelism
    a rank works on    other sequences                   a part of each sequence
    activations        of its sequences: the longest     1/W of the sequence's: W times as long
                       must fit on one device            a sequence fits
    sent in a layer    nothing                           K and V around the ring; dK and dV
    sent in a step     the gradients                     the gradients
    held               all weights and states            all weights and states

Source: Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective"
(arXiv 2105.13120), section 3; with FlashAttention's blocks in the ring it is Liu, Zaharia and
Abbeel, "Ring Attention" (arXiv 2310.01889).
"""

from labsupport.distributed.sequence_parallel.model import SequenceParallel, shard_model
from labsupport.distributed.sequence_parallel.run import train_with_ring
from labsupport.distributed.sequence_parallel.sharding import Shard, shard_batch

__all__ = ["SequenceParallel", "Shard", "shard_batch", "shard_model", "train_with_ring"]
