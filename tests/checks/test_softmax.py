import pytest
import torch

from labsupport import checks
from labsupport.checks import softmax
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import diagnosis, each, function, solution_source

ALL = [checks.check_running_values, checks.check_running_extremes, checks.check_running_streams]


def source():
    return solution_source("01", "ex-1-3-online-softmax")


@pytest.mark.parametrize("check", ALL)
def test_the_solution_passes(check):
    check(function(source(), "running_max_and_sum"))


def test_another_right_way_passes():
    def by_columns(scores, block_size):
        m = torch.full(scores.shape[:-1], -torch.inf)
        l = torch.zeros(scores.shape[:-1])
        for j in range(0, scores.shape[-1], block_size):
            block = scores[..., j : j + block_size]
            m_old, m = m, torch.maximum(m, block.max(dim=-1).values)
            factor = torch.where(m_old == -torch.inf, 0.0, (m_old - m).exp())
            shifted = (block - m.unsqueeze(-1)).exp()
            l = l * factor + torch.where(block == -torch.inf, 0.0, shifted).sum(-1)
        return m, l

    for check in ALL:
        check(by_columns)


OTHERS = (
    Mistake(("m_new.masked_fill(m_new == -torch.inf, 0.0)", "m_new"), "NaN"),
    Mistake(("return m, l", "return l, m"), "m is wrong"),
)


@each((ALL, softmax.running_max_and_sum, softmax.MAXIMUM_MISTAKES + softmax.SUM_MISTAKES + OTHERS))
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


def whole_row_by_amax(scores, block_size):
    m = scores.amax(-1)
    l = (scores - m.masked_fill(m == -torch.inf, 0.0)[..., None]).exp().sum(-1)
    return m, l


def whole_row_by_logsumexp(scores, block_size):
    m = scores.split(1, dim=-1)
    m = torch.stack([column.squeeze(-1) for column in m]).amax(0)
    return m, (scores.logsumexp(-1) - m.masked_fill(m == -torch.inf, 0.0)).exp()


def whole_row_by_matmul(scores, block_size):
    m = scores.cummax(-1).values[..., -1]
    p = (scores - m.masked_fill(m == -torch.inf, 0.0)[..., None]).exp()
    return m, p @ torch.ones(scores.shape[-1])


def two_passes(scores, block_size):
    m = torch.stack([b.amax(-1) for b in scores.split(block_size, -1)]).amax(0)
    shift = m.masked_fill(m == -torch.inf, 0.0)[..., None]
    return m, sum((b - shift).exp().sum(-1) for b in scores.split(block_size, -1))


@pytest.mark.parametrize(
    "student", [whole_row_by_amax, whole_row_by_logsumexp, whole_row_by_matmul, two_passes]
)
def test_more_than_one_look_at_one_block_is_refused_though_the_values_are_right(student):
    checks.check_running_values(student)
    said = diagnosis(checks.check_running_streams, student)
    assert "one block" in said or "reads the scores twice" in said


def test_writing_into_the_scores_is_refused():
    def in_place(scores, block_size):
        m = scores.amax(-1)
        return m, scores.sub_(m[..., None]).exp_().sum(-1)

    assert "in place" in diagnosis(checks.check_running_values, in_place)


@pytest.mark.parametrize(
    "result",
    [
        lambda scores: 1,
        lambda scores: (scores[..., 0], scores[..., 0]),
        lambda scores: (scores.amax(-1) * 0, scores.amax(-1) * 0 + 1),
    ],
    ids=["a number", "the first scores", "a constant"],
)
def test_a_function_that_computes_nothing_does_not_stream(result):
    diagnosis(checks.check_running_streams, lambda scores, block_size: result(scores.clone()))
