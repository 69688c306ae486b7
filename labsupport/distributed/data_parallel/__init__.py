"""The same model on every rank, other data on each: DDP, and FSDP, which also shares out the model.

ddp    every rank stores everything; gradients are averaged once a step
fsdp   every rank stores a part of everything; parameters come when a block needs them
costs  bytes sent per step, bytes stored by a rank

The steps are those of `labsupport.training.train.Trainer`.
"""

from labsupport.distributed.data_parallel.ddp import (
    ParallelRun,
    benchmark_ddp,
    share_of,
    train_with_ddp,
)
from labsupport.distributed.data_parallel.fsdp import shard, train_with_fsdp
from labsupport.distributed.process_group import RankInfo, cleanup_ddp, setup_ddp
