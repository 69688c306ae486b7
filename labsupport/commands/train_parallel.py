"""`labsupport train --parallel ddp|fsdp|ring`: the same command, on several devices.

    torchrun --nproc-per-node 8 -m labsupport.cli train --parallel ring --length 1M ...
    labsupport train --parallel ddp --processes 2 --accumulation 4 --device cpu

Under torchrun, which may run on several machines, each process is one rank. Without it the command
starts the ranks of this machine by `labsupport.distributed.launch`. Rank 0 prints for all.

PyTorch is imported when a run begins, not with this file: the program `labsupport` imports it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from labsupport.commands.train_options import (
    keep_curves,
    out_of_memory,
    plan,
    prepare,
    stopped_early,
    summary,
)
from labsupport.distributed.failures import explains_itself, is_lost, short
from labsupport.interrupt import interrupted_status, sigterm_noted

if TYPE_CHECKING:
    from labsupport.commands.train_options import Prepared
    from labsupport.distributed.process_group import RankInfo

TIMEOUT_S = 300.0  # for one rank to come to a collective; the first step may compile kernels


def train_in_parallel(options: dict[str, Any]) -> None:
    """Run `labsupport train` with `--parallel`; `options` are the command's, by name.

    Raises:
        ValueError: options that make no sense together; before any process is started.
        typer.Exit: a rank has failed; the message says which one, and why.
    """
    from labsupport.attention.implementations import by_name
    from labsupport.distributed.ring.kernels import KERNELS

    device, attention = options["device"], options["attention"]
    known = ["auto", *(kernel.name for kernel in KERNELS)]
    if options["parallel"] == "ring" and attention not in known:
        raise ValueError(f"--attention {attention!r}: a ring has {', '.join(known)}")
    if options["parallel"] != "ring" and attention != "auto":
        by_name(attention)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device {device!r}: with --parallel it is cpu or cuda")
    if "RANK" in os.environ:
        if options["processes"] is not None:
            world = os.environ.get("WORLD_SIZE", "the")
            raise ValueError(f"torchrun has started {world} processes: leave --processes out")
        _train_under_torchrun(options)
        return
    import torch

    from labsupport.distributed.launch import LaunchError, launch

    gpus, processes = torch.cuda.device_count(), options["processes"]
    if device == "cuda" and gpus < (processes or 1):
        raise ValueError(f"--device cuda: each rank needs a GPU, but PyTorch finds {gpus}")
    processes = processes or (0 if device == "cpu" else gpus)
    if not processes:
        raise ValueError("say how many processes: --processes 2, or as many as fit your cores")
    prepare(options, torch.device("cpu"))  # refuses here, once, what each rank would refuse
    _check_share(options, processes)
    try:
        forward = [] if options["folder"] is None else [signal.SIGTERM]
        settings = {"processes": processes, "device": device, "timeout": TIMEOUT_S}
        launch(train_as_rank, (options,), forward=forward, **settings)
    except LaunchError as error:
        typer.echo(short(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("stopped; with --folder, the same command resumes", err=True)
        raise typer.Exit(interrupted_status()) from None


def train_as_rank(options: Mapping[str, Any]) -> None:
    """Join the process group and train as one of its ranks; every rank calls this.

    Raises:
        torch.OutOfMemoryError: with what helps. Others as the training functions.
    """
    import torch

    from labsupport.attention.backends import last_call
    from labsupport.distributed.process_group import all_gather_object, cleanup_ddp, setup_ddp
    from labsupport.distributed.ring import last_ring_call
    from labsupport.distributed.ring.transport import TOTAL
    from labsupport.profiling.units import format_bytes
    from labsupport.training import StepRow, TrainingDivergedError, memory_limit
    from labsupport.training.memory import is_out_of_memory

    folder = options["folder"]
    place = setup_ddp({"cpu": "gloo", "cuda": "nccl", None: None}[options["device"]])
    _check_share(options, place.world)
    run = prepare(options, place.device)
    batches = run.open_batches("all")
    batches(0)  # raises for texts that cannot be had at this length, before the plan
    if place.rank == 0:
        typer.echo(f"{plan(run, place.device)}\n{_division(options, run, place)}")
    limit, taken = options["memory_limit"], list[StepRow]()
    try:
        with (
            nullcontext() if limit is None else memory_limit(limit, place.device),
            nullcontext() if folder is None else sigterm_noted() as stop,
        ):
            torch.manual_seed(options["seed"])
            done = _train(options, run, batches, place, taken, stop)
    except TrainingDivergedError as error:
        if folder is not None and len(error.history) and place.rank == 0:
            keep_curves(error.history, folder)
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The others wait for this rank: its launcher ends them.
        message = out_of_memory(error, run).removeprefix("labsupport: ")
        raise torch.OutOfMemoryError(message) from None
    peaks = all_gather_object(max((row.peak_bytes for row in taken), default=0))
    if place.rank == 0:
        ring = last_ring_call()
        calls: Any = last_call() if ring is None else replace(ring, traffic=TOTAL)
        typer.echo(summary(done.history, calls if taken else None))
        if taken:
            memory, listed = done.memory, ", ".join(map(format_bytes, peaks))
            typer.echo(
                f"each rank  peak {listed}\n"
                f"rank 0     {format_bytes(memory.parameters)} of parameters, "
                f"{format_bytes(memory.gradients)} of gradients, "
                f"{format_bytes(memory.optimizer)} of AdamW's states"
            )
        if folder is not None:
            keep_curves(done.history, folder)
            stopped_early(done.history, run.settings.steps)
    cleanup_ddp()


def _train(
    options: Mapping[str, Any],
    run: Prepared,
    batches: Any,
    place: RankInfo,
    taken: list[Any],
    stop: Callable[[], bool] | None,
) -> Any:
    """Return the `ParallelRun`; its new steps are appended to `taken`."""
    from labsupport.distributed.data_parallel import share_of, train_with_ddp, train_with_fsdp
    from labsupport.distributed.sequence_parallel import train_with_ring
    from labsupport.training import Decoder

    model = Decoder(run.config, run.savings).to(place.device)
    common: dict[str, Any] = {
        "folder": options["folder"],
        "fresh": options["fresh"],
        # With other ranks a step keeps its sequences, so micro-batches are not compared.
        "run_config": run.run_config | {"sequences": options["accumulation"]},
        "on_step": taken.append,
        "stop": stop,
        "progress": not options["quiet"],
    }
    if options["parallel"] == "ring":
        layout = {"zigzag": not options["contiguous"], "kernel": options["attention"]}
        return train_with_ring(model, batches, run.settings, **layout, **common)
    own = share_of(batches, place)
    if options["parallel"] == "ddp":
        return train_with_ddp(model, own, run.settings, **common)
    return train_with_fsdp(model, own, run.settings, cpu_offload=options["cpu_offload"], **common)


def _division(options: Mapping[str, Any], run: Prepared, place: RankInfo) -> str:
    """Describe in one line how the work is divided."""
    if options["parallel"] == "ring":
        from labsupport.distributed.sequence_parallel import shard_length

        layout = "contiguous" if options["contiguous"] else "zigzag"
        each = shard_length(run.length, place.world, zigzag=layout == "zigzag")
        return f"ring: {place.ranks}, each with {each:,} tokens of every sequence ({layout} shards)"
    each = run.settings.gradient_accumulation_steps / place.world
    held = {"ddp": "the whole model on each", "fsdp": f"1/{place.world} of the model on each"}
    offloaded = ", in the CPU's memory" if options["cpu_offload"] else ""
    return (
        f"{options['parallel']}: {place.ranks}, {each:g} sequences a step for each; "
        f"{held[options['parallel']]}{offloaded}"
    )


# --- what is refused, and torchrun ----------------------------------------------------------------


def _check_share(options: Mapping[str, Any], ranks: int) -> None:
    sequences = options["accumulation"]
    if options["parallel"] != "ring" and sequences < ranks:
        raise ValueError(
            f"--accumulation {sequences} leaves some of {ranks} ranks without a sequence: use "
            f"--accumulation {ranks} or more, or --parallel ring, which divides each sequence"
        )


def _train_under_torchrun(options: Mapping[str, Any]) -> None:
    try:
        train_as_rank(options)
    except Exception as error:
        if os.environ.get("WORLD_SIZE") == "1":
            raise
        lost = is_lost(error)  # another rank, which says why
        if not (lost or explains_itself(error)):
            traceback.print_exc()
        print(f"labsupport: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # A process group that lost a rank may hang while Python takes it down, and the others wait
        # until torchrun sees that this one has failed.
        os._exit(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a process of torchrun's, which ends here
        # All is saved and said. While Python takes gloo's threads down, they rarely abort it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
