"""Whole training steps, measured: time and memory by length, remedy after remedy."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention import BackendUnavailableError, last_call
from labsupport.profiling import measure_peak_memory, measure_time
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes
from labsupport.training.model import DecoderConfig
from labsupport.training.planner.fits import LADDER, Rung
from labsupport.training.planner.plan import plan_memory
from labsupport.training.saving.limit import is_out_of_memory, memory_limit, parse_bytes
from labsupport.training.steps import PlainTransformers, training_step

if TYPE_CHECKING:
    import pandas as pd

# A step that takes longer is timed while its memory is measured, and not a second time.
LONG_STEP_S = 0.4
# The plan may be off by this much: what it finds to be further above the limit is not tried.
PLAN_ERROR = 1.1


def measure_training(
    config: DecoderConfig,
    lengths: Sequence[int],
    *,
    rungs: Sequence[Rung | PlainTransformers] = LADDER,
    device: torch.device | str | None = None,
    limit: int | str | None = None,
    max_seconds: float = 1.0,
    progress: bool = True,
) -> pd.DataFrame:
    """Time and peak memory of training steps, one row for each remedy and length.

    Args:
        config: the decoder's shape.
        lengths: tokens of the sequence; batch 1.
        rungs: how it is computed; by default each remedy on top of those before it. `steps.PLAIN`
            are Transformers' own, for which there is no plan.
        device: by default a GPU if there is one.
        limit: bytes, or a text such as "16GiB". On a GPU the allocator is held to it, so that more
            fails. On a CPU it is the plan that decides. A step that the plan puts more than a tenth
            above the limit is not tried: its row says "predicted".
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

    where, bound = resolve_device(device), None if limit is None else parse_bytes(limit)
    rows = []
    cases = [(rung, length) for rung in rungs for length in lengths]
    with memory_limit(bound, where) if bound and where.type == "cuda" else nullcontext():
        for rung, seqlen in tqdm(cases, disable=not progress, unit="case", leave=False):
            rows.append(_measured(config, rung, seqlen, where, bound, max_seconds))
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = provenance(where, limit_bytes=bound, parameters=config.parameters)
    return table


def _measured(
    config: DecoderConfig,
    rung: Rung | PlainTransformers,
    seqlen: int,
    device: torch.device,
    limit: int | None,
    max_seconds: float,
) -> dict[str, Any]:
    dtype = "float32" if rung.autocast is None else f"{rung.autocast} autocast".split(".")[-1]
    row: dict[str, Any] = {"backend": rung.name, "seqlen": seqlen, "direction": "training step"}
    row |= {"dtype": dtype, "status": "ok", "reason": ""}
    if isinstance(rung, Rung):
        try:
            plan = plan_memory(
                config, seqlen=seqlen, savings=rung.savings, autocast=rung.autocast, device=device
            )
        except ValueError as error:  # longer than the learned positions, for one
            return row | {"status": "unsupported", "reason": str(error)}
        row["predicted_bytes"] = plan.peak_bytes
        if limit is not None and plan.peak_bytes > PLAN_ERROR * limit:
            what = f"{format_bytes(plan.peak_bytes)} in {plan.when}, {format_bytes(limit)} allowed"
            return row | {"status": "predicted", "reason": f"not tried: {what}"}
    try:
        row |= _timed(config, rung, seqlen, device, max_seconds)
    except BackendUnavailableError as error:
        row |= {"status": "unsupported", "reason": " ".join(str(error).split())}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        row |= {"status": "out of memory", "reason": " ".join(str(error).split())}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _timed(
    config: DecoderConfig,
    rung: Rung | PlainTransformers,
    seqlen: int,
    device: torch.device,
    max_seconds: float,
) -> dict[str, Any]:
    step = training_step(config, rung, seqlen, device)
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
    if seconds[-1] > LONG_STEP_S:
        median = q1 = q3 = 1000 * seconds[-1]
        repeats = 1
    else:
        timing = measure_time(
            lambda: losses.append(step.run()), device=device, warmup=1, min_repeats=3,
            min_seconds=0.0, max_seconds=max_seconds,
        )  # fmt: skip
        median, q1, q3, repeats = timing.median, timing.q1, timing.q3, timing.repeats
    attention = 3.5 * 2 * config.layers * seqlen**2 * config.width  # as labsupport.models.flops
    return {
        "kernel": report.kernel if report is not None else "",
        "median_ms": median,
        "q1_ms": q1,
        "q3_ms": q3,
        "repeats": repeats,
        "tokens_per_s": seqlen / median * 1000,
        "attention_tflops": attention / median / 1e9,
        "peak_memory_bytes": step.standing_bytes + memory.peak_bytes,
        "loss": losses[0],
    }


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The b of values = a · lengths^b, by least squares of the logarithms: 1 linear, 2 quadratic.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0

    Raises:
        ValueError: fewer than two lengths, or a value that is not above 0.
    """
    if len(set(lengths)) < 2 or len(lengths) != len(values):
        raise ValueError("an exponent needs two different lengths, and a value for each")
    if min(*lengths, *values) <= 0:
        raise ValueError("lengths and values must be above 0: their logarithms are fitted")
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - mean_x) ** 2 for a in x)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that a reader compares, with units."""
    shown = table.copy()
    for column in ("peak_memory_bytes", "predicted_bytes"):
        if column in shown:
            shown[column] = (shown[column] / 2**20).round(0)
    names = {
        "backend": "remedy",
        "seqlen": "tokens",
        "median_ms": "time, ms",
        "tokens_per_s": "tokens/s",
        "peak_memory_bytes": "peak, MiB",
        "predicted_bytes": "predicted, MiB",
        "status": "status",
    }
    digits = {"median_ms": 0, "tokens_per_s": 0}
    return shown[[c for c in names if c in shown]].round(digits).rename(columns=names)
