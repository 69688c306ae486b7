"""Exercise 4-4: a predictor of times, fitted to some rows and judged on others.

time = start + work / rate:  ms = start_ms + flops / (tflops * 1e9)

fit_time(flops, ms) -> (start_ms, tflops)

flops, ms: numpy arrays (n,) of float64. The pair of numbers with the least sum of squares of
*relative* errors, (predicted - measured) / measured: short calls count as much as long ones.

predict_time(flops, start_ms, tflops) -> ms is given.

held_out_error(table) -> (start_ms, tflops, error)

table: a DataFrame with the columns flops, median_ms, status ("ok", or why there is no time, and
then median_ms is NaN) and held_out (bool). Only rows with status "ok" count. Fit the rows that
are not held out; error is the mean of |predicted - measured| / measured over those that are, a
fraction. The table is left as it is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import Student, call, judge_numbers, mistakes, number, passed, values

if TYPE_CHECKING:
    import pandas as pd

FITTED, TESTED = ("start_ms", "tflops"), ("start_ms", "tflops", "error")
CLOSE = 1e-3  # fits by iteration end near the minimum, not at it


### BEGIN SOLUTION
def fit_time(flops: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """Return start_ms and tflops with the least relative errors; see the top of this file.

    >>> import numpy as np
    >>> start_ms, tflops = fit_time(np.array([1e9, 2e9, 4e9]), np.array([1.5, 2.5, 4.5]))
    >>> round(start_ms, 6), round(tflops, 6)
    (0.5, 1.0)
    """
    work = flops / 1e9
    slope, start_ms = np.polyfit(work, ms, 1, w=1 / ms)
    return float(start_ms), float(1 / slope)


FIT_MISTAKES = mistakes(r"""
You minimise errors in ms, so the longest calls decide alone. Divide each error by the measured
time: numpy.polyfit with w=1 / ms, or least squares of the rows (1 / ms, flops / ms) against 1.
    , w=1 / ms ->
You divide by ms**2. numpy.polyfit applies weights *before* squaring: 1 / ms.
    w=1 / ms -> w=1 / ms**2
There is no start: your line goes through 0. Fit both numbers.
    np.polyfit(work, ms, 1, w=1 / ms) -> (work / ms).sum() / ((work / ms) ** 2).sum(), 0
start_ms is the shortest time measured. That call did some work, too: fit both numbers.
    float(start_ms) -> float(ms.min())
start_ms is 0, but the rate is that of a fit with a start: return both of its numbers.
    float(start_ms) -> 0.0
start_ms is in seconds: a second has 1e3 ms.
    float(start_ms) -> float(start_ms) / 1e3
The two values are swapped: return start_ms, tflops.
    float(start_ms), float(1 / slope) -> float(1 / slope), float(start_ms)
The rate is in FLOP/s: divide by 1e12.
    1 / slope -> 1e12 / slope
The rate is in FLOPs a millisecond: divide by 1e9, since a TFLOP is 1e12 FLOPs and a second 1e3 ms.
    1 / slope -> 1e9 / slope
The rate is in TFLOPs a millisecond: a second has 1e3 of them.
    1 / slope -> 1e-3 / slope
That is the slope, the ms of 1e9 FLOPs. The rate is its inverse, 1 / slope.
    1 / slope -> slope
""")


def predict_time(flops: Any, start_ms: float, tflops: float) -> Any:
    """Return milliseconds; see the top of this file.

    >>> predict_time(2e9, start_ms=0.5, tflops=1.0)
    2.5
    """
    return start_ms + flops / tflops / 1e9


def held_out_error(table: pd.DataFrame) -> tuple[float, float, float]:
    """Return start_ms, tflops, and the mean relative error on held-out rows.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"flops": [1e9, 2e9, 4e9], "median_ms": [1.5, 2.5, 4.5]})
    >>> table = table.assign(status="ok", held_out=[False, False, True])
    >>> held_out_error(table)[2] < 1e-9
    True
    """
    ran = table[table.status == "ok"]
    seen, unseen = ran[~ran.held_out], ran[ran.held_out]
    start, rate = fit_time(seen.flops.to_numpy(), seen.median_ms.to_numpy())
    predicted, measured = predict_time(unseen.flops, start, rate), unseen.median_ms
    error = ((predicted - measured).abs() / measured).mean()
    return start, rate, float(error)


TEST_MISTAKES = mistakes("""
That is the error on the fitted rows. Take the held-out rows.
    ran[ran.held_out] -> ran[~ran.held_out]
