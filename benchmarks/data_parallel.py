"""Scaling of training over devices: time of a step and memory, under DDP, under FSDP, in a ring.

torchrun --nproc-per-node 8 -m benchmarks data_parallel --save NAME
python -m benchmarks data_parallel --processes 2      (starts them itself)

One start measures all numbers of ranks: each case runs on a group of the first ranks, and the
others wait. Weak scaling: each rank has the same tokens, however many there are:

    efficiency = tokens/s of W ranks / (W · tokens/s of one rank alone)

(In a ring, all of them are one sequence, with more attention.)

If a rank is left waiting, the process group's timeout ends the wait; with NCCL it ends the program,
and what was measured until then is kept (--save).
"""

import itertools
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks import runner
from labsupport.distributed.data_parallel.costs import (
    ddp_bytes_sent,
    fsdp_bytes_sent,
    predict_state_bytes,
    state_bytes,
)
from labsupport.distributed.data_parallel.ddp import AllReduces, wrap
from labsupport.distributed.data_parallel.fsdp import shard
from labsupport.distributed.failures import is_lost
from labsupport.distributed.launch import launch
from labsupport.distributed.process_group import RankInfo, all_gather_object, cleanup_ddp, setup_ddp
from labsupport.distributed.scaling import predict_ring
from labsupport.distributed.sequence_parallel import shard_model
from labsupport.profiling.grids import refusal
from labsupport.profiling.provenance import command_line
from labsupport.profiling.timing import Timing
from labsupport.profiling.units import parse_tokens
from labsupport.training import Decoder, DecoderConfig, MemoryOptions, TrainConfig
from labsupport.training.train import Trainer

STRATEGIES = ("single", "ddp", "fsdp", "fsdp, offload", "ring")
FEWEST, MOST = 3, 200  # steps that are timed, if --steps doesn't say
TIMEOUT = 120.0  # seconds that a rank waits for another within a case
# Ranks that take no part wait on the CPU for those that do, so long at most.
MEETING = timedelta(minutes=30)


