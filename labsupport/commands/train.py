"""The command `labsupport train`: a decoder on one device, or on several with `--parallel`.

    labsupport train --parallel ddp --processes 2 --accumulation 4 --device cpu
    torchrun --nproc-per-node 8 -m labsupport.cli train --parallel ring --length 1M ...

Under torchrun, which may run on several machines, each process is one rank. Without it the command
starts the ranks of this machine by `labsupport.distributed.launch`. Rank 0 prints for all.

PyTorch is imported when the command runs, not with this file: the program `labsupport` imports it.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from labsupport.distributed.failures import end_process, explains_itself, is_lost, short
from labsupport.interrupt import interrupted_status, sigterm_noted

if TYPE_CHECKING:
    import torch

    from labsupport.training import DecoderConfig, History, MemoryOptions, TrainConfig

Option = typer.Option
RESUMES = "the same command resumes"
TIMEOUT_S = 300.0  # for one rank to come to a collective; the first step may compile kernels


@dataclass(frozen=True)
class TrainOptions:
    """The command's options."""

    preset: Annotated[
        str, Option(help="tiny, gpt2-small, gpt2-medium, llama-110m, or LAYERSxWIDTH as GPT-2.")
    ] = "tiny"
    data: Annotated[
        str,
        Option(
            help="topics, source (Python's own texts); records, dialogue (facts to find); or your "
            "text files and folders, with commas."
        ),
    ] = "topics"
    tokens: Annotated[str, Option(help="bytes or gpt2; they give the vocabulary.")] = "bytes"
    length: Annotated[str, Option(help="Tokens in a sequence: 8192, 128K, 1M.")] = "1024"
    folder: Annotated[
        Path | None,
        Option(
            help="For checkpoints (ten in a run, at least one in 50 steps, and one at SIGTERM), "
            "history.csv, loss.png. Resumes a run there, on any number of ranks."
        ),
    ] = None
    steps: Annotated[int, Option(min=1, help="Optimizer steps of the whole run.")] = 100
    batch: Annotated[int, Option(min=1, help="Sequences in a micro-batch.")] = 1
    learning_rate: Annotated[
        float, Option(min=0.0, help="The highest, after a tenth of the steps.")
    ] = 6e-4
    dtype: Annotated[
        str | None,
        Option(
            help="Dtype of matrix products: float32, bfloat16, float16. Weights stay float32. "
            "Default: bfloat16 on a GPU that has it, else float32."
        ),
    ] = None
    attention: Annotated[
        str, Option(help="auto, or a backend's name; with --parallel ring a ring kernel's.")
    ] = "auto"
    device: Annotated[str | None, Option(help="cpu or cuda. Default: the GPU, if any.")] = None
    parallel: Annotated[
        str | None,
        Option(
            help="On several devices: ddp (other sequences on each), fsdp (the model is divided "
            "too), ring (each sequence is divided). Under torchrun, or with --processes."
        ),
    ] = None
    processes: Annotated[
        int | None, Option(min=1, help="Ranks here. Default: one for each GPU.")
    ] = None
    accumulation: Annotated[int, Option(min=1, help="Micro-batches in a step, of all ranks.")] = 1
    join_documents: Annotated[
        bool, Option("--join-documents", help="Documents in one sequence see those before them.")
    ] = False
    save_memory: Annotated[
        str,
        Option(
            help="With commas: checkpoint (store only inputs of blocks), mlp, loss, heads (compute "
            "a part at a time; mlp=8192: of so many), residual (a bfloat16 stream), offload (what "
            "checkpoint stores to the CPU's memory), states (fsdp: weights and AdamW's states too)."
        ),
    ] = ""
    limit: Annotated[str | None, Option(help="Use no more memory than this, such as 16GiB.")] = None
    seed: Annotated[int, Option(min=0, help="Seed of weights, texts and order.")] = 0

    def check(self) -> None:
        """Raise ValueError for options that are unknown or cannot be combined."""
        from labsupport.attention.implementations import by_name
        from labsupport.distributed.ring.kernels import KERNELS

        if self.parallel not in (None, "ddp", "fsdp", "ring"):
            raise ValueError(f"unknown --parallel {self.parallel!r}; known: ddp, fsdp, ring")
        if self.processes is not None and self.parallel is None:
            raise ValueError("--processes goes with --parallel ddp, fsdp or ring")
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"--dtype {self.dtype!r}: it is float32, bfloat16 or float16")
        if self.offloads_states and self.parallel != "fsdp":
            raise ValueError("--save-memory states goes with --parallel fsdp")
        if self.parallel == "ring" and self.packs_documents:
            raise ValueError(
                f"--data {self.data} packs several documents into a sequence, and a ring has no "
                "mask for that: add --join-documents, or use --data records or dialogue"
            )
        known = ["auto", *(kernel.name for kernel in KERNELS)]
        if self.parallel == "ring" and self.attention not in known:
            raise ValueError(f"--attention {self.attention!r}: a ring has {', '.join(known)}")
        if self.parallel != "ring" and self.attention != "auto":
            by_name(self.attention)
        if self.parallel is not None and self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"--device {self.device!r}: with --parallel it is cpu or cuda")

    def check_share(self, ranks: int) -> None:
        """Raise ValueError if a rank would never have a micro-batch."""
        if self.parallel != "ring" and self.accumulation < ranks:
            raise ValueError(
                f"--accumulation {self.accumulation} leaves some of {ranks} ranks without a "
                f"sequence: use --accumulation {ranks} or more, or --parallel ring, which divides "
                "each sequence"
            )

    @property
    def packs_documents(self) -> bool:
        """True if a sequence holds several documents, of which none sees another."""
        return self.data not in ("records", "dialogue") and not self.join_documents

    @property
    def offloads_states(self) -> bool:
        """True if FSDP is to store weights and AdamW's states in the CPU's memory."""
        return "states" in self.save_memory.split(",")


