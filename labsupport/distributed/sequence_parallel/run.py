"""The training loop with a sharded sequence: every rank works on each of its tokens' part.

A rank cuts its shard from each micro-batch of a step, and computes it forward and backward: K, V,
dK, dV go around in each layer. Gradients add up in .grad, and are summed over the ranks once a
step. The steps, the history and the checkpoints are those of data parallelism
(`data_parallel.run`): what W ranks saved, another number goes on with, and DDP or FSDP too.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.distributed.data_parallel.run import (
    Batches,
    ParallelRun,
    Share,
    check_settings,
    make_optimizer,
    run_steps,
)
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.distributed.sequence_parallel.model import shard_model
from labsupport.distributed.sequence_parallel.sharding import Shard
from labsupport.training.decoder import Decoder
from labsupport.training.train import TrainConfig, check_weights, tensors


def train_with_ring(
    model: Decoder,
    batches: Batches,
    settings: TrainConfig,
    *,
    zigzag: bool = True,
    kernel: str = "auto",
    **options: Any,
) -> ParallelRun:
    """Train with AdamW, each sequence sharded over the group that `setup_ddp` made.

    Args:
        model: a `Decoder` (with its savings); weights become rank 0's, and are float32 (or
            float64). It is moved to this rank's device, and has its own attention back when this
            returns.
        batches: step -> WHOLE micro-batches, the same on each rank, at most
            `settings.gradient_accumulation_steps`; see `shard_batch` for what is in them.
        settings: as for `train_with_ddp`: no policy, no float16.
        zigzag, kernel: as for `shard_model`.
        options: folder, fresh, run_config, on_step and progress, as for `run_steps`.

    Returns:
        The run. Losses are means over all labels; `memory` is what this rank holds.

    Raises:
        RuntimeError: no process group.
        ValueError: what `shard_model`, `shard_batch` and `train_with_ddp` refuse; ranks that were
            given different micro-batches. Others as `run_steps`.

    >>> info = setup_ddp()
    >>> run = train_with_ring(model, stream, TrainConfig(steps=100))  # not share_of(stream)
    """
    info = RankInfo.current()
    check_weights(model, None)
    check_settings(settings)
    model.to(info.device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer, dtype = make_optimizer(model, settings), settings.autocast
    shards: list[Shard] = []  # of the step in progress
    with shard_model(model, zigzag=zigzag, kernel=kernel) as sharded:

        def cut(step: int) -> list[dict[str, Tensor]]:
            """This rank's shards as a `Share` counts them, with the labels of whole sequences."""
            checksum = 0
            shards.clear()
            for batch in batches(step):
                for name, tensor in sorted(tensors(batch).items()):
                    data = tensor.detach().cpu().contiguous().numpy().tobytes()
                    checksum = zlib.crc32(data, zlib.crc32(name.encode(), checksum))
                shards.append(sharded.shard(batch))
            checksums = all_gather_object(checksum)
            if others := [rank for rank, own in enumerate(checksums) if own != checksums[0]]:
                raise ValueError(
                    f"step {step}: rank {', '.join(map(str, others))} was given other "
                    "micro-batches than rank 0. With a sharded sequence each rank gets all of "
                    "them, whole: no share_of, and the same seed"
                )
            return [
                {"tokens": x.tokens, "labels": x.all_labels, "fillers": torch.tensor(x.fillers)}
                for x in shards
            ]

        def add_gradients(share: Share) -> Tensor:
            optimizer.zero_grad()
            total = share.labels // info.world  # each rank has counted the labels of all
            loss = torch.zeros((), device=info.device)
            for shard in shards:
                with torch.autocast(info.device.type, dtype=dtype, enabled=dtype is not None):
                    part = sharded(shard.to(info.device), total)
                part.backward()
                loss = loss + part.detach()
            sharded.sum_gradients()
            return loss

        return run_steps(model, optimizer, cut, settings, add_gradients, **options)
