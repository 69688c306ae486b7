"""First tries of students who worked through the notebooks, and what the checks say to them."""

import linecache
import math
import os
import signal
import threading

import numpy as np
import pytest
import torch

from labsupport import checks
from labsupport.checks import (
    ex_1_4_tiled_forward,
    ex_3_2_chunked_loss,
    ex_4_1_cost,
    ex_4_4_predict,
    verdict,
)
from labsupport.checks.verdict import judge, mutant
from tests.checks.solutions import diagnosis

NOTEBOOK = {"torch": torch, "math": math, "np": np}


def cell(source, name, **variables):
    """Return a function as a notebook's cell defines it, among variables of earlier cells."""
    file = f"/tmp/ipykernel_1/{abs(hash(source))}.py"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope = {"__name__": "__main__", **NOTEBOOK, **variables}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def textbook_cell(scores, **variables):
    lines = [
        "def textbook_attention(q, k, v, mask=None):",
        f"    scores = {scores}",
        "    weights = scores.softmax(-1)",
        "    return weights @ v, weights",
    ]
    return cell("\n".join(lines), "textbook_attention", **variables)


ERRORS = {
    "k.T": ("q @ k.T", "raised RuntimeError in line 2:\n    scores = q @ k.T"),
    "k.mT": ("q @ k.T", "`.mT` swaps the last two"),
    "keepdim": ("(s := q @ k.mT) - s.amax(-1)", "keepdim=True"),
    "a name": ("q @ keys.mT", "raised NameError in line 2:\n    scores = q @ keys.mT\nname 'keys'"),
    "the call": ("q @ keys.mT", "with q: float32 (2, 3, 5, 16), k: float32 (2, 3, 7, 16), v: "),
    "a helper": ("(lambda x: x[9])(q)", "in line 2:\n    scores = (lambda x: x[9])(q)"),
    "no operator": ("torch.geqrf(q.bool())", "Error in line 2:\n    scores = torch.geqrf"),
}


@pytest.mark.parametrize(("scores", "said"), ERRORS.values(), ids=ERRORS)
def test_an_error_shows_the_students_line_and_the_call(scores, said):
    assert said in diagnosis(checks.check_textbook_values, textbook_cell(scores))


def test_renamed_parameters_are_named():
    source = "def textbook_traffic(N, d, bq):\n    return N, d"
    said = diagnosis(checks.check_textbook_traffic, cell(source, "textbook_traffic"))
    assert "Keep the names of the parameters" in said


def test_an_interrupted_loop_shows_its_line_and_no_traceback():
    endless = cell(
        "def textbook_attention(q, k, v):\n    while True:\n        q", "textbook_attention"
    )
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(verdict.CheckInterrupted) as stopped:
        checks.check_textbook_values(endless)
    first, second, call = stopped.value._render_traceback_()
    assert first.startswith("Check interrupted: textbook_attention was in line")
    assert second.strip() in ("while True:", "q")
    assert call.startswith("It was called with q: float32")


def test_an_error_in_an_autograd_function_shows_its_line():
    source = """class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):
        return (hidden @ weight).sum()"""
    said = diagnosis(checks.check_loss_values, cell(source, "ChunkedLoss"))
    assert "in line 4:\n    return (hidden @ weight).sum()" in said
    assert "called with hidden: float32 (24, 16), weight: float32 (150, 16), labels: int64" in said


def test_a_variable_of_the_notebook_in_an_arguments_place_is_named(capsys):
    said = diagnosis(
        checks.check_textbook_values, textbook_cell("q @ k.mT / head_dim**0.5", head_dim=64)
    )
    assert "Note: textbook_attention reads head_dim (64) from the notebook" in said
    checks.check_textbook_values(textbook_cell("q @ k.mT / head_dim**0.5", head_dim=16))  # luck
    assert "Note: textbook_attention reads head_dim (16)" in capsys.readouterr().out
    of_a_cell = "q @ k.mT / math.sqrt(K.shape[-1])"
    said = diagnosis(
        checks.check_textbook_values, textbook_cell(of_a_cell, K=torch.ones(3, 64), d=64)
    )
    assert "reads K (float32 (3, 64)) from the notebook" in said


def test_constants_and_helpers_of_the_notebook_are_meant_to_be_read(capsys):
    scale = "(q @ k.mT) * ONE * helper(q)"
    student = textbook_cell(scale, ONE=1.0, helper=lambda q: q.shape[-1] ** -0.5, shape=3)
    checks.check_textbook_values(student)
    assert "Note" not in capsys.readouterr().out


