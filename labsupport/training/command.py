"""The command `labsupport train`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from labsupport.precision import FlashAttentionConfig
    from labsupport.training.loop import History, StepRow
    from labsupport.training.model.config import DecoderConfig

Option = typer.Option


def train_command(
    preset: Annotated[
        str, Option(help="The shape: tiny, gpt2-small, gpt2-medium, llama-110m.")
    ] = "tiny",
    family: Annotated[
        str | None,
        Option(help="gpt2 (layer norm, GELU) or llama (RMS norm, SwiGLU). Default: the preset's."),
    ] = None,
    positions: Annotated[
        str | None,
        Option(help="rotary, without an end, or learned, as GPT-2 has them: up to --length."),
    ] = None,
    rope_base: Annotated[
        float | None, Option(help="Of rotary positions: larger for longer contexts.")
    ] = None,
    rope_scaling: Annotated[
        float | None, Option(help="Rotary positions divided by it: position interpolation.")
    ] = None,
    layers: Annotated[int | None, Option(help="In place of the preset's.")] = None,
    width: Annotated[int | None, Option(help="In place of the preset's.")] = None,
    heads: Annotated[int | None, Option(help="In place of the preset's.")] = None,
    kv_heads: Annotated[int | None, Option(help="Key/value heads. Default: one a head.")] = None,
    data: Annotated[
        str, Option(help="topics, source (Python's own texts); records, dialogue (facts to find).")
    ] = "topics",
    tokens: Annotated[str, Option(help="bytes or gpt2; they give the vocabulary.")] = "bytes",
    length: Annotated[str, Option(help="Tokens in a sequence: 8192, 128K, 1M.")] = "1024",
    steps: Annotated[int, Option(help="Optimizer steps of the whole run.")] = 100,
    accumulation: Annotated[int, Option(help="Sequences in a step, one after the other.")] = 1,
    learning_rate: Annotated[float, Option(help="At its highest.")] = 6e-4,
    warmup_steps: Annotated[int | None, Option(help="Default: a tenth of --decay-steps.")] = None,
    decay_steps: Annotated[
        int | None, Option(help="The learning rate is at its lowest then. Default: --steps.")
    ] = None,
    dtype: Annotated[
        str | None,
        Option(
            help="Of matrix products: float32, bfloat16, float16. Weights stay float32. "
            "Default: bfloat16 on a GPU that has it, else float32."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        Option(
            help="In place of --dtype: bfloat16, float16, float32, also for stored weights, "
            "whose updates float32 masters take (labsupport.precision)."
        ),
    ] = None,
    attention: Annotated[str, Option(help="auto, or a backend's name.")] = "auto",
    checkpoint_layers: Annotated[
        bool, Option("--checkpoint-layers", help="Keep each block's input only; compute it twice.")
    ] = False,
    mlp_chunk: Annotated[int | None, Option(help="Tokens at a time through the MLP.")] = None,
    loss_chunk: Annotated[
        int | None, Option(help="Tokens at a time through the classifier.")
    ] = None,
    residual: Annotated[
        str | None,
        Option(help="Dtype of the stream between blocks. Default: float32, or the policy's."),
    ] = None,
    memory_limit: Annotated[
        str | None, Option(help="16GiB: a device that has no more, really.")
    ] = None,
    folder: Annotated[
        Path | None,
        Option(help="For checkpoints, history.csv and loss.png. A run in it goes on."),
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Delete the run in --folder, and begin anew.")
    ] = False,
    checkpoint_every: Annotated[int, Option(help="Steps between checkpoints.")] = 50,
    seed: Annotated[int, Option(help="Of weights, texts and order.")] = 0,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: the GPU, if any.")] = None,
    quiet: Annotated[bool, Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a decoder on long sequences, and say how fast and with how much memory.

    \b
    labsupport train --length 8192 --steps 20
    labsupport train --preset gpt2-small --tokens gpt2 --length 128K --checkpoint-layers \\
        --mlp-chunk 8192 --loss-chunk 1024 --memory-limit 16GiB --folder runs/long
    """
    if fresh and folder is None:
        raise ValueError("--fresh begins the run in --folder FOLDER anew: name the folder")
    if dtype is not None and policy is not None:
        raise ValueError(
            "--dtype and --policy both say what is computed in which dtype: give one. --dtype "
            "keeps the weights in float32, --policy does not"
        )

    import torch

    from labsupport.attention.backends import last_call
    from labsupport.attention.implementations import by_name
    from labsupport.profiling.timing import resolve_device
    from labsupport.training.lengths import parse_tokens
    from labsupport.training.loop import TrainingDivergedError, TrainSettings, train
    from labsupport.training.loop.data import data_origin, named_batches, named_tokenizer
    from labsupport.training.loop.messages import out_of_memory, plan, summary
    from labsupport.training.model.config import Savings
    from labsupport.training.model.decoder import Decoder
    from labsupport.training.saving.limit import is_out_of_memory
    from labsupport.training.saving.limit import memory_limit as limited

    where = resolve_device(device)
    if attention != "auto":
        by_name(attention)  # refuses an unknown one before anything long begins
    tokenizer = named_tokenizer(tokens)
    size = parse_tokens(length)
    config = shape(
        preset, family, tokenizer.vocab_size,
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, positions=positions,
        max_positions=size if positions == "learned" else None,
        rope_base=rope_base, rope_scaling=rope_scaling,
    )  # fmt: skip
    savings = Savings(
        attention, checkpoint_layers, mlp_chunk, loss_chunk, dtype_named(residual, "--residual")
    )
    settings = TrainSettings(
        steps,
        learning_rate,
        warmup_steps=(decay_steps or steps) // 10 if warmup_steps is None else warmup_steps,
        decay_steps=decay_steps,
        accumulation=accumulation,
        autocast=_autocast(dtype, where) if policy is None else None,
        policy=_policy(policy),
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    batches = named_batches(data, tokenizer, size, accumulation=accumulation, seed=seed)
    batches(0)  # what cannot be had at this length is said before the plan
    typer.echo(plan(config, savings, settings, size, where))
    taken: list[StepRow] = []
    try:
        with nullcontext() if memory_limit is None else limited(memory_limit, where):
            torch.manual_seed(seed)
            history = train(
                Decoder(config, savings).to(where),
                batches,
                settings,
                folder=folder,
                fresh=fresh,
                course={"data": data_origin(data), "tokens": tokens, "length": size},
                on_step=taken.append,
                progress=not quiet,
            )
    except TrainingDivergedError as error:
        if folder is not None and len(error.history):
            _keep(error.history, folder)
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        typer.echo(out_of_memory(error, savings, settings, size), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        if folder is not None:
            typer.echo("stopped; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None
    typer.echo(summary(history, where, last_call() if taken else None))
    if folder is not None:
        _keep(history, folder)


def _keep(history: History, folder: Path) -> None:
    history.frame().to_csv(folder / "history.csv", index=False)
    history.chart().savefig(folder / "loss.png")
    typer.echo(f"in {folder}: checkpoints, history.csv, loss.png")


def shape(preset: str, family: str | None, vocab_size: int, **sizes: Any) -> DecoderConfig:
    """A preset's shape with the tokenizer's vocabulary, in a family, with other sizes.

    Args:
        preset: a name of `labsupport.training.model.config.PRESETS`.
        family: "gpt2", "llama", or None for the preset's own.
        vocab_size: of the tokenizer.
        sizes: layers, width, heads, and other fields; None for the preset's own.

    A swiglu MLP gets Llama's width for the model's: 8/3 of it, up to the next multiple of 64.

    Raises:
        ValueError: an unknown name, or sizes that do not fit together.
    """
    from labsupport.training.model.config import DecoderConfig

    changes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    mlp = {"gpt2": "gelu", "llama": "swiglu", None: DecoderConfig.preset(preset).mlp}.get(family)
    if mlp is None:
        raise ValueError(f"unknown family {family!r}; known: gpt2, llama")
    if family == "gpt2":
        changes |= {"norm": "layer", "mlp": "gelu", "mlp_width": None, "bias": True}
    elif family == "llama":
        changes |= {"norm": "rms", "mlp": "swiglu", "bias": False}
    if mlp == "swiglu" and (family is not None or "width" in changes):
        wide = changes.get("width", DecoderConfig.preset(preset).width)
        changes["mlp_width"] = -(-8 * wide // (3 * 64)) * 64
    return DecoderConfig.preset(preset, vocab_size=vocab_size, **changes)


def dtype_named(name: str | None, option: str) -> torch.dtype | None:
    """float32, bfloat16 or float16; None for None.

    Raises:
        ValueError: another name.
    """
    import torch

    if name is None:
        return None
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{option} {name!r}: it is float32, bfloat16 or float16")
    return getattr(torch, name)


def _autocast(name: str | None, where: torch.device) -> torch.dtype | None:
    import torch

    if name is None and where.type == "cuda" and torch.cuda.get_device_capability(where) >= (8, 0):
        return torch.bfloat16
    chosen = dtype_named(name, "--dtype")
    return None if chosen == torch.float32 else chosen


def _policy(name: str | None) -> FlashAttentionConfig | None:
    from labsupport.precision import FlashAttentionConfig

    dtype = dtype_named(name, "--policy")
    return None if dtype is None else getattr(FlashAttentionConfig, str(name))()
