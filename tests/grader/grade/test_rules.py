import pytest

from grader.grade.plan import flags_of, make_plan
from grader.grade.submissions import pristine_notebooks


@pytest.fixture
def kinds(hand_in, solved_folder):
    def found(square):
        pristine = pristine_notebooks(solved_folder)["01-Powers"]
        plan = make_plan(pristine, hand_in(square))
        return [flag.kind for flag in flags_of(plan, pristine)]

    return found


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("F.scaled_dot_product_attention(x, x, x)", "library call"),
        ("getattr(F, 'scaled_dot_product_attention')(x, x, x)", "library call"),
        ("torch.onnx.ops.rotary_embedding(x)", "library call"),
        ("import labsupport.checks.flash", "odd name"),
        ("import pydoc; pydoc.locate('torch')", "odd name"),
        ("exec('x = 1')", "odd name"),
        ("torch._C", "odd name"),
        ("table = [" + "1, " * 50 + "]", "many numbers"),
    ],
)
def test_what_looks_odd_is_flagged(kinds, line, kind):
    assert kind in kinds(f"def square(x):\n    {line}\n    return x * x")


def test_honest_work_carries_no_flag(kinds):
    assert kinds("import torch\ndef square(x):\n    return torch.as_tensor(x) ** 2") == []
