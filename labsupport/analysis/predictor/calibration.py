"""Fit the weights: non-negative least squares on relative errors, and what is left over.

For each (backend, dtype, direction)

    work(case)     = w_matmul * matmul(case) + w_memory * memory(case) + ...          w >= 0
    starting(case) = w_launch + w_tiles * tiles(case)
    t(case)        = (starting^p + work^p)^(1/p)

with the features of `work` (theory, chapter 8). On a CPU p = 1, a sum; on a GPU, which works while
Python starts the next kernel, p = 2. Each equation is divided by the measured time and by what that
time is worth: `MODEL_ERROR` and the measurement's own relative spread, added as variances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from labsupport.analysis.predictor.device import Device, device_of_run
from labsupport.analysis.predictor.split import divide
from labsupport.analysis.predictor.work import features
from labsupport.profiling.grids import Case

if TYPE_CHECKING:
    import pandas as pd

# What the model itself is taken to be off by: measurements better than this are not worth more.
MODEL_ERROR = 0.05
# The p above, on a GPU. Calibration shapes called from Python: 2 is 3.3% off, 1 is 3.7% off.
OVERLAP = 2.0
SMALLEST_SPREAD = 0.02  # however well a few cases are fitted
STARTING = ("launch", "tiles")

Key = tuple[str, str, str]  # backend, dtype, direction
Measured = tuple[Case, float, float]  # time in ms, and its relative spread


@dataclass(frozen=True)
class Fit:
    """The weights of one (backend, dtype, direction), and the range they were fitted in.

    weights: by feature; those that the data do not need are 0.
    cases: how many were fitted.
    head_dims: calibrated ones.
    seqlens: the shortest and the longest calibrated sequence.
    overlap: the p of the norm that joins starting and work; 1 is their sum.
    """

    weights: dict[str, float]
    cases: int
    head_dims: tuple[int, ...]
    seqlens: tuple[int, int]
    overlap: float = 1.0

    def ms(self, found: Mapping[str, float]) -> float:
        """The time of a case with these features."""
        parts = {name: weight * found[name] for name, weight in self.weights.items()}
        starting = sum(part for name, part in parts.items() if name in STARTING)
        work = sum(part for name, part in parts.items() if name not in STARTING)
        return (starting**self.overlap + work**self.overlap) ** (1 / self.overlap)


@dataclass(frozen=True)
class Model:
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


def calibrate(
    cases: Iterable[Case],
    times_ms: Iterable[float],
    device: Device,
    *,
    spreads: Iterable[float] | None = None,
) -> Model:
    """Fit all weights.

    Args:
        cases, times_ms: calibration measurements on `device`.
        spreads: standard deviation of each one's repeats, as a fraction of its time; 0 if unknown.

    Raises:
        ValueError: a (backend, dtype, direction) with fewer than three measurements.
    """
    groups: dict[Key, list[Measured]] = {}
    cases = list(cases)
    known = [0.0] * len(cases) if spreads is None else spreads
    for case, ms, spread in zip(cases, times_ms, known, strict=True):
        key = (case.backend, case.dtype, case.direction)
        groups.setdefault(key, []).append((case, float(ms), float(spread)))
    few = [" ".join(key) for key, group in groups.items() if len(group) < 3]
    if few:
        raise ValueError(f"too few measurements, at least 3 are needed, of: {', '.join(few)}")
    fits = {key: _fit(group, device) for key, group in groups.items()}
    return Model(device, fits, _spread(fits, groups, device))


def calibrate_run(run: str) -> tuple[Model, pd.DataFrame]:
    """The model from a run's (see `SPLITS`) calibration shapes, and the rows that are held out.

    >>> model, held_out = calibrate_run("attention-h200")
    >>> "sdpa_flash" in model.backends("bfloat16", "forward")
    True
    """
    seen, held_out = divide(run)
    device = device_of_run(run.split(":")[0])
    return calibrate(seen.case, seen.ms, device, spreads=seen.spread), held_out


def non_negative_least_squares(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> Any:
    """The x >= 0 that minimises |a x - b|, exactly: every set of positive entries is tried.

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


def _fit(group: list[Measured], device: Device) -> Fit:
    """Fit the weights of one group.

    With an overlap the launch is searched (100 steps up to the shortest time): for each, the rest
    is what the work must take, and the weights of the work are fitted. A row in which the launch
    hides the work says little about the work, and counts as much less.
    """
    times = np.array([ms for _, ms, _ in group])
    worth = MODEL_ERROR / np.hypot(MODEL_ERROR, [spread for _, _, spread in group])
    found = [features(case, device) for case, _, _ in group]
    names = list(found[0])
    matrix = np.array([list(each.values()) for each in found])
    p = OVERLAP if device.kind == "cuda" and "tiles" not in names else 1.0
    best, best_error = np.zeros(len(names)), np.inf
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
    lengths = [case.seqlen for case, _, _ in group]
    return Fit(
        weights=dict(zip(names, map(float, best), strict=True)),
        cases=len(group),
        head_dims=tuple(sorted({case.head_dim for case, _, _ in group})),
        seqlens=(min(lengths), max(lengths)),
        overlap=p,
    )


def _spread(fits: Mapping[Key, Fit], groups: Mapping[Key, list[Measured]], device: Device) -> float:
    """Standard deviation of log(measured / predicted), over all fits together.

    Each length between the shortest and the longest is left out once and predicted from the rest
    (residuals would be too small; where no fit has three lengths they must do). From the median of
    the absolute errors, so that one odd call does not widen every interval.
    """

    def off(fit: Fit, rows: Iterable[Measured]) -> list[float]:
        return [abs(math.log(ms / fit.ms(features(case, device)))) for case, ms, _ in rows]

    errors, residuals = [], []
    for key, fit in fits.items():
        residuals += off(fit, groups[key])
        for length in {case.seqlen for case, _, _ in groups[key]} - set(fit.seqlens):
            rest = [row for row in groups[key] if row[0].seqlen != length]
            if len(rest) >= 3:
                errors += off(_fit(rest, device), [r for r in groups[key] if r[0].seqlen == length])
    return max(float(np.median(errors or residuals)) / 0.6745, SMALLEST_SPREAD)
