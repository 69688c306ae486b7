"""The backend for a workload, on a calibrated device or on a GPU known by specification only.

The fastest predicted one among those that run and fit; with the reasons, and what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from labsupport.analysis.predictor import CalibratedModel, OutOfRangeError, Prediction, predict
from labsupport.analysis.work import tensor_bytes
from labsupport.attention.implementations import Can, by_name
from labsupport.profiling.grids import Case
from labsupport.profiling.units import format_bytes, format_ms


@dataclass(frozen=True)
class Recommendation:
    """(backend, prediction) of those that run and fit, the fastest first; why each other is out."""

    ranking: tuple[tuple[str, Prediction], ...]
    excluded: dict[str, str]
    device: str

    @property
    def backend(self) -> str:
        """The choice."""
        return self.ranking[0][0]

    @property
    def prediction(self) -> Prediction:
        """The prediction of the choice."""
        return self.ranking[0][1]

    @property
    def close(self) -> list[str]:
        """Backends whose expected time is inside the choice's interval: measure these."""
        return [name for name, other in self.ranking[1:] if other.ms <= self.prediction.high_ms]

    def __str__(self) -> str:
        """Describe the choice: its cost, the second best, and the excluded backends."""
        first = self.prediction
        lines = [f"{self.backend} on {self.device}: the fastest predicted, {first}"]
        if first.peak_memory_bytes is not None:
            lines.append(f"It needs {format_bytes(first.peak_memory_bytes)} besides its inputs.")
        if len(self.ranking) > 1:
            name, other = self.ranking[1]
            times = other.ms / first.ms
            lines.append(f"Next: {name}, {format_ms(other.ms)} ms, {times:.2f} times as long.")
        if self.close:
            lines.append(f"Too close to call, measure them: {', '.join(self.close)}.")
        if first.from_specification:
            lines.append("No measurements of this device: predicted from its specification.")
        lines += [f"Not {name}: {why}." for name, why in self.excluded.items()]
        return "\n".join(lines)


def recommend(
    workload: Case, model: CalibratedModel, *, memory_gib: float | None = None
) -> Recommendation:
    """The backend that is predicted to be the fastest among those that run and fit.

    Args:
        workload: shape, dtype, direction; its `backend` is ignored.
        model: of the device; `transfer(model, gpu)` for one that is only specified.
        memory_gib: what there is for inputs and peak; by default what the device holds. A backend
            whose memory is not known is taken to fit.

    Raises:
        ValueError: memory_gib is not above 0.
        OutOfRangeError: no calibrated backend is left; the message says why each is out.

    Example:
        >>> model, _ = calibrate_run("attention-h200")
        >>> print(recommend(Case("any", 4096, batch=4, heads=16, dtype="bfloat16"), model))
    """
    if memory_gib is not None and not memory_gib > 0:
        raise ValueError(f"memory_gib is {memory_gib}, and must be above 0")
    device = model.device
    room = (device.memory_gib if memory_gib is None else memory_gib) * 2**30
    ranking: list[tuple[str, Prediction]] = []
    excluded = dict(model.left_out)
    for name in model.backends(workload.dtype, workload.direction):
        case = replace(workload, backend=name)
        try:
            refuse_unsupported(case)
            found = predict(case, model)
        except OutOfRangeError as problem:
            excluded[name] = str(problem)
            continue
        of_q, of_kv = tensor_bytes(case)  # a backward is also given the output's gradient
        inputs = of_q * (1 if case.direction == "forward" else 2) + of_kv
        needed = inputs + (found.peak_memory_bytes or 0)
        if needed > room:
            excluded[name] = f"needs {format_bytes(needed)}, there are {format_bytes(int(room))}"
        else:
            ranking.append((name, found))
    if not ranking:
        reasons = "; ".join(f"{name}: {why}" for name, why in excluded.items())
        raise OutOfRangeError(
            f"no backend is left for {workload.dtype}, {workload.direction} on {device.name}: "
            f"{reasons or 'none is calibrated'}"
        )
    ranking.sort(key=lambda pair: pair[1].ms)
    return Recommendation(tuple(ranking), excluded, device.name)


def refuse_unsupported(case: Case) -> None:
    """Raise OutOfRangeError if the backend does not take such inputs, by its limits."""
    limits = by_name(case.backend).limits
    features = {
        Can.GROUPED_HEADS: case.heads != case.kv_heads,
        Can.UNEQUAL_CAUSAL: case.causal and case.seqlen != case.kv_seqlen,
    }
    if limits.max_head_dim and case.head_dim > limits.max_head_dim:
        raise OutOfRangeError(f"takes head_dim up to {limits.max_head_dim}, not {case.head_dim}")
    if case.head_dim % limits.head_dim_multiple:
        raise OutOfRangeError(f"needs head_dim to be a multiple of {limits.head_dim_multiple}")
    for feature, needed in features.items():
        if needed and feature not in limits.can:
            raise OutOfRangeError(f"cannot do {feature.value}")
