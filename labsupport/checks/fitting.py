"""Exercise 4-4: a predictor of times, fitted to some rows and judged on others.

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

from labsupport.checks.counting_numbers import Numbers, compare, first_wrong, kind, number, numbers
from labsupport.checks.verdict import CheckFailed, Mistake, call, passed

if TYPE_CHECKING:
    import pandas as pd

FITTED = ("start_ms", "tflops")
TESTED = ("start_ms", "tflops", "error")
CLOSE = 1e-3  # fits by iteration end near the minimum, not at it


def fit_time(flops: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """Return start_ms and tflops with the least relative errors; see the top of this file."""
    work = flops / 1e9
    slope, start_ms = np.polyfit(work, ms, 1, w=1 / ms)
    return float(start_ms), float(1 / slope)


def predict_time(flops: Any, start_ms: float, tflops: float) -> Any:
    """Return milliseconds; see the top of this file."""
    return start_ms + flops / tflops / 1e9


def held_out_error(table: pd.DataFrame) -> tuple[float, float, float]:
    """Return start_ms, tflops, and the mean relative error on held-out rows."""
    ran = table[table.status == "ok"]
    seen, unseen = ran[~ran.held_out], ran[ran.held_out]
    start, rate = fit_time(seen.flops.to_numpy(), seen.median_ms.to_numpy())
    predicted, measured = predict_time(unseen.flops, start, rate), unseen.median_ms
    error = ((predicted - measured).abs() / measured).mean()
    return start, rate, float(error)


_LINE = "slope, start_ms = np.polyfit(work, ms, 1, w=1 / ms)"
FIT_MISTAKES = (
    Mistake(
        (", w=1 / ms", ""),
        "You minimise errors in ms: the longest calls decide alone, and the start drowns in their "
        "noise. Divide each error by the measured time: numpy.polyfit with w=1 / ms, or least "
        "squares of the rows (1 / ms, flops / ms) against 1.",
    ),
    Mistake(
        ("w=1 / ms", "w=1 / ms**2"),
        "You divide by ms**2. numpy.polyfit applies weights *before* squaring: 1 / ms.",
    ),
    Mistake(
        ("w=1 / ms", "w=ms**-0.5"),
        "You divide by sqrt(ms). numpy.polyfit applies weights *before* squaring: 1 / ms.",
    ),
    Mistake(
        (_LINE, "start_ms, slope = 0, (work / ms).sum() / ((work / ms) ** 2).sum()"),
        "There is no start: your line goes through 0. Fit both numbers.",
    ),
    Mistake(
        ("float(start_ms)", "float(ms.min())"),
        "start_ms is the shortest time measured. That call did some work, too: fit both numbers.",
    ),
    Mistake(
        (
            _LINE,
            "a, b = work.argmin(), work.argmax()\n"
            "    slope = (ms[b] - ms[a]) / (work[b] - work[a])\n"
            "    start_ms = ms[a] - slope * work[a]",
        ),
        "You draw the line through two rows. The others know something, too: fit all.",
    ),
    Mistake(
        ("1 / slope", "(work / ms).mean()"),
        "tflops is the mean of flops / ms, and the start is in it. Fit both numbers.",
    ),
    Mistake(
        ("float(start_ms), float(1 / slope)", "float(1 / slope), float(start_ms)"),
        "The two values are swapped: return start_ms, tflops.",
    ),
    Mistake(
        ("1 / slope", "slope"),
        "The second value is the slope, a time for work. The rate is 1 over it.",
    ),
    Mistake(("1 / slope", "1e12 / slope"), "The rate is in FLOP/s: divide by 1e12."),
    Mistake(("1 / slope", "1e3 / slope"), "The rate is in GFLOP/s: divide by 1e3."),
    Mistake(("1 / slope", "1e9 / slope"), "The rate is in FLOPs a millisecond: divide by 1e9."),
    Mistake(("float(start_ms)", "float(start_ms) / 1e3"), "start_ms is in seconds."),
    Mistake(("float(start_ms)", "float(start_ms) * 1e3"), "start_ms is in microseconds."),
)
_TIME = "start_ms + flops / tflops / 1e9"
PREDICT_MISTAKES = (
    Mistake(("start_ms + flops", "flops"), "start_ms is missing."),
    Mistake(
        (_TIME, f"({_TIME}) / 1e3"),
        "A millisecond has 1e-3 s, a TFLOP 1e12 FLOPs: flops / tflops / 1e9 is in ms.",
    ),
    Mistake(("/ 1e9", "/ 1e12"), "The work's time is in seconds, start_ms in ms."),
    Mistake(("flops / tflops", "flops * tflops"), "Divide by the rate."),
    Mistake(
        (_TIME, "max(start_ms, flops / tflops / 1e9)"),
        "The two times add up: first the start, then the work.",
    ),
)
_ERROR = "((predicted - measured).abs() / measured).mean()"
TEST_MISTAKES = (
    Mistake(
        ("ran[~ran.held_out],", "ran,"),
        "The held-out rows were fitted, too: their error then says nothing about others.",
    ),
    Mistake(
        ("seen, unseen =", "unseen, seen ="),
        "You fit the held-out rows and test the others: it is the other way round.",
    ),
    Mistake(
        ("    predicted,", "    unseen = seen\n    predicted,"),
        "That is the error on the rows that were fitted. Ask the rows that are held out.",
    ),
    Mistake(
        ("    predicted,", "    unseen = ran\n    predicted,"),
        "That is the error on all rows. Ask only those that are held out.",
    ),
    Mistake(
        ("/ measured)", "/ predicted)"), "Divide by the measured time, not by the predicted one."
    ),
    Mistake(
        (".abs()", ""),
        "Errors of both signs cancel: take absolute values before the mean. (It is the bias.)",
    ),
    Mistake(
        (_ERROR, "((predicted / measured - 1) ** 2).mean()"),
        "That is the mean of the squares; take absolute values.",
    ),
    Mistake(
        (_ERROR, "((predicted / measured - 1) ** 2).mean() ** 0.5"),
        "That is the root of the mean square; take the mean of absolute values.",
    ),
    Mistake((".mean()", ".max()"), "That is the largest error; return the mean."),
    Mistake((".mean()", ".median()"), "That is the median of the errors; return the mean."),
    Mistake(
        (".abs() / measured", ".abs()"), "That is in ms: divide each error by the measured time."
    ),
    Mistake(
        (_ERROR, "(predicted - measured).abs().sum() / measured.sum()"),
        "You divide the sum of the errors by the sum of the times: the longest calls decide alone. "
        "Divide each one by its own time, then take the mean.",
    ),
    Mistake(("error = ", "error = 100 * "), "That is in percent; return a fraction."),
    Mistake(
        (
            "start, rate = fit_time(seen.flops.to_numpy(), seen.median_ms.to_numpy())",
            "slope, start = np.polyfit(seen.flops / 1e9, seen.median_ms, 1)\n    rate = 1 / slope",
        ),
        FIT_MISTAKES[0].say,
    ),
)


def check_fit(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-4 (a): start and rate from times with noise of 5%."""
    draw = np.random.default_rng(seed)
    cases = [_measured(draw, rows=10, noise=noise) for noise in (0.0, 0.05, 0.05, 0.08)]
    given = [numbers(call(student, flops.copy(), ms.copy()), FITTED) for flops, ms in cases]
    wrong = compare(given, fit_time, FIT_MISTAKES, lambda f: [f(*case) for case in cases], CLOSE)
    if wrong is not None:
        i, said = wrong
        right = fit_time(*cases[i])
        off = [name for name, a, b in zip(FITTED, given[i], right, strict=True)
               if not abs(a - b) <= CLOSE * abs(b)]  # fmt: skip
        ours = (
            f"{' and '.join(off)} {'are' if len(off) > 1 else 'is'} off: the least relative errors "
            f"are at {right[0]:.4g} ms and {right[1]:.4g} TFLOP/s."
        )
        raise CheckFailed(
            f"from {len(cases[i][0])} times you fit start_ms {given[i][0]:.4g} and tflops "
            f"{given[i][1]:.4g}. {said or ours}"
        )
    passed("start and rate with the least relative errors", seed)


