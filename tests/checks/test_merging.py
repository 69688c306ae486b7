import pytest
import torch

from labsupport import checks
from labsupport.attention import merge_attention
from labsupport.checks import merging
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import diagnosis, each, function, solution_source

VALUES, EDGES, ALL = checks.check_merge_values, checks.check_merge_edges, checks.check_merge_all


def source():
    return solution_source("03", "ex-3-4-merge")


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_the_solutions_pass(seed, capsys):
    VALUES(function(source(), "merge"), seed=seed)
    EDGES(function(source(), "merge"), seed=seed)
    ALL(function(source(), "merge_all"), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_the_labs_own_function_passes():
    def merge_all(parts):
        parts = iter(parts)
        part, lse = next(parts)
        out = part.float()
        for one, one_lse in parts:
            out, lse = merge_attention(out, lse, one, one_lse)
        return out.to(part.dtype), lse

    VALUES(merge_attention)
    EDGES(merge_attention)
    ALL(merge_all)


def test_other_right_ways_pass():
    """With the larger of the two, in float64; and a running result that begins with nothing."""

    def merge(out, lse, part, part_lse):
        m = torch.maximum(lse, part_lse)
        m = torch.where(torch.isinf(m), torch.zeros_like(m), m).double()
        a, b = torch.exp(lse - m), torch.exp(part_lse - m)
        total = a + b
        share = torch.where(total == 0, 1.0, total)
        result = (out * a.unsqueeze(-1) + part * b.unsqueeze(-1)) / share.unsqueeze(-1)
        return result.float(), (m + torch.log(total)).float()

    def merge_all(parts):
        out = lse = dtype = None
        for part, part_lse in parts:
            if out is None:
                dtype = part.dtype
                out = torch.zeros(part.shape)
                lse = torch.full(part_lse.shape, float("-inf"))
            out, lse = merge(out, lse, part, part_lse)
        return out.type(dtype), lse

    VALUES(merge)
    EDGES(merge)
    ALL(merge_all)


def test_weights_by_a_sigmoid_are_a_right_way_too():
    def merge(out, lse, part, part_lse):
        share = torch.sigmoid((part_lse - lse).nan_to_num(posinf=3e38, neginf=-3e38))[..., None]
        return out + share * (part.float() - out), torch.logaddexp(lse, part_lse)

    VALUES(merge)
    EDGES(merge)


BOTH, SAFE = "both = torch.logaddexp(lse, part_lse)", "both.masked_fill(both == -torch.inf, 0.0)"
WEIGHTS = "weight, part_weight = (lse - safe).exp(), (part_lse - safe).exp()"
RETURN = "return weight[..., None] * out + part_weight[..., None] * part, both"
OTHER_MERGES = (
    Mistake(
        (
            RETURN,
            RETURN.replace("return ", "out = ").replace(
                ", both", "\n    return out.to(part.dtype), both"
            ),
        ),
        "stays in float32",
    ),
    Mistake(
        (
            RETURN,
            "return (weight[..., None] * out).to(part.dtype).float() + part_weight[..., None] * part, both",
        ),
        "entries are wrong",
    ),
    Mistake((RETURN, "out *= weight[..., None]\n    " + RETURN), "in place"),
    Mistake((RETURN, RETURN.replace(", both", "")), "return 2 values"),
    # Right only where the second part has the larger log-sum-exp.
    Mistake(
        (BOTH, "both = part_lse + torch.log1p((lse - part_lse).clamp(max=0).exp())"), "is wrong"
    ),
)
OTHER_EDGES = (
    Mistake((SAFE, "both"), "subtract 0 instead of -inf"),
    Mistake((BOTH, BOTH + ".clamp(min=-1e9)"), "is -inf, not -1e+09"),
    Mistake(("part, both", "part, safe"), "is -inf, not 0"),
    Mistake((RETURN, "empty = both == -torch.inf\n    " + RETURN.replace("* part,", "* part + empty[..., None],")), "has seen no key is 0"),
    Mistake(
        (BOTH, "total = lse.exp() + part_lse.exp(); both = total.log()", WEIGHTS, "weight, part_weight = (e.exp() / total.where(total > 0, torch.ones(())) for e in (lse, part_lse))"),
        "Subtract the larger",
    ),
    Mistake(
        (BOTH, "m = lse.masked_fill(lse == -torch.inf, 0.0); both = m + ((lse - m).exp() + (part_lse - m).exp()).log()"),
        "whichever it is",
    ),
    Mistake((RETURN, "weight = weight.nan_to_num() * (part_lse > -torch.inf)\n    " + RETURN), "wrong"),
)  # fmt: skip
STEP = "out, lse = merge(out, lse, part, part_lse)"
OTHER_LOOPS = (
    Mistake(("out.to(dtype)", "out.float()"), "cast the result back"),
    Mistake((STEP, STEP + "\n        out = out.to(dtype).float()"), "rounded on the way"),
    Mistake(("out.to(dtype), lse", "out.to(dtype), lse.to(dtype)"), "stays float32"),
    Mistake(("parts = iter(parts)", "parts = iter(list(parts))"), "were still in memory"),
    Mistake(
        ("part, lse = next(parts)", "parts = list(parts); part, lse = parts.pop(0)"),
        "were still in memory",
    ),
)


@each(
    (VALUES, merging.merge, merging.OUT_MISTAKES + merging.LSE_MISTAKES + OTHER_MERGES),
    (EDGES, merging.merge, OTHER_EDGES),
    (ALL, merging.merge_all, merging.ALL_MISTAKES + OTHER_LOOPS),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


def test_all_parts_stacked_at_once_are_refused_although_the_result_is_right():
    def at_once(parts):
        outs, lses = zip(*parts, strict=True)
        lse = torch.stack(lses).logsumexp(0)
        weights = (torch.stack(lses) - lse).exp()[..., None]
        return (weights * torch.stack(outs).float()).sum(0).to(outs[0].dtype), lse

    assert "Merge each as it comes" in diagnosis(ALL, at_once)


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("for _ in parts: pass", "from a generator) lse is wrong"),  # all are taken, one is used
        ("return merge_all([(part, lse), next(parts)])", "Only the first two parts"),
    ],
)
def test_what_comes_from_a_generator_must_be_merged_too(rest, said):
    """Right for a list; of a generator the rest is dropped."""
    wrong = (
        "def merge_all(parts):\n    if not isinstance(parts, list):\n"
        f"        part, lse = next(parts)\n        {rest}\n        return part, lse\n"
    )
    text = source().replace("def merge_all(", "def merge_list(")
    student = function(text + "\n" + wrong + "    return merge_list(parts)\n", "merge_all")
    assert said in diagnosis(ALL, student)


@pytest.mark.parametrize(
    ("name", "check"), [("merge", VALUES), ("merge", EDGES), ("merge_all", ALL)]
)
def test_stubs_are_called_stubs(name, check):
    stub = function(f"def {name}(*args):\n    raise NotImplementedError", name)
    assert "not written yet" in diagnosis(check, stub)
