"""The training loop that DDP, FSDP and the sharded sequence share.

Step k depends on nothing but the weights, the optimizer's state and k; random numbers are seeded
in each step, from k and the rank. So a run may go on with another number of ranks.

WEIGHTS. The step's loss is the mean over ALL N labels of all ranks' micro-batches. DDP as FSDP
*average* gradients over the W ranks, so each micro-batch's loss is weighted by W n / N, with its n
labels (theory chapter 11, uneven ranks).

UNEVEN INPUTS. A collective needs every rank. So the ranks first tell one another what they have;
then a rank that has too few computes empty micro-batches of weight 0: DDP needs one per step, FSDP
as many as the busiest rank has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labsupport.distributed.data_parallel.checkpoints import DistributedCheckpoints
from labsupport.distributed.data_parallel.costs import StateBytes, state_bytes
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.training.history import History, StepRow, read_peak, reset_peak
from labsupport.training.train import (
    IGNORED,
    TrainConfig,
    TrainingDivergedError,
    check_weights,
    learning_rate,
    model_run_config,
    parameter_groups,
    progress_bar,
    tensors,
)

Batch = dict[str, Tensor]
Batches = Callable[[int], Iterable[Any]]


@dataclass
class ParallelRun:
    """A finished run.

    Attributes:
        history: a row for each step, from the run's beginning. loss, grad_norm and tokens are those
            of all ranks together; seconds and peak_bytes this rank's (before a resumption, rank
            0's).
        memory: held by this rank after the last step, gradients included.
        all_reduces: of each of this call's steps, DDP only: buckets that were all-reduced, and
            their bytes (of which each rank sends 2 (W-1)/W).
    """

    history: History = field(default_factory=History)
    memory: StateBytes = field(default_factory=lambda: StateBytes(0, 0, 0))
    all_reduces: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Share:
    """One rank's micro-batches of a step: (tensors on its device, weight n_ri / N).

    Those without labels are left out, empty ones of weight 0 filled in. labels, tokens: of all
    ranks, without empty micro-batches and a micro-batch's `fillers`.
    """

    micro_batches: list[tuple[Batch, float]]
    labels: int
    tokens: int


def share_of(batches: Batches, info: RankInfo) -> Batches:
    """Return this rank's part of a stream: micro-batches `rank`, `rank + world`, ... of each step.

    All ranks together then take the same steps as one process with the whole stream, for any
    number of ranks: a `torch.utils.data.DistributedSampler` for streams.

    >>> stream = batches(documents, 512, end_token=256, accumulation=8)
    >>> own = share_of(stream, info)  # of 2 ranks, 4 micro-batches each
    """
    return lambda step: list(batches(step))[info.rank :: info.world]


def deal(
    step: int, batches: Batches, info: RankInfo, *, accumulation: int, same_number: bool
) -> Share:
    """Draw this rank's micro-batches, and agree with the other ranks about the weights.

    Raises:
        ValueError, on all ranks: no rank has a label; a rank has more than `accumulation`
            micro-batches. TypeError, on the rank itself: what is no micro-batch.
    """
    own = [tensors(batch) for batch in batches(step)]
    labels = [int((batch["labels"] != IGNORED).sum()) for batch in own]
    tokens = sum(batch["tokens"].numel() - int(batch.get("fillers", 0)) for batch in own)
    by_rank = all_gather_object((len(own), sum(map(bool, labels)), sum(labels), tokens))
    numbers, with_labels, all_labels, all_tokens = zip(*by_rank, strict=True)
    if max(numbers) > accumulation:
        raise ValueError(
            f"batches({step}) gave the ranks {list(numbers)} micro-batches, but a rank may "
            f"have at most {accumulation} (accumulation in the settings)"
        )
    if not sum(all_labels):
        raise ValueError(f"batches({step}) has no label to learn from, on any rank")
    shares = [
        ({name: tensor.to(info.device) for name, tensor in batch.items()}, count / sum(all_labels))
        for batch, count in zip(own, labels, strict=True)
        if count
    ]
    # With a label, although it does not count: the mean over no labels may be NaN, and 0 · NaN too.
    one = torch.zeros(1, 1, dtype=torch.int64, device=info.device)
    missing = (max(with_labels) if same_number else 1) - len(shares)
    shares += [({"tokens": one, "labels": one}, 0.0)] * missing
    return Share(shares, sum(all_labels), sum(all_tokens))


def check_settings(model: nn.Module, settings: TrainConfig) -> None:
    """Raise ValueError for weights in 16 bits, and settings that only one device's loop knows."""
    check_weights(model, None)
    if settings.policy is not None:
        raise ValueError(
            "a precision policy keeps float32 masters beside the weights, which is for one device. "
            "Here: TrainConfig(autocast=torch.bfloat16), or FSDP's mixed_precision"
        )
    if settings.autocast is torch.float16:
        raise ValueError(
            "float16 needs loss scaling, which all ranks would have to agree on. Use "
            "autocast=torch.bfloat16, which needs none"
        )


