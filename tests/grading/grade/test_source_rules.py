import pytest

from labsupport.grading.grade.pristine import Pristine, PristineCell, pristine_notebooks
from labsupport.grading.grade.source_rules import flags_of

SETUP = "import torch\nimport torch.nn.functional as F\nfrom labsupport.attention import attention"


@pytest.fixture
def judge():
    """The rules for a solution, where the instructor's own is this one."""

    def findings(source, solution="return q @ k"):
        own = f"def solve(q, k, v):\n    {solution}"
        cells = (PristineCell("code", SETUP), PristineCell("code", own, "ex", solution=True))
        return flags_of({"ex": source}, Pristine("01", cells))

    return findings


@pytest.mark.parametrize(
    "line",
    [
        "return F.scaled_dot_product_attention(q, k, v)",
        "return torch.nn.functional.scaled_dot_product_attention(q, k, v)",
        "f = F.scaled_dot_product_attention\n    return f(q, k, v)",
        'return getattr(F, "scaled_dot_product_attention")(q, k, v)',
        "from torch.nn.functional import scaled_dot_product_attention as f\n    return f(q, k, v)",
        "from labsupport.attention import standard_attention as f\n    return f(q, k, v)",
        "import labsupport.attention.flash_torch as f\n    return f.flash_attention(q, k, v)",
        "from flash_attn import flash_attn_func\n    return flash_attn_func(q, k, v)",
        "return attention(q, k, v)",
        "return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)",
        "from labsupport.checks import roof\n    return roof(q, k, v, 1)",
    ],
)
def test_a_library_that_does_the_exercise_is_found(judge, line):
    assert "ex" in judge(f"def solve(q, k, v):\n    {line}").forbidden


@pytest.mark.parametrize(
    "source",
    [
        "def solve(q, k, v):\n    '''Not F.scaled_dot_product_attention.'''\n    return q @ k",
        "def attention(q, k):\n    return q @ k\ndef solve(q, k, v):\n    return attention(q, k)",
        "def solve(q, k, v):\n    attention = (q @ k).softmax(-1)\n    return attention @ v",
        "def solve(q, k, v):\n    # labsupport.attention would do this\n    return torch.exp(q)",
    ],
)
def test_own_work_that_only_mentions_the_library_is_left_alone(judge, source):
    found = judge(source)

    assert found.forbidden == {}
    assert found.flags == ()


def test_where_the_exercise_is_to_use_attention_any_may_be_used(judge):
    found = judge(
        "def solve(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)",
        solution="return attention(q, k, v)",
    )

    assert found.forbidden == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exec('x = 1')", "runs text"),
        ("open('/etc/passwd')", "opens a file"),
        ("getattr(F, 'scaled' + name)(q)", "computed"),
        ("import inspect", "who calls it"),
        ("torch.allclose = lambda *a: True", "replaces a part of a library"),
        ("().__class__.__base__.__subclasses__()", "inside"),
        (f"table = {list(range(60))}", "constants"),
        ("import subprocess", "starts programs"),
    ],
)
def test_what_only_looks_odd_is_for_a_person_and_costs_nothing(judge, line, said):
    found = judge(f"def solve(q, k, v):\n    {line}\n    return q @ k")

    assert found.forbidden == {}
    assert any(said in flag.text for flag in found.flags)


def test_the_labs_own_solutions_break_no_rule():
    for pristine in pristine_notebooks().values():
        sources = {name: cell.source for name, cell in pristine.solutions.items()}
        found = flags_of(sources, pristine)

        assert found.forbidden == {}
        assert found.flags == ()
