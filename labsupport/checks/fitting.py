"""Checks of exercise 4-4: a predictor of times, fitted to some rows and judged on others.

time = start + work / rate:  ms = start_ms + flops / (tflops * 1e9)

fit_time(flops, ms) -> (start_ms, tflops)

flops, ms: numpy arrays (n,) of float64. The pair of numbers with the least sum of squares of
*relative* errors, (predicted - measured) / measured: short calls count as much as long ones.

predict_time(flops, start_ms, tflops) -> ms

flops: a number, or a numpy array (n,); so is the result.

held_out_error(table) -> (start_ms, tflops, error)

table: a DataFrame with the columns flops, median_ms, status ("ok", or why there is no time, and
then median_ms is NaN) and held_out (bool). Only rows with status "ok" count. Fit the rows that
are not held out; error is the mean of |predicted - measured| / measured over those that are, a
fraction. The table is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from labsupport.checks.counting_numbers import (
    Numbers,
    explanation,
    first_wrong,
    kind,
    number,
    numbers,
)
from labsupport.checks.fitting_mistakes import (
    FIT_MISTAKES,
    PREDICT_MISTAKES,
    TEST_MISTAKES,
    fit_time,
    fitted_with,
    predict_time,
    tested_with,
    time_with,
)
from labsupport.checks.verdict import CheckFailed, call, passed

if TYPE_CHECKING:
    import pandas as pd

FITTED = ("start_ms", "tflops")
TESTED = ("start_ms", "tflops", "error")
CLOSE = 1e-3  # fits by iteration end near the minimum, not at it


def held_out_error(table: pd.DataFrame) -> tuple[float, float, float]:
    """start_ms, tflops, and the mean relative error on held-out rows; see the top of this file."""
    start, rate, error = tested_with(table, "")
    return start, rate, error


def check_fit(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-4 (a): start and rate from times with noise of 5%.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    draw = np.random.default_rng(seed)
    cases = [_measured(draw, rows=10, noise=noise) for noise in (0.0, 0.05, 0.05, 0.08)]
    given = [numbers(call(student, flops.copy(), ms.copy()), FITTED) for flops, ms in cases]
    right = [fit_time(*case) for case in cases]
    i = first_wrong(given, right, CLOSE)
    if i is not None:
        said = explanation(
            given, FIT_MISTAKES, lambda m: [fitted_with(*case, m) for case in cases], CLOSE
        )
        off = [name for name, a, b in zip(FITTED, given[i], right[i], strict=True)
               if not abs(a - b) <= CLOSE * abs(b)]  # fmt: skip
        ours = (
            f"{' and '.join(off)} {'are' if len(off) > 1 else 'is'} off: the least relative errors "
            f"are at {right[i][0]:.4g} ms and {right[i][1]:.4g} TFLOP/s."
        )
        raise CheckFailed(
            f"from {len(cases[i][0])} times you fit start_ms {given[i][0]:.4g} and tflops "
            f"{given[i][1]:.4g}. {said or ours}"
        )
    passed("start and rate with the least relative errors", seed)


def check_predict(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-4 (b): a time from work, start and rate; of a number, and of an array.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    draw = np.random.default_rng(seed)
    cases = [(10 ** draw.uniform(8, 13), draw.uniform(0.01, 9), draw.uniform(1, 900))
             for _ in range(6)]  # fmt: skip
    given = [(number(call(student, *case), "the time"),) for case in cases]
    right = [(predict_time(*case),) for case in cases]
    if (i := first_wrong(given, right)) is not None:
        said = explanation(
            given, PREDICT_MISTAKES, lambda m: [time_with(*case, m) for case in cases]
        )
        flops, start, rate = cases[i]
        raise CheckFailed(
            f"for {flops:.3g} FLOPs, start_ms {start:.3g} and {rate:.3g} TFLOP/s you return "
            f"{given[i][0]:.4g} ms. {said or f'{right[i][0]:.4g} is right.'}"
        )
    work = np.array([case[0] for case in cases])
    many = call(student, work.copy(), 0.5, 100.0)
    wanted = predict_time(work, 0.5, 100.0)
    if np.shape(many) != work.shape:
        raise CheckFailed(
            f"for an array of {len(work)} FLOPs you return {kind(many)}: one time for each was "
            "expected. Plain arithmetic does numbers and arrays."
        )
    try:
        many = np.asarray(many, dtype=float)
    except (TypeError, ValueError):
        raise CheckFailed(
            "for an array of FLOPs you return an array, but not of numbers."
        ) from None
    if not np.allclose(many, wanted, rtol=1e-6):
        raise CheckFailed("for an array of FLOPs other times come back than for each alone.")
    passed("a time from work, start and rate", seed)


def check_held_out(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-4 (c): fitted on some rows, judged on others, which the fit never sees.

    Raises:
        CheckFailed: naming the likely mistake, or that held-out times changed the fit.
    """
    draw = np.random.default_rng(seed)
    tables = [_table(draw) for _ in range(4)]
    answers = []
    for table in tables:
        theirs = table.copy()
        answers.append(_answer(student, theirs))
        if not theirs.equals(table):
            raise CheckFailed("the table was changed: work on table.copy(), or on columns of it.")
    right = [held_out_error(table) for table in tables]
    for i, table in enumerate(tables):
        changed = table.copy()
        factor = draw.uniform(2, 6, len(table))
        changed.loc[changed.held_out, "median_ms"] *= factor[changed.held_out]
        again = _answer(student, changed.copy())
        if first_wrong([again[:2]], [answers[i][:2]], 1e-6) is not None:
            said = explanation(
                answers, TEST_MISTAKES, lambda m: [tested_with(t, m) for t in tables], CLOSE
            )
            raise CheckFailed(
                "the check changed the times of held-out rows, and start_ms or tflops changed: "
                "your fit looks at them. " + (said or "Fit the rows where held_out is False.")
            )
    i = first_wrong(answers, right, CLOSE)
    if i is not None:
        known = {**TEST_MISTAKES, "absolute": FIT_MISTAKES["absolute"]}
        said = explanation(answers, known, lambda m: [tested_with(t, m) for t in tables], CLOSE)
        ours = ", ".join(f"{n} {x:.4g}" for n, x in zip(TESTED, right[i], strict=True))
        theirs = ", ".join(f"{n} {x:.4g}" for n, x in zip(TESTED, answers[i], strict=True))
        raise CheckFailed(f"you return {theirs}. {said or f'Right is {ours}.'}")
    passed("fitted on some rows, judged on the others", seed)


