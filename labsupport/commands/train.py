"""The command `labsupport train`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labsupport.commands.train_options import (
    check_options,
    keep_curves,
    out_of_memory,
    plan,
    prepare,
    stopped_early,
    summary,
)
from labsupport.interrupt import interrupted_status, sigterm_noted

if TYPE_CHECKING:
    from labsupport.training import StepRow

Option = typer.Option


def train_command(
    preset: Annotated[str, Option(help="tiny, gpt2-small, gpt2-medium, llama-110m.")] = "tiny",
    family: Annotated[
        str | None,
        Option(help="gpt2 (layer norm, GELU) or llama (RMS norm, SwiGLU). Default: the preset's."),
    ] = None,
    positions: Annotated[
        str | None, Option(help="rotary (any length) or learned (up to --length).")
    ] = None,
    rope_base: Annotated[
        float | None, Option(help="RoPE's base; larger for longer contexts.")
    ] = None,
    rope_scaling: Annotated[
        float | None, Option(help="Position interpolation: divide by this.")
    ] = None,
    layers: Annotated[int | None, Option(help="Replaces the preset's.")] = None,
    width: Annotated[int | None, Option(help="Replaces the preset's.")] = None,
    heads: Annotated[int | None, Option(help="Replaces the preset's.")] = None,
    kv_heads: Annotated[int | None, Option(help="Key/value heads. Default: as heads.")] = None,
    data: Annotated[
        str,
        Option(
            help="topics, source (Python's own texts); records, dialogue (facts to find); or your "
            "text files and folders, with commas."
        ),
    ] = "topics",
    tokens: Annotated[str, Option(help="bytes or gpt2; they give the vocabulary.")] = "bytes",
    length: Annotated[str, Option(help="Tokens in a sequence: 8192, 128K, 1M.")] = "1024",
    steps: Annotated[int, Option(help="Optimizer steps of the whole run.")] = 100,
    join_documents: Annotated[
        bool, Option("--join-documents", help="Documents in one sequence see those before them.")
    ] = False,
    accumulation: Annotated[int, Option(help="Sequences in a step, of all ranks.")] = 1,
    learning_rate: Annotated[float, Option(help="Highest learning rate.")] = 6e-4,
    warmup_steps: Annotated[int | None, Option(help="Default: a tenth of --decay-steps.")] = None,
    decay_steps: Annotated[
        int | None, Option(help="Step of the lowest learning rate. Default: --steps.")
    ] = None,
    dtype: Annotated[
        str | None,
        Option(
            help="Dtype of matrix products: float32, bfloat16, float16. Weights stay float32. "
            "Default: bfloat16 on a GPU that has it, else float32."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        Option(help="In place of --dtype: a dtype for stored weights, too, with float32 masters."),
    ] = None,
    attention: Annotated[
        str, Option(help="auto, or a backend's name; with --parallel ring a ring kernel's.")
    ] = "auto",
    checkpoint_layers: Annotated[
        bool,
        Option("--checkpoint-layers", help="Store only the inputs of blocks; compute them twice."),
    ] = False,
    mlp_chunk: Annotated[int | None, Option(help="Tokens at a time in the MLP.")] = None,
    loss_chunk: Annotated[int | None, Option(help="Tokens at a time in the loss.")] = None,
    residual: Annotated[str | None, Option(help="Dtype of the stream between blocks.")] = None,
    head_chunk: Annotated[int | None, Option(help="Key heads at a time in attention.")] = None,
    offload: Annotated[
        bool, Option("--offload", help="Move what --checkpoint-layers stores to host memory.")
    ] = False,
    memory_limit: Annotated[
        str | None, Option(help="Use no more memory than this, such as 16GiB.")
    ] = None,
    folder: Annotated[
        Path | None,
        Option(
            help="For checkpoints (SIGTERM saves one), history.csv, loss.png. Resumes a run there."
        ),
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Delete the run in --folder.")] = False,
    checkpoint_every: Annotated[
        int, Option(help="Steps between checkpoints, validation losses and samples of text.")
    ] = 50,
    seed: Annotated[int, Option(help="Seed of weights, texts and order.")] = 0,
    parallel: Annotated[
        str | None,
        Option(
            help="On several devices: ddp (other sequences on each), fsdp (the model is divided "
            "too), ring (each sequence is divided). Under torchrun, or with --processes."
        ),
    ] = None,
    processes: Annotated[int | None, Option(help="Ranks here. Default: one for each GPU.")] = None,
    contiguous: Annotated[
        bool, Option("--contiguous", help="ring: shards without the zigzag that balances work.")
    ] = False,
    cpu_offload: Annotated[
        bool, Option("--cpu-offload", help="fsdp: weights and states in the CPU's memory.")
    ] = False,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: the GPU, if any.")] = None,
    quiet: Annotated[bool, Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a decoder on long sequences; report losses, speed, memory and a sample of its text.

    \b
    labsupport train --length 8192 --steps 20
    labsupport train --data my-texts/,notes.md --folder runs/own
    labsupport train --preset gpt2-small --tokens gpt2 --length 128K --checkpoint-layers \\
        --mlp-chunk 8192 --loss-chunk 1024 --memory-limit 16GiB --folder runs/long
    labsupport train --parallel ddp --processes 2 --accumulation 4 --device cpu
    torchrun --nproc-per-node 8 -m labsupport.cli train --parallel ring --length 1M ...
    """
    options = dict(locals())
    check_options(options)
    if parallel is not None:
        from labsupport.commands.train_parallel import train_in_parallel

        train_in_parallel(options)
        return

    import torch

    from labsupport.attention.backends import last_call
    from labsupport.attention.implementations import by_name
    from labsupport.profiling.timing import resolve_device
    from labsupport.training import Decoder, TrainingDivergedError, train
    from labsupport.training.memory import is_out_of_memory
    from labsupport.training.memory import memory_limit as limited

    chosen = resolve_device(device)
    if attention != "auto":
        by_name(attention)  # refuses an unknown one before anything long begins
    run = prepare(options, chosen)
    batches, validation = run.open_batches("training"), run.open_batches("validation")(0)
    batches(0)  # raises for texts that cannot be had at this length, before the plan
    typer.echo(plan(run, chosen))
    taken: list[StepRow] = []
    try:
        with (
            nullcontext() if memory_limit is None else limited(memory_limit, chosen),
            nullcontext() if folder is None else sigterm_noted() as stop,
        ):
            torch.manual_seed(seed)
            history = train(
                Decoder(run.config, run.savings).to(chosen),
                batches,
                run.settings,
                validation=validation,
                sample=run.sample,
                folder=folder,
                fresh=fresh,
                run_config=run.run_config,
                on_step=taken.append,
                stop=stop,
                progress=not quiet,
            )
    except TrainingDivergedError as error:
        if folder is not None and len(error.history):
            keep_curves(error.history, folder)
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        typer.echo(out_of_memory(error, run), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("stopped; with --folder, the same command resumes", err=True)
        raise typer.Exit(interrupted_status()) from None
    typer.echo(summary(history, last_call() if taken else None))
    if folder is not None:
        keep_curves(history, folder)
        stopped_early(history, run.settings.steps)
