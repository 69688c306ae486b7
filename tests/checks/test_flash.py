import pytest
import torch

from labsupport import checks
from labsupport.attention import standard_attention
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.checks import flash
from labsupport.checks.verdict import Mistake, mutant
from tests.checks.solutions import diagnosis, each, function, solution_source

FORWARD = [
    checks.check_forward_values,
    checks.check_forward_lse,
    checks.check_forward_edges,
    checks.check_forward_memory,
]
BACKWARD = [checks.check_backward_values, checks.check_backward_edges, checks.check_backward_memory]


def forward_source():
    return solution_source("01", "ex-1-4-tiled-forward")


def backward_source():
    return solution_source("01", "ex-1-5-backward")


# --- the right solutions --------------------------------------------------------------------------


@pytest.mark.parametrize("check", FORWARD)
def test_the_forward_solution_passes(check):
    check(function(forward_source(), "my_flash_forward"))


@pytest.mark.parametrize("check", BACKWARD)
def test_the_backward_solution_passes(check):
    check(function(backward_source(), "my_flash_backward"))


@pytest.mark.parametrize("check", FORWARD)
def test_the_labs_own_forward_passes(check):
    def ours(q, k, v, is_causal, block_q, block_k):
        return flash_attention_forward(q, k, v, is_causal, block_q=block_q, block_k=block_k)

    check(ours)


@pytest.mark.parametrize("check", BACKWARD)
def test_the_labs_own_backward_passes(check):
    def ours(dout, q, k, v, out, lse, is_causal, block_q, block_k):
        blocks = {"block_q": block_q, "block_k": block_k}
        return flash_attention_backward(dout, q, k, v, out, lse, is_causal, **blocks)

    check(ours)


def test_other_seeds_pass_too():
    checks.check_forward_edges(function(forward_source(), "my_flash_forward"), seed=99)
    checks.check_backward_edges(function(backward_source(), "my_flash_backward"), seed=99)


# --- the forward's mistakes -----------------------------------------------------------------------

SCALE = "scale = 1 / math.sqrt(q.shape[-1])"


@each(
    (FORWARD, flash.flash_forward, flash.LSE_MISTAKES),
    (FORWARD, flash.flash_forward, (Mistake(("return out, lse", "return out"), "2 values"),)),
)
def test_each_mistake_in_the_forward_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


def naive_forward(q, k, v, is_causal, block_q, block_k):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        offset = k.shape[-2] - q.shape[-2]
        keep = torch.ones(scores.shape[-2:]).tril(offset).bool()
        scores = scores.masked_fill(~keep, -torch.inf)
    return standard_attention(q, k, v, causal=is_causal)[0], scores.logsumexp(-1)


def test_a_forward_that_stores_all_scores_is_refused_though_its_values_are_right():
    for check in FORWARD[:3]:
        check(naive_forward)
    message = diagnosis(checks.check_forward_memory, naive_forward)
    assert "256, 256)" in message


def test_a_mask_of_full_size_is_refused_too():
    student = mutant(
        flash.flash_forward, (SCALE, SCALE + "\n    full = torch.ones(seqlen_q, seqlen_k)")
    )
    assert "256, 256)" in diagnosis(checks.check_forward_memory, student)


def test_a_full_mask_built_only_for_causal_calls_is_refused_too():
    student = mutant(
        flash.flash_forward,
        (SCALE, SCALE + "\n    full = is_causal and torch.ones(seqlen_q, seqlen_k).tril()"),
    )
    assert "is_causal=True" in diagnosis(checks.check_forward_memory, student)


def test_scaling_q_in_place_is_named_as_what_it_is():
    student = mutant(flash.flash_forward, (SCALE, "q *= q.shape[-1] ** -0.5; scale = 1"))
    assert "in place" in diagnosis(FORWARD, student)


# --- the backward's mistakes ----------------------------------------------------------------------

OTHERS = (
    Mistake(("dq[..., rows, :] +=", "dq[..., rows, :] ="), "dq is wrong. Each block overwrites"),
    Mistake(
        (
            " * scale\n            dk",
            "\n            dk",
            "q[..., rows, :] * scale",
            "q[..., rows, :]",
        ),
        "missing in dQ",
    ),
    Mistake(("lse = lse.masked_fill(lse == -torch.inf, torch.inf)", "pass"), "+inf"),
    Mistake(("return dq, dk, dv", "return dq, dk"), "3 values"),
)


@each((BACKWARD, flash.flash_backward, flash.BACKWARD_MISTAKES + OTHERS))
def test_each_mistake_in_the_backward_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


def test_a_backward_that_stores_p_is_refused_though_its_values_are_right():
    def naive(dout, q, k, v, out, lse, is_causal, block_q, block_k):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            output, _ = standard_attention(*leaves, causal=is_causal)
        return torch.autograd.grad(output, leaves, dout)

    for check in BACKWARD[:2]:
        check(naive)
    assert "256, 256)" in diagnosis(checks.check_backward_memory, naive)


# --- little memory is no merit of a wrong result --------------------------------------------------


@pytest.mark.parametrize("result", [1, lambda q: (q, q[..., 0])], ids=["a number", "its input"])
def test_a_forward_that_computes_nothing_does_not_pass_for_its_little_memory(result):
    def student(q, k, v, is_causal, block_q, block_k):
        return result(q.clone()) if callable(result) else result

    diagnosis(checks.check_forward_memory, student)


def test_a_backward_that_computes_nothing_does_not_pass_for_its_little_memory():
    def student(dout, q, k, v, out, lse, is_causal, block_q, block_k):
        return q.clone(), k.clone(), v.clone()

    assert "dv" in diagnosis(checks.check_backward_memory, student)
