"""Options and messages of `labsupport train`; PyTorch is imported when a function runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch

    from labsupport.training import DecoderConfig, History, MemoryOptions, TrainConfig


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that cannot be combined."""
    parallel, folder = options["parallel"], options["folder"]
    if options["fresh"] and folder is None:
        raise ValueError("--fresh restarts the run in --folder FOLDER: name the folder")
    if options["dtype"] is not None and options["policy"] is not None:
        raise ValueError("--dtype and --policy both choose dtypes: give one (--policy of weights)")
    if parallel not in (None, "ddp", "fsdp", "ring"):
        raise ValueError(f"unknown --parallel {parallel!r}; known: ddp, fsdp, ring")
    for name, of in (("processes", parallel), ("contiguous", "ring"), ("cpu_offload", "fsdp")):
        if options[name] and (parallel is None or parallel != of):
            owner = of or "ddp, fsdp or ring"
            raise ValueError(f"--{name.replace('_', '-')} goes with --parallel {owner}")
    if parallel is not None and (options["policy"] is not None or options["dtype"] == "float16"):
        raise ValueError(
            "--parallel works neither with --policy nor with float16: float32 masters and loss "
            "scaling are for one device. Use --dtype bfloat16 or float32"
        )
    packed = options["data"] not in ("records", "dialogue") and not options["join_documents"]
    if parallel == "ring" and packed:
        raise ValueError(
            f"--data {options['data']} packs several documents into a sequence, and a ring has "
            "no mask for that: add --join-documents, or use --data records or dialogue"
        )
    if folder is not None:
        other = "step-*/run.json" if parallel is None else "step-*.pt"
        if list(folder.glob(other)):
            whose = "several processes (--parallel)" if parallel is None else "one process"
            raise ValueError(f"{folder} holds a run of {whose}: give this one another --folder")


@dataclass(frozen=True)
class Prepared:
    """The command's options, understood; `length` of a sequence in tokens.

    run_config: what the weights depend on besides the settings.
    open_batches: reads the texts; takes a split, returns step -> micro-batches.
    sample: lets a model write a text.
    """

    config: DecoderConfig
    savings: MemoryOptions
    settings: TrainConfig
    length: int
    run_config: dict[str, Any]
    open_batches: Callable[[str], Callable[[int], list[Any]]]
    sample: Callable[[Any], str]


def prepare(options: Mapping[str, Any], device: torch.device) -> Prepared:
    """Understand the options of `train_command`; raise ValueError for what does not fit."""
    import torch

    from labsupport.precision import FlashAttentionConfig
    from labsupport.training import MemoryOptions, TrainConfig
    from labsupport.training.data import data_origin, named_batches, named_tokenizer
    from labsupport.training.sizes import parse_tokens
    from labsupport.training.train import write_text

    tokenizer, size = named_tokenizer(options["tokens"]), parse_tokens(options["length"])
    chosen = ("layers", "width", "heads", "kv_heads", "positions", "rope_base", "rope_scaling")
    sizes = {name: options[name] for name in chosen}
    sizes["max_positions"] = size if options["positions"] == "learned" else None
    config = shape(options["preset"], options["family"], tokenizer.vocab_size, **sizes)
    savings = MemoryOptions(
        options["attention"],
        options["checkpoint_layers"],
        options["mlp_chunk"],
        options["loss_chunk"],
        dtype_named(options, "residual"),
        options["head_chunk"],
        options["offload"],
    )
    policy, dtype = options["policy"], dtype_named(options, "dtype")
    dtype_named(options, "policy")  # its names are dtypes, too
    if dtype is None and policy is None and device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else None
    steps, decay, warmup = (options[name] for name in ("steps", "decay_steps", "warmup_steps"))
    settings = TrainConfig(
        steps,
        options["learning_rate"],
        warmup_steps=(decay or steps) // 10 if warmup is None else warmup,
        decay_steps=decay,
        gradient_accumulation_steps=options["accumulation"],
        autocast=None if dtype == torch.float32 else dtype,
        policy=policy and getattr(FlashAttentionConfig, policy)(),
        seed=options["seed"],
        checkpoint_every=options["checkpoint_every"],
    )
    data, join = data_named(options["data"]), options["join_documents"]
    run_config = {"data": data_origin(data), "tokens": options["tokens"], "length": size}

    def open_batches(split: Any) -> Callable[[int], list[Any]]:
        count, seed = options["accumulation"], options["seed"]
        stream = named_batches(data, tokenizer, size, accumulation=count, seed=seed, split=split)
        if not join:
            return stream
        # Without cu_seqlens a document sees those before it, and positions count through.
        return lambda step: [{"tokens": p.tokens, "labels": p.labels} for p in stream(step)]

    def sample(model: Any) -> str:
        prompt = torch.tensor([tokenizer.encode("The ")], device=device)
        return tokenizer.decode(write_text(model, prompt, 60, context=size)[0].tolist())

    run_config |= {"joined": True} if join else {}
    return Prepared(config, savings, settings, size, run_config, open_batches, sample)


def data_named(value: str) -> str | list[str]:
    """Return the name of the lab's texts, or the paths of the reader's own.

    Raises:
        ValueError: no such texts, and no such file or folder.
    """
    from labsupport.training.data import DATA

    if value in DATA:
        return value
    paths = value.split(",")
    for path in paths:
        if not Path(path).exists():
            raise ValueError(
                f"unknown data {path!r}: give one of {', '.join(DATA)}, or text files and folders"
            )
    return paths


