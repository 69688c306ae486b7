"""Parallel training and its messages are right, or an error on all ranks."""

import re

import pytest
import torch

from labsupport.distributed import setup_ddp, train_with_ddp, train_with_fsdp
from labsupport.distributed.by_hand import ProcessComm, RehearsalError, rehearse
from labsupport.distributed.sequence_parallel import (
    shard_batch,
    shard_length,
    shard_model,
    train_with_ring,
)
from labsupport.training import Decoder, DecoderConfig, TrainConfig, batches

TRAIN = {"ddp": train_with_ddp, "fsdp": train_with_fsdp, "ring": train_with_ring}
STREAM = batches([[1, 2, 3] * 20], 32, end_token=0)


def decoder():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(5, width=16, layers=1, heads=2))


def refused(rank, group, how, name):
    """On a rank: the error of training in which rank 1 has another setting."""
    model, settings = decoder(), {"steps": 2}
    if name == "frozen":
        model.blocks.requires_grad_(rank == 0)
    elif rank == 1:
        settings |= {name: {"steps": 3, "learning_rate": 0.1, "weight_decay": 0.3}[name]}
    try:
        TRAIN[how](model, STREAM, TrainConfig(**settings), progress=False)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("how", "name", "said"),
    [
        ("ddp", "learning_rate", r"learning_rate .*0\.0006 and 0\.1"),
        ("fsdp", "weight_decay", r"weight_decay .*0\.1 and 0\.3"),
        ("ring", "steps", "2 and 3"),
        ("ring", "frozen", "trainable weights"),
    ],
)
def test_ranks_with_other_settings_are_refused_and_do_not_drift_apart(pool, how, name, said):
    for text in pool(2).run(refused, how, name):
        assert re.search(f"ranks 0 and 1 differ in .*{said}", text or "no error")


def reduced_slice(rank, group):
    """On a rank: a matrix of which one column was all-reduced."""
    matrix = torch.full((3, 4), rank + 1.0)
    ProcessComm().all_reduce(matrix[:, 1])()
    return matrix


def test_an_all_reduce_of_a_column_changes_nothing_beside_it(pool):
    for rank, matrix in enumerate(pool(2).run(reduced_slice)):
        expected = torch.full((3, 4), rank + 1.0)
        expected[:, 1] = 3
        assert torch.equal(matrix, expected)


def mixed_dtypes(comm):
    comm.all_reduce(torch.ones(2, dtype=torch.float64 if comm.rank else torch.float32))()


def uneven(comm):
    return comm.reduce_scatter(torch.arange(5.0))


@pytest.mark.parametrize(
    ("program", "said"), [(mixed_dtypes, "torch.float64"), (uneven, "5 rows cannot be cut into 2")]
)
def test_a_rehearsal_refuses_what_real_processes_cannot_do(program, said):
    with pytest.raises(RehearsalError, match=said):
        rehearse(program, 2)


BATCH = {"tokens": torch.ones(1, 8).long(), "labels": torch.ones(1, 8).long()}


@pytest.mark.parametrize(
    "call",
    [
        lambda: shard_batch(BATCH | {"tokens": torch.ones(1, 8)}, 0, 2),
        lambda: shard_batch(BATCH | {"positions": torch.arange(8.0)}, 0, 2),
        lambda: shard_batch(BATCH | {"positions": -torch.arange(8)}, 0, 2),
        lambda: shard_batch(BATCH | {"cu_seqlens": torch.tensor([0, 12])}, 0, 2),
        lambda: shard_batch(BATCH | {"cu_seqlens": torch.tensor([2, 8])}, 0, 2),
        lambda: shard_batch(BATCH, -1, 2),
        lambda: shard_batch(BATCH, 0, 2, zigzag="no"),
        lambda: shard_length(0, 2),
        lambda: rehearse(uneven, 0),
        lambda: setup_ddp("gloo", timeout=-1),
        lambda: setup_ddp("gloo", timeout=float("nan")),
    ],
)
def test_what_is_no_batch_length_or_timeout_is_refused(call):
    with pytest.raises(ValueError, match=r"must|at least|begin|no rank|be cut"):
        call()


def test_a_mean_over_fewer_labels_than_there_are_is_refused(group_of_one):
    with shard_model(decoder()) as sharded:
        shard = sharded.shard(BATCH)
        with pytest.raises(ValueError, match="this micro-batch alone has 8 labels"):
            sharded(shard, total=0)
