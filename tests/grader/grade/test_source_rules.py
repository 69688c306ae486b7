import pytest

from grader.grade.assemble import assemble
from grader.grade.pristine import Pristine, PristineCell, pristine_notebooks
from grader.grade.source_rules import flags_of
from grader.grade.submissions import Submission, find_submissions
from tests.grader.variants import honest_files, honest_work, hostile_cells
from tests.grader.variants.course import write_course

SETUP = """
import torch
import torch.nn.functional as F
import labsupport
from labsupport.attention import attention
from labsupport.profiling import speedup
"""
SOLVE = "def solve(q, k, v):\n    "


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
        "from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as f\n    f(q)",
        "from transformers.models.bert.modeling_bert import eager_attention_forward as f\n    f(q)",
        "from transformers.integrations import sdpa_attention as f\n"
        "    return f.sdpa_attention_forward(None, q, k, v, None)",
        "return F.linear_cross_entropy(q, k, v)",
        "return torch._native_multi_head_attention(q, k, v)",
        "return torch.nn.TransformerEncoderLayer(4, 2)(q)",
        "from torch.nn.attention.varlen import varlen_attn\n    return varlen_attn(q, k, v)",
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


@pytest.mark.parametrize(
    "source",
    [
        f"attention = attention\n{SOLVE}return attention(q, k, v)",
        f"first = attention\nattention = first\n{SOLVE}return attention(q, k, v)",
        "def solve(q, k, v, attention=attention):\n    return attention(q, k, v)",
        f"class Box:\n    call = attention\n{SOLVE}return Box.call(q, k, v)",
        f"def f():\n    from math import exp as attention\n{SOLVE}return attention(q, k, v)",
        "from flash_attn import flash_attn_func as f\ndef other():\n    from math import exp as f\n"
        f"{SOLVE}return f(q, k, v)",
        f"from torch.nn.functional import *\n{SOLVE}return scaled_dot_product_attention(q, k, v)",
    ],
)
def test_a_name_that_is_bound_again_still_belongs_to_the_library(judge, source):
    assert "ex" in judge(source).forbidden


@pytest.mark.parametrize(
    "source",
    [
        f"attention = 1 / 0\nattention = attention\n{SOLVE}return attention(q, k, v)",
        f"if False:\n    attention = 0\n{SOLVE}return attention(q, k, v)",
        f"attention: object\n{SOLVE}return attention(q, k, v)",
        "for attention in [attention]:\n    def solve(q, k, v):\n        return attention(q, k, v)",
        f"{SOLVE}global attention\n    attention = attention\n    return attention(q, k, v)",
        f"class Box:\n    attention = attention\n{SOLVE}return Box.attention(q, k, v)",
        f"other = attention\ndef attention():\n    pass\n{SOLVE}return other(q, k, v)",
        "def get():\n    return attention\nother = get()\ndef attention():\n    pass\n"
        f"{SOLVE}return other(q, k, v)",
        f"lab = labsupport\n{SOLVE}return lab.attention.attention(q, k, v)",
        f"from transformers import GPT2Model\n{SOLVE}return GPT2Model(q)",
        "other = torch.nn.functional\nclass Decoy:\n    def scaled_dot_product_attention(self):\n"
        f"        pass\n{SOLVE}return other.scaled_dot_product_attention(q, k, v)",
    ],
)
def test_what_may_belong_to_the_library_or_not_is_for_a_person(judge, source):
    found = judge(source)

    assert found.forbidden == {}
    assert [flag.kind for flag in found.flags] == ["library call"]


@pytest.mark.parametrize(
    "line",
    [
        'return vars(F)["scaled_dot_product_attention"](q, k, v)',
        'return F.__dict__["scaled_dot_product_attention"](q, k, v)',
        'take = getattr\n    return take(F, "scaled_dot_product_attention")(q, k, v)',
        'import operator\n    return operator.attrgetter("nn.functional.flex_attention")(torch)(q)',
        'import operator as o\n    return o.methodcaller("scaled_dot_product_attention", q)(F)',
        'print("scaled_dot_product_attention")\n    return q @ k',
        'return load("labsupport.attention").attention(q, k, v)',
    ],
)
def test_a_text_that_names_ready_made_attention_is_for_a_person(judge, line):
    found = judge(f"{SOLVE}{line}")

    assert found.forbidden == {}
    assert "library call" in {flag.kind for flag in found.flags}


