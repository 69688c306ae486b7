"""The check of a kernel's update: right ones pass, and each mistake gets its own diagnosis."""

import importlib.util
import sys
from itertools import count

import pytest

from labsupport import checks

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.checks import ex_4_3_triton_kernels as kernel
from labsupport.checks.verdict import mistakes
from tests.checks.solutions import diagnosis, solution_source

VALUES, EXTREMES, _ = UPDATE = (
    checks.check_update_values,
    checks.check_update_extremes,
    checks.check_update_dtype,
)
SOLUTION = solution_source("04", "ex-4-3-kernel")
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

    def define(source, *edit):
        for old, new in zip(edit[::2], edit[1::2], strict=True):
            assert old in source, f"the solution no longer contains {old!r}"
            source = source.replace(old, new)
        file = tmp_path / f"cell{next(number)}.py"
        file.write_text(f"import triton\nimport triton.language as tl\n{source}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.update

    return define


def test_an_error_in_an_update_shows_its_line(jitted):
    said = diagnosis(VALUES, jitted(SOLUTION, "p = tl.exp2(scores -", "p = tl.exp2(score -"))
    assert "raised NameError in line" in said
    assert "    p = tl.exp2(score -" in said


@pytest.mark.parametrize(("style", "seed"), [(SOLUTION, 1), (ANOTHER_STYLE, 0)])
def test_right_updates_pass_and_write_nothing_else(style, seed, jitted, capfd):
    student = jitted(style)
    VALUES(student, seed)
    EXTREMES(student, seed)
    checks.check_update_dtype(student)
    printed, warned = capfd.readouterr()
    assert printed.count("[ok]") == 3
    assert warned == ""


OTHERS = mistakes(r"""
m is wrong
    tl.maximum(m, tl.max(scores, 1)) -> tl.maximum(tl.maximum(m, tl.max(scores, 1)), -1e6)
one dtype
    p.to(v.dtype) -> p
widened
    tl.dot(p.to(v.dtype), v) -> tl.dot(p, v.to(tl.float32))
exact as float16
    exp2(scores - shift[:, None]) -> exp2(scores - shift[:, None]).to(v.dtype).to(tl.float32)
exact as float16
    tl.sum(p, 1) -> tl.sum(p, 1).to(v.dtype)
three values, m, l and acc
    return m_new, l, acc -> return m_new, l
inside of exp2
    tl.exp2(scores - shift[:, None]) -> tl.exp2(scores) / tl.exp2(shift)[:, None]
v_new
    return m_new -> return v_new
@triton.jit
    @triton.jit ->
not written yet
    return m_new, l, acc -> raise NotImplementedError
""")


@pytest.mark.parametrize("mistake", kernel.UPDATE_MISTAKES + OTHERS, ids=lambda m: m.say[:60])
def test_each_mistake_gets_its_own_diagnosis(mistake, jitted):
    """The table's edits are of the lab's function on tensors; they fit the notebook's kernel."""
    assert mistake.say in diagnosis(UPDATE, jitted(SOLUTION, *mistake.edit))


def test_sums_in_the_inputs_dtype_are_found(jitted):
    student = jitted(SOLUTION, "v)\n", "v)\n    acc = acc.to(v.dtype)\n")
    assert "acc overflows" in diagnosis(checks.check_update_dtype, student)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("tl.max(scores, 1)", "scores.max(dim=1)"), "tl.max(scores, 1)"),
        (("m - shift)", "shift - m)"), "alpha = exp2(m - m_new)"),
    ],
)
def test_a_check_that_runs_alone_names_the_mistake_too(edit, said, jitted):
    assert said in diagnosis(checks.check_update_dtype, jitted(SOLUTION, *edit))
