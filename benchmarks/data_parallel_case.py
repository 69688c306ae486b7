"""One line of the scaling table, measured: a model, a strategy, and some of the ranks.

Every rank of the group builds the same model, takes some steps on tokens of its own, and times them
from when all are ready until its device is done. A step is what training does: forward, backward,
whatever the strategy sends, clipping, AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from labsupport.distributed.data_parallel.costs import (
    StateBytes,
    ddp_bytes_sent,
    fsdp_bytes_sent,
    predict_state_bytes,
    state_bytes,
)
from labsupport.distributed.data_parallel.ddp import AllReduces, wrap
from labsupport.distributed.data_parallel.fsdp import shard
from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.data_parallel.run import clip_gradients, make_optimizer
from labsupport.profiling.timing import quantile
from labsupport.training import Decoder, DecoderConfig, Savings
from labsupport.training.history import read_peak, reset_peak
from labsupport.training.train import TrainSettings

STRATEGIES = ("single", "ddp", "fsdp")


@dataclass(frozen=True)
class Case:
    """What is measured.

    strategy: "single" (each rank by itself, nothing is sent), "ddp" or "fsdp".
    preset: the decoder's shape, as for `shape_of`.
    world: the first so many ranks take part.
    length, batch: tokens (batch, length) of each micro-batch of each rank.
    micro_batches: of each step and rank.
    sync_every: communicate after each of them, not after the last only.
    dtype: "bfloat16": by autocast, under FSDP by its policy, with a bfloat16 residual stream in
        both, so that activations are alike. "float32": all of it.
    attention: the backend.
    """

    strategy: str
    preset: str
    world: int
    length: int
    batch: int = 1
    micro_batches: int = 1
    sync_every: bool = False
    dtype: str = "float32"
    attention: str = "auto"


@dataclass(frozen=True)
class Measured:
    """What one rank saw: milliseconds of each step; bytes; all-reduces of one step (DDP).

    peak_bytes: NaN on a CPU, where the system knows the peak of the process's whole life only.
    """

    step_ms: list[float]
    state: StateBytes
    peak_bytes: float
    all_reduces: int
    all_reduced_bytes: int


def shape_of(preset: str) -> DecoderConfig:
    """A preset of `labsupport.training`, or GPT-2's shape as LAYERSxWIDTH with heads of 64.

    >>> shape_of("48x1600").heads  # GPT-2 XL's size
    25

    Raises:
        ValueError: neither.
    """
    layers, x, width = preset.partition("x")
    if x and layers.isdigit() and width.isdigit():
        return DecoderConfig(layers=int(layers), width=int(width), heads=max(1, int(width) // 64))
    return DecoderConfig.preset(preset)


def savings_of(case: Case) -> Savings:
    """How the decoder computes: the loss in chunks, or logits would be most of the memory."""
    residual = torch.bfloat16 if case.dtype == "bfloat16" else None
    return Savings(attention=case.attention, loss_chunk=1024, residual=residual)


def measure_case(
    case: Case, group: dist.ProcessGroup, place: Place, *, steps: int, warmup: int
) -> Measured:
    """Measure on the ranks of `group`; each of them calls this, and no other rank."""
    step, model, optimizer, counter = _prepared(case, group, place)
    taken: list[float] = []
    for i in range(warmup + steps):
        if i == warmup:
            reset_peak(place.device)
        counter.calls = counter.nbytes = 0
        _wait(group, place)
        began = time.perf_counter()
        step()
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        taken.append(1000 * (time.perf_counter() - began))
    return Measured(
        taken[warmup:],
        state_bytes(model, optimizer),
        read_peak(place.device) if place.device.type == "cuda" else float("nan"),
        counter.calls,
        counter.nbytes,
    )


def _prepared(
    case: Case, group: dist.ProcessGroup, place: Place
) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer, AllReduces]:
    device, bfloat16 = place.device, case.dtype == "bfloat16"
    config = shape_of(case.preset)
    torch.manual_seed(0)  # the same weights on all ranks
    with device:
        model = Decoder(config, savings_of(case))
    torch.manual_seed(1 + place.rank)  # other tokens on each
    tokens = torch.randint(config.vocab_size, (case.batch, case.length + 1), device=device)
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    counter, called, autocast = AllReduces(), model, bfloat16

    def communicating(last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    if case.strategy == "ddp":
        wrapped, counter = wrap(model, group=group)
        called = wrapped

        def communicating(last: bool) -> AbstractContextManager[Any]:
            return nullcontext() if case.sync_every or last else wrapped.no_sync()

    elif case.strategy == "fsdp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else None
        mesh = DeviceMesh.from_group(group, device.type)
        sharded, autocast = shard(model, mixed_precision=policy, mesh=mesh), False

        def communicating(last: bool) -> AbstractContextManager[Any]:
            sharded.set_requires_gradient_sync(case.sync_every or last)
            return nullcontext()

    optimizer = make_optimizer(model, TrainSettings(steps=1))

    def step() -> None:
        # DDP's gradients are views of its buckets: they are set to zero, not thrown away.
        optimizer.zero_grad(set_to_none=case.strategy != "ddp")
        for i in range(case.micro_batches):
            with communicating(i == case.micro_batches - 1):
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    loss = called(tokens, labels) / case.micro_batches
                loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()

    return step, model, optimizer, counter


def _wait(group: dist.ProcessGroup, place: Place) -> None:
    """Return when all ranks of the group have come here."""
    here = torch.zeros(1, device=place.device)
    dist.all_reduce(here, group=group)
    here.item()


def row_of(case: Case) -> dict[str, Any]:
    """The columns that are known beforehand: the case, and what is predicted of it."""
    parameters = shape_of(case.preset).parameters
    shares = case.world if case.strategy == "fsdp" else 1
    return asdict(case) | {
        "parameters": parameters,
        "predicted_state_bytes": predict_state_bytes(parameters, ranks=shares).total,
        "predicted_sent_bytes": _sent(case, parameters),
    }


def columns_of(case: Case, heard: Sequence[Measured]) -> dict[str, float]:
    """The measured columns, from what each rank measured."""
    nan = float("nan")
    slowest = tuple(map(max, zip(*(said.step_ms for said in heard), strict=True)))
    most = max(heard, key=lambda said: said.state.total)
    median = statistics.median(slowest)
    return {
        "step_ms": median,
        "q1_ms": quantile(slowest, 0.25),
        "q3_ms": quantile(slowest, 0.75),
        "tokens_s": 1000 * case.world * case.micro_batches * case.batch * case.length / median,
        "parameter_bytes": most.state.parameters,
        "gradient_bytes": most.state.gradients,
        "optimizer_bytes": most.state.optimizer,
        "state_bytes": most.state.total,
        "peak_memory_bytes": max(said.peak_bytes for said in heard),
        "all_reduces": most.all_reduces if case.strategy == "ddp" else nan,
        "all_reduced_bytes": most.all_reduced_bytes if case.strategy == "ddp" else nan,
    }


def _sent(case: Case, parameters: int) -> float:
    syncs = case.micro_batches if case.sync_every else 1
    if case.strategy == "ddp":
        return syncs * ddp_bytes_sent(4 * parameters, case.world)
    if case.strategy == "fsdp":
        travels = 2 if case.dtype == "bfloat16" else 4
        config = shape_of(case.preset)
        one, two = (replace(config, layers=n).parameters for n in (1, 2))
        root = 2 * one - two  # what lies outside of the blocks
        return fsdp_bytes_sent(
            travels * parameters,
            4 * parameters,
            case.world,
            micro_batches=case.micro_batches,
            sync_every=case.sync_every,
            kept_bytes=travels * root,
        )
    return 0.0
