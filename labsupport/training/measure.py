"""Whole training steps, measured: time and memory by length, remedy after remedy.

Weights, gradients and AdamW's states are float32. Batch 1, random tokens, seed 0.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention import BackendUnavailableError, last_call
from labsupport.precision.dtypes import short
from labsupport.profiling import measure_peak_memory, measure_time
from labsupport.profiling.health import warn_if_busy
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes, parse_bytes
from labsupport.training.config import DecoderConfig
from labsupport.training.memory_limit import is_out_of_memory, memory_limit
from labsupport.training.planner import (
    STRATEGIES,
    MakeModel,
    MemoryStrategy,
    TrainingStep,
    plan_memory,
    training_step,
)

if TYPE_CHECKING:
    import pandas as pd

# A step that takes longer is timed while its memory is measured, and not a second time.
LONG_STEP_S = 0.4
# The plan may be off by this much: a step that it puts further above the limit is not tried.
PLAN_ERROR = 1.1


@warn_if_busy()
def measure_training(
    config: DecoderConfig,
    lengths: Sequence[int],
    *,
    strategies: Sequence[MemoryStrategy] = STRATEGIES,
    make_model: MakeModel | None = None,
    device: torch.device | str | None = None,
    limit: int | str | None = None,
    max_seconds: float = 1.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure time and peak memory of training steps, one row for each remedy and length.

    Args:
        config: the decoder's shape.
        lengths: tokens of the sequence; batch 1.
        strategies: ways to save memory, by default each on top of the earlier ones.
        make_model: as for `training_step`; of another model than the `Decoder` there is no plan.
        device: by default a GPU if there is one.
        limit: bytes, or a text such as "16GiB". On a GPU the allocator is limited to it (beyond
            what it holds before), so that more fails. On a CPU it is the plan that decides. A step
            that the plan puts more than a tenth above the limit is not tried: its row says
            "predicted".
        max_seconds: time limit for the repeats of a short step.

    Returns:
        backend (the remedy's name), seqlen, direction, dtype; status ("ok", "predicted", "out of
        memory", "unsupported") and reason; kernel, what ran; median_ms, q1_ms, q3_ms, repeats;
        tokens_per_s; attention_tflops, if attention took all of the time: a lower bound of its
        speed, recomputation not counted; peak_memory_bytes, weights and states included;
        reserved_bytes, of a GPU's allocator at the peak; predicted_bytes; loss.
        Provenance in `.attrs["provenance"]`.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    place, bound = resolve_device(device), None if limit is None else parse_bytes(limit)

    def measured(strategy: MemoryStrategy, seqlen: int) -> dict[str, Any]:
        """Return one case's row, also if it cannot run."""
        dtype = "float32" if strategy.autocast is None else f"{short(strategy.autocast)} autocast"
        row: dict[str, Any] = {"backend": strategy.name, "seqlen": seqlen}
        row |= {"direction": "training step", "dtype": dtype, "status": "ok", "reason": ""}
        how: dict[str, Any] = {"autocast": strategy.autocast, "device": place}
        try:
            if make_model is None:
                how["savings"] = strategy.savings
                plan = plan_memory(config, seqlen=seqlen, **how)
                row["predicted_bytes"] = plan.peak_bytes
                if bound is not None and plan.peak_bytes > PLAN_ERROR * bound:
                    peak = f"{format_bytes(plan.peak_bytes)} in {plan.when}"
                    reason = f"not tried: {peak}, {format_bytes(bound)} allowed"
                    return row | {"status": "predicted", "reason": reason}
            step = training_step(config, strategy, seqlen, place, make_model=make_model)
            row |= _timed(step, place, max_seconds)
            seconds = row["median_ms"] / 1000
            # As labsupport.models.flops counts.
            attention = 3.5 * 2 * config.layers * seqlen**2 * config.width
            row["tokens_per_s"] = seqlen / seconds
            row["attention_tflops"] = attention / seconds / 1e12
        except (BackendUnavailableError, ValueError) as error:  # more than the learned positions
            row |= {"status": "unsupported", "reason": " ".join(str(error).split())}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            row |= {"status": "out of memory", "reason": " ".join(str(error).split())}
        if place.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return row

    cases = [(strategy, length) for strategy in strategies for length in lengths]
    limited: AbstractContextManager[None] = nullcontext()
    if bound and place.type == "cuda":
        torch.cuda.empty_cache()
        limited = memory_limit(bound + torch.cuda.memory_reserved(place), place)
    with limited:
        rows = [
            measured(*case) for case in tqdm(cases, disable=not progress, unit="case", leave=False)
        ]
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = provenance(
        place, limit_bytes=bound, parameters=config.parameters,
        allocator=os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF")),
    )  # fmt: skip
    return table


def _timed(step: TrainingStep, device: torch.device, max_seconds: float) -> dict[str, Any]:
    losses: list[float] = []
    seconds: list[float] = []

    def clocked() -> None:
        start = time.perf_counter()
        losses.append(step.run())  # reading the loss waits for the GPU
        seconds.append(time.perf_counter() - start)

    # A step of a million tokens takes minutes: what only the first step does, a short one does too.
    step.warm_up()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = measure_peak_memory(clocked, device=device, warmup=0)
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    report = last_call()
    median = q1 = q3 = 1000 * seconds[-1]
    repeats = 1
    if seconds[-1] <= LONG_STEP_S:
        timing = measure_time(
            step.run, device=device, warmup=0, min_repeats=3, min_seconds=0.0,
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
        "reserved_bytes": reserved,
        "loss": losses[0],
    }


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
