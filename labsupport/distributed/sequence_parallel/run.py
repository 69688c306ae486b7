"""The training loop with a sharded sequence: every rank works on each of its tokens' part.

One step of a rank with two micro-batches (sequences):

    cut the shard of sequence 0     forward, backward: K, V, dK, dV go around in each layer
    cut the shard of sequence 1     the same; gradients add up in .grad
    all-reduce the gradients        once a step: 2 (W-1)/W of their bytes, as DDP
    clip, AdamW                     the same on every rank, so that the weights stay the same

The steps, the history and the checkpoints are those of data parallelism (`data_parallel.run`): what
W ranks saved, another number goes on with, and DDP or FSDP too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.data_parallel.run import (
    ParallelRun,
    check_settings,
    make_optimizer,
    run_steps,
)
from labsupport.distributed.data_parallel.shares import Batches, Share, told
from labsupport.distributed.sequence_parallel.model import SequenceParallel, shard_model
from labsupport.distributed.sequence_parallel.sharding import Shard
from labsupport.training.history import StepRow
from labsupport.training.train import TrainSettings, check_weights, tensors


def train_with_ring(
    model: nn.Module,
    batches: Batches,
    settings: TrainSettings,
    *,
    zigzag: bool = True,
    kernel: str = "auto",
    loss_chunk: int | None = None,
    folder: Path | str | None = None,
    fresh: bool = False,
    course: Mapping[str, Any] | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    progress: bool = True,
) -> ParallelRun:
    """Train with AdamW, each sequence sharded over the group that `setup_ddp` made.

    Args:
        model: a `Decoder` (with its savings), GPT2LMHeadModel or LlamaForCausalLM; weights become
            rank 0's, and are float32 (or float64). It is moved to this rank's device, and has its
            own attention back when this returns.
        batches: step -> WHOLE micro-batches, the same on each rank, at most
            `settings.accumulation`; see `shard_batch` for what is in them.
        settings: as for `train_with_ddp`: no policy, no float16.
        zigzag, kernel, loss_chunk: as for `shard_model`.
        folder, fresh, course, on_step, progress: as for `train_with_ddp`.

    Returns:
        The run. Losses are means over all labels; `memory` is what this rank holds.

    Raises:
        RuntimeError: no process group.
        TrainingDivergedError, ResumeError, CheckpointError, TypeError: as
            `labsupport.training.train`.
        ValueError: what `shard_model`, `shard_batch` and `train_with_ddp` refuse; ranks that were
            given different micro-batches.

    >>> place = setup_ddp()
    >>> run = train_with_ring(model, stream, TrainSettings(steps=100))  # not share_of(stream)
    """
    place = Place.current()
    check_weights(model, None)
    check_settings(settings)
    model.to(place.device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = make_optimizer(model, settings)
    with shard_model(model, zigzag=zigzag, kernel=kernel, loss_chunk=loss_chunk) as sharded:
        stream = _Stream(sharded, batches)

        def add_gradients(share: Share) -> Tensor:
            optimizer.zero_grad()
            stream.check_same(place)
            total = int(share.counts[0, 1])  # each rank has counted the labels of all
            loss = torch.zeros((), device=place.device)
            for batch in share.micro_batches:
                loss = loss + _backward(sharded, stream.shard_of(batch), total, settings)
            sharded.sum_gradients()
            return loss

        return run_steps(
            ParallelRun(),
            model,
            optimizer,
            stream,
            settings,
            place,
            add_gradients=add_gradients,
            same_number=False,
            folder=folder,
            fresh=fresh,
            course=course,
            on_step=on_step,
            progress=progress,
        )


def _backward(
    sharded: SequenceParallel, shard: Shard, total: int, settings: TrainSettings
) -> Tensor:
    """Add a micro-batch's part to the gradients; returns this rank's part of the loss."""
    dtype = settings.autocast
    with torch.autocast(shard.tokens.device.type, dtype=dtype, enabled=dtype is not None):
        part = sharded(shard, total)
    part.backward()
    return part.detach()


class _Stream:
    """step -> this rank's shards, in the form that `Share` counts.

    What a `Share` counts as labels are those of the whole sequence, on each rank. So all ranks keep
    or leave out the same micro-batches: one whose labels all lie on other ranks is computed too.
    """

    def __init__(self, sharded: SequenceParallel, batches: Batches) -> None:
        self.sharded, self.batches = sharded, batches
        self.step = self.print = self.farthest = 0

    def __call__(self, step: int) -> list[dict[str, Tensor]]:
        self.step, self.print, shards = step, 0, []
        for batch in self.batches(step):
            for name, tensor in sorted(tensors(batch).items()):
                data = tensor.detach().cpu().contiguous().numpy()
                self.print = zlib.crc32(data.tobytes(), zlib.crc32(name.encode(), self.print))
            shard = self.sharded.shard(batch)
            self.farthest = shard.farthest
            shards.append(
                {
                    "tokens": shard.tokens,
                    "labels": shard.all_labels,
                    "own_labels": shard.labels,
                    "positions": shard.positions,
                    "fillers": torch.tensor(shard.fillers),
                }
            )
        return shards

    def shard_of(self, batch: Mapping[str, Tensor]) -> Shard:
        """The shard again, by now on the rank's device."""
        labels, whole = batch["own_labels"], batch["labels"]
        return Shard(batch["tokens"], labels, batch["positions"], whole, self.farthest)

    def check_same(self, place: Place) -> None:
        """Raise ValueError, on all ranks, if they were not given the same micro-batches."""
        prints = told([self.print], place)[:, 0]
        different = torch.nonzero(prints != prints[0]).flatten().tolist()
        if different:
            raise ValueError(
                f"step {self.step}: rank {', '.join(map(str, different))} was given other "
                "micro-batches than rank 0. With a sharded sequence each rank gets all of them, "
                "whole: no share_of, and the same seed"
            )
