import numpy as np
import pandas as pd
import pytest
import torch

from labsupport import checks
from labsupport.analysis.roofline import case_of
from labsupport.profiling.runs import load_run
from labsupport.profiling.work import flops_of
from tests.checks.solutions import broken, diagnosis, solution_source

FIT, PREDICT, HELD_OUT = ALL = checks.check_fit, checks.check_predict, checks.check_held_out


def source():
    return solution_source("04", "ex-4-4-predict")


def solved(name, *changes):
    return broken(source(), name, *changes, np=np)


@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solutions_pass(seed, capsys):
    FIT(solved("fit_time"), seed=seed)
    PREDICT(solved("predict_time"), seed=seed)
    HELD_OUT(solved("held_out_error"), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_the_labs_own_functions_pass():
    FIT(checks.fit_time)
    PREDICT(checks.predict_time)
    HELD_OUT(checks.held_out_error)


def test_other_right_ways_pass():
    """A fit by descent, in torch; sums by hand; a table that is cut by query and worked on."""

    def by_newton(flops, ms):
        x, t = torch.tensor(flops) / 1e9, torch.tensor(ms)
        p = torch.tensor([0.1, 0.003], dtype=torch.float64)

        def loss(p):
            return (((p[0] + p[1] * x) / t - 1) ** 2).sum()

        for _ in range(3):
            gradient = torch.autograd.functional.jacobian(loss, p)
            p = p - torch.linalg.solve(torch.autograd.functional.hessian(loss, p), gradient)
        return [p[0], 1 / p[1]]

    def by_hand(table):
        copy = table.copy().dropna(subset="median_ms").reset_index(drop=True)
        start, rate = by_newton(*copy.query("not held_out")[["flops", "median_ms"]].to_numpy().T)
        off = [
            abs(float(start) + row.flops / float(rate) / 1e9 - row.median_ms) / row.median_ms
            for row in copy.itertuples()
            if row.held_out
        ]
        return float(start), float(rate), sum(off) / len(off)

    FIT(by_newton)
    HELD_OUT(by_hand)


def test_the_fit_is_the_minimum_of_the_relative_errors():
    draw = np.random.default_rng(0)
    flops = 10 ** draw.uniform(9, 13, 12)
    ms = (0.05 + flops / 3e11) * draw.uniform(0.9, 1.1, 12)
    start, rate = checks.fit_time(flops, ms)

    def loss(start, rate):
        return np.square(checks.predict_time(flops, start, rate) / ms - 1).sum()

    for by in (0.99, 1.01):
        assert loss(start, rate) < min(loss(start * by, rate), loss(start, rate * by))


@pytest.mark.parametrize("backend", ["sdpa_flash", "fa4"])
def test_two_numbers_predict_recorded_times_on_an_h200(backend):
    """Lengths that calibrated nothing, of forward passes without a mask: within a tenth."""
    run = load_run("attention-h200")
    table = run[(run.backend == backend) & (run.direction == "forward") & ~run.causal].copy()
    table["flops"] = [flops_of(case_of(row)) for row in table.to_dict("records")]
    table["held_out"] = ~table.seqlen.isin([512, 4096, 16_384])
    start, rate, error = checks.held_out_error(table)
    assert 0 < start < 0.1
    assert 300 < rate < 990
    assert error < 0.1


LINE = "(start_ms, slope), *_ = np.linalg.lstsq(rows, np.ones(len(ms)))"
RETURN = "return start_ms, 1 / slope"
FIT_MISTAKES = {
    "absolute": ([(LINE, "slope, start_ms = np.polyfit(work, ms, 1)")], "minimise errors in ms"),
    "squared weights": ([(LINE, "slope, start_ms = np.polyfit(work, ms, 1, w=1 / ms**2)")], "divide by ms**2"),
    "square roots": ([(LINE, "slope, start_ms = np.polyfit(work, ms, 1, w=ms**-0.5)")], "the square root of ms"),
    "no start": ([("np.stack([1 / ms,", "np.stack([0 / ms,")], "goes through 0"),
    "smallest time": ([(RETURN, "return ms.min(), 1 / slope")], "shortest time"),
    "two points": ([(LINE, "a, b = work.argmin(), work.argmax(); slope = (ms[b] - ms[a]) / (work[b] - work[a]); start_ms = ms[a] - slope * work[a]")], "through two rows"),
    "mean rate": ([(RETURN, "return start_ms, (work / ms).mean()")], "the start is in it"),
    "swapped": ([(RETURN, "return 1 / slope, start_ms")], "swapped"),
    "slope": ([(RETURN, "return start_ms, slope")], "The rate is 1 over it"),
    "FLOP/s": ([(RETURN, "return start_ms, 1e12 / slope")], "in FLOP/s"),
    "GFLOP/s": ([(RETURN, "return start_ms, 1e3 / slope")], "in GFLOP/s"),
    "FLOP/ms": ([("flops / 1e9", "flops")], "a millisecond: divide"),
    "seconds": ([(RETURN, "return start_ms / 1e3, 1 / slope")], "in seconds"),
    "microseconds": ([(RETURN, "return start_ms * 1e3, 1 / slope")], "in microseconds"),
    "one value": ([(RETURN, "return start_ms")], "return 2 values (start_ms, tflops), not a float64"),
    "an array": ([(RETURN, "return np.array([start_ms, 1 / slope])")], "not a ndarray of shape (2,)"),
    "text": ([(RETURN, "return start_ms, 'fast'")], "tflops must be a number, not a str"),
    "NaN": ([(RETURN, "return start_ms, math.nan")], "tflops is NaN"),
    "something else": ([(RETURN, "return start_ms, 0.9 / slope")], "tflops is off"),
}  # fmt: skip
TIME = "start_ms + flops / (tflops * 1e12) * 1e3"
PREDICT_MISTAKES = {
    "no start": ([("start_ms + flops", "flops")], "start_ms is missing"),
    "seconds": ([(TIME, f"({TIME}) / 1e3")], "is in ms"),
    "seconds in part": ([("1e12) * 1e3", "1e12)")], "start_ms in ms"),
    "multiplied": ([("flops / (tflops * 1e12) * 1e3", "flops * tflops / 1e9")], "Divide by the rate"),
    "maximum": ([(TIME, "max(start_ms, flops / (tflops * 1e9))")], "first the start, then the work"),
    "text": ([(TIME, f"f'{{{TIME}}} ms'")], "the time must be a number, not a str"),
    "an integer": ([(TIME, f"int({TIME})")], "is right"),
    "one time for many": ([(TIME, f"float(np.max({TIME}))")], "one time for each was expected"),
    "none": ([("return start_ms +", "start_ms +")], "is a `return` missing"),
}  # fmt: skip
ERROR = "((predicted - unseen.median_ms).abs() / unseen.median_ms).mean()"
OFF = "((predicted - unseen.median_ms) / unseen.median_ms)"
SIDES = "seen, unseen = ran[~ran.held_out], ran[ran.held_out]"
HELD_OUT_MISTAKES = {
    "all fitted": ([("seen, unseen = ran[~ran.held_out],", "seen, unseen = ran,")], "says nothing about others"),
    "sides swapped": ([("seen, unseen = ran", "unseen, seen = ran")], "the other way round"),
    "calibration error": ([("    predicted", "    unseen = seen\n    predicted")], "rows that were fitted"),
    "error of all": ([("    predicted", "    unseen = ran\n    predicted")], "the error on all rows"),
    "relative to predicted": ([("/ unseen.median_ms)", "/ predicted)")], "not by the predicted"),
    "signed": ([(".abs()", "")], "cancel"),
    "squared": ([(ERROR, f"({OFF} ** 2).mean()")], "mean of the squares"),
    "root": ([(ERROR, f"({OFF} ** 2).mean() ** 0.5")], "root of the mean square"),
    "largest": ([(").mean()", ").max()")], "largest error"),
    "median": ([(").mean()", ").median()")], "median of the errors"),
    "in ms": ([(" / unseen.median_ms).mean()", ").mean()")], "divide each error"),
    "of sums": ([(ERROR, "(predicted - unseen.median_ms).abs().sum() / unseen.median_ms.sum()")], "the longest calls decide alone"),
    "percent": ([("error = ", "error = 100 * ")], "in percent"),
    "absolute fit": ([(LINE, "slope, start_ms = np.polyfit(work, ms, 1)")], "minimise errors in ms"),
    "rows without a time": ([('table[table.status == "ok"]', "table")], "some rows have no time"),
    "the table changed": ([("    ran =", "    table['work'] = table.flops / 1e9\n    ran =")], "the table was changed"),
    "gaps filled in place": ([("    ran =", "    table['median_ms'] = table.median_ms.fillna(0)\n    ran =")], "the table was changed"),
    "two values": ([("return start_ms, tflops, error", "return start_ms, tflops")], "return 3 values"),
    "a column": ([(").mean()", ")")], "error must be a number, not a Series"),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), FIT_MISTAKES.values(), ids=FIT_MISTAKES)
