"""The same model on every rank, other data on each: DDP, and FSDP, which also shares out the model.

run          what the two have in common: each rank's share of a step, the steps, the history
ddp          every rank holds everything; gradients are averaged once a step
fsdp         every rank holds a part of everything; parameters come when a block needs them
checkpoints  distributed checkpoints, which another number of ranks can read
costs        bytes sent per step, bytes stored by a rank
"""

from labsupport.distributed.data_parallel.ddp import train_with_ddp
from labsupport.distributed.data_parallel.fsdp import shard, train_with_fsdp
from labsupport.distributed.data_parallel.run import ParallelRun, share_of
from labsupport.distributed.process_group import RankInfo, cleanup_ddp, setup_ddp
