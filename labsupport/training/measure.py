"""Whole training steps, measured: time and memory by length, remedy after remedy.

Weights, gradients and AdamW's states are float32. Batch 1, random tokens, seed 0. `PLAIN` are
Transformers' GPT-2 as its users write it, beside the lab's decoder.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from labsupport.attention import BackendUnavailableError, last_call
from labsupport.precision.dtypes import short
from labsupport.profiling import measure_peak_memory, measure_time
from labsupport.profiling.health import warn_if_busy
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes
from labsupport.training.config import DecoderConfig
from labsupport.training.decoder import Decoder
from labsupport.training.memory import is_out_of_memory, memory_limit
from labsupport.training.planner import STRATEGIES, MemoryStrategy, plan_memory
from labsupport.training.sizes import parse_bytes

if TYPE_CHECKING:
    import pandas as pd

WARM_UP_TOKENS = 128
# A step that takes longer is timed while its memory is measured, and not a second time.
LONG_STEP_S = 0.4
# The plan may be off by this much: a step that it puts further above the limit is not tried.
PLAN_ERROR = 1.1


@dataclass(frozen=True)
class PlainTransformers:
    """GPT-2 of the Transformers library, with nothing of the lab's."""

    name: str
    attention: str
    checkpoint: bool = False
    autocast: torch.dtype = torch.bfloat16


PLAIN = (
    PlainTransformers("Transformers, eager attention", "eager"),
    PlainTransformers("Transformers, SDPA", "sdpa"),
    PlainTransformers("Transformers, SDPA, gradient checkpointing", "sdpa", checkpoint=True),
)


@dataclass(frozen=True)
class Step:
    """A model with its optimizer, ready to do steps on the same random tokens."""

    run: Callable[[], float]  # one step; returns its loss
    warm_up: Callable[[], float]  # the same of the first tokens only
    standing_bytes: int  # weights and AdamW's states, which are there between steps


def training_step(
    config: DecoderConfig,
    how: MemoryStrategy | PlainTransformers,
    seqlen: int,
    device: torch.device,
) -> Step:
    """Make a training step on `device`: forward, backward, AdamW.

    Transformers' GPT-2 takes the shape's sizes, with learned positions for `seqlen` tokens, and its
    own defaults for the rest, dropout among them.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = (
            Decoder(config, how.savings)
            if isinstance(how, MemoryStrategy)
            else _gpt2(config, how, seqlen)
        )
        tokens = torch.randint(config.vocab_size, (1, seqlen))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for weight in model.parameters():  # the states are made by a first step
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    def run(tokens: Tensor) -> float:
        try:
            with torch.autocast(device.type, how.autocast, enabled=how.autocast is not None):
                if isinstance(how, MemoryStrategy):
                    loss = model(tokens, tokens.roll(-1, dims=1))
                else:
                    loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            return float(loss.detach())
        finally:
            optimizer.zero_grad(set_to_none=True)

    standing = 3 * sum(weight.nbytes for weight in model.parameters())
    return Step(partial(run, tokens), partial(run, tokens[:, :WARM_UP_TOKENS]), standing)


def _gpt2(config: DecoderConfig, how: PlainTransformers, seqlen: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": config.width, "n_layer": config.layers}
    sizes |= {"n_head": config.heads, "vocab_size": config.vocab_size, "n_positions": seqlen}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}  # theirs may lie outside of the vocabulary
    sizes |= {"attn_implementation": how.attention, "use_cache": False}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes)).train()
    if how.checkpoint:
        # The new name of gradient_checkpointing_enable.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    return model


@warn_if_busy()
def measure_training(
    config: DecoderConfig,
    lengths: Sequence[int],
    *,
    strategies: Sequence[MemoryStrategy | PlainTransformers] = STRATEGIES,
    device: torch.device | str | None = None,
    limit: int | str | None = None,
    max_seconds: float = 1.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure time and peak memory of training steps, one row for each remedy and length.

    Args:
        config: the decoder's shape.
        lengths: tokens of the sequence; batch 1.
        strategies: ways to save memory, by default each on top of the earlier ones; or `PLAIN`.
        device: by default a GPU if there is one.
        limit: bytes, or a text such as "16GiB". On a GPU the allocator is limited to it, so that
            more fails. On a CPU it is the plan that decides. A step that the plan puts more than a
            tenth above the limit is not tried: its row says "predicted".
        max_seconds: time limit for the repeats of a short step.

    Returns:
        backend (the remedy's name), seqlen, direction, dtype; status ("ok", "predicted", "out of
        memory", "unsupported") and reason; kernel, what ran; median_ms, q1_ms, q3_ms, repeats;
        tokens_per_s; attention_tflops, if attention took all of the time: a lower bound of its
        speed, recomputation not counted; peak_memory_bytes, weights and states included;
        predicted_bytes; loss. Provenance in `.attrs["provenance"]`.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    place, bound = resolve_device(device), None if limit is None else parse_bytes(limit)
    cases = [(strategy, length) for strategy in strategies for length in lengths]
    with memory_limit(bound, place) if bound and place.type == "cuda" else nullcontext():
        rows = [
            _measured(config, strategy, seqlen, place, bound, max_seconds)
            for strategy, seqlen in tqdm(cases, disable=not progress, unit="case", leave=False)
        ]
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = provenance(place, limit_bytes=bound, parameters=config.parameters)
    return table


def _measured(
    config: DecoderConfig,
    strategy: MemoryStrategy | PlainTransformers,
    seqlen: int,
    device: torch.device,
    limit: int | None,
    max_seconds: float,
) -> dict[str, Any]:
    """Return one case's row, also if it cannot run."""
    dtype = "float32" if strategy.autocast is None else f"{short(strategy.autocast)} autocast"
    row: dict[str, Any] = {"backend": strategy.name, "seqlen": seqlen, "direction": "training step"}
    row |= {"dtype": dtype, "status": "ok", "reason": ""}
    try:
        if isinstance(strategy, MemoryStrategy):
            how: Any = {"savings": strategy.savings, "autocast": strategy.autocast}
            plan = plan_memory(config, seqlen=seqlen, device=device, **how)
            row["predicted_bytes"] = plan.peak_bytes
            if limit is not None and plan.peak_bytes > PLAN_ERROR * limit:
                peak = f"{format_bytes(plan.peak_bytes)} in {plan.when}"
                reason = f"not tried: {peak}, {format_bytes(limit)} allowed"
                return row | {"status": "predicted", "reason": reason}
        row |= _timed(training_step(config, strategy, seqlen, device), device, max_seconds)
        seconds = row["median_ms"] / 1000
        attention = 3.5 * 2 * config.layers * seqlen**2 * config.width  # as labsupport.models.flops
        row |= {"tokens_per_s": seqlen / seconds, "attention_tflops": attention / seconds / 1e12}
    except (BackendUnavailableError, ValueError) as error:  # longer than the learned positions, say
        row |= {"status": "unsupported", "reason": " ".join(str(error).split())}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        row |= {"status": "out of memory", "reason": " ".join(str(error).split())}
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return row