def test_each_mistake_in_the_fit_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(FIT, solved("fit_time", *changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), PREDICT_MISTAKES.values(), ids=PREDICT_MISTAKES)
def test_each_mistake_in_the_prediction_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(PREDICT, solved("predict_time", *changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), HELD_OUT_MISTAKES.values(), ids=HELD_OUT_MISTAKES)
def test_each_mistake_in_the_test_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(HELD_OUT, solved("held_out_error", *changes), seed=seed)


def test_a_choice_by_held_out_rows_is_found_even_if_both_candidates_are_fair():
    """Two fits on the right rows; the one that does better on the held-out rows is kept."""
    fit, predict = solved("fit_time"), solved("predict_time")

    def best_of_two(table):
        ran = table[table.status == "ok"]
        seen, unseen = ran[~ran.held_out], ran[ran.held_out]
        fits = []
        for factor in (1.0, 0.7):
            start, rate = fit(seen.flops.to_numpy(), seen.median_ms.to_numpy())
            off = predict(unseen.flops, start, rate * factor) - unseen.median_ms
            fits.append(((off.abs() / unseen.median_ms).mean(), start, rate * factor))
        error, start, rate = min(fits)
        return start, rate, error

    assert "your fit looks at them" in diagnosis(HELD_OUT, best_of_two)