def shape(preset: str, family: str | None, vocab_size: int, **sizes: Any) -> DecoderConfig:
    """Return a preset's shape with the tokenizer's vocabulary, in a family, with other sizes.

    `sizes` are fields of `DecoderConfig`; None leaves the preset's own. A swiglu MLP gets Llama's
    width for the model's: 8/3 of it, up to the next multiple of 64.

    Raises:
        ValueError: an unknown name, or sizes that do not fit together.
    """
    from labsupport.training import DecoderConfig

    families: dict[str | None, dict[str, Any]] = {
        None: {},
        "gpt2": {"norm": "layer", "mlp": "gelu", "mlp_width": None, "bias": True},
        "llama": {"norm": "rms", "mlp": "swiglu", "bias": False},
    }
    if family not in families:
        raise ValueError(f"unknown family {family!r}; known: gpt2, llama")
    base = DecoderConfig.preset(preset)
    changes = {name: size for name, size in sizes.items() if size is not None} | families[family]
    if changes.get("mlp", base.mlp) == "swiglu" and (family or "width" in changes):
        changes["mlp_width"] = -(-8 * changes.get("width", base.width) // (3 * 64)) * 64
    return DecoderConfig.preset(preset, vocab_size=vocab_size, **changes)


def dtype_named(options: Mapping[str, Any], name: str) -> torch.dtype | None:
    """Return an option's dtype, or None; raise ValueError for another name."""
    import torch

    value = options[name]
    if value not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"--{name} {value!r}: it is float32, bfloat16 or float16")
    return value and getattr(torch, value)


def keep_curves(history: History, folder: Path) -> None:
    """Write history.csv and loss.png beside the checkpoints."""
    history.frame().to_csv(folder / "history.csv", index=False)
    history.chart().savefig(folder / "loss.png")
    typer.echo(f"in {folder}: checkpoints, history.csv, loss.png")


def stopped_early(history: History, steps: int) -> None:
    """Print on stderr that SIGTERM ended the run before its last step, if it did."""
    if len(history) < steps:
        done = f"stopped by SIGTERM after {len(history):,} of {steps:,} steps, with a checkpoint"
        typer.echo(f"{done}; the same command resumes", err=True)


# --- messages -------------------------------------------------------------------------------------


def plan(run: Prepared, device: torch.device) -> str:
    """Describe the run in two lines: model and step; options that save memory."""
    import torch

    from labsupport.precision.dtypes import short

    config, savings, settings = run.config, run.savings, run.settings
    count = settings.gradient_accumulation_steps
    each = f" ({count} x {run.length:,})" if count > 1 else ""
    positions = f"{config.positions} positions"
    if config.positions == "rotary":
        positions += f", base {config.rope_base:,.0f}, divided by {config.rope_scaling:g}"
    dtype = short(settings.autocast or torch.float32)
    if settings.policy is not None:
        dtype = f"{short(settings.policy.mlp)} policy"
    saved = "each block's input is stored" if savings.checkpoint else "all activations are stored"
    if savings.residual is not None:
        saved += f", residual stream in {short(savings.residual)}"
    if savings.head_chunk is not None:
        saved += f", {savings.head_chunk} key heads at a time"
    if savings.offload:
        saved += ", the host's memory"
    for part, chunk in (("MLP", savings.mlp_chunk), ("loss", savings.loss_chunk)):
        saved += f", {part} at once" if chunk is None else f", {part} in chunks of {chunk:,} tokens"
    return (
        f"{config.parameters / 1e6:.1f}M parameters ({config.layers} layers of {config.width}, "
        f"{config.heads} heads, {config.mlp}, {positions}), "
        f"{count * run.length:,} tokens a step{each}, {dtype} on {device}\n"
        f"{saved}; attention: {savings.attention}"
    )


def summary(history: History, call: Any) -> str:
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
        f"attention  {call or 'none ran: the run in the folder is complete'}",
    ]
    if last.sample is not None:
        lines.append(f"sample     {last.sample!r}")
    return "\n".join(lines)


def out_of_memory(error: BaseException, run: Prepared) -> str:
    """Explain an out-of-memory error, and list the remedies not in use yet, the best first."""
    savings, settings = run.savings, run.settings
    low = settings.autocast is not None or settings.policy is not None
    remedies = {
        "--attention auto: no matrix of length x length": savings.attention != "standard",
        "--loss-chunk 1024: never all the logits; costs no time": savings.loss_chunk is not None,
        "--checkpoint-layers: only a block's input is stored": savings.checkpoint,
        "--mlp-chunk 4096: the MLP's wide tensors for some tokens": savings.mlp_chunk is not None,
        "--dtype bfloat16: activations of two bytes, not four": low,
        "--residual bfloat16: half between blocks": savings.residual or settings.policy,
        "--head-chunk 2: queries, keys, values of some heads": savings.head_chunk is not None,
        "--offload, on a GPU: moves what blocks store to host memory": savings.offload,
        f"--length {max(run.length // 2, 1)}, or a smaller --preset": False,
    }
    # Without PyTorch's hints, and those of memory_limit, which are for Python.
    head = re.split(r"Of the allocated memory|What helps,", " ".join(str(error).split()))[0].strip()
    helpful = [text for text, in_use in remedies.items() if not in_use]
    listed = "\n".join(f"  {place}. {text}" for place, text in enumerate(helpful, 1))
    return f"labsupport: {head}\nWhat helps, in this order:\n{listed}"
