"""Time and memory of a call, predicted from a device's ceilings and a short calibration.

For each (backend, dtype, direction)

    work(case)     = w_matmul * matmul(case) + w_memory * memory(case) + ...          w >= 0
    starting(case) = w_launch + w_tiles * tiles(case)
    t(case)        = (starting^p + work^p)^(1/p)

with the features of `work` (theory, chapter 8). On a CPU p = 1, a sum; on a GPU, which works while
Python starts the next kernel, p = 2. Each equation is divided by the measured time and by what that
time is worth: `MODEL_ERROR` and the measurement's own relative spread, added as variances. Peak
memory is the results, whose size is known, and a multiple of them and of the score matrix.

`python -m benchmarks predictor --save NAME` records a run to calibrate on.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from labsupport.analysis.work import Device, features, tensor_bytes
from labsupport.attention.implementations import by_name, version
from labsupport.profiling.grids import ITEMSIZE, Case, case_of
from labsupport.profiling.hardware import find_spec, read_specs
from labsupport.profiling.runs import list_runs, load_run, runs_dir
from labsupport.profiling.units import format_ms

CPU_CACHE_MIB = 32.0  # of a CPU whose run does not say
# What the model itself is taken to be off by: measurements better than this are not worth more.
MODEL_ERROR = 0.05
# The p above, on a GPU. Calibration shapes called from Python: 2 is 3.3% off, 1 is 3.7% off.
OVERLAP = 2.0
SMALLEST_SPREAD = 0.02  # however well a few cases are fitted
# 90% of a normal distribution lie within 1.645 standard deviations, half of it within 0.6745.
NINETY_PERCENT, HALF = 1.645, 0.6745
# How far beyond the calibrated lengths a prediction is still given.
LENGTHS_BEYOND = 4
# Standard deviation of log(time) on a GPU that was only specified: of the calibrated generation,
# and of another, whose kernels reach a different share of its tensor cores. The second is wide for
# a reason: the same kernels reach 50% to 73% of an A100's peak (FlashAttention-2 paper, abstract)
# and 35% of an H100's (FlashAttention-3 paper, abstract). Both are judgements, not fits.
SAME_GENERATION, OTHER_GENERATION = 0.15, 0.45

# --- shapes that calibrate, and shapes that are tested -------------------------------------------


@dataclass(frozen=True)
class Split:
    """Calibration shapes of a run: lengths, and forms (batch, heads, kv_heads); None is any.

    column: the run's time: median_ms; or call_ms, calls from Python of a run whose median_ms comes
        from CUDA graphs.
    """

    seqlens: tuple[int, ...]
    forms: tuple[tuple[int, int, int], ...] | None = None
    column: str = "median_ms"

    def calibrates(self, case: Case) -> bool:
        """Return whether the case may be seen while weights are fitted."""
        form = case.batch, case.heads, case.kv_heads
        return case.seqlen in self.seqlens and (self.forms is None or form in self.forms)


# Written down before anything is fitted. Of a run's lengths the shortest, the middle and the
# longest calibrate, in both masks; the others are tested. On the CPU a larger batch and grouped
# heads are tested at every length and never calibrate. Held-out errors were used once to change the
# model: attention-h200, first split at 2048, showed that launches overlap with work. The run was
# then split again at its other middle length, and peers-h200:calls, which nobody had looked at,
# tested as well. The rule for the interval's width reads calibration shapes only, but was settled
# after its coverage on held-out shapes was known.
SPLITS = {
    "attention-h200": Split((512, 4096, 16_384)),
    "peers-h200": Split((512, 2048, 16_384)),
    "peers-h200:calls": Split((512, 2048, 16_384), column="call_ms"),
    "calibration-cpu": Split((128, 512, 2048), forms=((1, 4, 4),)),
}


def divide(name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split a recorded run into the rows that calibrate and those that are held out.

    Returns:
        its rows that ran, with columns added: case, ms (the time that the split names), spread
        (standard deviation of the repeats, as a fraction of the time).

    Raises:
        ValueError: no split is written for that name in `SPLITS`.
    """
    if name not in SPLITS:
        raise ValueError(f"no run {name!r} calibrates; these do: {', '.join(SPLITS)}")
    split = SPLITS[name]
    table = load_run(name.split(":")[0])
    table = table[table.status == "ok"]
    # The quartiles of a normal distribution lie 2 * 0.6745 standard deviations apart.
    spread = (table.q3_ms - table.q1_ms) / table.median_ms / 1.35
    cases: Any = [case_of(row) for row in table.to_dict("records")]
    table = table.assign(case=cases, ms=table[split.column], spread=spread)
    seen = table.case.map(split.calibrates).astype(bool)
    return table[seen].reset_index(drop=True), table[~seen].reset_index(drop=True)


