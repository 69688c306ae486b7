"""`labsupport train --parallel ddp|fsdp|ring`: the same command, on several devices.

    torchrun --nproc-per-node 8 -m labsupport.cli train --parallel ring --length 1M ...
    labsupport train --parallel ddp --processes 2 --accumulation 4 --device cpu

Under torchrun, which may run on several machines, each process is one rank. Without it the command
starts the ranks of this machine by `labsupport.distributed.launch`. Rank 0 speaks for all.

PyTorch is imported when a run begins, not with this file: the program `labsupport` imports it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from labsupport.distributed.failures import explains_itself, is_lost, short
from labsupport.interrupt import interrupted_status

if TYPE_CHECKING:
    from labsupport.commands.train_options import Prepared
    from labsupport.distributed.data_parallel import Place
    from labsupport.distributed.data_parallel.run import ParallelRun

TIMEOUT_S = 300.0  # for one rank to come to a collective; the first step may compile kernels


def train_in_parallel(options: dict[str, Any]) -> None:
    """Run `labsupport train` with `--parallel`; `options` are the command's, by name.

    Raises:
        ValueError: options that make no sense together; before any process is started.
        typer.Exit: a rank has failed, and it has been said which one, and why.
    """
    _check_kernel(options)
    if "RANK" in os.environ:
        if options["processes"] is not None:
            raise ValueError(
                f"torchrun has started {os.environ.get('WORLD_SIZE', 'the')} processes: leave "
                "--processes out"
            )
        _as_rank_of_torchrun(options)
        return
    import torch

    from labsupport.commands.train_options import prepare
    from labsupport.distributed.launch import LaunchError, launch

    device = _device(options["device"])
    processes = _processes(options["processes"], device)
    prepare(options, torch.device("cpu"))  # what is refused is refused here, and once
    _check_share(options, processes)
    try:
        launch(
            train_as_rank,
            (options,),
            processes=processes,
            device=device,
            timeout=TIMEOUT_S,
        )
    except LaunchError as error:
        typer.echo(short(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        goes_on = "the same command goes on from the last checkpoint"
        nothing = "--folder FOLDER would keep checkpoints, from which a run goes on"
        typer.echo(f"stopped; {nothing if options['folder'] is None else goes_on}", err=True)
        raise typer.Exit(interrupted_status()) from None


def train_as_rank(options: Mapping[str, Any]) -> None:
    """Train, as one rank of a process group that is to be made; every rank calls this.

    Raises:
        torch.OutOfMemoryError: with what helps. Others as the training functions.
    """
    import torch

    from labsupport.commands.train_options import keep_curves, prepare
    from labsupport.distributed.process_group import cleanup_ddp, setup_ddp
    from labsupport.training.loop import TrainingDivergedError
    from labsupport.training.loop.messages import out_of_memory, plan
    from labsupport.training.saving.limit import is_out_of_memory, memory_limit

    device, folder = _device(options["device"]), options["folder"]
    place = setup_ddp({"cpu": "gloo", "cuda": "nccl", None: None}[device])
    _check_share(options, place.world)
    run = prepare(options, place.device)
    if options["parallel"] == "ring":
        _check_ring(options, run, place)
    batches = run.open_batches()
    batches(0)  # what cannot be had at this length is said before the plan
    if place.rank == 0:
        whole = plan(run.config, run.savings, run.settings, run.length, place.device)
        typer.echo(f"{whole}\n{_dealt(options, run, place)}")
    limit = options["memory_limit"]
    try:
        with nullcontext() if limit is None else memory_limit(limit, place.device):
            torch.manual_seed(options["seed"])
            done, new_steps = _train(options, run, batches, place)
    except TrainingDivergedError as error:
        if folder is not None and len(error.history) and place.rank == 0:
            keep_curves(error.history, folder)
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # The others wait for this rank. Whoever started it ends them when it fails.
        said = out_of_memory(error, run.savings, run.settings, run.length)
        raise torch.OutOfMemoryError(said.removeprefix("labsupport: ")) from None
    _report(done, new_steps, place, folder)
    cleanup_ddp()


def _train(
    options: Mapping[str, Any], run: Prepared, batches: Any, place: Place
) -> tuple[ParallelRun, int]:
    """The run, and how many of its steps were taken now."""
    from labsupport.distributed.data_parallel import share_of, train_with_ddp, train_with_fsdp
    from labsupport.distributed.sequence_parallel import train_with_ring
    from labsupport.training.loop import StepRow
    from labsupport.training.model.decoder import Decoder

    model = Decoder(run.config, run.savings).to(place.device)
    taken: list[StepRow] = []
    common: dict[str, Any] = {
        "folder": options["folder"],
        "fresh": options["fresh"],
        # With other ranks a step keeps its sequences, so `settings.accumulation` is not compared.
        "course": run.course | {"sequences": options["accumulation"]},
        "on_step": taken.append,
        "progress": not options["quiet"],
    }
    if options["parallel"] == "ring":
        layout = {"zigzag": not options["contiguous"], "kernel": options["attention"]}
        done = train_with_ring(model, batches, run.settings, **layout, **common)
    elif options["parallel"] == "ddp":
        done = train_with_ddp(model, share_of(batches, place), run.settings, **common)
    else:
        offload = {"cpu_offload": options["cpu_offload"]}
        done = train_with_fsdp(model, share_of(batches, place), run.settings, **offload, **common)
    return done, len(taken)


# --- what is said ---------------------------------------------------------------------------------


def _dealt(options: Mapping[str, Any], run: Prepared, place: Place) -> str:
    """Who does what, in one line."""
    if options["parallel"] == "ring":
        from labsupport.distributed.sequence_parallel.sharding import shard_length

        layout = "contiguous" if options["contiguous"] else "zigzag"
        each = shard_length(run.length, place.world, zigzag=layout == "zigzag")
        return f"ring: {place.ranks}, each with {each:,} tokens of every sequence ({layout} shards)"
    each = run.settings.accumulation / place.world
    held = {"ddp": "the whole model on each", "fsdp": f"1/{place.world} of the model on each"}
    offloaded = ", in the CPU's memory" if options["cpu_offload"] else ""
    return (
        f"{options['parallel']}: {place.ranks}, {each:g} sequences a step for each; "
        f"{held[options['parallel']]}{offloaded}"
    )


def _report(done: ParallelRun, new_steps: int, place: Place, folder: Path | None) -> None:
    from labsupport.attention.backends import last_call
    from labsupport.commands.train_options import keep_curves
    from labsupport.distributed.process_group import all_gather_object
    from labsupport.distributed.ring.attention import all_ring_calls
    from labsupport.profiling.units import format_bytes
    from labsupport.training.loop.messages import summary

    new = done.history.rows[len(done.history) - new_steps :]
    peaks = all_gather_object(max((row.peak_bytes for row in new), default=0))
    if place.rank:
        return
    ran: Any = all_ring_calls() or last_call()
    typer.echo(summary(done.history, place.device, ran if new_steps else None))
    if new_steps:
        listed = ", ".join(format_bytes(peak) for peak in peaks)
        memory = done.memory
        typer.echo(
            f"each rank  peak {listed}\n"
            f"rank 0     holds {format_bytes(memory.parameters)} of parameters, "
            f"{format_bytes(memory.gradients)} of gradients, "
            f"{format_bytes(memory.optimizer)} of AdamW's states"
        )
    if folder is not None:
        keep_curves(done.history, folder)


# --- what is refused, and torchrun ----------------------------------------------------------------


def _device(name: str | None) -> str | None:
    if name not in (None, "cpu", "cuda"):
        raise ValueError(
            f"--device {name!r}: with --parallel it is cpu or cuda, and each rank takes its own GPU"
        )
    return name


def _processes(asked: int | None, device: str | None) -> int:
    """How many to start; raises ValueError where that is not known, or not possible."""
    import torch

    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < (asked or 1):
        there = f"only {gpus} can be had: --processes {gpus}" if gpus else "there is none"
        raise ValueError(f"--device cuda: each rank needs a GPU, and {there}, or --device cpu")
    if asked is None:
        asked = 0 if device == "cpu" else gpus
    if not asked:
        raise ValueError("how many processes? --processes 2, or a number for your CPU's cores")
    return asked


def _check_share(options: Mapping[str, Any], ranks: int) -> None:
    sequences = options["accumulation"]
    if options["parallel"] != "ring" and sequences < ranks:
        raise ValueError(
            f"--accumulation {sequences} gives {ranks} ranks {sequences} of the sequences of a "
            f"step: some would have nothing to do. Take --accumulation {ranks} or more, or "
            "--parallel ring, which shares out each sequence"
        )


def _check_kernel(options: Mapping[str, Any]) -> None:
    name = options["attention"]
    if name == "auto":
        return
    if options["parallel"] != "ring":
        from labsupport.attention.implementations import by_name

        by_name(name)
        return
    from labsupport.distributed.ring.kernels import KERNELS

    known = [kernel.name for kernel in KERNELS]
    if name not in known:
        raise ValueError(f"--attention {name!r}: a ring has auto, {', '.join(known)}")


def _check_ring(options: Mapping[str, Any], run: Prepared, place: Place) -> None:
    """Ask the ring's kernel about this model and device, before anything is said.

    Raises:
        BackendUnavailableError: it cannot; says every reason, and which kernels can.
    """
    import torch

    from labsupport.attention.registry import AttentionCall
    from labsupport.distributed.ring.kernels import choose

    config, dtype = run.config, run.settings.autocast or torch.float32
    q, k, v = (
        torch.zeros(1, 2, heads, config.head_dim, dtype=dtype, device=place.device)
        for heads in (config.heads, config.key_heads, config.key_heads)
    )
    call = AttentionCall(q.requires_grad_(), k, v, causal=True, return_lse=True)
    choose(options["attention"], call, deterministic=False)


def _as_rank_of_torchrun(options: Mapping[str, Any]) -> None:
    try:
        train_as_rank(options)
    except Exception as error:
        rank, alone = os.environ["RANK"], os.environ.get("WORLD_SIZE") == "1"
        if alone:
            raise
        lost = is_lost(error)  # another rank, which says why
        if not (lost or explains_itself(error)):
            traceback.print_exc()
        print(f"labsupport: rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # At once: a process group that lost a rank may hang while Python takes it down, and the
        # others wait until torchrun sees that this one has failed.
        os._exit(1)