def _answer(student: Callable[..., Any], table: pd.DataFrame) -> Numbers:
    """What the student returns; who stumbles over rows without a time is told so."""
    try:
        return numbers(call(student, table), TESTED)
    except CheckFailed as problem:
        first = problem
    try:
        numbers(call(student, table[table.status == "ok"].copy()), TESTED)
    except CheckFailed:
        raise first from None
    reason = str(first).split("\n")[0]
    raise CheckFailed(
        f'some rows have no time: median_ms is NaN, and status is not "ok". Leave them out first; '
        f"without them your function works. ({reason})"
    )


def _measured(
    draw: np.random.Generator, rows: int, noise: float, rate: float = 0.0, start: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Times from a microsecond's work to a second's, with noise that grows with the time."""
    rate, start = rate or draw.uniform(100, 700), start or draw.uniform(0.02, 0.2)
    flops = 10 ** np.linspace(9, 14, rows) * draw.uniform(0.5, 2, rows)
    draw.shuffle(flops)
    ms = predict_time(flops, start, rate) * np.exp(noise * draw.standard_normal(rows))
    return flops, ms


def _table(draw: np.random.Generator) -> pd.DataFrame:
    """Rows of both sides in any order, with an index that does not count from 0."""
    import pandas as pd

    flops, ms = _measured(draw, rows=24, noise=0.08)
    held_out = np.arange(24) % 3 == 1
    status = np.where(np.arange(24) % 8 == 5, "out of memory", "ok")
    table = pd.DataFrame({"flops": flops, "median_ms": ms, "status": status, "held_out": held_out})
    # Held-out shapes are a little slower: who fits them gets other numbers.
    table.loc[table.held_out, "median_ms"] *= draw.uniform(1.0, 1.3, int(held_out.sum()))
    table.loc[table.status != "ok", "median_ms"] = np.nan
    return table.sample(frac=1, random_state=int(draw.integers(1000)))
