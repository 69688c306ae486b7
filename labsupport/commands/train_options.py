"""What the options of `labsupport train` mean. PyTorch is imported when a function runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch

    from labsupport.precision import FlashAttentionConfig
    from labsupport.training.loop import History, TrainSettings
    from labsupport.training.model.config import DecoderConfig, Savings


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that make no sense together."""
    parallel, folder = options["parallel"], options["folder"]
    if options["fresh"] and folder is None:
        raise ValueError("--fresh begins the run in --folder FOLDER anew: name the folder")
    if options["dtype"] is not None and options["policy"] is not None:
        raise ValueError(
            "--dtype and --policy both say what is computed in which dtype: give one. --dtype "
            "keeps the weights in float32, --policy does not"
        )
    if parallel not in (None, "ddp", "fsdp", "ring"):
        raise ValueError(f"unknown --parallel {parallel!r}; known: ddp, fsdp, ring")
    for name, of in (("processes", parallel), ("contiguous", "ring"), ("cpu_offload", "fsdp")):
        if options[name] and (parallel is None or parallel != of):
            owner = of or "ddp, fsdp or ring"
            raise ValueError(f"--{name.replace('_', '-')} goes with --parallel {owner}")
    if parallel is not None and (options["policy"] is not None or options["dtype"] == "float16"):
        raise ValueError(
            "with --parallel there is neither --policy nor float16, whose masters and loss scale "
            "are for one device: take --dtype bfloat16, or float32"
        )
    packed = options["data"] in ("topics", "source") and not options["join_documents"]
    if parallel == "ring" and packed:
        raise ValueError(
            f"--data {options['data']} packs several documents into a sequence, which must not see "
            "one another, and the ring knows no such mask: let them, by --join-documents, or take "
            "--data records or dialogue, one document a sequence"
        )
    if folder is None:
        return
    files, folders = list(folder.glob("step-*.pt")), list(folder.glob("step-*/run.json"))
    if folders if parallel is None else files:
        whose = "several processes (--parallel)" if parallel is None else "one process"
        raise ValueError(f"{folder} holds a run of {whose}: give this one another --folder")


@dataclass(frozen=True)
class Prepared:
    """The command's options, understood.

    length: of a sequence, in tokens. course: what the weights depend on besides the settings.
    open_batches: reads the texts; returns step -> micro-batches.
    """

    config: DecoderConfig
    savings: Savings
    settings: TrainSettings
    length: int
    course: dict[str, Any]
    open_batches: Callable[[], Callable[[int], list[Any]]]


def prepare(options: Mapping[str, Any], where: torch.device) -> Prepared:
    """Understand the options of `train_command`, by their names.

    Raises:
        ValueError: unknown names; values that do not fit together.
    """
    from labsupport.training.lengths import parse_tokens
    from labsupport.training.loop import TrainSettings
    from labsupport.training.loop.data import data_origin, named_batches, named_tokenizer
    from labsupport.training.model.config import Savings

    tokenizer = named_tokenizer(options["tokens"])
    size = parse_tokens(options["length"])
    chosen = ("layers", "width", "heads", "kv_heads", "positions", "rope_base", "rope_scaling")
    config = shape(
        options["preset"],
        options["family"],
        tokenizer.vocab_size,
        max_positions=size if options["positions"] == "learned" else None,
        **{name: options[name] for name in chosen},
    )
    savings = Savings(
        options["attention"],
        options["checkpoint_layers"],
        options["mlp_chunk"],
        options["loss_chunk"],
        dtype_named(options["residual"], "--residual"),
    )
    steps, decay, warmup = (options[name] for name in ("steps", "decay_steps", "warmup_steps"))
    policy = options["policy"]
    settings = TrainSettings(
        steps,
        options["learning_rate"],
        warmup_steps=(decay or steps) // 10 if warmup is None else warmup,
        decay_steps=decay,
        accumulation=options["accumulation"],
        autocast=_autocast(options["dtype"], where) if policy is None else None,
        policy=_policy(policy),
        seed=options["seed"],
        checkpoint_every=options["checkpoint_every"],
    )
    data, join = options["data"], options["join_documents"]
    course = {"data": data_origin(data), "tokens": options["tokens"], "length": size}

    def open_batches() -> Callable[[int], list[Any]]:
        stream = named_batches(
            data,
            tokenizer,
            size,
            accumulation=options["accumulation"],
            seed=options["seed"],
        )
        if not join:
            return stream
        # Without cu_seqlens a document sees those before it, and positions count through.
        return lambda step: [{"tokens": p.tokens, "labels": p.labels} for p in stream(step)]

    return Prepared(
        config, savings, settings, size, course | ({"joined": True} if join else {}), open_batches
    )


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


def keep_curves(history: History, folder: Path) -> None:
    """Write history.csv and loss.png beside the checkpoints."""
    history.frame().to_csv(folder / "history.csv", index=False)
    history.chart().savefig(folder / "loss.png")
    typer.echo(f"in {folder}: checkpoints, history.csv, loss.png")
