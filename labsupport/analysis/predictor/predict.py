"""Predict the time and the peak memory of a case, with an interval and the reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from labsupport.analysis.predictor.calibration import Model
from labsupport.analysis.predictor.device import Device, device_from_specification
from labsupport.analysis.predictor.memory import peak_memory
from labsupport.analysis.predictor.work import features
from labsupport.attention.implementations import by_name, version
from labsupport.profiling.grids import Case
from labsupport.profiling.hardware import find_spec
from labsupport.profiling.timing import format_ms

# 90% of a normal distribution lie within 1.645 standard deviations.
NINETY_PERCENT = 1.645
# How far beyond the calibrated lengths a prediction is still given.
LENGTHS_BEYOND = 4
# Standard deviation of log(time) on a GPU that was only specified: of the calibrated generation,
# and of another, whose kernels reach a different share of its tensor cores. The second is wide for
# a reason: the same kernels reach 50% to 73% of an A100's peak (FlashAttention-2 paper, abstract)
# and 35% of an H100's (FlashAttention-3 paper, abstract). Both are judgements, not fits.
SAME_GENERATION, OTHER_GENERATION = 0.15, 0.45


class OutOfRangeError(ValueError):
    """The model was not calibrated for this case, and an answer would be a guess."""


@dataclass(frozen=True)
class Prediction:
    """Time and memory that a case will take.

    ms: the median expected; low_ms, high_ms: 90% of measurements are expected between them.
    peak_memory_bytes: beyond the inputs; None on a CPU, and where no formula is known.
    because: in words: what the time consists of, and what it rests on.
    from_specification: True where the device was not measured.
    """

    ms: float
    low_ms: float
    high_ms: float
    peak_memory_bytes: int | None
    because: str
    from_specification: bool = False

    def __str__(self) -> str:
        low, high = format_ms(self.low_ms), format_ms(self.high_ms)
        return f"{format_ms(self.ms)} ms (90%: {low}-{high}); {self.because}"


def predict(case: Case, model: Model) -> Prediction:
    """Time and peak memory of a case on the model's device.

    Args:
        case: backend, shape, dtype, direction.
        model: as `calibrate_run` or `transfer` gives it.

    Raises:
        OutOfRangeError: a backend, dtype, direction or head_dim that was not calibrated, or a
            sequence more than four times as long as the longest that was, or as short as the
            shortest.

    >>> from labsupport.profiling import Case
    >>> model, _ = calibrate_run("attention-h200")
    >>> case = Case("sdpa_cudnn", 4096, batch=4, heads=16, dtype="bfloat16")
    >>> soon = predict(case, model)
    >>> soon.low_ms < soon.ms < soon.high_ms
    True
    """
    key = (case.backend, case.dtype, case.direction)
    fit, name = model.fits.get(key), model.device.name
    if fit is None:
        raise OutOfRangeError(f"{' '.join(key)} is not calibrated for {name}")
    if case.head_dim not in fit.head_dims:
        known = ", ".join(map(str, fit.head_dims))
        raise OutOfRangeError(
            f"head_dim {case.head_dim} is not calibrated for {case.backend} on {name}; there are: "
            f"{known}"
        )
    low, high = fit.seqlens
    for what, length in (("seqlen", case.seqlen), ("kv_seqlen", case.kv_seqlen)):
        if not low / LENGTHS_BEYOND <= length <= high * LENGTHS_BEYOND:
            raise OutOfRangeError(
                f"{what} {length} is too far from the lengths calibrated for {case.backend} on "
                f"{name}, {low} to {high}: at most {LENGTHS_BEYOND} times"
            )
    parts = features(case, model.device)
    ms = fit.ms(parts)
    factor = math.exp(NINETY_PERCENT * model.spread)
    memory = peak_memory(case, model.device.units) if model.device.kind == "cuda" else None
    rests = "by specification alone" if model.device.specified else f"{fit.cases} cases calibrated"
    shares = {name: weight * parts[name] / ms for name, weight in fit.weights.items()}
    largest = sorted(shares, key=lambda name: -shares[name])
    text = ", ".join(f"{shares[n]:.0%} {_WORDS[n]}" for n in largest if shares[n] >= 0.005)
    at_once = ", partly overlapped" if sum(shares.values()) > 1.02 else ""
    because = f"{text}{at_once} ({rests})"
    return Prediction(ms, ms / factor, ms * factor, memory, because, model.device.specified)


def transfer(model: Model, gpu: str) -> Model:
    """The same weights on a GPU of data/hardware.csv that was not measured (theory, chapter 8).

    Backends that need a newer GPU or a dtype without tensor cores there are left out.

    Raises:
        ValueError: a GPU that is not in the table, or a model of a CPU.

    >>> model, _ = calibrate_run("attention-h200")
    >>> transfer(model, "A100 SXM 80 GB").device.name
    'A100 SXM 80 GB'
    """
    source, target = model.device, device_from_specification(gpu, model.device)
    refusals = {key: _refusal(key, target) for key in model.fits}
    same = source.compute_capability[0] == target.compute_capability[0]
    wider = SAME_GENERATION if same else OTHER_GENERATION
    own = find_spec(source.name)
    if own is not None and own.name == target.name:
        wider = 0.0
    return replace(
        model,
        device=target,
        fits={key: fit for key, fit in model.fits.items() if not refusals[key]},
        spread=math.hypot(model.spread, wider),
        left_out={key[0]: why for key, why in refusals.items() if why},
    )


def _refusal(key: tuple[str, str, str], device: Device) -> str:
    """Return the reason why a backend cannot run in a dtype on a GPU; empty if it can."""
    name, dtype, _ = key
    if dtype not in device.matmul_tflops:
        return f"no rate is specified for {dtype} on {device.name}"
    limits = by_name(name).limits
    needed = limits.min_capability
    if dtype == "bfloat16":
        needed = max(needed, limits.min_capability_bfloat16)
    if device.compute_capability < needed:
        return f"needs compute capability {version(needed)}"
    return ""


_WORDS = {
    "launch": "launching",
    "tiles": "launching tiles",
    "matmul": "matrix products",
    "exp": "exponentials",
    "memory": "reading and writing",
    "scores": "moving the scores",
    "spill": "moving scores beyond the cache",
    "mask": "masking",
    "edge": "the causal edge",
}