@pytest.mark.parametrize(
    "source",
    [
        f"{SOLVE}return attention(q, k)\ndef attention(q, k):\n    return q @ k\nsolve(1, 2, 3)",
        f"attention = lambda q, k: q @ k\n{SOLVE}return attention(q, k)",
        f"{SOLVE}return q\nfor speedup in (1, 2):\n    print(solve(speedup, 1, 2))",
        f"speedup = 3\n{SOLVE}return speedup * q",
        "class Own:\n    def attention(self, q):\n        return q\n"
        "    def apply_rotary_pos_emb(self, q):\n        return self._scaled_dot_product_scores\n"
        "    def forward(self, q):\n        return self.attention(q)\n"
        f"{SOLVE}return Own().forward(q)",
        f"{SOLVE}flash_attn_ms = q\n    return flash_attn_ms.mean() + F.cross_entropy(q, k)",
        f"{SOLVE}raise ValueError('not as F.scaled_dot_product_attention does it')",
        f"from scipy import signal\n{SOLVE}return torch.signal.windows.hann(3), signal",
        "def attention(q, n):\n    return attention(q, n - 1) if n else q\n"
        f"{SOLVE}return attention(q, 3)",
    ],
)
def test_own_names_that_a_library_has_too_are_left_alone(judge, source):
    found = judge(source)

    assert found.forbidden == {}
    assert found.flags == ()


def test_where_the_exercise_is_to_use_attention_any_may_be_used(judge):
    found = judge(
        "def solve(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)",
        solution="return attention(q, k, v)",
    )

    assert found.forbidden == {}


def test_a_wrapper_of_attention_from_another_library_is_for_a_person_wherever_it_is_used(judge):
    found = judge(
        "from transformers.integrations.sdpa_attention import sdpa_attention_forward as solve\n"
        "print('flash_attn_func')",
        solution="return attention(q, k, v)",
    )

    assert found.forbidden == {}
    assert len(found.flags) == 1
    assert "sdpa_attention_forward" in found.flags[0].text


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
        ("torch.os.fork()", "the system"),
        ("torch.sys.exit()", "inside"),
        ("torch.importlib.import_module(name)", "computed"),
        ("from torch import os", "the system"),
        ("import torch.multiprocessing as mp", "starts processes"),
        ("from torch import multiprocessing", "starts processes"),
        ("import multiprocessing", "starts processes"),
        ("import concurrent.futures", "processes or threads"),
        ("from threading import Thread", "starts threads"),
        ("from grader.handover import worker", "reaches for the grader"),
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


def test_honest_submissions_break_no_rule(tmp_path):
    variants = {**honest_work.honest, **honest_files.honest}

    flagged = {name for name, found in _judged(variants, tmp_path).items() if found != ({}, ())}

    # It writes to sys.stderr, which the rules cannot tell from other uses of sys.
    assert flagged == {"prints-and-warns"}


def test_detours_to_ready_made_attention_are_seen(tmp_path):
    variants = {name: one for name, one in hostile_cells.hostile.items() if "calls-" in name}

    judged = _judged(variants, tmp_path)

    assert judged.keys() == variants.keys()
    assert [name for name, found in judged.items() if found == ({}, ())] == []


def _judged(variants, folder):
    """What the rules say about submissions, which are put together and not run."""
    course = write_course(folder / "course")
    for name, variant in variants.items():
        variant.hand_in(folder / "submissions" / name, course)
    pristine = pristine_notebooks(course)
    judged = {}
    for one in find_submissions(folder / "submissions", notebooks=course):
        if isinstance(one, Submission):
            notebook = pristine[one.notebook]
            found = flags_of(assemble(notebook, one).sources, notebook)
            judged[one.student] = (found.forbidden, found.flags)
    return judged
