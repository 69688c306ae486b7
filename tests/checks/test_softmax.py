import pytest
import torch

from labsupport import checks
from tests.checks.solutions import broken, function, solution_source
from tests.checks.test_textbook import diagnosis

ALL = [
    checks.check_running_values,
    checks.check_running_extremes,
    checks.check_running_streams,
]


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


MISTAKES = {
    "l not rescaled": ([("l * torch.exp(m - shift) +", "l +")], "l is not rescaled"),
    "rescaled upside down": (
        [("l * torch.exp(m - shift)", "torch.where(l == 0, l, l * torch.exp(shift - m))")],
        "must shrink",
    ),
    "maximum of the last block": (
        [("torch.maximum(m, block.amax(dim=-1))", "block.amax(dim=-1)")],
        "last block alone",
    ),
    "m starts at 0": (
        [
            (
                "torch.full(scores.shape[:-1], -torch.inf, dtype=scores.dtype, device=scores.device)",
                "scores.new_zeros(scores.shape[:-1])",
            )
        ],
        "start at -inf",
    ),
    "NaN in empty rows": ([("m_new.masked_fill(m_new == -torch.inf, 0.0)", "m_new")], "NaN"),
    "maximum never subtracted": (
        [("torch.exp(m - shift)", "1"), ("block - shift[..., None]", "block")],
        "never subtracted",
    ),
    "last block dropped": (
        [
            (
                "scores.split(block_size, dim=-1)",
                "scores[..., : scores.shape[-1] // block_size * block_size].split(block_size, dim=-1)",
            )
        ],
        "shorter block is left out",
    ),
    "own maxima added": (
        [
            (
                "l * torch.exp(m - shift) + torch.exp(block - shift[..., None])",
                "l + torch.exp(block - block.amax(-1, keepdim=True))",
            )
        ],
        "under its own maximum",
    ),
    "wrong order": ([("return m, l", "return l, m")], "m is wrong"),
}


@pytest.mark.parametrize(("changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(broken(source(), "running_max_and_sum", *changes), *ALL)


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
    said = diagnosis(student, checks.check_running_streams)
    assert "one block" in said or "reads the scores twice" in said


def test_writing_into_the_scores_is_refused():
    def in_place(scores, block_size):
        m = scores.amax(-1)
        return m, scores.sub_(m[..., None]).exp_().sum(-1)

    assert "in place" in diagnosis(in_place, checks.check_running_values)


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
    diagnosis(lambda scores, block_size: result(scores.clone()), checks.check_running_streams)