@dataclass(frozen=True)
class Run:
    """A run, understood from the options.

    run_config: what the weights depend on besides the settings.
    open_batches: reads the texts; takes a split, returns step -> micro-batches.
    sample: lets a model write a text.
    """

    config: DecoderConfig
    savings: MemoryOptions
    settings: TrainConfig
    run_config: dict[str, Any]
    open_batches: Callable[[str], Callable[[int], list[Any]]]
    sample: Callable[[Any], str]


def train_command(options: TrainOptions) -> None:
    """Train a decoder on long sequences; report losses, speed, memory and a sample of its text.

    \b
    labsupport train --length 8192 --steps 20
    labsupport train --data my-texts/,notes.md --folder runs/own
    labsupport train --preset gpt2-small --tokens gpt2 --length 128K \\
        --save-memory checkpoint,mlp=8192,loss --limit 16GiB --folder runs/long
    labsupport train --parallel ddp --processes 2 --accumulation 4 --device cpu
    torchrun --nproc-per-node 8 -m labsupport.cli train --parallel ring --length 1M ...
    """
    options.check()
    if options.parallel is None:
        try:
            train_here(options)
        except KeyboardInterrupt:
            stopped()
    elif "RANK" not in os.environ:
        _start_ranks(options)
    elif options.processes is not None:
        world = os.environ.get("WORLD_SIZE", "the")
        raise ValueError(f"torchrun has started {world} processes: leave --processes out")
    else:
        _train_under_torchrun(options)


def with_options(function: Callable[[Any], None], options: type) -> Callable[..., None]:
    """Return the command of a function whose argument is a dataclass of options."""

    def command(**given: Any) -> None:
        function(options(**given))

    command.__doc__ = function.__doc__
    command.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
    command.__annotations__ = get_type_hints(options, include_extras=True)
    return command


# --- the run --------------------------------------------------------------------------------------