L_IN_BYTES = ("seqlen_q * 4", "seqlen_q * dtype.itemsize")
ALL_HEADS = ("seqlen_k * kv_heads", "seqlen_k * heads")
TOP_LEFT = (
    "pairs -= seqlen_q * (seqlen_q - 1) // 2",
    "pairs = seqlen_q * (seqlen_q + 1) // 2",
)
TWO = [
    (
        checks.check_cost_bytes,
        mutant(ex_4_1_cost.attention_cost, L_IN_BYTES + ALL_HEADS),
        ("L is float32 whatever dtype is", "K and V have kv_heads heads"),
    ),
    (
        checks.check_cost_flops,
        mutant(ex_4_1_cost.attention_cost, (*TOP_LEFT, "10 if", "8 if")),
        ("aligned top-left", "five products"),
    ),
    (
        checks.check_fit,
        mutant(ex_4_4_predict.fit_time, (", w=1 / ms", "", "1 / slope", "1e12 / slope")),
        ("errors in ms", "divide by 1e12"),
    ),
    (
        checks.check_forward_values,
        mutant(
            ex_1_4_tiled_forward.flash_forward,
            ("1 / math.sqrt(q.shape[-1])", "1.0", "o * alpha[..., None]", "o"),
        ),
        ("not divided by sqrt(head_dim)", "accumulator O is not rescaled"),
    ),
    (
        checks.check_loss_gradients,
        mutant(
            ex_3_2_chunked_loss.ChunkedLoss,
            ("-torch.ones_like", "0 * torch.ones_like", "d /= count", "pass"),
        ),
        ("minus one at the label", "not divided by the number"),
    ),
]


@pytest.mark.parametrize(
    ("check", "student", "said"), TWO, ids=lambda x: getattr(x, "__name__", "")
)
def test_two_mistakes_at_once_are_named(check, student, said, monkeypatch):
    monkeypatch.setattr(verdict, "SECONDS", 60.0)  # here a slow machine is no reason to give up
    found = diagnosis(check, student)
    assert "There may be two mistakes: " in found
    assert all(one in found for one in said)


def test_a_mistake_that_explains_every_wrong_case_is_a_perhaps():
    """L is counted in the dtype's bytes, and only in the forward pass."""
    edit = ("else 2 * q + 2 * k + lse", "else 2 * q + 2 * k + lse // 4 * dtype.itemsize")
    said = diagnosis(checks.check_cost_bytes, mutant(ex_4_1_cost.attention_cost, edit))
    assert "Expected moved" in said
    assert "Perhaps: L is float32 whatever dtype is" in said


def test_a_mistake_that_explains_the_first_case_alone_is_not_named():
    edit = ("return flops, moved", "return flops, moved - lse * dtype.itemsize // 4 * (1 + causal)")
    said = diagnosis(checks.check_cost_bytes, mutant(ex_4_1_cost.attention_cost, edit))
    assert said.endswith("Expected moved 6,574,080.")  # without L, as in "L is missing"


def test_a_mistake_that_explains_some_entries_is_not_named():
    ones = torch.ones(4, 5)
    partly = ones.clone()
    partly[0, 0] = 7
    with pytest.raises(checks.CheckFailed, match="20 of 20") as caught:
        judge("x", partly, 0 * ones, allowed=0.1, mistakes=[("Ones.", ones)])
    assert "Ones" not in str(caught.value)


@pytest.mark.parametrize("nothing", [0.0, torch.inf, torch.nan])
def test_two_mistakes_are_not_named_where_no_number_tells_them_apart(nothing):
    student, two = torch.full((3,), nothing), "There may be two mistakes: A. And: B."
    with pytest.raises(checks.CheckFailed) as caught:
        judge("x", student, torch.ones(3), allowed=0.1, mistakes=[(two, student)])
    assert "two mistakes" not in str(caught.value)


def test_a_search_that_is_given_up_says_so(monkeypatch, capsys):
    monkeypatch.setattr(verdict, "SECONDS", -1.0)
    student = mutant(ex_4_1_cost.attention_cost, ("return flops", "return 3 + flops"))
    diagnosis(checks.check_cost_flops, student)
    assert "Gave up looking for the cause" in capsys.readouterr().out