# --- devices -------------------------------------------------------------------------------------


def device_of_run(run: str) -> Device:
    """Return the device that a recorded run was made on, with the ceilings measured there.

    Where the run's own provenance has no ceilings, they are the highest that other runs recorded on
    a device of the same name.

    Raises:
        FileNotFoundError: no such run.
        ValueError: no run on this device recorded its ceilings.
    """
    about = load_run(run).attrs["provenance"]
    name, spec = about["device"], find_spec(about["device"])
    units = about.get("units", spec.sms if spec else None)
    measured = [about]
    if "matmul_tflops" not in about:
        paths = (runs_dir() / run / "provenance.json" for run in list_runs())
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        measured = [run for run in runs if run.get("device") == name and "matmul_tflops" in run]
    if units is None or not measured:
        raise ValueError(f"no recorded run says what {name} reaches at most (measured_ceilings)")
    return Device(
        name=name,
        kind=about["device_kind"],
        units=units,
        copy_gb_s=max(ceilings["copy_gb_s"] for ceilings in measured),
        matmul_tflops=pd.DataFrame([run["matmul_tflops"] for run in measured]).max().to_dict(),
        memory_gib=about["device_memory_gib"],
        cache_mib=spec.l2_mib if spec else about.get("cache_mib", CPU_CACHE_MIB),
        compute_capability=_capability(about.get("compute_capability") or "0.0"),
    )


def device_from_specification(name: str, like: Device) -> Device:
    """Describe a GPU that need not be here by its row of data/hardware.csv.

    No device reaches its specification. This one is taken to reach the same share of it as `like`,
    a measured GPU of the table, reaches of its specification.

    Raises:
        ValueError: a name that is not in the table, or a `like` that is not.
    """
    known = {spec.name: spec for spec in read_specs()}
    spec, measured = known.get(name) or find_spec(name), find_spec(like.name)
    if spec is None:
        raise ValueError(f"{name!r} is not in data/hardware.csv; there are: {', '.join(known)}")
    if measured is None:
        raise ValueError(f"{like.name!r} is not in data/hardware.csv: nothing to compare it with")
    peaks = {n: (spec.peak_tflops(n), measured.peak_tflops(n)) for n in like.matmul_tflops}
    return Device(
        name=spec.name,
        kind="cuda",
        units=spec.sms,
        copy_gb_s=like.copy_gb_s * spec.bandwidth_gb_s / measured.bandwidth_gb_s,
        matmul_tflops={
            dtype: like.matmul_tflops[dtype] * peak / there
            for dtype, (peak, there) in peaks.items()
            if peak and there
        },
        memory_gib=spec.memory_gib,
        cache_mib=spec.l2_mib,
        compute_capability=_capability(spec.compute_capability),
        specified=True,
    )


