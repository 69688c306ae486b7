"""DDP: every rank stores the whole model, and works on its own micro-batches.

All micro-batches of a step but the last run under no_sync(). In the last backward each bucket of
gradients is all-reduced when it is complete (Li et al., PyTorch Distributed, arXiv 2006.15704,
section 3.2; theory chapter 11). The first step has one bucket only, since there DDP sees in which
order gradients are done.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labsupport.distributed.data_parallel.run import (
    Batches,
    ParallelRun,
    Share,
    add_micro_batches,
    check_settings,
    make_optimizer,
    run_steps,
)
from labsupport.distributed.process_group import RankInfo
from labsupport.training.train import TrainConfig


@dataclass
class AllReduces:
    """A counter of all-reduces over a group (None: all ranks) and of the bytes of their buckets."""

    group: dist.ProcessGroup | None = None
    calls: int = 0
    nbytes: int = 0


def counted_all_reduce(counter: AllReduces, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's communication hook: its default (divide by W, all-reduce), counted.

    DDP reads these annotations, and takes no strings for them: this file must not import
    `annotations` from `__future__`.
    """
    counter.calls += 1
    counter.nbytes += bucket.buffer().nbytes
    group = counter.group or dist.group.WORLD
    return allreduce_hook(group, bucket)  # pyrefly: ignore[bad-argument-type]


def wrap(
    model: nn.Module, group: dist.ProcessGroup | None = None, bucket_cap_mb: float = 25
) -> tuple[DistributedDataParallel, AllReduces]:
    """Return a model in DDP over a group (None: all ranks), and its counter of all-reduces."""
    options: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": True}
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    counter = AllReduces(group)
    wrapped.register_comm_hook(counter, counted_all_reduce)
    return wrapped, counter


def train_with_ddp(
    model: nn.Module,
    batches: Batches,
    settings: TrainConfig,
    *,
    sync_every: bool = False,
    **options: Any,
) -> ParallelRun:
    """Train with AdamW on the process group that `setup_ddp` made; every rank calls this.

    Args:
        model: the same on each rank but for its weights, which become rank 0's. In float32 (or
            float64); it is moved to this rank's device, and `model(**batch)` returns the mean loss
            over the labels that are not -100.
        batches: step -> THIS rank's micro-batches, none to `settings.gradient_accumulation_steps`.
            `share_of` deals out one stream.
        settings: as for `labsupport.training.train`, without policy and float16.
        sync_every: all-reduce after each micro-batch, as without no_sync(): to see what that costs.
        options: folder, fresh, run_config, on_step, stop and progress, as for `run_steps`.

    Returns:
        The run. Losses are means over the labels of all ranks; `all_reduces` counts.

    Raises:
        RuntimeError: no process group.
        ValueError: settings with a policy or float16. Others as `run_steps`.

    >>> from labsupport.training import Decoder, DecoderConfig, TrainConfig, batches
    >>> from labsupport.distributed.data_parallel import share_of
    >>> info, model = setup_ddp(), Decoder(DecoderConfig.preset("tiny"))
    >>> stream = share_of(batches([list(range(200))], 64, end_token=256), info)
    >>> run = train_with_ddp(model, stream, TrainConfig(steps=2), progress=False)
    >>> len(run.history)
    2
    >>> cleanup_ddp()
    """
    info = RankInfo.current()
    check_settings(model, settings)
    model.to(info.device)
    wrapped, counter = wrap(model)
    optimizer = make_optimizer(model, settings)
    counts: list[tuple[int, int]] = []

    def communicating(last: bool) -> AbstractContextManager[Any] | None:
        return None if sync_every or last else wrapped.no_sync()

    def add_gradients(share: Share) -> Tensor:
        # They are views of DDP's buckets: without them, no_sync() would have to hold others.
        optimizer.zero_grad(set_to_none=False)
        counter.calls = counter.nbytes = 0
        loss = add_micro_batches(wrapped, share, info, settings, communicating)
        counts.append((counter.calls, counter.nbytes))
        return loss

    # A rank that communicates at each micro-batch needs as many of them as the others.
    run = run_steps(
        model, optimizer, batches, settings, add_gradients, same_number=sync_every, **options
    )
    run.all_reduces = counts
    return run
