"""The same model on every rank, other data on each: DDP, and FSDP, which also shares out the model.

process_group  who am I: rank, number of ranks, device
shares         what each rank works on, and how much its loss counts; uneven inputs
ddp            every rank holds everything; gradients are averaged once a step
fsdp           every rank holds a part of everything; parameters come when a block needs them
run            what the two have in common: the steps, clipping, the optimizer, the history
saving         distributed checkpoints, which another number of ranks can read
costs          bytes sent a step, bytes held by a rank

                    DDP                                  FSDP
held by a rank      parameters, gradients, states        1/W of each (W ranks)
sent by a rank      2 (W-1)/W of the gradients' bytes    about 3 (W-1)/W: half as much again
sent when           during the backward of the last      before each block's forward, before
                    micro-batch                          its backward, and after it
"""

from labsupport.distributed.data_parallel.ddp import train_with_ddp
from labsupport.distributed.data_parallel.fsdp import shard, train_with_fsdp
from labsupport.distributed.data_parallel.process_group import Place, cleanup_ddp, setup_ddp
from labsupport.distributed.data_parallel.run import ParallelRun
from labsupport.distributed.data_parallel.shares import share_of

__all__ = [
    "ParallelRun",
    "Place",
    "cleanup_ddp",
    "setup_ddp",
    "shard",
    "share_of",
    "train_with_ddp",
    "train_with_fsdp",
]
