import math

import pytest
import torch
import torch.nn.functional as F

from labsupport import checks
from tests.checks.solutions import broken, function, solution_source

ATTENTION = [
    checks.check_textbook_values,
    checks.check_textbook_mask,
    checks.check_textbook_empty_rows,
]


def attention_source():
    return solution_source("01", "ex-1-1-textbook-attention")


def memory_source():
    return solution_source("01", "ex-1-2-score-memory")


def diagnosis(student, *checks_to_run, **options):
    """The message of the first check that fails."""
    with pytest.raises(checks.CheckFailed) as caught:
        for check in checks_to_run:
            check(student, **options)
    return str(caught.value)


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


MISTAKES = {
    "missing scale": ([(" / math.sqrt(q.shape[-1])", "")], "not divided by sqrt"),
    "scale by head_dim": ([("math.sqrt(q.shape[-1])", "q.shape[-1]")], "square root"),
    "multiplied by the scale": ([("/ math.sqrt", "* math.sqrt")], "divide by it"),
    "softmax over queries": ([("dim=-1)\n    if", "dim=-2)\n    if")], "over the queries"),
    "no softmax": ([("torch.softmax(scores, dim=-1)", "scores")], "softmax is missing"),
    "mask inverted": ([("masked_fill(~mask, ", "masked_fill(mask, ")], "inverted"),
    "hidden scores 0": (
        [("masked_fill(~mask, -torch.inf)", "masked_fill(~mask, 0.0)")],
        "exp(0) is 1",
    ),
    "mask ignored": ([("if mask is not None", "if False")], "ignored"),
    "mask after the softmax": (
        [
            ("scores = scores.masked_fill(~mask, -torch.inf)", "pass"),
            ("weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)", "weights * mask"),
        ],
        "after the softmax",
    ),
    "NaN in empty rows": (
        [("weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)", "pass")],
        "0 / 0",
    ),
    "-1e9": (
        [
            ("-torch.inf", "-1e9"),
            ("weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)", "weights"),
        ],
        "uniform average",
    ),
    "output only": ([("return weights @ v, weights", "return weights @ v")], "2 values"),
    "mask written into": (
        [
            (
                "scores = scores.masked_fill(~mask, -torch.inf)",
                "mask.logical_not_(); scores = scores.masked_fill(mask, -torch.inf)",
            )
        ],
        "in place",
    ),
    "scale in place": (
        [
            (
                "scores = q @ k.mT / math.sqrt(q.shape[-1])",
                "q /= math.sqrt(q.shape[-1]); scores = q @ k.mT",
            )
        ],
        "in place",
    ),
    "NaN kept in the weights": (
        [
            ("weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)", "pass"),
            ("weights @ v, weights", "torch.nan_to_num(weights @ v), weights"),
        ],
        "weights are NaN",
    ),
    "forgotten return": ([("return weights @ v, weights", "weights @ v")], "`return`"),
}


@pytest.mark.parametrize(("changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_gets_its_own_diagnosis(changes, said):
    student = broken(attention_source(), "textbook_attention", *changes)
    assert said in diagnosis(student, *ATTENTION)


def test_minus_1e9_in_float16_is_reported_as_what_pytorch_says():
    student = broken(attention_source(), "textbook_attention", ("-torch.inf", "-1e9"))
    message = diagnosis(student, checks.check_textbook_empty_rows)
    assert "RuntimeError" in message
    assert "float16" in message


def test_a_stub_is_told_apart_from_a_crash():
    def stub(*args):
        raise NotImplementedError

    assert "NotImplementedError" in diagnosis(stub, checks.check_textbook_values)
    assert "not written yet" in diagnosis(stub, checks.check_textbook_values)


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


BYTES_MISTAKES = {
    "one matrix": (lambda b, h, n, w: b * h * n * n * w, "count both"),
    "entries": (lambda b, h, n, w: 2 * b * h * n * n, "bytes of each"),
    "no heads": (lambda b, h, n, w: 2 * b * n * n * w, "heads"),
    "no batch": (lambda b, h, n, w: 2 * h * n * n * w, "batch"),
    "linear": (lambda b, h, n, w: 2 * b * h * n * w, "counts twice"),
    "MiB": (lambda b, h, n, w: 2 * b * h * n * n * w / 2**20, "return bytes"),
    "text": (lambda b, h, n, w: "many", "not str"),
}


@pytest.mark.parametrize(("student", "said"), BYTES_MISTAKES.values(), ids=BYTES_MISTAKES)
def test_each_wrong_formula_gets_its_own_diagnosis(student, said):
    assert said in diagnosis(student, checks.check_score_bytes)


LENGTH_MISTAKES = {
    "no root": (lambda m, b, h, w: m // (2 * b * h * w), "square root"),
    "S alone": (lambda m, b, h, w: math.isqrt(m // (b * h * w)), "fits S alone"),
    "float": (lambda m, b, h, w: math.sqrt(m / (2 * b * h * w)) + 0.1, "whole number"),
    "off by one": (lambda m, b, h, w: math.isqrt(m // (2 * b * h * w)) + 1, "longest that fits"),
}


@pytest.mark.parametrize(("student", "said"), LENGTH_MISTAKES.values(), ids=LENGTH_MISTAKES)
def test_each_wrong_length_gets_its_own_diagnosis(student, said):
    assert said in diagnosis(student, checks.check_largest_length)


def test_a_students_function_is_used_only_when_it_passes(capsys):
    good = function(attention_source(), "textbook_attention")
    bad = broken(attention_source(), "textbook_attention", (" / math.sqrt(q.shape[-1])", ""))
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