@dataclass(frozen=True)
class Scaling:
    """One row of the table.

    strategy: of STRATEGIES. "single": each rank alone, nothing is sent. "fsdp, offload": shards and
        AdamW's states in the CPU's memory.
    preset: the decoder's shape, as for `DecoderConfig.preset`.
    world: number of ranks that take part, the first ones.
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


def add_options(parser: ArgumentParser) -> None:
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--presets", type=runner.names, default="gpt2-medium,48x1600" if gpu else "tiny,8x128",
        help="shapes, separated by commas: names of presets, or LAYERSxWIDTH")  # fmt: skip
    add("--worlds", type=runner.numbers, default="1,2,4,8",
        help="numbers of ranks; those that are not there are left out")  # fmt: skip
    add("--length", type=parse_tokens, default=4096 if gpu else 128, help="tokens, such as 4K")
    add("--batch", type=int, default=1, help="sequences of each rank")
    add("--accumulation", type=int, default=1, help="also measure this many micro-batches a step")
    add("--attention", default="auto", help="the backend; of a ring, the kernel is its own choice")
    add("--strategies", default="single,ddp,fsdp", type=lambda text: tuple(text.split("+")),
        help="separated by +: " + " + ".join(STRATEGIES))  # fmt: skip
    add("--steps", type=int, help="to time; default: as many as a second takes, 3 at least")
    add("--warmup", type=int, default=3)
    add("--seconds", type=float, default=float("inf"), help="then no further case is begun")
    add("--processes", type=int, default=2, help="to start where torchrun did not")


def measure(options: Namespace) -> pd.DataFrame | None:
    for preset in options.presets:
        DecoderConfig.preset(preset)  # an unknown one is refused before anything starts
    dtype = "bfloat16" if torch.cuda.is_available() and options.device != "cpu" else "float32"
    given = {name: getattr(options, name) for name in ("length", "batch", "attention")}
    chosen = list(
        cases(
            options.presets,
            options.worlds,
            options.strategies,
            options.accumulation,
            dtype,
            **given,
        )
    )
    given = {name: getattr(options, name) for name in ("steps", "warmup", "seconds")}
    return on_all_ranks(partial(measure_scaling, chosen, **given), options, TIMEOUT)


def on_all_ranks(
    function: Callable[..., pd.DataFrame], options: Namespace, timeout: float
) -> pd.DataFrame | None:
    """Measure on torchrun's ranks, or on --processes; return the table on rank 0, else None.

    Under torchrun `function` gets `on_rows`, which keeps the rows so far: a case may end the
    program.
    """
    backend = {"cpu": "gloo", "cuda": "nccl"}.get(options.device or "")

    def on_this_rank(on_rows: Any = None) -> pd.DataFrame | None:
        info = setup_ddp(backend, timeout)
        # FSDP's offloading updates weights on the CPU, and torchrun gives each rank one thread.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", info.world))
        torch.set_num_threads(max(1, min(16, (os.cpu_count() or 1) // ranks_here)))
        table = function(on_rows=None if info.rank else on_rows)
        cleanup_ddp()
        return None if info.rank else table

    if "RANK" in os.environ:
        return on_this_rank(runner.keep_rows(options))
    where = {"processes": options.processes, "device": options.device}
    table = launch(on_this_rank, timeout=timeout, **where)[0]
    table.attrs["provenance"]["command"] = command_line()
    return table


def show(table: pd.DataFrame, options: Namespace | None) -> str:
    columns = ["preset", "strategy", "world", "micro_batches", "sync_every", "step_ms"]
    columns += [
        "efficiency",
        "state_bytes",
        "predicted_state_bytes",
        "peak_memory_bytes",
    ]
    columns += ["all_reduces", "predicted_sent_bytes", "status", "reason"]
    shown = table.reindex(columns=columns)
    return shown.to_string(index=False, na_rep="", float_format="{:.4g}".format)


def cases(
    presets: Sequence[str],
    worlds: Sequence[int],
    strategies: Sequence[str],
    accumulation: int,
    dtype: str,
    **shared: Any,
) -> Iterator[Scaling]:
    """Yield every strategy on every number of ranks.

    The first preset also shows accumulation, with no_sync() (or its like) and without. `shared`
    are further fields of `Scaling`.
    """
    for preset, world, strategy in itertools.product(presets, worlds, strategies):
        case = Scaling(strategy, preset, world, dtype=dtype, **shared)
        yield case
        if accumulation > 1 and preset == presets[0]:
            yield replace(case, micro_batches=accumulation)
            if strategy != "single" and world > 1:
                yield replace(case, micro_batches=accumulation, sync_every=True)


def measure_scaling(
    chosen: Sequence[Scaling],
    *,
    steps: int | None = None,
    warmup: int = 3,
    timeout: float = TIMEOUT,
    seconds: float = float("inf"),
    on_rows: Callable[[pd.DataFrame], Any] | None = None,
) -> pd.DataFrame:
    """Measure cases on the process group that `setup_ddp` made; every rank calls this.

    Args:
        chosen: what to measure, the same on all ranks. Worlds larger than the group are left out.
        steps: that are timed; None: as many as take a second, between FEWEST and MOST.
        timeout: seconds that a rank may wait for another within a case.
        seconds: then no further case is begun; its row says "not tried".
        on_rows: is given the table so far after each case, on rank 0.

    Returns:
        On all ranks, a row for each case: its fields and predictions (`row_of`); status ("ok",
        "out of memory", "failed", "not tried") and reason; what `columns_of` has: times of the
        slowest rank of each step, bytes of the rank that holds most (peak: GPUs only); efficiency
        against "single" on one rank, NaN without it.
    """
    info = RankInfo.current()
    meeting: Any = dist.new_group(backend="gloo", timeout=MEETING)
    groups: dict[int, Any] = {}
    began = time.monotonic()

    def attempt(case: Scaling) -> runner.Row:
        # Ranks' clocks differ: rank 0 decides.
        if all_gather_object(time.monotonic() - began > seconds, meeting)[0]:
            return {"status": "not tried", "reason": f"{seconds:g} s were over"}
        if case.world not in groups:
            limit = timedelta(seconds=timeout)
            groups[case.world] = dist.new_group(range(case.world), timeout=limit)
        own = None
        if info.rank < case.world:
            try:
                own = measure_case(case, groups[case.world], info, steps=steps, warmup=warmup)
            except Exception as error:
                found = refusal(error)
                # The cause sorts before what only follows from it.
                own = is_lost(error), found["status"], f"rank {info.rank}: {found['reason'][:300]}"
        by_rank = all_gather_object(own, meeting)[: case.world]
        if failures := [answer for answer in by_rank if isinstance(answer, tuple)]:
            del groups[case.world]  # its ranks may wait for each other: make a new one
            return dict(zip(("status", "reason"), min(failures)[1:], strict=True))
        return columns_of(case, by_rank)

    table = runner.run(
        [runner.Trial(row_of(c), partial(attempt, c)) for c in chosen if c.world <= info.world],
        info.device,
        progress=info.rank == 0,
        on_rows=(lambda rows: on_rows(with_efficiency(rows))) if on_rows else None,
        ranks=info.world,
        steps=steps,
        warmup=warmup,
    )
    return with_efficiency(table)


def measure_case(
    case: Scaling, group: dist.ProcessGroup, info: RankInfo, *, steps: int | None, warmup: int
) -> dict[str, Any]:
    """Measure one rank of `group`: milliseconds of each step; bytes; all-reduces of one step."""
    device, bfloat16, config = (
        info.device,
        case.dtype == "bfloat16",
        DecoderConfig.preset(case.preset),
    )
    # The loss in chunks, or logits would be most of the memory.
    residual = torch.bfloat16 if bfloat16 else None
    savings = MemoryOptions(attention=case.attention, loss_chunk=1024, residual=residual)
    torch.manual_seed(0)  # the same weights on all ranks
    with device:
        model = Decoder(config, savings)
    torch.manual_seed(1 + info.rank)  # other tokens on each
    tokens = torch.randint(config.vocab_size, (case.batch, case.length + 1), device=device)
    tokens, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch: Any = {"tokens": tokens, "labels": labels}
    counter, called, around = AllReduces(), model, nullcontext()
    if case.strategy == "ddp":
        called, counter = wrap(model, group)
    elif case.strategy.startswith("fsdp"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else None
        mesh = DeviceMesh.from_group(group, device.type)
        offload = case.strategy == "fsdp, offload"
        shard(model, mixed_precision=policy, cpu_offload=offload, mesh=mesh)
    elif case.strategy == "ring":
        around = shard_model(model, group=group)
        torch.manual_seed(1)  # all tokens are one sequence, which every rank has
        whole = torch.randint(config.vocab_size, (case.batch, case.world * case.length + 1))
        batch = around.shard({"tokens": whole[:, :-1], "labels": whole[:, 1:]}).to(device)
    autocast = torch.bfloat16 if bfloat16 and not case.strategy.startswith("fsdp") else None
    settings = TrainConfig(MOST, gradient_accumulation_steps=case.micro_batches, autocast=autocast)
    shares = None if case.strategy == "single" else group
    times: list[float] = []
    with around:
        trainer = Trainer(
            called, settings, group=shares, device=device, sync_every=case.sync_every,
            one_sequence=case.strategy == "ring",
        )  # fmt: skip
        peak = 0
        while steps is None or len(times) < warmup + steps:
            if len(times) == warmup:
                peak = 0
                if steps is None:
                    slowest = max(all_gather_object(times[-1] if times else 1000.0, group))
                    steps = max(FEWEST, min(MOST, round(1000 / slowest)))
            counter.calls = counter.nbytes = 0
            info.barrier(group)
            row = trainer.step(len(times), [batch] * case.micro_batches)
            peak = max(peak, row.peak_bytes)
            times.append(1000 * row.seconds)
    nan = float("nan")
    return {
        "times": times[warmup:],
        "state": state_bytes(model, trainer.optimizer.optimizer),
        # On a CPU the system knows the peak of the process's whole life only.
        "peak": peak if device.type == "cuda" else nan,
        "all_reduces": counter.calls if case.strategy == "ddp" else nan,
        "all_reduced_bytes": counter.nbytes if case.strategy == "ddp" else nan,
    }


def row_of(case: Scaling) -> dict[str, Any]:
    """Return the columns that are known beforehand: the case, and what is predicted of it."""
    config = DecoderConfig.preset(case.preset)
    parameters, sent, ranks = config.parameters, 0.0, 1
    if case.strategy == "ddp":
        sent = ddp_bytes_sent(4 * parameters, case.world)
        sent *= case.micro_batches if case.sync_every else 1
    elif case.strategy == "ring":
        sent = ddp_bytes_sent(4 * parameters, case.world)
        sent += case.micro_batches * config.layers * ring_bytes(case)
    elif case.strategy.startswith("fsdp"):
        ranks = case.world
        travels = 2 if case.dtype == "bfloat16" else 4
        one, two = (replace(config, layers=n).parameters for n in (1, 2))
        sent = fsdp_bytes_sent(
            travels * parameters, 4 * parameters, case.world,
            micro_batches=case.micro_batches, sync_every=case.sync_every,
            kept_bytes=travels * (2 * one - two),  # what lies outside of the blocks
        )  # fmt: skip
    return asdict(case) | {
        "parameters": parameters,
        "predicted_state_bytes": predict_state_bytes(parameters, ranks=ranks).total,
        "predicted_sent_bytes": sent,
    }


def ring_bytes(case: Scaling) -> float:
    """Return the bytes that a rank sends for one layer's attention in a step."""
    config = DecoderConfig.preset(case.preset)
    return predict_ring(
        case.world, case.batch * case.length, heads=config.heads,
        head_dim=config.width // config.heads, dtype=case.dtype, direction="forward+backward",
        single_ms=1.0,
    ).sent_bytes  # fmt: skip