def prepare(options: TrainOptions, device: torch.device) -> Run:
    """Understand the options; raise ValueError for what does not fit."""
    import torch

    from labsupport.profiling.units import parse_tokens
    from labsupport.training import DecoderConfig, MemoryOptions, TrainConfig
    from labsupport.training.data import (
        data_named,
        data_origin,
        named_batches,
        named_tokenizer,
        together,
    )
    from labsupport.training.train import write_text

    tokenizer, length = named_tokenizer(options.tokens), parse_tokens(options.length)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if (
        dtype is None
        and device.type == "cuda"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        dtype = torch.bfloat16
    settings = TrainConfig(
        options.steps,
        options.learning_rate,
        warmup_steps=options.steps // 10,
        gradient_accumulation_steps=options.accumulation,
        autocast=None if dtype == torch.float32 else dtype,
        seed=options.seed,
        checkpoint_every=max(1, min(50, options.steps // 10)),
    )
    data, sequences = data_named(options.data), options.batch * options.accumulation
    run_config = {"data": data_origin(data), "tokens": options.tokens, "length": length}
    run_config |= {"sequences": sequences, "joined": options.join_documents}
    named = {"accumulation": sequences, "seed": options.seed}

    def open_batches(split: Any) -> Callable[[int], list[Any]]:
        stream = named_batches(data, tokenizer, length, split=split, **named)
        apart = options.packs_documents
        return lambda step: together(stream(step), options.batch, apart=apart)

    def sample(model: Any) -> str:
        prompt = torch.tensor([tokenizer.encode("The ")], device=device)
        return tokenizer.decode(write_text(model, prompt, 60, context=length)[0].tolist())

    config = DecoderConfig.preset(options.preset, vocab_size=tokenizer.vocab_size)
    named_savings = [name for name in options.save_memory.split(",") if name not in ("", "states")]
    backend = "auto" if options.parallel == "ring" else options.attention
    savings = MemoryOptions.named(named_savings, attention=backend)
    return Run(config, savings, settings, run_config, open_batches, sample)


def train_here(options: TrainOptions) -> None:
    """Train on this process's device, as one of the ranks if there are several."""
    import torch

    from labsupport.attention.backends import last_call
    from labsupport.distributed import cleanup_ddp, setup_ddp
    from labsupport.distributed.ring import last_ring_call
    from labsupport.distributed.ring.transport import TOTAL
    from labsupport.profiling.timing import resolve_device
    from labsupport.training import Decoder, StepRow, TrainingDivergedError, memory_limit
    from labsupport.training.memory_limit import is_out_of_memory

    rank, world, folder = 0, 1, options.folder
    if options.parallel is None:
        device = resolve_device(options.device)
    else:
        place = setup_ddp({"cpu": "gloo", "cuda": "nccl", None: None}[options.device])
        rank, world, device = place.rank, place.world, place.device
        options.check_share(world)
    run = prepare(options, device)
    batches, validation = run.open_batches("training"), run.open_batches("validation")(0)
    batches(0)  # raises for texts that cannot be had at this length, before the plan
    if rank == 0:
        typer.echo(describe(options, run, device, world))
    taken = list[StepRow]()
    try:
        with (
            nullcontext() if options.limit is None else memory_limit(options.limit, device),
            nullcontext() if folder is None else sigterm_noted() as stop,
        ):
            torch.manual_seed(options.seed)
            model = Decoder(run.config, run.savings).to(device)
            history, stored = _train(
                options, run, model, batches, validation, on_step=taken.append, stop=stop
            )
    except TrainingDivergedError as error:
        if folder is not None and len(error.history) and rank == 0:
            keep_curves(error.history, folder)
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if options.parallel:  # the others wait for this rank: its launcher ends them
            raise torch.OutOfMemoryError(out_of_memory(error, options)) from None
        typer.echo(f"labsupport: {out_of_memory(error, options)}", err=True)
        raise typer.Exit(1) from None
    if rank == 0:
        call: Any = last_call()
        if options.parallel == "ring" and (ring := last_ring_call()) is not None:
            call = replace(ring, traffic=TOTAL)
        typer.echo(summary(history, call if taken else None, stored))
        if folder is not None:
            keep_curves(history, folder)
            if len(history) < options.steps:
                done = f"{len(history):,} of {options.steps:,} steps, with a checkpoint"
                typer.echo(f"stopped by SIGTERM after {done}; {RESUMES}", err=True)
    cleanup_ddp()


def _train(
    options: TrainOptions, run: Run, model: Any, batches: Any, validation: Any, **common: Any
) -> tuple[History, list[str]]:
    """Train as `--parallel` says; return the history, and lines about the ranks' memory."""
    from labsupport.distributed.data_parallel import share_of, train_with_ddp, train_with_fsdp
    from labsupport.distributed.process_group import RankInfo, all_gather_object
    from labsupport.distributed.sequence_parallel import train_with_ring
    from labsupport.profiling.units import format_bytes
    from labsupport.training import train

    common |= {"folder": options.folder, "run_config": run.run_config, "sample": run.sample}
    common |= {"validation": validation, "progress": sys.stderr.isatty()}
    if options.parallel is None:
        return train(model, batches, run.settings, **common), []
    if options.parallel == "ring":
        done = train_with_ring(model, batches, run.settings, kernel=options.attention, **common)
    else:
        info = RankInfo.current()
        batches, common["validation"] = share_of(batches, info), validation[info.rank :: info.world]
        if options.parallel == "ddp":
            done = train_with_ddp(model, batches, run.settings, **common)
        else:
            offload = options.offloads_states
            done = train_with_fsdp(model, batches, run.settings, cpu_offload=offload, **common)
    peaks, memory = all_gather_object(done.history.peak_bytes), done.memory
    return done.history, [
        f"each rank  peak {', '.join(map(format_bytes, peaks))}",
        f"rank 0     {format_bytes(memory.parameters)} of parameters, "
        f"{format_bytes(memory.gradients)} of gradients, "
        f"{format_bytes(memory.optimizer)} of AdamW's states",
    ]


def _start_ranks(options: TrainOptions) -> None:
    """Start the ranks of this machine, and wait for them."""
    import torch

    from labsupport.distributed.launch import LaunchError, launch

    gpus, processes = torch.cuda.device_count(), options.processes
    if options.device == "cuda" and gpus < (processes or 1):
        raise ValueError(f"--device cuda: each rank needs a GPU, but PyTorch finds {gpus}")
    processes = processes or (0 if options.device == "cpu" else gpus)
    if not processes:
        raise ValueError("say how many processes: --processes 2, or as many as fit your cores")
    prepare(options, torch.device("cpu"))  # refuses here, once, what each rank would refuse
    options.check_share(processes)
    forward = [] if options.folder is None else [signal.SIGTERM]
    where: dict[str, Any] = {"processes": processes, "device": options.device}
    try:
        launch(train_here, (options,), forward=forward, timeout=TIMEOUT_S, **where)
    except LaunchError as error:
        typer.echo(short(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        stopped()


def _train_under_torchrun(options: TrainOptions) -> None:
    try:
        train_here(options)
    except Exception as error:
        if os.environ.get("WORLD_SIZE") == "1":
            raise
        lost = is_lost(error)  # another rank, which says why
        if not (lost or explains_itself(error)):
            traceback.print_exc()
        print(f"labsupport: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        end_process(1)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a process of torchrun's, which ends here
        end_process(0)


# --- files and messages ---------------------------------------------------------------------------


def stopped() -> None:
    """End the program after Control-C."""
    typer.echo(f"stopped; with --folder, {RESUMES}", err=True)
    raise typer.Exit(interrupted_status()) from None


def keep_curves(history: History, folder: Path) -> None:
    """Write history.csv and loss.png beside the checkpoints."""
    history.frame().to_csv(folder / "history.csv", index=False)
    history.chart().savefig(folder / "loss.png")
    typer.echo(f"in {folder}: checkpoints, history.csv, loss.png")


def describe(options: TrainOptions, run: Run, device: torch.device, world: int = 1) -> str:
    """Describe the run: model and step; options that save memory; how ranks divide the work."""
    import torch

    from labsupport.precision.dtypes import short as name_of

    config, sequences = run.config, options.batch * options.accumulation
    lines = [
        f"{config.parameters / 1e6:.1f}M parameters ({config.layers} layers of {config.width}, "
        f"{config.heads} heads, {config.mlp}), {sequences} x {run.run_config['length']:,} tokens a "
        f"step, {name_of(run.settings.autocast or torch.float32)} on {device}",
        f"saves memory: {options.save_memory or 'no'}; attention: {options.attention}",
    ]
    if options.parallel is not None:
        parts = {"ddp": "sequences", "fsdp": "sequences, and the model,", "ring": "each sequence"}
        lines.append(f"{options.parallel}: {parts[options.parallel]} shared by {world} ranks")
    return "\n".join(lines)


def summary(history: History, call: Any, stored: Sequence[str] = ()) -> str:
    """Describe the result: losses, speed, memory, a sample, the attention that ran (or None)."""
    from labsupport.profiling.units import format_bytes

    first, last = history.rows[0], history.rows[-1]
    lines = [
        f"loss       {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}"
    ]
    if last.validation_loss is not None:
        lines.append(f"validation {last.validation_loss:.3f} after step {last.step}")
    if skipped := sum(row.skipped for row in history):
        lines.append(f"skipped    {skipped} steps, whose float16 gradients overflowed")
    lines += [
        f"speed      {history.tokens_per_s:,.0f} tokens/s (median step)",
        f"memory     {format_bytes(history.peak_bytes)} at the peak (CPU: of all the program)",
        *stored,
        f"attention  {call or 'none ran: the run in the folder is complete'}",
    ]
    if last.sample is not None:
        lines.append(f"sample     {last.sample!r}")
    return "\n".join(lines)


def out_of_memory(error: BaseException, options: TrainOptions) -> str:
    """Explain an out-of-memory error, and list what helps and is not in use, the best first."""
    remedies = {
        "--attention auto: no matrix of length x length": options.attention != "standard",
        "--batch 1, and --accumulation": options.batch == 1,
        "--save-memory loss: never all the logits; costs no time": "loss",
        "--save-memory checkpoint: only a block's input is stored": "checkpoint",
        "--save-memory mlp: the MLP's wide tensors for some tokens": "mlp",
        "--dtype bfloat16: activations of two bytes, not four": options.dtype == "bfloat16",
        "--save-memory residual: half between blocks": "residual",
        "--save-memory heads: queries, keys, values of some heads": "heads",
        "--save-memory offload, on a GPU: what blocks store in the CPU's memory": "offload",
        "a shorter --length, or a smaller --preset": False,
    }
    in_use = {True, *re.findall(r"\w+", options.save_memory)}
    helpful = [text for text, used in remedies.items() if used not in in_use]
    listed = "\n".join(f"  {place}. {text}" for place, text in enumerate(helpful, 1))
    # Without PyTorch's hints, and those of memory_limit, which are for Python.
    head = re.split(r"Of the allocated memory|What helps,", " ".join(str(error).split()))[0].strip()
    return f"{head}\nWhat helps, in this order:\n{listed}"
