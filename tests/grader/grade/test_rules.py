import time

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
        ("from transformers.models.t5.modeling_t5 import T5Attention as layer", "library call"),
        ("match torch.nn:\n        case object(MultiheadAttention=layer): pass", "library call"),
        ("import labsupport.checks.flash", "odd name"),
        ("import pydoc; pydoc.locate('torch')", "odd name"),
        ("exec('x = 1')", "odd name"),
        ("torch._C", "odd name"),
        ("from torch.utils import _python_dispatch as watching", "odd name"),
        ("torch.nn.__getattribute__('Multihead' + 'Attention')", "odd name"),
        ("globals()['__built' + 'ins__']", "odd name"),
        ("type(square)(compile('torch.n' + 'n', '', 'eval'), {})", "odd name"),
        ("torch.hidden = max", "odd name"),
        ("%run helper.py", "odd name"),
        ("/exec helper", "odd name"),
        ("%time (\n    /f x", "odd name"),
        ("table = [" + "1, " * 50 + "]", "many numbers"),
    ],
)
@pytest.mark.parametrize("magic", ["", "%%capture\n"])
def test_what_looks_odd_is_flagged(kinds, line, kind, magic):
    found = kinds(f"{magic}import torch\ndef square(x):\n    {line}\n    return x * x")
    assert kind in found


@pytest.mark.parametrize(
    "source",
    [
        "def square(x):\n    return torch.as_tensor(x) ** 2",
        "%matplotlib inline\n%time y = square(3)\nout = %timeit -o square(3)\n!ls\n"
        "?torch.exp\ntorch?",
        "class A:\n    def __init__(self):\n        self._attention = 1\na = A()\na.x = 1",
        "model = torch.nn.Linear(1, 1)\nmodel.weight.grad = None\n"
        "x = torch.__version__, A.__name__",
    ],
)
def test_honest_work_carries_no_flag(kinds, source):
    assert kinds(f"{source}\nimport torch") == []


def test_a_flood_of_flags_and_of_magics_is_cut_short(hand_in, solved_folder):
    pristine = pristine_notebooks(solved_folder)["01-Powers"]
    cells = [f"exec(1)\nos.x{n}.sys = %time {n}" for n in range(200)]
    cells.append("\n".join(f"x{n} = %time {n}" for n in range(400)))
    plan = make_plan(pristine, hand_in(after=cells))
    start = time.process_time()
    assert 0 < len(list(flags_of(plan, pristine))) <= 50
    assert time.process_time() - start < 5
