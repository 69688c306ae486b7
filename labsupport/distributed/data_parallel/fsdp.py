"""FSDP: every rank stores a W-th part of each tensor, and gathers the rest when needed.

The root (embedding, last norm, classifier) is kept from forward to backward, since the backward
pass begins with it; each block is gathered for both. `set_requires_gradient_sync(False)`, FSDP2's
no_sync(), puts off the reduce-scatter. `costs` has the bytes, theory chapter 11 the schedule.

Ranks may have sequences of different lengths; with `dynamic=False` each length is compiled, until
`recompile_limit` (8) makes a block run uncompiled.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from labsupport.distributed.data_parallel.costs import state_bytes
from labsupport.distributed.data_parallel.ddp import ParallelRun
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.training.config import TrainConfig
from labsupport.training.train import Batches, Trainer, check_weights


def shard(
    model: nn.Module,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    mesh: DeviceMesh | None = None,
) -> FSDPModule:
    """Shard a model in place over the process group: each block separately, then what is left.

    Blocks, which are gathered and freed as one, are the members of the model's `ModuleList`s.

    Args:
        model: whole, and the same on all ranks (seed before you build it). Its parameters become
            `DTensor`s: the whole shape, of which each rank holds its rows.
        mixed_precision: in which dtype parameters travel and compute, and gradients travel. The
            shards, and AdamW's states, keep theirs.
        cpu_offload: keep shards, gradients and AdamW's states in the CPU's memory, and compute the
            update there. On a GPU it saves memory and costs time; without one it changes nothing.
        mesh: the ranks to share it, in one dimension; None: all of them.

    Raises:
        RuntimeError: no process group.
        ValueError: it has no blocks, or is sharded already; the ranks' weights differ.
    """
    info = RankInfo.current()
    if isinstance(model, FSDPModule):
        raise ValueError("the model is sharded already")
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError("the model has no nn.ModuleList, whose members would be its blocks")
    mesh = mesh or init_device_mesh(info.device.type, (info.world,))
    _check_same_weights(model, mesh)
    # Pinned memory is what a GPU can copy from while it computes; without one there is none.
    offload = CPUOffloadPolicy(pin_memory=info.device.type != "cpu")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision or MixedPrecisionPolicy(),
        "offload_policy": offload if cpu_offload else OffloadPolicy(),
    }
    for members in lists:
        for block in members:
            fully_shard(block, **options)
    return fully_shard(model, **options)


def _check_same_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError, on all ranks, if one has other weights than rank 0.

    DDP copies rank 0's to the others. FSDP sends nothing: each rank keeps its rows of what it has,
    and of models from different seeds one would be patched together that nobody had built.
    """
    own = sum(float(p.detach().abs().sum(dtype=torch.float64)) for p in model.parameters())
    sums = all_gather_object(own, mesh.get_group())
    if not all(math.isclose(each, sums[0]) for each in sums):
        raise ValueError(
            "the ranks' weights differ: call torch.manual_seed with the same number on each before "
            "the model is built, or load the same file"
        )


def train_with_fsdp(
    model: nn.Module,
    batches: Batches,
    settings: TrainConfig,
    *,
    folder: Any = None,
    run_config: Any = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    **options: Any,
) -> ParallelRun:
    """Train as `train_with_ddp` does, with the model sharded; every rank calls this.

    Args:
        model: the same on each rank, weights too, in float32 (or float64); sharded in place.
        batches: as for `train_with_ddp`. A rank with fewer than the others computes empty ones.
        settings: as for `train_with_ddp`, without a policy. With autocast in place of
            `mixed_precision` parameters travel in float32.
        folder, run_config: as for `train_with_ddp`: the two go on from each other's checkpoints.
        mixed_precision, cpu_offload: as for `shard`. bfloat16 with gradients added up in float32:
            `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`.
        options: as for `Trainer.run`.

    Raises: as `train_with_ddp` and `shard`.

    >>> from labsupport.training import Decoder, DecoderConfig, TrainConfig, batches
    >>> from labsupport.distributed.data_parallel import share_of
    >>> info, model = setup_ddp(), Decoder(DecoderConfig.preset("tiny"))
    >>> stream = share_of(batches([list(range(200))], 64, end_token=256), info)
    >>> run = train_with_fsdp(model, stream, TrainConfig(steps=2), cpu_offload=True, progress=False)
    >>> len(run.history)
    2
    >>> cleanup_ddp()
    """
    info = RankInfo.current()
    check_weights(model, None)
    if mixed_precision is not None:
        dtypes = mixed_precision.param_dtype, mixed_precision.reduce_dtype
        run_config = {**(run_config or {}), "mixed_precision": [str(dtype) for dtype in dtypes]}
    shard(model, mixed_precision=mixed_precision, cpu_offload=cpu_offload)
    trainer = Trainer(
        model, settings, folder=folder, run_config=run_config, group=dist.group.WORLD,
        device=info.device,
    )  # fmt: skip
    history = trainer.run(batches, **options)
    return ParallelRun(history, state_bytes(model, trainer.optimizer.optimizer))
