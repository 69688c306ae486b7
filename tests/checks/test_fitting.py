import numpy as np
import pandas as pd
import pytest
import torch

from labsupport import checks
from labsupport.analysis.roofline import case_of
from labsupport.checks import fitting
from labsupport.checks.verdict import Mistake
from labsupport.profiling.runs import load_run
from labsupport.profiling.work import flops_of
from tests.checks.solutions import diagnosis, each, function, solution_source

FIT, PREDICT, HELD_OUT = ALL = checks.check_fit, checks.check_predict, checks.check_held_out


@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solutions_pass(seed, capsys):
    for name, check in zip(("fit_time", "predict_time", "held_out_error"), ALL, strict=True):
        check(function(solution_source("04", "ex-4-4-predict"), name, np=np), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


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


RETURN = "return float(start_ms), float(1 / slope)"
OTHER_FITS = (
    Mistake((RETURN, "return start_ms"), "return 2 values (start_ms, tflops), not a float64"),
    Mistake((RETURN, "return np.array([start_ms, 1 / slope])"), "not a ndarray of shape (2,)"),
    Mistake((RETURN, "return start_ms, 'fast'"), "tflops must be a number, not a str"),
    Mistake((RETURN, "return start_ms, float('nan')"), "tflops is NaN"),
    Mistake((RETURN, "return start_ms, 0.9 / slope"), "tflops is off"),
)
TIME = "start_ms + flops / tflops / 1e9"
OTHER_TIMES = (
    Mistake((TIME, f"f'{{{TIME}}} ms'"), "the time must be a number, not a str"),
    Mistake((TIME, f"int({TIME})"), "is right"),
    Mistake((TIME, f"float(np.max({TIME}))"), "one time for each was expected"),
    Mistake(("return start_ms", "start_ms"), "is a `return` missing"),
)
OTHER_TESTS = (
    Mistake(('table[table.status == "ok"]', "table"), "some rows have no time"),
    Mistake(
        ("    ran =", "    table['work'] = table.flops / 1e9\n    ran ="), "the table was changed"
    ),
    Mistake(
        ("    ran =", "    table['median_ms'] = table.median_ms.fillna(0)\n    ran ="),
        "the table was changed",
    ),
    Mistake(("return start, rate, float(error)", "return start, rate"), "return 3 values"),
    Mistake((").mean()", ")", "float(error)", "error"), "error must be a number, not a Series"),
)


@pytest.mark.parametrize("seed", [0, 1])
@each(
    (FIT, fitting.fit_time, fitting.FIT_MISTAKES + OTHER_FITS),
    (PREDICT, fitting.predict_time, fitting.PREDICT_MISTAKES + OTHER_TIMES),
    (HELD_OUT, fitting.held_out_error, fitting.TEST_MISTAKES + OTHER_TESTS),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said, seed):
    assert said in diagnosis(check, student, seed=seed)


def test_a_choice_by_held_out_rows_is_found_even_if_both_candidates_are_fair():
    """Two fits on the right rows; the one that does better on the held-out rows is kept."""

    def best_of_two(table):
        ran = table[table.status == "ok"]
        seen, unseen = ran[~ran.held_out], ran[ran.held_out]
        fits = []
        for factor in (1.0, 0.7):
            start, rate = checks.fit_time(seen.flops.to_numpy(), seen.median_ms.to_numpy())
            off = checks.predict_time(unseen.flops, start, rate * factor) - unseen.median_ms
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
