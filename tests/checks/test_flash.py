import pytest
import torch

from labsupport import checks
from labsupport.attention import standard_attention
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from tests.checks.solutions import broken, function, solution_source
from tests.checks.test_textbook import diagnosis

FORWARD = [
    checks.check_forward_values,
    checks.check_forward_lse,
    checks.check_forward_edges,
    checks.check_forward_memory,
]
BACKWARD = [
    checks.check_backward_values,
    checks.check_backward_edges,
    checks.check_backward_memory,
]


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
FORWARD_MISTAKES = {
    "missing scale": ([(SCALE, "scale = 1.0")], "not divided by sqrt"),
    "scale 1/d": ([(SCALE, "scale = 1 / q.shape[-1]")], "square root"),
    "o not rescaled": ([("o * alpha[..., None] +", "o +")], "accumulator O is not rescaled"),
    "l not rescaled": ([("l * alpha +", "l +")], "running sum l is not"),
    "nothing rescaled": (
        [("o * alpha[..., None] +", "o +"), ("l * alpha +", "l +")],
        "Neither O nor l",
    ),
    "block maximum": (
        [("torch.maximum(m, s.amax(dim=-1))", "s.amax(dim=-1)")],
        "maximum of the last block",
    ),
    "never divided": ([("o / l.masked_fill(l == 0, 1.0)[..., None]", "o")], "never divided"),
    "divided in the loop": (
        [
            (
                "@ v[..., cols, :]\n",
                "@ v[..., cols, :]\n            o = o / l.masked_fill(l == 0, 1.0)[..., None]\n",
            ),
            ("= o / l.masked_fill(l == 0, 1.0)[..., None]\n        lse", "= o\n        lse"),
        ],
        "inside the loop",
    ),
    "causal ignored": ([("if is_causal:", "if False:")], "mask is missing"),
    "top-left": ([("query + seqlen_k - seqlen_q", "query")], "top-left"),
    "strict": ([("key > query", "key >= query")], "own position"),
    "one key of the future": (
        [("key > query + seqlen_k", "key > query + 1 + seqlen_k")],
        "one key of the future",
    ),
    "last columns dropped": (
        [("range(0, seqlen_k, block_k)", "range(0, seqlen_k // block_k * block_k, block_k)")],
        "block of keys is left out",
    ),
    "last rows dropped": (
        [("range(0, seqlen_q, block_q)", "range(0, seqlen_q // block_q * block_q, block_q)")],
        "block of queries is left out",
    ),
    "NaN in empty rows": ([("m_new.masked_fill(m_new == -torch.inf, 0.0)", "m_new")], "NaN"),
    "lse without m": ([("= m + torch.log(l)", "= torch.log(l)")], "m + log(l)"),
    "lse in base 2": ([("= m + torch.log(l)", "= (m + torch.log(l)) / math.log(2)")], "base 2"),
    "lse is m": ([("= m + torch.log(l)", "= m")], "running maximum"),
    "one value": ([("return out, lse", "return out")], "2 values"),
}


@pytest.mark.parametrize(("changes", "said"), FORWARD_MISTAKES.values(), ids=FORWARD_MISTAKES)
def test_each_mistake_in_the_forward_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(broken(forward_source(), "my_flash_forward", *changes), *FORWARD)


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
    message = diagnosis(naive_forward, checks.check_forward_memory)
    assert "256, 256)" in message


def test_a_mask_of_full_size_is_refused_too():
    student = broken(
        forward_source(),
        "my_flash_forward",
        (SCALE, SCALE + "\n    full = torch.ones(seqlen_q, seqlen_k)"),
    )
    assert "256, 256)" in diagnosis(student, checks.check_forward_memory)


def test_a_full_mask_built_only_for_causal_calls_is_refused_too():
    student = broken(
        forward_source(),
        "my_flash_forward",
        (SCALE, SCALE + "\n    full = is_causal and torch.ones(seqlen_q, seqlen_k).tril()"),
    )
    assert "is_causal=True" in diagnosis(student, checks.check_forward_memory)