def test_a_table_that_holds_the_answers_does_not_help():
    def by_heart(table):
        return 0.05, 400.0, 0.0

    assert "you return start_ms 0.05" in diagnosis(HELD_OUT, by_heart)


@pytest.mark.parametrize("check", ALL)
def test_a_stub_is_called_one(check):
    def fit_time(*anything):
        raise NotImplementedError

    assert "not written yet" in diagnosis(check, fit_time)


@pytest.mark.parametrize("check", ALL)
def test_a_function_that_stumbles_is_told_on_what_it_was_called(check):
    assert "It was called with" in diagnosis(check, lambda: 0)


def test_a_text_in_an_array_is_not_a_raw_error():
    def in_words(flops, start_ms, tflops):
        ms = start_ms + flops / tflops / 1e9
        return ms if np.ndim(ms) == 0 else np.array([f"{x} ms" for x in ms])

    assert "numbers" in diagnosis(PREDICT, in_words)


def test_the_tables_hold_rows_without_a_time_on_both_sides():
    seen = []
    HELD_OUT(lambda table: seen.append(table.copy()) or checks.held_out_error(table))
    for table in seen:
        assert isinstance(table, pd.DataFrame)
        failed = table[table.status != "ok"]
        assert failed.median_ms.isna().all()
        assert failed.held_out.nunique() == 2
