"""Data parallelism for notebook 3: what is sent, what is held, and a rank that is killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import torch

from labsupport.distributed.data_parallel import (
    cleanup_ddp,
    setup_ddp,
    share_of,
    train_with_ddp,
    train_with_fsdp,
)
from labsupport.training import (
    ByteTokenizer,
    Decoder,
    DecoderConfig,
    TrainSettings,
    batches,
    source_documents,
)


def train_on_ranks(
    *, seqlen: int = 256, micro_batches: int = 4, steps: int = 2, layers: int = 4
) -> list[dict[str, Any]]:
    """The same steps under DDP and FSDP, on the processes that `launch` started.

    Args:
        seqlen: of a micro-batch.
        micro_batches: of each rank in each step.
        steps: the last one is counted.
        layers: of the `tiny` decoder.

    Returns:
        a row for each case: rank, loss (of the last step), all_reduces and sent_bytes (None where
        DDP did not count them), parameters, gradients, optimizer (bytes held after the step).
    """
    place = setup_ddp("gloo")
    try:
        tokenizer = ByteTokenizer()
        documents = [tokenizer.encode(document.text) for document in source_documents()]
        stream = batches(
            documents,
            seqlen,
            end_token=tokenizer.end_token,
            accumulation=micro_batches * place.world,
        )
        settings = TrainSettings(steps=steps, accumulation=micro_batches)
        rows = []
        for case, train in (
            ("DDP, without no_sync", partial(train_with_ddp, sync_every=True)),
            ("DDP", train_with_ddp),
            ("FSDP", train_with_fsdp),
        ):
            torch.manual_seed(0)
            model = Decoder(DecoderConfig.preset("tiny", layers=layers))
            run = train(model, share_of(stream, place), settings, progress=False)
            counted = bool(run.all_reduces)
            rows.append(
                {
                    "case": case,
                    "rank": place.rank,
                    "loss": run.history.losses[-1],
                    "all_reduces": run.all_reduces[-1] if counted else None,
                    "all_reduced_bytes": run.all_reduced_bytes[-1] if counted else None,
                    "parameters": run.memory.parameters,
                    "gradients": run.memory.gradients,
                    "optimizer": run.memory.optimizer,
                }
            )
        return rows
    finally:
        cleanup_ddp()


def leave(rank: int = 1) -> None:
    """Let one rank be killed, as by a system that has no memory left; the others wait for it."""
    place = setup_ddp("gloo")
    if place.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    place.wait_for_all()
