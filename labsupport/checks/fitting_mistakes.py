"""The fit of exercise 4-4, what typical wrong solutions compute, and what to say of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from labsupport.checks.counting_numbers import Numbers

if TYPE_CHECKING:
    import pandas as pd

FIT_MISTAKES = {
    "absolute": (
        "You minimise errors in ms: the longest calls decide alone, and the start drowns in their "
        "noise. Divide each error by the measured time: numpy.polyfit with w=1 / ms, or least "
        "squares of the rows (1 / ms, flops / ms) against 1."
    ),
    "squared weights": (
        "You divide by ms**2. Weights (also those of numpy.polyfit) multiply an error *before* it "
        "is squared: 1 / ms."
    ),
    "square roots": (
        "You divide by the square root of ms. Weights (also those of numpy.polyfit) multiply an "
        "error *before* it is squared: 1 / ms."
    ),
    "no start": "There is no start: your line goes through 0. Fit both numbers.",
    "smallest time": (
        "start_ms is the shortest time measured. That call did some work, too: fit both numbers."
    ),
    "two points": "You draw the line through two rows. The others know something, too: fit all.",
    "mean rate": "tflops is the mean of flops / ms, and the start is in it. Fit both numbers.",
    "swapped": "The two values are swapped: return start_ms, tflops.",
    "slope": "The second value is the slope, a time for work. The rate is 1 over it.",
    "FLOP/s": "The rate is in FLOP/s: divide by 1e12.",
    "GFLOP/s": "The rate is in GFLOP/s: divide by 1e3.",
    "FLOP/ms": "The rate is in FLOPs a millisecond: divide by 1e9.",
    "seconds": "start_ms is in seconds.",
    "microseconds": "start_ms is in microseconds.",
}
PREDICT_MISTAKES = {
    "no start": "start_ms is missing.",
    "seconds": "A millisecond has 1e-3 s, a TFLOP 1e12 FLOPs: flops / tflops / 1e9 is in ms.",
    "seconds in part": "The work's time is in seconds, start_ms in ms.",
    "multiplied": "Divide by the rate.",
    "maximum": "The two times add up: first the start, then the work.",
}
TEST_MISTAKES = {
    "all fitted": (
        "The held-out rows were fitted, too: an error on rows that the fit has seen says nothing "
        "about others."
    ),
    "sides swapped": "You fit the held-out rows and test the others: it is the other way round.",
    "calibration error": (
        "That is the error on the rows that were fitted. Ask the rows that are held out."
    ),
    "error of all": "That is the error on all rows. Ask only those that are held out.",
    "relative to predicted": "Divide by the measured time, not by the predicted one.",
    "signed": (
        "Errors of both signs cancel: take absolute values before the mean. (It is the bias.)"
    ),
    "squared": "That is the mean of the squares; take absolute values.",
    "root": "That is the root of the mean square; take the mean of absolute values.",
    "largest": "That is the largest error; return the mean.",
    "median": "That is the median of the errors; return the mean.",
    "in ms": "That is in ms: divide each error by the measured time.",
    "of sums": (
        "You divide the sum of the errors by the sum of the times: the longest calls decide alone. "
        "Divide each one by its own time, then take the mean."
    ),
    "percent": "That is in percent; return a fraction.",
}


def fit_time(flops: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """start_ms and tflops with the least relative errors; see `fitting`."""
    slope, start = np.polyfit(np.asarray(flops) / 1e9, ms, 1, w=1 / np.asarray(ms))
    return float(start), float(1 / slope)


def predict_time(flops: Any, start_ms: float, tflops: float) -> Any:
    """Milliseconds; see `fitting`."""
    return start_ms + flops / tflops / 1e9


def fitted_with(flops: np.ndarray, ms: np.ndarray, mistake: str) -> Numbers:
    """start_ms and tflops, with one mistake."""
    start, rate = fit_time(flops, ms)
    x, power = flops / 1e9, {"absolute": 0, "squared weights": 2, "square roots": 0.5}.get(mistake)
    if power is not None:
        slope, start = np.polyfit(x, ms, 1, w=ms**-power)
        return float(start), float(1 / slope)
    if mistake == "two points":
        low, high = x.argmin(), x.argmax()
        slope = (ms[high] - ms[low]) / (x[high] - x[low])
        return float(ms[low] - slope * x[low]), float(1 / slope)
    return {
        "no start": (0.0, float(((x / ms) ** 2).sum() / (x / ms).sum())),
        "smallest time": (float(ms.min()), rate),
        "mean rate": (start, float((x / ms).mean())),
        "swapped": (rate, start),
        "slope": (start, 1 / rate),
        "FLOP/s": (start, rate * 1e12),
        "GFLOP/s": (start, rate * 1e3),
        "FLOP/ms": (start, rate * 1e9),
        "seconds": (start / 1e3, rate),
        "microseconds": (start * 1e3, rate),
    }[mistake]


def time_with(flops: float, start: float, rate: float, mistake: str) -> Numbers:
    """The time in ms, with one mistake."""
    work = flops / rate / 1e9
    return (
        {
            "no start": work,
            "seconds": (start + work) / 1e3,
            "seconds in part": start + work / 1e3,
            "multiplied": start + flops * rate / 1e9,
            "maximum": max(start, work),
        }[mistake],
    )


def tested_with(table: pd.DataFrame, mistake: str) -> Numbers:
    """start_ms, tflops and error, with one mistake; right without."""
    ok = table[table.status == "ok"]
    fitted, tested = ok[~ok.held_out], ok[ok.held_out]
    fitted = {"all fitted": ok, "sides swapped": tested}.get(mistake, fitted)
    asked = {"sides swapped": ok[~ok.held_out], "calibration error": ok[~ok.held_out]}
    asked["error of all"] = ok
    tested = asked.get(mistake, tested)
    flops, ms = fitted.flops.to_numpy(), fitted.median_ms.to_numpy()
    start, rate = (
        fitted_with(flops, ms, "absolute") if mistake == "absolute" else fit_time(flops, ms)
    )
    predicted = predict_time(tested.flops.to_numpy(), start, rate)
    measured = tested.median_ms.to_numpy()
    off = predicted - measured
    relative = off / measured
    errors = {
        "relative to predicted": lambda: np.abs(off / predicted).mean(),
        "signed": lambda: np.mean(relative),
        "squared": lambda: np.square(relative).mean(),
        "root": lambda: np.square(relative).mean() ** 0.5,
        "largest": lambda: np.abs(relative).max(),
        "median": lambda: np.median(np.abs(relative)),
        "in ms": lambda: np.abs(off).mean(),
        "of sums": lambda: np.abs(off).sum() / measured.sum(),
        "percent": lambda: 100 * np.abs(relative).mean(),
    }
    error = errors.get(mistake, lambda: np.abs(relative).mean())()
    return start, rate, float(error)