def check_predict(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-4 (b): a time from work, start and rate; of a number, and of an array."""
    draw = np.random.default_rng(seed)
    cases = [(10 ** draw.uniform(8, 13), draw.uniform(0.01, 9), draw.uniform(1, 900))
             for _ in range(6)]  # fmt: skip
    given = [(number(call(student, *case), "the time"),) for case in cases]
    wrong = compare(
        given, predict_time, PREDICT_MISTAKES, lambda f: [(f(*case),) for case in cases]
    )
    if wrong is not None:
        i, said = wrong
        flops, start, rate = cases[i]
        raise CheckFailed(
            f"for {flops:.3g} FLOPs, start_ms {start:.3g} and {rate:.3g} TFLOP/s you return "
            f"{given[i][0]:.4g} ms. {said or f'{predict_time(*cases[i]):.4g} is right.'}"
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
    wrong = compare(
        answers, held_out_error, TEST_MISTAKES, lambda f: [f(table) for table in tables], CLOSE
    )
    i, said = wrong or (0, "")
    for answer, table in zip(answers, tables, strict=True):
        changed = table.copy()
        factor = draw.uniform(2, 6, len(table))
        changed.loc[changed.held_out, "median_ms"] *= factor[changed.held_out]
        again = _answer(student, changed.copy())
        if first_wrong([again[:2]], [answer[:2]], 1e-6) is not None:
            raise CheckFailed(
                "the check changed the times of held-out rows, and start_ms or tflops changed: "
                "your fit looks at them. " + (said or "Fit the rows where held_out is False.")
            )
    if wrong is not None:
        theirs, ours = (
            ", ".join(f"{n} {x:.4g}" for n, x in zip(TESTED, numbers, strict=True))
            for numbers in (answers[i], held_out_error(tables[i]))
        )
        raise CheckFailed(f"you return {theirs}. {said or f'Right is {ours}.'}")
    passed("fitted on some rows, judged on the others", seed)


def _answer(student: Callable[..., Any], table: pd.DataFrame) -> Numbers:
    """Return the student's numbers; say so if rows without a time make the function fail."""
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
