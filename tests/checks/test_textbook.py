import math

import pytest
import torch
import torch.nn.functional as F

from labsupport import checks
from labsupport.checks import textbook
from labsupport.checks.verdict import Mistake, mutant
from tests.checks.solutions import diagnosis, each, function, solution_source

ATTENTION = [
    checks.check_textbook_values,
    checks.check_textbook_mask,
    checks.check_textbook_empty_rows,
]


def attention_source():
    return solution_source("01", "ex-1-1-textbook-attention")


def memory_source():
    return solution_source("01", "ex-1-2-score-memory")


@pytest.mark.parametrize("check", ATTENTION)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_solution_passes(check, seed, capsys):
    check(function(attention_source(), "textbook_attention"), seed=seed)
    assert capsys.readouterr().out.startswith("[ok]")


def test_another_right_way_passes():
    def by_multiplication(q, k, v, mask=None):
        d = q.shape[-1]
        scores = torch.einsum("...id,...jd->...ij", q * d**-0.25, k * d**-0.25)
        if mask is not None:
            scores = scores + torch.where(mask, 0.0, -torch.inf).to(scores.dtype)
        weights = F.softmax(scores, dim=-1).nan_to_num(0.0)
        return torch.matmul(weights, v), weights

    for check in ATTENTION:
        check(by_multiplication)


@pytest.mark.parametrize("seed", range(40))
def test_a_right_way_passes_whatever_inputs_are_drawn(seed):
    """In float16, of a few dozen entries, the textbook's own error is now and then tiny by luck."""

    def by_hand(q, k, v, mask):
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num(0.0)
        return weights @ v, weights

    checks.check_textbook_empty_rows(by_hand, seed=seed)


EMPTY = "weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)"
OTHERS = (
    Mistake((EMPTY, "weights"), "0 / 0"),
    Mistake(("-torch.inf", "-1e9", EMPTY, "weights"), "uniform average"),
    Mistake(("return weights @ v, weights", "return weights @ v"), "2 values"),
    Mistake(
        (
            "scores = scores.masked_fill(~mask",
            "mask.logical_not_(); scores = scores.masked_fill(mask",
        ),
        "in place",
    ),
    Mistake(("scores = q", "q /= 2; scores = 2 * q"), "in place"),
    Mistake((EMPTY, "weights", "weights @ v", "torch.nan_to_num(weights @ v)"), "weights are NaN"),
    Mistake(("return weights", "weights"), "`return`"),
)


@each(
    (ATTENTION, textbook.textbook_attention, textbook.MISTAKES + OTHERS),
    (checks.check_score_bytes, textbook.score_bytes, textbook.BYTE_MISTAKES),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


def test_minus_1e9_in_float16_is_reported_as_what_pytorch_says():
    student = mutant(textbook.textbook_attention, ("-torch.inf", "-1e9"))
    message = diagnosis(checks.check_textbook_empty_rows, student)
    assert "RuntimeError" in message
    assert "float16" in message


def test_a_stub_is_told_apart_from_a_crash():
    def stub(*args):
        raise NotImplementedError

    assert "NotImplementedError" in diagnosis(checks.check_textbook_values, stub)
    assert "not written yet" in diagnosis(checks.check_textbook_values, stub)


def test_the_failure_shows_no_traceback_in_a_notebook():
    failure = checks.CheckFailed("the reason")
    assert failure._render_traceback_() == ["Check failed: the reason"]


def test_a_long_failure_is_shown_in_lines_that_fit_and_break_between_words():
    reason = "\n".join([" ".join(["seventeen"] * 30), "It was called with two tensors."])
    shown = checks.CheckFailed(reason)._render_traceback_()
    assert max(map(len, shown)) <= 100
    assert " ".join(shown).split() == f"Check failed: {reason}".split()
    assert shown[-1] == "It was called with two tensors."


def test_memory_formulas_pass():
    checks.check_score_bytes(function(memory_source(), "score_bytes"))
    checks.check_largest_length(function(memory_source(), "longest_that_fits"))


def test_a_text_is_no_number_of_bytes():
    assert "not str" in diagnosis(checks.check_score_bytes, lambda *shape: "many")


LENGTH_MISTAKES = {
    "no root": (lambda m, b, h, w: m // (2 * b * h * w), "square root"),
    "S alone": (lambda m, b, h, w: math.isqrt(m // (b * h * w)), "fits S alone"),
    "float": (lambda m, b, h, w: math.sqrt(m / (2 * b * h * w)) + 0.1, "whole number"),
    "off by one": (lambda m, b, h, w: math.isqrt(m // (2 * b * h * w)) + 1, "longest that fits"),
}


@pytest.mark.parametrize(("student", "said"), LENGTH_MISTAKES.values(), ids=LENGTH_MISTAKES)
def test_each_wrong_length_gets_its_own_diagnosis(student, said):
    assert said in diagnosis(checks.check_largest_length, student)


def test_a_students_function_is_used_only_when_it_passes(capsys):
    good = function(attention_source(), "textbook_attention")
    bad = mutant(textbook.textbook_attention, textbook.MISTAKES[0].edit)
    ours = object()
    assert checks.yours_or_ours(good, ours, *ATTENTION) is good
    assert checks.yours_or_ours(bad, ours, *ATTENTION) is ours
    said = capsys.readouterr().out
    assert "Using your textbook_attention" in said
    assert "does not pass its checks yet" in said


@pytest.mark.parametrize(
    ("predicted", "said"), [(10, "close"), (100, "factor of 10.0"), (None, "no prediction")]
)
def test_predictions_are_compared_with_measurements(predicted, said, capsys):
    checks.compare_prediction("Time", predicted, 10.0, "ms")
    assert said in capsys.readouterr().out


def test_large_numbers_are_printed_without_powers_of_ten(capsys):
    checks.compare_prediction("Growth", 2000, 2784.6, "times")
    assert "you predicted 2,000 times, measured 2,785 times" in capsys.readouterr().out
