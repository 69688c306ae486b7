"""The check of a kernel's update: right ones pass, and each mistake gets its own diagnosis."""

import importlib.util
import sys
from itertools import count

import pytest

from labsupport import checks

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels.template import softmax_update
from labsupport.checks import kernel
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import diagnosis, solution_source

UPDATE = [checks.check_update_values, checks.check_update_extremes, checks.check_update_dtype]


def solution():
    return solution_source("04", "ex-4-3-kernel")


ANOTHER_STYLE = """
@triton.jit
def largest(m, scores):
    return tl.where(tl.max(scores, axis=1) > m, tl.max(scores, axis=1), m)

@triton.jit
def update(m_old, l, acc, s, v):
    m = largest(m_old, s)
    seen = m > float("-inf")
    p = tl.where(seen[:, None], tl.math.exp2(s - m[:, None]), 0.0)
    alpha = tl.where(m_old > float("-inf"), tl.math.exp2(m_old - m), 0.0)
    l *= alpha
    l += tl.sum(p, axis=1)
    acc *= alpha[:, None]
    return m, l, tl.dot(p.to(v.type.element_ty), v, acc)
"""


@pytest.fixture
def jitted(tmp_path):
    """Kernel functions need a file: Triton reads their source."""
    number = count()

    def define(source, name="update"):
        file = tmp_path / f"cell{next(number)}.py"
        file.write_text(f"import triton\nimport triton.language as tl\n{source}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)

    return define


@pytest.fixture
def broken(jitted):
    def define(*edit):
        source = solution()
        for old, new in zip(edit[::2], edit[1::2], strict=True):
            assert old in source, f"the solution no longer contains {old!r}"
            source = source.replace(old, new)
        return jitted(source)

    return define


@pytest.mark.parametrize("check", UPDATE)
@pytest.mark.parametrize("style", ["solution", "another style"])
def test_right_updates_pass_and_write_nothing_else(check, style, jitted, capfd):
    check(jitted(solution() if style == "solution" else ANOTHER_STYLE))
    printed, warned = capfd.readouterr()
    assert printed.startswith("[ok]")
    assert warned == ""


@pytest.mark.parametrize("check", UPDATE)
def test_the_labs_own_update_passes(check):
    check(softmax_update)


@pytest.mark.parametrize("seed", range(1, 6))
def test_other_seeds_pass_too(seed, jitted):
    checks.check_update_values(jitted(solution()), seed=seed)
    checks.check_update_extremes(jitted(solution()), seed=seed)


OTHERS = (
    Mistake(("- shift)", "- shift) * 1.4426950408889634)", "tl.exp2(m -", "tl.exp2((m -", "- shift[:, None])", "- shift[:, None]) * 1.4426950408889634)", "tl.exp2(scores -", "tl.exp2((scores -"), "second factor log2(e)"),
    Mistake(("return m_new", "return shift"), "must stay -inf, but is 0"),
    Mistake(("tl.maximum(m, tl.max(scores, 1))", "tl.maximum(tl.maximum(m, tl.max(scores, 1)), -1e6)"), "must stay -inf, but is -1e+06"),
    Mistake(("p.to(v.dtype)", "p"), "one dtype"),
    Mistake(("p.to(v.dtype)", "p.to(tl.float16)"), "the inputs' dtype, float32 here"),
    Mistake(("tl.dot(p.to(v.dtype), v)", "tl.dot(p, v.to(tl.float32))"), "widened"),
    Mistake(("exp2(scores - shift[:, None])", "exp2(scores - shift[:, None]).to(v.dtype).to(tl.float32)"), "exact as float16"),
    Mistake(("return m_new, l, acc", "return m_new, l"), "three values, m, l and acc"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", kernel.MISTAKES + OTHERS, ids=lambda m: m.say[:60])
def test_each_mistake_gets_its_own_diagnosis(mistake, broken):
    """The table's edits are of the lab's function on tensors; they fit the notebook's kernel."""
    assert mistake.say in diagnosis(UPDATE, broken(*mistake.edit))


def test_a_quotient_of_exponentials_overflows(broken):
    """The same on paper; and right for small scores."""
    quotient = "tl.exp2(scores) / tl.exp2(shift)[:, None]"
    student = broken("tl.exp2(scores - shift[:, None])", quotient)
    checks.check_update_values(student)
    assert "inside of exp2" in diagnosis(UPDATE, student)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("v)\n", "v)\n    acc = acc.to(v.dtype)\n"), "acc overflows"),
        (("tl.sum(p, 1)", "tl.sum(p, 1).to(v.dtype)"), "exact as float16"),
    ],
)
def test_sums_in_the_inputs_dtype_are_found(changes, said, broken):
    """Random inputs might let float16 sums pass: these do not."""
    student = broken(*changes)
    messages = [diagnosis(check, student) for check in UPDATE if check_fails(check, student)]
    assert any(said in message for message in messages), messages


def check_fails(check, student):
    try:
        check(student)
    except checks.CheckFailed:
        return True
    return False


def test_two_mistakes_at_once_say_where_the_result_goes_wrong(broken):
    student = broken("l * alpha", "l", "return m_new", "return m_new + 1")
    assert "m is wrong" in diagnosis(UPDATE, student)


def test_a_stub_and_a_plain_function_are_named_as_what_they_are(jitted):
    whole = solution()
    stub = whole[: whole.index("    m_new")] + "    raise NotImplementedError\n"
    assert "not written yet" in diagnosis(UPDATE, jitted(stub))
    assert "@triton.jit" in diagnosis(UPDATE, jitted(whole.replace("@triton.jit", "")))


def test_what_does_not_run_says_why(broken):
    assert "v_new" in diagnosis(UPDATE, broken("return m_new", "return v_new"))
