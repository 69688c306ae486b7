"""FSDP: every rank holds a W-th part of each tensor, and gets the rest when it needs it.

One step, with W ranks, for each block:

    before its forward     all-gather its parameters; compute; free the others' parts
    before its backward    all-gather them again; compute the gradients
    after its backward     reduce-scatter: each rank gets the average of its part of the gradients
    at the end             clip, AdamW on the rank's own part of everything

Nobody holds the whole model. Layers are NOT dealt out to ranks (that is pipeline parallelism):
every rank computes every layer, on its own data.

    block's parameters, on rank 0   [0 0 0 . . . . . .]     its third of each tensor's rows
    during the block                [0 0 0 1 1 1 2 2 2]     all, for a moment

What is held: (parameters + gradients + AdamW) / W, and one or two whole blocks at a time.
What is sent: the parameters twice and the gradients once, 1.5 times DDP's bytes (`costs`;
Rajbhandari et al., ZeRO, arXiv 1910.02054, section 7). The next block's parameters travel while
this one computes. The root (embedding, last norm, classifier) is kept from forward to backward,
since the backward pass begins with it: it is gathered once.

Accumulation. FSDP2 has no no_sync(); `set_requires_gradient_sync(False)` puts off the
reduce-scatter. But the gradients that wait for it are whole, not sharded, on every rank: it trades
memory for traffic. And each micro-batch gathers the parameters anew, however that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.data_parallel.run import (
    ParallelRun,
    add_micro_batches,
    check_settings,
    make_optimizer,
    run_steps,
)
from labsupport.distributed.data_parallel.shares import Batches, Share
from labsupport.training.history import StepRow
from labsupport.training.train import TrainSettings, check_weights


def shard(
    model: nn.Module,
    *,
    blocks: Iterable[nn.Module] | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
    mesh: DeviceMesh | None = None,
) -> FSDPModule:
    """Shard a model in place over the process group: each block by itself, then what is left.

    Args:
        model: whole, and the same on all ranks (seed before you build it). Its parameters become
            `DTensor`s: the whole shape, of which each rank holds its rows.
        blocks: what is gathered and freed as one; None: the members of the model's `ModuleList`s.
        mixed_precision: in which dtype parameters travel and compute, and gradients travel. The
            shards, and AdamW's states, keep theirs.
        cpu_offload: keep shards, gradients and AdamW's states in the CPU's memory, and compute the
            update there. On a GPU it saves memory and costs time; without one it changes nothing.
        reshard_after_forward: False keeps whole blocks from forward to backward: less traffic
            (DDP's), more memory. (ZeRO calls that stage 2.)
        mesh: the ranks to share it, in one dimension; None: all of them.

    Raises:
        RuntimeError: no process group.
        ValueError: no blocks are found; it is sharded already; the ranks' weights differ.
    """
    place = Place.current()
    if isinstance(model, FSDPModule):
        raise ValueError("the model is sharded already")
    if blocks is None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = [block for members in lists for block in members]
    blocks = list(blocks)
    if not blocks:
        raise ValueError(
            "the model has no nn.ModuleList, so that it would be gathered as a whole: say which "
            "modules are its blocks, shard(model, blocks=model.layers)"
        )
    mesh = mesh or init_device_mesh(place.device.type, (place.world,))
    _check_same_weights(model, place.device, mesh)
    offload = OffloadPolicy()
    if cpu_offload:
        # Pinned memory is what a GPU can copy from while it computes; without one there is none.
        offload = CPUOffloadPolicy(pin_memory=place.device.type != "cpu")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision or MixedPrecisionPolicy(),
        "offload_policy": offload,
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(model, **options)


def _check_same_weights(model: nn.Module, device: torch.device, mesh: DeviceMesh) -> None:
    """Raise ValueError, on all ranks, if one has other weights than rank 0.

    DDP copies rank 0's to the others. FSDP sends nothing: each rank keeps its rows of what it has,
    and of models from different seeds one would be patched together that nobody had built.
    """
    sums = torch.zeros(mesh.size(), dtype=torch.float64, device=device)
    for parameter in model.parameters():
        own = parameter.detach().abs().sum(dtype=torch.float64)
        sums[mesh.get_local_rank()] += own.to(device)
    dist.all_reduce(sums, group=mesh.get_group())  # each entry is 0 on all ranks but one
    if not bool(torch.isclose(sums, sums[0], rtol=1e-9, equal_nan=True).all()):
        raise ValueError(
            "the ranks' weights differ: call torch.manual_seed with the same number on each before "
            "the model is built, or load the same file"
        )


def train_with_fsdp(
    model: nn.Module,
    batches: Batches,
    settings: TrainSettings,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    sync_every: bool = False,
    folder: Path | str | None = None,
    fresh: bool = False,
    course: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    progress: bool = True,
) -> ParallelRun:
    """Train with AdamW on the process group that `setup_ddp` made; every rank calls this.

    Args:
        model: the same on each rank, weights too, in float32 (or float64); sharded in place. One
            that went through `shard` already is taken as it is.
        batches: step -> THIS rank's micro-batches, as for `train_with_ddp`. A rank with fewer than
            the others computes empty ones.
        settings: as for `labsupport.training.train`, without policy and float16. autocast may be
            used in place of `mixed_precision`; parameters then travel in float32.
        mixed_precision, cpu_offload: as for `shard`. bfloat16 with gradients added up in float32:
            `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`.
        sync_every: reduce-scatter after each micro-batch: gradients stay sharded, more is sent.
        folder, fresh, course, on_step, progress: as for `train_with_ddp`. A run under DDP and one
            under FSDP can go on from each other's checkpoints.

    Returns:
        The run; `memory` is what this rank holds.

    Raises: as `train_with_ddp` and `shard`.
    """
    place = Place.current()
    check_weights(model, None)
    check_settings(settings)
    if isinstance(model, FSDPModule):
        sharded = model
        if mixed_precision is not None or cpu_offload:
            raise ValueError("the model is sharded already: give these options to shard(...)")
    else:
        sharded = shard(model, mixed_precision=mixed_precision, cpu_offload=cpu_offload)

    optimizer = make_optimizer(model, settings)
    course = dict(course or {})
    if mixed_precision is not None:
        dtypes = mixed_precision.param_dtype, mixed_precision.reduce_dtype
        course["mixed_precision"] = [str(dtype) for dtype in dtypes]

    def communicating(last: bool) -> AbstractContextManager[Any]:
        sharded.set_requires_gradient_sync(sync_every or last)
        return nullcontext()

    def add_gradients(share: Share) -> Tensor:
        optimizer.zero_grad()
        return add_micro_batches(model, share, place, settings, communicating)

    return run_steps(
        ParallelRun(),
        model,
        optimizer,
        batches,
        settings,
        place,
        add_gradients=add_gradients,
        same_number=True,
        folder=folder,
        fresh=fresh,
        course=course,
        on_step=on_step,
        progress=progress,
    )