def _capability(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


# --- the fit -------------------------------------------------------------------------------------

Key = tuple[str, str, str]  # backend, dtype, direction


@dataclass(frozen=True)
class Fit:
    """The weights of one (backend, dtype, direction), and the range they were fitted in.

    weights: by feature; those that the data do not need are 0.
    cases: how many were fitted.
    head_dims: calibrated ones.
    seqlens: the shortest and the longest calibrated sequence.
    overlap: the p of the norm that joins starting and work; 1 is their sum.
    memory: weights of `_memory`'s columns; None where no memory was measured.
    """

    weights: dict[str, float]
    cases: int
    head_dims: tuple[int, ...]
    seqlens: tuple[int, int]
    overlap: float = 1.0
    memory: tuple[float, ...] | None = None

    def ms(self, found: Mapping[str, float]) -> float:
        """Return the time of a case with these features."""
        parts = {name: weight * found[name] for name, weight in self.weights.items()}
        starting = parts.pop("launch") + parts.pop("tiles", 0.0)
        return (starting**self.overlap + sum(parts.values()) ** self.overlap) ** (1 / self.overlap)

    def peak_memory(self, case: Case) -> int | None:
        """Return the bytes at the peak beyond the inputs; None where none were measured."""
        if self.memory is None:
            return None
        results, others = _memory(case)
        return round(results + np.dot(others, self.memory))


@dataclass(frozen=True)
class CalibratedModel:
    """Everything that predicts on one device: its ceilings, and a fit for each (backend, ...).

    spread: standard deviation of log(measured / predicted), of all fits together: six cases say
        little about a spread of their own.
    left_out: why a backend cannot run on a device to which the model was transferred.
    """

    device: Device
    fits: dict[Key, Fit]
    spread: float
    left_out: dict[str, str] = field(default_factory=dict)

    def backends(self, dtype: str, direction: str) -> list[str]:
        """Return the backends that are calibrated for a dtype and a direction."""
        return [key[0] for key in self.fits if key[1:] == (dtype, direction)]


def calibrate(table: pd.DataFrame, device: Device) -> CalibratedModel:
    """Fit all weights.

    Args:
        table: calibration measurements on `device`: the columns case, ms and spread of `divide`
            and, for a GPU, peak_memory_bytes where it was measured.

    Raises:
        ValueError: a (backend, dtype, direction) with fewer than three measurements.
    """
    keys = [(case.backend, case.dtype, case.direction) for case in table.case]
    groups = dict(iter(table.groupby(pd.Series(keys, index=table.index), sort=False)))
    few = [" ".join(key) for key, group in groups.items() if len(group) < 3]
    if few:
        raise ValueError(f"too few measurements, at least 3 are needed, of: {', '.join(few)}")
    fits = {key: _fit(group, device) for key, group in groups.items()}
    # The spread: each length between the shortest and the longest is left out once and predicted
    # from the rest (residuals would be too small; where no fit has three lengths they must do).
    # From the median of the absolute errors, so that one odd call does not widen every interval.
    errors, residuals = [], []
    for key, fit in fits.items():
        group, lengths = groups[key], groups[key].case.map(lambda case: case.seqlen)
        residuals += _errors(fit, group, device)
        for length in set(lengths) - set(fit.seqlens):
            if (lengths != length).sum() >= 3:
                without = _fit(group[lengths != length], device)
                errors += _errors(without, group[lengths == length], device)
    spread = max(float(np.median(errors or residuals)) / HALF, SMALLEST_SPREAD)
    return CalibratedModel(device, fits, spread)


def calibrate_run(run: str) -> tuple[CalibratedModel, pd.DataFrame]:
    """Return the model from a run's (see `SPLITS`) calibration shapes, and the held-out rows.

    Raises:
        ValueError: no such run.

    >>> model, held_out = calibrate_run("attention-h200")
    >>> "sdpa_flash" in model.backends("bfloat16", "forward")
    True
    """
    seen, held_out = divide(run)
    return calibrate(seen, device_of_run(run.split(":")[0])), held_out


def non_negative_least_squares(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> Any:
    """Return the x >= 0 that minimises |a x - b|, exactly: each set of positive entries is tried.

    With at most six columns these are 63 small systems. Columns are tried few at a time, and more
    are taken only where they lower the sum of squares.
    """
    columns = a.shape[1]
    best, best_error = np.zeros(columns), float(b @ b)
    for size in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), size)):
            x, *_ = np.linalg.lstsq(a[:, chosen], b, rcond=None)
            error = float(np.sum((a[:, chosen] @ x - b) ** 2))
            if (x > 0).all() and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(columns), error
                best[chosen] = x
    return best


def _fit(group: pd.DataFrame, device: Device) -> Fit:
    """Fit the weights of one group.

    With an overlap the launch is searched (100 steps up to the shortest time): for each, the rest
    is what the work must take, and the weights of the work are fitted. A row in which the launch
    hides the work says little about the work, and counts as much less.
    """
    times = group.ms.to_numpy(float)
    worth = MODEL_ERROR / np.hypot(MODEL_ERROR, group.spread.to_numpy(float))
    found = pd.DataFrame([features(case, device) for case in group.case])
    matrix = found.to_numpy()
    p = OVERLAP if device.kind == "cuda" and "tiles" not in found else 1.0
    best, best_error = np.zeros(matrix.shape[1]), np.inf
    if p == 1:
        best = non_negative_least_squares(matrix * (worth / times)[:, None], worth)
    for launch in np.linspace(0, times.min(), 101) if p > 1 else ():
        work = np.maximum(times**p - launch**p, (0.01 * times) ** p) ** (1 / p)
        counts = worth * (work / times) ** (p - 1) / times
        x = non_negative_least_squares(matrix[:, 1:] * counts[:, None], work * counts)
        fitted = (launch**p + (matrix[:, 1:] @ x) ** p) ** (1 / p)
        error = float(np.sum((worth * (fitted / times - 1)) ** 2))
        if error < best_error:
            best, best_error = np.array([launch, *x]), error
    memory = None
    if device.kind == "cuda" and "peak_memory_bytes" in group:
        peak = group.peak_memory_bytes.to_numpy(float)
        results, others = map(np.array, zip(*map(_memory, group.case), strict=True))
        x = non_negative_least_squares(others / peak[:, None], 1 - results / peak)
        memory = tuple(map(float, x))
    lengths = [case.seqlen for case in group.case]
    return Fit(
        weights=dict(zip(found.columns, map(float, best), strict=True)),
        cases=len(group),
        head_dims=tuple(sorted({case.head_dim for case in group.case})),
        seqlens=(min(lengths), max(lengths)),
        overlap=p,
        memory=memory,
    )