def test_scaling_q_in_place_is_named_as_what_it_is():
    student = broken(
        forward_source(), "my_flash_forward", (SCALE, "q *= q.shape[-1] ** -0.5; scale = 1")
    )
    assert "in place" in diagnosis(student, *FORWARD)


# --- the backward's mistakes ----------------------------------------------------------------------

BACKWARD_MISTAKES = {
    "no D": ([("(dp - delta[..., rows, None])", "dp")], "rowsum(dO * O) is missing"),
    "D added": ([("dp - delta", "dp + delta")], "must be subtracted"),
    "no P in dS": (
        [("p * (dp - delta[..., rows, None])", "dp - delta[..., rows, None]")],
        "factor P",
    ),
    "dS in dV": (
        [
            ("dv[..., cols, :] += p.mT @ dout[..., rows, :]\n", "\n"),
            (
                "[..., rows, None])\n            dq",
                "[..., rows, None])\n            dv[..., cols, :] += ds.mT @ dout[..., rows, :]\n            dq",
            ),
        ],
        "not dS^T dO",
    ),
    "no scale in dq": ([("@ k[..., cols, :] * scale", "@ k[..., cols, :]")], "missing in dQ"),
    "no scale in dk": ([("@ q[..., rows, :] * scale", "@ q[..., rows, :]")], "in dK"),
    "no scale in scores": (
        [("@ k[..., cols, :].mT * scale", "@ k[..., cols, :].mT")],
        "recomputed scores",
    ),
    "causal ignored": ([("if is_causal:", "if False:")], "without the causal mask"),
    "top-left": ([("query + seqlen_k - seqlen_q", "query")], "top-left"),
    "strict": ([("key > query", "key >= query")], "own position"),
    "dq assigned": ([("dq[..., rows, :] +=", "dq[..., rows, :] =")], "added up (+=)"),
    "dk assigned": ([("dk[..., cols, :] +=", "dk[..., cols, :] =")], "added up (+=)"),
    "dv assigned": ([("dv[..., cols, :] +=", "dv[..., cols, :] =")], "added up (+=)"),
    "NaN in empty rows": (
        [("lse = lse.masked_fill(lse == -torch.inf, torch.inf)", "pass")],
        "+inf",
    ),
    "two values": ([("return dq, dk, dv", "return dq, dk")], "3 values"),
}


@pytest.mark.parametrize(("changes", "said"), BACKWARD_MISTAKES.values(), ids=BACKWARD_MISTAKES)
def test_each_mistake_in_the_backward_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(broken(backward_source(), "my_flash_backward", *changes), *BACKWARD)


def test_a_backward_that_stores_p_is_refused_though_its_values_are_right():
    def naive(dout, q, k, v, out, lse, is_causal, block_q, block_k):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            output, _ = standard_attention(*leaves, causal=is_causal)
        return torch.autograd.grad(output, leaves, dout)

    for check in BACKWARD[:2]:
        check(naive)
    assert "256, 256)" in diagnosis(naive, checks.check_backward_memory)


# --- little memory is no merit of a wrong result --------------------------------------------------


@pytest.mark.parametrize("result", [1, lambda q: (q, q[..., 0])], ids=["a number", "its input"])
def test_a_forward_that_computes_nothing_does_not_pass_for_its_little_memory(result):
    def student(q, k, v, is_causal, block_q, block_k):
        return result(q.clone()) if callable(result) else result

    diagnosis(student, checks.check_forward_memory)


def test_a_backward_that_computes_nothing_does_not_pass_for_its_little_memory():
    def student(dout, q, k, v, out, lse, is_causal, block_q, block_k):
        return q.clone(), k.clone(), v.clone()

    assert "dv" in diagnosis(student, checks.check_backward_memory)