def _timed(step: Step, device: torch.device, max_seconds: float) -> dict[str, Any]:
    losses: list[float] = []
    seconds: list[float] = []

    def clocked() -> None:
        start = time.perf_counter()
        losses.append(step.run())  # reading the loss waits for the GPU
        seconds.append(time.perf_counter() - start)

    # A step of a million tokens takes minutes: what only the first step does, a short one does too.
    step.warm_up()
    memory = measure_peak_memory(clocked, device=device, warmup=0)
    report = last_call()
    median = q1 = q3 = 1000 * seconds[-1]
    repeats = 1
    if seconds[-1] <= LONG_STEP_S:
        timing = measure_time(
            step.run, device=device, warmup=1, min_repeats=3, min_seconds=0.0,
            max_seconds=max_seconds,
        )  # fmt: skip
        median, q1, q3, repeats = timing.median, timing.q1, timing.q3, timing.repeats
    return {
        "kernel": report.kernel if report is not None else "",
        "median_ms": median,
        "q1_ms": q1,
        "q3_ms": q3,
        "repeats": repeats,
        "peak_memory_bytes": step.standing_bytes + memory.peak_bytes,
        "loss": losses[0],
    }


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Return the b of values = a · lengths^b, by least squares of logarithms: 1 linear, 2 square.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0

    Raises:
        ValueError: fewer than two lengths, or a value that is not above 0.
    """
    if len(set(lengths)) < 2 or min(*lengths, *values) <= 0:
        raise ValueError("an exponent needs two different lengths, and values above 0")
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that a reader compares, with units."""
    columns = {
        "backend": ("remedy", 1),
        "seqlen": ("tokens", 1),
        "median_ms": ("time, ms", 1),
        "tokens_per_s": ("tokens/s", 1),
        "peak_memory_bytes": ("peak, MiB", 2**20),
        "predicted_bytes": ("predicted, MiB", 2**20),
        "status": ("status", 1),
    }
    shown = table[[name for name in columns if name in table]].copy()
    for name in shown.columns.intersection(list(columns)[2:6]):
        shown[name] = (shown[name] / columns[name][1]).round(0)
    return shown.rename(columns={name: title for name, (title, _) in columns.items()})