def _memory(case: Case) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the results, and counts whose multiples are held beside them.

    These are a tensor like q, the scores of all heads, one causal mask, and a tile for each head.
    Grouped keys are taken to be as many as the queries: some kernels write their gradients so.
    """
    of_q, of_kv = tensor_bytes(replace(case, kv_heads=case.heads))
    heads, pairs = case.batch * case.heads, case.seqlen * case.kv_seqlen
    results = of_q if case.direction == "forward" else 2 * of_q + of_kv
    return results, (of_q, heads * pairs * ITEMSIZE[case.dtype], case.causal * pairs, heads)


def _errors(fit: Fit, rows: pd.DataFrame, device: Device) -> list[float]:
    """Return the absolute logarithms of measured over predicted times."""
    predicted = [fit.ms(features(case, device)) for case in rows.case]
    return list(np.abs(np.log(rows.ms / predicted)))


# --- predictions ---------------------------------------------------------------------------------


class OutOfRangeError(ValueError):
    """The model was not calibrated for this case, and an answer would be a guess."""


@dataclass(frozen=True)
class Prediction:
    """Time and memory that a case will take.

    ms: the median expected; low_ms, high_ms: 90% of measurements are expected between them.
    peak_memory_bytes: beyond the inputs; None on a CPU, and where it was not calibrated.
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


def predict(case: Case, model: CalibratedModel) -> Prediction:
    """Predict time and peak memory of a case on the model's device.

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
    rests = "by specification alone" if model.device.specified else f"{fit.cases} cases calibrated"
    shares = {name: weight * parts[name] / ms for name, weight in fit.weights.items()}
    largest = sorted(shares, key=lambda name: -shares[name])
    text = ", ".join(f"{shares[n]:.0%} {_WORDS[n]}" for n in largest if shares[n] >= 0.005)
    overlap = ", partly overlapped" if sum(shares.values()) > 1.02 else ""
    return Prediction(
        ms,
        ms / factor,
        ms * factor,
        fit.peak_memory(case),
        f"{text}{overlap} ({rests})",
        model.device.specified,
    )


def with_predictions(held_out: pd.DataFrame, model: CalibratedModel) -> pd.DataFrame:
    """Add predicted_ms, low_ms, high_ms, predicted_bytes, and errors as fractions to the rows.

    error is (predicted - measured) / measured of the time; memory_error the same of the peak, NaN
    where a run did not measure it; covered says whether the interval holds the measured time. Cases
    that the model refuses to predict, as too far from those it has seen, are left out;
    `.attrs["refused"]` has the reason for each, by the row's index.
    """
    found, refused = {}, {}
    for index, case in held_out.case.items():
        try:
            found[index] = predict(case, model)
        except OutOfRangeError as error:
            refused[index] = str(error)
    table = held_out.loc[list(found)].copy()
    table["predicted_ms"] = [p.ms for p in found.values()]
    table["low_ms"] = [p.low_ms for p in found.values()]
    table["high_ms"] = [p.high_ms for p in found.values()]
    memory = [p.peak_memory_bytes for p in found.values()]
    table["predicted_bytes"] = np.array(memory, dtype=float)  # None is NaN
    table["error"] = table.predicted_ms / table.ms - 1
    table["covered"] = table.ms.between(table.low_ms, table.high_ms)
    table["memory_error"] = table.predicted_bytes / table.get("peak_memory_bytes", np.nan) - 1
    table.attrs["refused"] = refused
    return table


def transfer(model: CalibratedModel, gpu: str) -> CalibratedModel:
    """Carry the weights to a GPU of data/hardware.csv that was not measured (theory, chapter 8).

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


def _refusal(key: Key, device: Device) -> str:
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