def make_optimizer(model: nn.Module, settings: TrainConfig) -> torch.optim.AdamW:
    """AdamW over what the model has on this rank; biases and norms' gains do not decay."""
    return torch.optim.AdamW(
        parameter_groups(model.parameters()),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def add_micro_batches(
    model: nn.Module,
    share: Share,
    info: RankInfo,
    settings: TrainConfig,
    communicating: Callable[[bool], AbstractContextManager[Any] | None],
) -> Tensor:
    """Run a share's micro-batches forward and backward; return this rank's part of the loss.

    The gradients are those of `world * weight * loss`, because they are averaged over ranks.
    `communicating(last)` says whether those of a micro-batch travel; a context that it returns
    surrounds the forward pass as well.
    """
    loss, dtype = torch.zeros((), device=info.device), settings.autocast
    for i, (batch, weight) in enumerate(share.micro_batches):
        with communicating(i == len(share.micro_batches) - 1) or nullcontext():
            with torch.autocast(info.device.type, dtype=dtype, enabled=dtype is not None):
                part = model(**batch)
            part = part.to(torch.promote_types(part.dtype, torch.float32)) * weight
            (info.world * part).backward()
        loss = loss + part.detach()
    return loss


def run_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    settings: TrainConfig,
    add_gradients: Callable[[Share], Tensor],
    *,
    same_number: bool = False,
    folder: Path | str | None = None,
    fresh: bool = False,
    run_config: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    stop: Callable[[], bool] | None = None,
    progress: bool = True,
) -> ParallelRun:
    """Run all steps, from the end of the folder's run on.

    Args:
        add_gradients: clears the gradients, runs a share's micro-batches forward and backward,
            communicates, and returns this rank's part of the loss.
        same_number: all ranks need equally many micro-batches.
        folder: for distributed checkpoints, the same for all ranks. If a run is in it, that run
            resumes, with any number of ranks.
        fresh, run_config, on_step: as for `labsupport.training.train`; on_step on each rank.
        stop: as for `labsupport.training.train`, given on all ranks: all stop after the same step
            if it returns True on one.
        progress: show a bar, on rank 0.

    Raises:
        TrainingDivergedError, ResumeError, CheckpointError, TypeError: as
            `labsupport.training.train`.
        ValueError: too many micro-batches; no labels at all.
    """
    info, run, checkpoints = RankInfo.current(), ParallelRun(), None
    everything = settings.run_config() | model_run_config(model) | dict(run_config or {})
    # Eight micro-batches of one rank are four of each of two: not compared.
    del everything["gradient_accumulation_steps"]
    if folder is not None:
        checkpoints = DistributedCheckpoints(folder, info, everything, keep=settings.keep)
    with nullcontext() if checkpoints is None else checkpoints.in_use(fresh=fresh):
        if checkpoints is not None:
            run.history = checkpoints.load_newest(model, optimizer) or History()
        model.train()
        with progress_bar(run.history, settings, shown=progress and info.rank == 0) as bar:
            for step in range(len(run.history), settings.steps):
                began = time.perf_counter()
                reset_peak(info.device)
                torch.manual_seed(settings.seed + step * 2**16 + info.rank)
                most = settings.gradient_accumulation_steps
                share = deal(step, batches, info, accumulation=most, same_number=same_number)
                loss = add_gradients(share)
                dist.all_reduce(loss)
                norm = clip_gradients(model, settings.max_grad_norm)
                if not math.isfinite(norm + float(loss)):  # on all ranks alike
                    raise TrainingDivergedError(
                        f"step {step}: the loss is {loss:g}, the gradients' norm {norm:g}. The "
                        "step was not taken: run it with labsupport.training.train in one process "
                        "to find the micro-batch and the layer",
                        step, None, run.history,
                    )  # fmt: skip
                rate = learning_rate(step, settings)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                peak, seconds = read_peak(info.device), time.perf_counter() - began
                row = StepRow(step, float(loss), norm, rate, seconds, share.tokens, peak)
                run.history.rows.append(row)
                bar.set_postfix_str(f"loss {row.loss:.3f}, {row.tokens_per_s:,.0f} tokens/s")
                bar.update()
                if on_step is not None:
                    on_step(row)
                # A signal reaches the ranks at different times: all stop if one of them has it.
                stopping = stop is not None and any(all_gather_object(stop()))
                if checkpoints is not None and (stopping or settings.saves_after(step)):
                    checkpoints.save(step + 1, model, optimizer, run.history)
                if stopping:
                    break
    run.memory = state_bytes(model, optimizer)
    return run


def clip_gradients(model: nn.Module, limit: float | None) -> float:
    """Scale the gradients down to a total norm; return the old one, over all ranks' parts.

    If it is not finite they are left as they are.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # each rank has the norm of its shards: all of them meet here
    if limit is not None and bool(norm.isfinite()):
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)