def columns_of(case: Scaling, by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the measured columns, from what each rank measured."""
    slowest = Timing(tuple(map(max, zip(*(rank["times"] for rank in by_rank), strict=True))))
    most = max(by_rank, key=lambda rank: rank["state"].total)
    state, tokens = most["state"], case.world * case.micro_batches * case.batch * case.length
    return {
        "step_ms": slowest.median,
        "q1_ms": slowest.q1,
        "q3_ms": slowest.q3,
        "tokens_s": 1000 * tokens / slowest.median,
        "parameter_bytes": state.parameters,
        "gradient_bytes": state.gradients,
        "optimizer_bytes": state.optimizer,
        "state_bytes": state.total,
        "peak_memory_bytes": max(rank["peak"] for rank in by_rank),
        "all_reduces": most["all_reduces"],
        "all_reduced_bytes": most["all_reduced_bytes"],
    }


def with_efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with `efficiency`, of each row against one rank alone."""
    if "tokens_s" not in table:
        return table
    same = ["preset", "length", "batch", "micro_batches", "dtype", "attention"]
    single = table[(table.strategy == "single") & (table.world == 1)]
    alone = table[same].merge(single[[*same, "tokens_s"]], on=same, how="left").tokens_s
    return table.assign(efficiency=table.tokens_s / table.world / alone.to_numpy())
