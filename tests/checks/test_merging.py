import pytest
import torch

from labsupport import checks
from labsupport.attention import merge_attention
from tests.checks.solutions import broken, function, solution_source

VALUES, EDGES, ALL = checks.check_merge_values, checks.check_merge_edges, checks.check_merge_all


def source():
    return solution_source("03", "ex-3-4-merge")


def solved(name, *changes):
    return broken(source(), name, *changes)


def diagnosis(check, student):
    with pytest.raises(checks.CheckFailed) as caught:
        check(student)
    return str(caught.value)


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_the_solutions_pass(seed, capsys):
    VALUES(solved("merge"), seed=seed)
    EDGES(solved("merge"), seed=seed)
    ALL(solved("merge_all"), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 3


def test_the_labs_own_function_passes():
    def merge_all(parts):
        parts = iter(parts)
        part, lse = next(parts)
        out = part.float()
        for each, each_lse in parts:
            out, lse = merge_attention(out, lse, each, each_lse)
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
MAXIMUM = (
    "m = torch.maximum(lse, part_lse)\n"
    "    weight, part_weight = (lse - m).exp(), (part_lse - m).exp()\n"
    "    total = weight + part_weight"
)
VALUE_MISTAKES = {
    "plain average": ([(RETURN, "return (out + part) / 2, both")], "plain average"),
    "sum": ([(RETURN, "return out + part, both")], "without weights"),
    "weights by lse": ([(WEIGHTS, "weight, part_weight = lse / (lse + part_lse), part_lse / (lse + part_lse)")], "They are logarithms"),
    "not normalised": ([(WEIGHTS, "weight, part_weight = lse.exp(), part_lse.exp()")], "do not add up to 1"),
    "not normalised, with a maximum": ([(WEIGHTS, MAXIMUM)], "exp(lse - m) and exp(part_lse - m)"),
    "normalised twice": ([(WEIGHTS, MAXIMUM + "\n    weight, part_weight = weight / total**2, part_weight / total**2")], "twice"),
    "swapped": ([("weight, part_weight =", "part_weight, weight =")], "swapped"),
    "the larger": ([(WEIGHTS, "weight, part_weight = (lse >= part_lse).float(), (lse < part_lse).float()")], "Only the part with the larger"),
    "part not scaled": ([(WEIGHTS, MAXIMUM), (RETURN, "return weight[..., None] * out + part, both")], "but part by nothing"),
    "unchanged": ([(RETURN, "return out + 0, both")], "part is not in it"),
    "replaced": ([(RETURN, "return part.float(), both")], "out is lost"),
    "powers of 2": ([(WEIGHTS, "weight, part_weight = (1 / (1 + 2 ** (part_lse - lse))), (1 / (1 + 2 ** (lse - part_lse)))")], "powers of 2"),
    "lse added": ([(RETURN, RETURN.replace("both", "lse + part_lse"))], "are added"),
    "lse of the larger": ([(RETURN, RETURN.replace("both", "torch.maximum(lse, part_lse)"))], "larger of the two"),
    "lse mean": ([(RETURN, RETURN.replace("both", "(lse + part_lse) / 2"))], "mean of the two"),
    "lse without m": ([(WEIGHTS, WEIGHTS + "; both = both - torch.maximum(lse, part_lse)")], "maximum is missing"),
    "sum of exponentials": ([(RETURN, RETURN.replace("both", "both.exp()"))], "logarithm is missing"),
    "m plus the sum": ([(WEIGHTS, WEIGHTS + "; m = torch.maximum(lse, part_lse); both = m + (both - m).exp()")], "A logarithm is missing"),
    "base 2": ([(RETURN, RETURN.replace("both", "both / math.log(2)"))], "base 2"),
    "lse unchanged": ([(RETURN, RETURN.replace("both", "lse + 0"))], "has to grow"),
    "the part's lse": ([(RETURN, RETURN.replace("both", "part_lse + 0"))], "running one is lost"),
    "lse weighted": ([(RETURN, RETURN.replace("both", "weight * lse + part_weight * part_lse"))], "averaged with the weights"),
    "rounded to the part's dtype": ([(RETURN, RETURN.replace("return ", "out = ").replace(", both", "\n    return out.to(part.dtype), both"))], "stays in float32"),
    "computed in the part's dtype": ([(RETURN, "return (weight[..., None] * out).to(part.dtype).float() + part_weight[..., None] * part, both")], "entries are wrong"),
    "in place": ([(RETURN, "out *= weight[..., None]\n    " + RETURN)], "in place"),
    "one value": ([(RETURN, RETURN.replace(", both", ""))], "return 2 values"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), VALUE_MISTAKES.values(), ids=VALUE_MISTAKES)
def test_each_wrong_merge_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(VALUES, solved("merge", *changes))


EDGE_MISTAKES = {
    "nothing seen": ([(SAFE, "both")], "subtract 0 instead of -inf"),
    "a very small number for nothing": ([(BOTH, BOTH + ".clamp(min=-1e9)")], "is -inf, not -1e+09"),
    "lse 0 for nothing": ([(RETURN, RETURN.replace("both", "safe"))], "is -inf, not 0"),
    "out of nothing": ([(RETURN, "empty = both == -torch.inf\n    " + RETURN.replace("* part,", "* part + empty[..., None],"))], "has seen no key is 0"),
    "no maximum": (
        [(BOTH, "total = lse.exp() + part_lse.exp(); both = total.log()"), (WEIGHTS, "weight, part_weight = (e.exp() / total.where(total > 0, torch.ones(())) for e in (lse, part_lse))")],
        "Subtract the larger",
    ),
    "the running one instead of the larger": (
        [(BOTH, "m = lse.masked_fill(lse == -torch.inf, 0.0); both = m + ((lse - m).exp() + (part_lse - m).exp()).log()")],
        "whichever it is",
    ),
    "not written for half of the rows": ([(RETURN, "weight = weight.nan_to_num() * (part_lse > -torch.inf)\n    " + RETURN)], "wrong"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), EDGE_MISTAKES.values(), ids=EDGE_MISTAKES)
def test_each_mistake_at_the_edges_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(EDGES, solved("merge", *changes))


STEP = "out, lse = merge(out, lse, part, part_lse)"
BEGIN = "part, lse = next(parts)\n    out, dtype = part.float(), part.dtype"
ALL_MISTAKES = {
    "first lost": ([("parts = iter(parts)", "parts = list(parts); parts = iter(parts[1:] or parts)")], "first part is lost"),
    "last lost": ([(STEP, "if held is not None: out, lse = merge(out, lse, *held)\n        held = part, part_lse"), ("out, dtype =", "held = None; out, dtype =")], "last part is lost"),
    "starts at 0": ([(BEGIN, BEGIN + "\n    out, lse = merge(out * 0, lse * 0, part, lse)")], "starts at 0"),
    "averaged": ([(STEP, "n += 1; out = out + (part - out) / n"), ("out, dtype =", "n = 1; out, dtype =")], "All parts weigh the same"),
    "lse not kept": ([(STEP, "out, _ = merge(out, lse, part, part_lse)")], "is not carried on"),
    "only two": ([(STEP, STEP + "; break")], "Only the first two"),
    "float32 comes back": ([("out.to(dtype)", "out")], "cast the result back"),
    "rounded in each step": ([(STEP, STEP + "\n        out = out.to(dtype).float()")], "rounded on the way"),
    "lse in the parts' dtype": ([("out.to(dtype), lse", "out.to(dtype), lse.to(dtype)")], "stays float32"),
    "all held": ([("parts = iter(parts)", "parts = iter(list(parts))")], "were still in memory"),
    "needs a list": ([("part, lse = next(parts)", "parts = list(parts); part, lse = parts.pop(0)")], "were still in memory"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), ALL_MISTAKES.values(), ids=ALL_MISTAKES)
def test_each_mistake_with_many_parts_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(ALL, solved("merge_all", *changes))


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


def test_an_order_that_matters_is_found():
    """Right only where the second part has the larger log-sum-exp."""
    merge = solved(
        "merge",
        (BOTH, "both = part_lse + torch.log1p((lse - part_lse).clamp(max=0).exp())"),
    )
    assert "is wrong" in diagnosis(VALUES, merge)


@pytest.mark.parametrize(
    ("name", "check"), [("merge", VALUES), ("merge", EDGES), ("merge_all", ALL)]
)
def test_stubs_are_called_stubs(name, check):
    stub = function(f"def {name}(*args):\n    raise NotImplementedError", name)
    assert "not written yet" in diagnosis(check, stub)