That is the error on all rows. Take only the held-out ones.
    ran[ran.held_out] -> ran
`error` is a fraction, not a percentage: 0.05 means 5%.
    float(error) -> 100 * float(error)
That is the root of the mean square. Take the mean of the absolute errors.
    .abs() / measured).mean() -> / measured).pow(2).mean() ** 0.5
That is the median of the errors. Take their mean.
    .mean() -> .median()
That is the largest error. Take the mean.
    .mean() -> .max()
Divide by the measured time, not by the predicted one.
    / measured) -> / predicted)
Errors of both signs cancel: take absolute values before the mean. (It is the bias.)
    .abs() ->
That is in ms: divide each error by the measured time.
    .abs() / measured -> .abs()
You divide the sum of the errors by the sum of the times: the longest calls decide alone. Divide
each one by its own time, then take the mean.
    .abs() / measured).mean() -> .abs().sum() / measured.sum())
""")
### END SOLUTION


def check_fit(student: Student, seed: int = 0) -> None:
    """Exercise 4-4 (a): start and rate from times with noise of 5%."""
    rng = np.random.default_rng(seed)
    cases = [_measured(rng, rows=10, noise=noise) for noise in (0.0, 0.05, 0.05, 0.08)]
    judge_numbers(student, cases, fit_time, FIT_MISTAKES, FITTED, close=CLOSE)
    passed("start and rate with the least relative errors", seed)


def check_held_out(student: Student, seed: int = 0) -> None:
    """Exercise 4-4 (b): fitted on some rows, judged on others, which the fit never sees.

    Raises:
        CheckFailed: names the likely mistake, or says that held-out times changed the fit.
    """
    rng = np.random.default_rng(seed)
    tables = [_table(rng) for _ in range(4)]
    for table in tables:
        changed = table.copy()
        factor = rng.uniform(2, 6, len(table))
        changed.loc[changed.held_out, "median_ms"] *= factor[changed.held_out]
        if not np.allclose(_answer(student, changed)[:2], _answer(student, table)[:2], rtol=1e-6):
            raise CheckFailed(
                "the check changed the times of held-out rows, and start_ms or tflops changed: "
                "your fit looks at them. Fit the rows where held_out is False, and test the others."
            )
    cases = [(table,) for table in tables]
    answer = partial(_answer, student)
    judge_numbers(answer, cases, held_out_error, TEST_MISTAKES, TESTED, close=CLOSE)
    passed("fitted on some rows, judged on the others", seed)


def _answer(student: Student, table: pd.DataFrame) -> tuple[float, ...]:
    """Return the student's numbers for a copy of the table, which must stay as it is."""
    theirs = table.copy()
    try:
        found = values(call(student, theirs), TESTED)
    except CheckFailed as problem:
        if "LinAlgError" in str(problem):
            say = 'Rows whose status is not "ok" have no time (NaN): drop them before you fit.'
            raise CheckFailed(f"{say} {problem}") from None
        raise
    if not theirs.equals(table):
        raise CheckFailed("the table was changed: work on table.copy(), or on columns of it.")
    return tuple(number(value, name) for value, name in zip(found, TESTED, strict=True))


def _measured(rng: np.random.Generator, rows: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return work and times from a microsecond to a second, with noise in proportion."""
    rate, start = rng.uniform(100, 700), rng.uniform(0.02, 0.2)
    flops = 10 ** np.linspace(9, 14, rows) * rng.uniform(0.5, 2, rows)
    rng.shuffle(flops)
    ms = predict_time(flops, start, rate) * np.exp(noise * rng.standard_normal(rows))
    return flops, ms


def _table(rng: np.random.Generator) -> pd.DataFrame:
    """Return rows of both sides in any order, with an index that does not count from 0."""
    import pandas as pd

    flops, ms = _measured(rng, rows=24, noise=0.08)
    held_out = np.arange(24) % 3 == 1
    status = np.where(np.arange(24) % 8 == 5, "out of memory", "ok")
    table = pd.DataFrame({"flops": flops, "median_ms": ms, "status": status, "held_out": held_out})
    # Held-out shapes are a little slower: a fit of all rows gives other numbers.
    table.loc[table.held_out, "median_ms"] *= rng.uniform(1.0, 1.3, int(held_out.sum()))
    table.loc[table.status != "ok", "median_ms"] = np.nan
    return table.sample(frac=1, random_state=int(rng.integers(1000)))
