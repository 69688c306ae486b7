"""DDP: every rank holds the whole model, and works on its own micro-batches.

One step of a rank with three micro-batches:

    forward 0, backward 0      no_sync(): gradients add up in .grad, nothing is sent
    forward 1, backward 1      no_sync()
    forward 2, backward 2      as soon as a bucket of gradients is complete, the last layers' first,
                               it is all-reduced while the backward pass goes on
    clip, AdamW                the same on every rank, so that the weights stay the same

What is sent: the gradients, once a step, in buckets (25 MiB by default; Li et al., PyTorch
Distributed, arXiv 2006.15704, section 3.2); in the first step in one bucket, since it is there that
DDP sees in which order gradients are done. By ring all-reduce each rank sends 2 (W-1)/W of their
bytes: `costs.ddp_bytes_sent`. Without no_sync() it would be that for each micro-batch, for the same
result.

What is held: everything, on each rank. With float32 and AdamW 16 bytes a parameter: 4 for the
weight, 4 for the gradient (the buckets are the gradients: `gradient_as_bucket_view`), 8 for AdamW.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

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


@dataclass
class AllReduces:
    """A counter of all-reduces over a group (None: all ranks) and of the bytes of their buckets."""

    group: dist.ProcessGroup | None = None
    calls: int = 0
    nbytes: int = 0


def counted_all_reduce(counter: AllReduces, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's communication hook: what it would do anyway (divide by W, all-reduce), counted.

    DDP reads these annotations, and takes no strings for them: this file must not import
    `annotations` from `__future__`.
    """
    counter.calls += 1
    counter.nbytes += bucket.buffer().nbytes
    group = counter.group or dist.group.WORLD
    return allreduce_hook(group, bucket)  # pyrefly: ignore[bad-argument-type]


def wrap(
    model: nn.Module, *, bucket_mib: float = 25.0, group: dist.ProcessGroup | None = None
) -> tuple[DistributedDataParallel, AllReduces]:
    """A model on its rank's device in DDP over a group (None: all ranks), and the counter."""
    wrapped = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
    )
    counter = AllReduces(group)
    wrapped.register_comm_hook(counter, counted_all_reduce)
    return wrapped, counter


def train_with_ddp(
    model: nn.Module,
    batches: Batches,
    settings: TrainSettings,
    *,
    sync_every: bool = False,
    bucket_mib: float = 25.0,
    folder: Path | str | None = None,
    fresh: bool = False,
    course: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    progress: bool = True,
) -> ParallelRun:
    """Train with AdamW on the process group that `setup_ddp` made; every rank calls this.

    Args:
        model: the same on each rank but for its weights, which become rank 0's. In float32 (or
            float64); it is moved to this rank's device, and `model(**batch)` returns the mean loss
            over the labels that are not -100.
        batches: step -> THIS rank's micro-batches, at most `settings.accumulation`, for each rank
            and step as many as it likes, none too. `share_of` deals out one stream.
        settings: as for `labsupport.training.train`, without policy and float16.
        sync_every: all-reduce after each micro-batch, as without no_sync(): to see what that costs.
        bucket_mib: the size of a bucket of gradients.
        folder: for distributed checkpoints, the same for all ranks. If a run is in it, that run
            goes on, whatever number of ranks it had.
        fresh, course, on_step: as for `labsupport.training.train`; on_step on each rank.
        progress: show a bar, on rank 0.

    Returns:
        The run. Losses are means over the labels of all ranks; `all_reduces` counts.

    Raises:
        RuntimeError: no process group.
        TrainingDivergedError, ResumeError, CheckpointError, TypeError: as
            `labsupport.training.train`.
        ValueError: settings with a policy or float16; too many micro-batches; no labels at all.

    >>> place = setup_ddp()
    >>> run = train_with_ddp(model, share_of(stream, place), TrainSettings(steps=100))
    """
    place = Place.current()
    check_weights(model, None)
    check_settings(settings)
    model.to(place.device)
    wrapped, counter = wrap(model, bucket_mib=bucket_mib)
    optimizer = make_optimizer(model, settings)

    def communicating(last: bool) -> AbstractContextManager[Any]:
        # DDP learns it in the forward pass already.
        return nullcontext() if sync_every or last else wrapped.no_sync()

    def add_gradients(share: Share) -> Tensor:
        # They are views of DDP's buckets: without them, no_sync() would have to hold others.
        optimizer.zero_grad(set_to_none=False)
        return add_micro_batches(wrapped, share, place, settings, communicating)

    run = ParallelRun()

    def noted(row: StepRow) -> None:
        run.all_reduces.append(counter.calls)
        run.all_reduced_bytes.append(counter.nbytes)
        counter.calls = counter.nbytes = 0
        if on_step is not None:
            on_step(row)

    return run_steps(
        run,
        model,
        optimizer,
        batches,
        settings,
        place,
        add_gradients=add_gradients,
        # A rank that syncs at each micro-batch needs as many of them as the others.
        same_number=sync_every,
        folder=folder,
        fresh=fresh,
        course=course,
        on_step=noted,
        progress=progress,
    )
