"""DDP: every rank stores the whole model, and works on its own micro-batches.

All micro-batches of a step but the last run under no_sync(). In the last backward each bucket of
gradients is all-reduced when it is complete (Li et al., PyTorch Distributed, arXiv 2006.15704,
section 3.2; theory chapter 11). The first step has one bucket only, since there DDP sees in which
order gradients are done.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labsupport.distributed.data_parallel.costs import StateBytes, state_bytes
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.training.config import TrainConfig
from labsupport.training.history import History, StepRow
from labsupport.training.train import Batches, Trainer, check_weights


@dataclass
class ParallelRun:
    """A finished run.

    Attributes:
        history: a row for each step, from the run's beginning. loss, grad_norm and tokens are those
            of all ranks together; seconds and peak_bytes this rank's (before a resumption, rank
            0's).
        memory: stored by this rank after the last step, gradients included.
        all_reduces: of each of this call's steps, DDP only: buckets that were all-reduced, and
            their bytes (of which each rank sends 2 (W-1)/W).
    """

    history: History
    memory: StateBytes
    all_reduces: list[tuple[int, int]] = field(default_factory=list)


def share_of(batches: Batches, info: RankInfo) -> Batches:
    """Return this rank's part of a stream: micro-batches `rank`, `rank + world`, ... of each step.

    All ranks together then take the same steps as one process with the whole stream, for any
    number of ranks: a `torch.utils.data.DistributedSampler` for streams.

    >>> stream = batches(documents, 512, end_token=256, accumulation=8)
    >>> own = share_of(stream, info)  # of 2 ranks, 4 micro-batches each
    """
    return lambda step: list(batches(step))[info.rank :: info.world]


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
    folder: Any = None,
    run_config: Any = None,
    sync_every: bool = False,
    on_step: Callable[[StepRow], None] | None = None,
    **options: Any,
) -> ParallelRun:
    """Train with AdamW on the process group that `setup_ddp` made; every rank calls this.

    Args:
        model: the same on each rank but for its weights, which become rank 0's. In float32 (or
            float64); it is moved to this rank's device, and `model(**batch)` returns the mean loss
            over the labels that are not -100.
        batches: step -> THIS rank's micro-batches, none to `settings.gradient_accumulation_steps`.
            `share_of` deals out one stream.
        settings: as for `labsupport.training.train`. With a policy the masters' gradients are
            averaged, in float32, after the backward passes, and not by DDP.
        folder, run_config: as for `labsupport.training.train.Trainer`. Any number of ranks may go
            on with a run.
        sync_every: all-reduce after each micro-batch, as without no_sync(): to see what that costs.
        on_step, options: as for `Trainer.run`, validation among them: this rank's micro-batches.

    Returns:
        The run. Losses are means over the labels of all ranks; `all_reduces` counts.

    Raises:
        RuntimeError: no process group. Others as `Trainer` and `Trainer.run`.

    >>> from labsupport.training import Decoder, DecoderConfig, TrainConfig, batches
    >>> from labsupport.distributed.data_parallel import share_of
    >>> info, model = setup_ddp(), Decoder(DecoderConfig.preset("tiny"))
    >>> stream = share_of(batches([list(range(200))], 64, end_token=256), info)
    >>> run = train_with_ddp(model, stream, TrainConfig(steps=2), progress=False)
    >>> len(run.history)
    2
    >>> cleanup_ddp()
    """
    info, counter = RankInfo.current(), AllReduces()
    check_weights(model, settings.policy)
    called: nn.Module = model.to(info.device)
    if settings.policy is None:
        called, counter = wrap(model)
    trainer = Trainer(
        called, settings, folder=folder, run_config=run_config, group=dist.group.WORLD,
        device=info.device, sync_every=sync_every,
    )  # fmt: skip
    counts: list[tuple[int, int]] = []

    def count(row: StepRow) -> None:
        counts.append((counter.calls, counter.nbytes))
        counter.calls = counter.nbytes = 0
        if on_step is not None:
            on_step(row)

    history = trainer.run(batches, on_step=count, **options)
    return ParallelRun(history, state_bytes(model, trainer.optimizer.optimizer), counts)


def benchmark_ddp(
    model: nn.Module, dataloader: Iterable[Any], epochs: int = 3
) -> list[dict[str, float]]:
    """Time epochs of a model in DDP, forward and backward; weights stay, gradients are dropped.

    Args:
        model: on each rank; `model(*batch)`, for a mapping `model(**batch)`, returns the loss or
            something with a `loss`. Its weights become rank 0's, on this rank's device.
        dataloader: this rank's batches, sequences or mappings of tensors; as many as on the other
            ranks, and all loaded before.
        epochs: the first one is the warm-up, too.

    Returns:
        for each epoch its number, the seconds of the slowest rank, steps/s, the samples/s of all
        ranks, and the bytes of this rank's all-reduces.

    Raises:
        RuntimeError: no process group.
        ValueError: no epochs, or no batches; on all ranks if their numbers of batches differ.

    >>> from labsupport.training import Decoder, DecoderConfig
    >>> info, model = setup_ddp(), Decoder(DecoderConfig.preset("tiny"))
    >>> tokens = torch.zeros(2, 16, dtype=torch.long)
    >>> [row["epoch"] for row in benchmark_ddp(model, [(tokens, tokens)], epochs=2)]
    [1, 2]
    >>> cleanup_ddp()
    """
    info, own = RankInfo.current(), list(dataloader)
    counts = all_gather_object(len(own))
    if epochs < 1 or 0 in counts or len(set(counts)) > 1:
        raise ValueError(
            f"DDP needs at least 1 epoch, and as many batches on each rank, but {epochs} and "
            f"{', '.join(map(str, counts))} were given"
        )
    mapped = isinstance(own[0], Mapping)
    wrapped, counter = wrap(model.to(info.device))
    rows: list[dict[str, float]] = []
    for epoch in range(1, epochs + 1):
        counter.nbytes, samples = 0, 0
        info.barrier()
        start = time.perf_counter()
        for batch in own:
            named = {name: x.to(info.device) for name, x in batch.items()} if mapped else {}
            given = [] if mapped else [x.to(info.device) for x in batch]
            samples += len((given or [*named.values()])[0])
            result = wrapped(*given, **named)
            (result if isinstance(result, Tensor) else result.loss).backward()
            wrapped.zero_grad()
        info.barrier()
        seconds = max(all_gather_object(time.perf_counter() - start))
        rows.append(
            {
                "epoch": epoch,
                "seconds": seconds,
                "steps_per_s": len(own) / seconds,
                "samples_per_s": sum(all_gather_object(samples)) / seconds,
                "all_reduce_bytes": counter.nbytes,
            }
        )
    return rows
