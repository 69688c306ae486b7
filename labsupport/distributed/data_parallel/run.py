"""What DDP and FSDP have in common: the steps, clipping, the optimizer, the history.

As in `labsupport.training`, step k depends on nothing but the weights, the optimizer's state
and k; random numbers are seeded anew in each step, from k and the rank. So a run may go on with
another number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labsupport.distributed.data_parallel.costs import StateBytes, state_bytes
from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.data_parallel.saving import DistributedCheckpoints
from labsupport.distributed.data_parallel.shares import Batch, Batches, Share
from labsupport.training.history import History, StepRow, read_peak, reset_peak
from labsupport.training.train import (
    TrainingDivergedError,
    TrainSettings,
    learning_rate,
    model_course,
    parameter_groups,
    progress_bar,
)


@dataclass
class ParallelRun:
    """What a run did.

    history: a row for each step, from the run's beginning. loss and grad_norm are those of all
        ranks together, tokens too; seconds and peak_bytes this rank's (before a resumption, rank
        0's).
    memory: what this rank holds after the last step, gradients included.
    all_reduces, all_reduced_bytes: of this call's steps, DDP only: how many buckets were
        all-reduced in each, and their bytes (of which each rank sends 2 (W-1)/W).
    """

    history: History = field(default_factory=History)
    memory: StateBytes = field(default_factory=lambda: StateBytes(0, 0, 0))
    all_reduces: list[int] = field(default_factory=list)
    all_reduced_bytes: list[int] = field(default_factory=list)


def check_settings(settings: TrainSettings) -> None:
    """Raise ValueError for settings that only the loop on one device knows."""
    if settings.policy is not None:
        raise ValueError(
            "a precision policy keeps float32 masters beside the weights, which is for one device. "
            "Here: TrainSettings(autocast=torch.bfloat16), or FSDP's mixed_precision"
        )
    if settings.autocast is torch.float16:
        raise ValueError(
            "float16 needs loss scaling, which all ranks would have to agree on. Take "
            "autocast=torch.bfloat16, which needs none"
        )


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW over what the model has on this rank; biases and norms' gains do not decay."""
    return torch.optim.AdamW(
        parameter_groups(model.parameters()),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def weighted_backward(
    model: nn.Module, batch: Batch, weight: float, place: Place, settings: TrainSettings
) -> Tensor:
    """Add a micro-batch's part to the gradients; returns its part of the loss.

    The gradients are those of `world * weight * loss`, because they are averaged over ranks.
    """
    dtype = settings.autocast
    with torch.autocast(place.device.type, dtype=dtype, enabled=dtype is not None):
        loss = model(**batch)
    part = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight
    (place.world * part).backward()
    return part.detach()


def add_micro_batches(
    model: nn.Module,
    share: Share,
    place: Place,
    settings: TrainSettings,
    communicating: Callable[[bool], AbstractContextManager[Any]],
) -> Tensor:
    """Run a share's micro-batches forward and backward; returns this rank's part of the loss.

    `communicating(last)` surrounds each of them, the forward pass as well: it says whether the
    gradients travel, `last` being True for the last one.
    """
    loss = torch.zeros((), device=place.device)
    last = len(share.micro_batches) - 1
    for i, batch in enumerate(share.micro_batches):
        with communicating(i == last):
            loss = loss + weighted_backward(model, batch, share.weights[i], place, settings)
    return loss


def run_steps(
    run: ParallelRun,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    settings: TrainSettings,
    place: Place,
    *,
    add_gradients: Callable[[Share], Tensor],
    same_number: bool,
    folder: Path | str | None,
    fresh: bool,
    course: Mapping[str, Any] | None,
    on_step: Callable[[StepRow], None] | None,
    progress: bool,
) -> ParallelRun:
    """All steps from where the folder's run ended; fills `run`.

    `add_gradients` clears the gradients, runs a share's micro-batches forward and backward,
    communicates, and returns this rank's part of the loss. `same_number`: whether all ranks need as
    many micro-batches.
    """
    everything = settings.course() | model_course(model) | dict(course or {})
    # Eight micro-batches of one rank are four of each of two: not part of the course here.
    del everything["accumulation"]
    checkpoints = None
    if folder is not None:
        checkpoints = DistributedCheckpoints(folder, place, everything, keep=settings.keep)
    try:
        if checkpoints is not None:
            checkpoints.open(fresh=fresh)
            run.history = checkpoints.load_newest(model, optimizer) or History()
        model.train()
        with progress_bar(run.history, settings, shown=progress and place.rank == 0) as bar:
            for step in range(len(run.history), settings.steps):
                began = time.perf_counter()
                reset_peak(place.device)
                torch.manual_seed(settings.seed + step * 2**16 + place.rank)
                share = Share(
                    step,
                    batches,
                    place,
                    accumulation=settings.accumulation,
                    same_number=same_number,
                )
                rate = learning_rate(step, settings)
                loss = add_gradients(share)
                dist.all_reduce(loss)
                norm = clip_gradients(model, settings.max_grad_norm)
                _check_finite(step, float(loss), norm, run.history)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                peak = read_peak(place.device)
                seconds = time.perf_counter() - began
                row = StepRow(step, float(loss), norm, rate, seconds, share.tokens, peak)
                run.history.rows.append(row)
                bar.set_postfix_str(f"loss {row.loss:.3f}, {row.tokens_per_s:,.0f} tokens/s")
                bar.update()
                if on_step is not None:
                    on_step(row)
                if checkpoints is not None and settings.saves_after(step):
                    checkpoints.save(step + 1, model, optimizer, run.history)
    finally:
        if checkpoints is not None:
            checkpoints.close()
    run.memory = state_bytes(model, optimizer)
    return run


def clip_gradients(model: nn.Module, limit: float | None) -> float:
    """Scale the gradients down to a total norm; returns what it was, over all ranks' parts.

    If it is not finite they are left as they are.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # each rank has the norm of its shards: all of them meet here
    if limit is not None and bool(norm.isfinite()):
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def _check_finite(step: int, loss: float, norm: float, history: History) -> None:
    # Both are the same on all ranks: all of them stop here, or none.
    if math.isfinite(loss) and math.isfinite(norm):
        return
    raise TrainingDivergedError(
        f"step {step}: the loss is {loss}, the gradients' norm {norm}. The step was not taken, the "
        "weights are those from before it. To find the micro-batch and the layer, run that step "
        "with labsupport.training.train in one process",
        step,
        None,
        history,
    )
