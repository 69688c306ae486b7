"""Exercise 4-3: right kernels pass, mistakes are named, and PyTorch cannot stand in for Triton."""

import importlib.util
import sys
from itertools import count

import pytest

from labsupport import checks

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.checks import ex_4_3_triton_kernels as lab
from labsupport.checks.verdict import mistakes
from tests.checks.solutions import diagnosis, each, solution_source

FLASH = (
    checks.check_triton_flash_values,
    checks.check_triton_flash_edges,
    checks.check_triton_flash_skips,
)
IMPORTS = """
import math, torch, triton
import triton.language as tl
from labsupport.checks.guard import check_guard, guarded_zeros

"""
STEPS = ("kernel", "flash")
CELLS = "\n\n".join(solution_source(f"ex-4-3-{step}") for step in STEPS)
VALUES, EXTREMES, _ = UPDATE = (
    checks.check_update_values,
    checks.check_update_extremes,
    checks.check_update_dtype,
)
STEP = solution_source("ex-4-3-kernel")
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
def kernels(tmp_path):
    """The notebook's two cells, or another source, as a module: Triton reads kernels from a file."""
    number = count()

    def define(*edit, source=CELLS):
        for old, new in zip(edit[::2], edit[1::2], strict=True):
            assert old in source, f"the solution no longer contains {old!r}"
            source = source.replace(old, new)
        file = tmp_path / f"cells{next(number)}.py"
        file.write_text(IMPORTS + source)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return define


def test_the_notebooks_kernels_pass_with_another_seed(kernels, capfd):
    cells = kernels()
    for check in FLASH:
        check(cells.flash_kernel, seed=5)
    printed, warned = capfd.readouterr()
    assert printed.count("(other inputs)") == 3
    assert warned == ""


@each(
    (FLASH[:2], lab.flash, lab.FLASH_MISTAKES),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said, monkeypatch):
    monkeypatch.setattr(lab, "_launched", lambda student, _: student)  # edits of PyTorch's code
    assert said in diagnosis(check, student)


@pytest.mark.parametrize(
    ("said", "edit"),
    [
        (
            "count as keys with score 0",
            ("visible = cols[None, :] < n_k", "visible = cols[None, :] >= 0"),
        ),
        ("tiles are loaded and masked", ("stop = tl.minimum(n_k, (", "stop = tl.maximum(n_k, (")),
        ("the diagonal cuts are not", ("j + BLOCK_K > full", "j + BLOCK_K > stop")),
        ("lse is in base 2", ("* 0.6931471805599453", "")),
        ("four digits are not enough", ("* 0.6931471805599453", "* 0.6931")),
        ("not multiplied by `scale`", ("tl.trans(k)) * scale", "tl.trans(k))")),
        ("starts at the top left", ("<= rows[:, None] + n_k - n_q", "<= rows[:, None]")),
        (
            "V is read with K's strides",
            (
                "head * stride_vh + cols[:, None] * stride_vn",
                "head * stride_kh + cols[:, None] * stride_kn",
            ),
        ),
        (
            "Only one tile of keys is visited",
            ("tl.range(0, stop, BLOCK_K)", "tl.range(0, BLOCK_K, BLOCK_K)"),
        ),
        ("the queries of head 0", ("Q + head * stride_qh", "Q")),
        ("not written yet", ("    divisor =", "    raise NotImplementedError\n    divisor =")),
    ],
)
def test_mistakes_in_the_kernel_itself_are_named(said, edit, kernels):
    assert said in diagnosis(FLASH, kernels(*edit).flash_kernel)


def test_only_tiles_that_are_loaded_are_said_to_be_loaded(kernels):
    edit = ("return m_new, l", "return l, m_new")  # gives NaN too
    said = diagnosis(checks.check_triton_flash_skips, kernels(*edit).flash_kernel)
    assert said.startswith("out is wrong")


def test_a_store_without_a_mask_is_noticed(kernels):
    edit = ("rows, lse, mask=rows < n_q)", "rows, lse)")
    assert "wrote beyond the end" in diagnosis(FLASH, kernels(*edit).flash_kernel)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "is no kernel function"),
        ("torch.softmax(X, 1)", "uses `torch`"),
        ("np.exp(X.handle)", "uses `np`"),
        ("tl.store(OUT, X.handle)", "uses `handle`"),
        ("helper(X)", "uses `helper`"),
        ("hidden(X)", "uses `np`"),
        ("getattr(X, 'han' + 'dle')", "uses `getattr`"),
        ("import numpy", "uses `numpy`"),
        ("TABLE[0](X)", "uses `TABLE`"),
        ("(lambda: X)()", "is not Triton's"),
        ("raise NotImplementedError", "not written yet"),
    ],
)
def test_nothing_but_triton_can_do_the_kernels_work(body, said, kernels):
    source = (
        "import numpy as np\ndef helper(x): return np.exp(x)\n"
        "TABLE = [np.exp]\n@triton.jit\ndef hidden(x): return np.exp(x)\n"
        f"{'@triton.jit' if body else ''}\ndef flash_kernel(X, OUT):\n    "
    )
    student = kernels(source=source + (body or "pass")).flash_kernel
    assert said in diagnosis(checks.check_triton_flash_values, student)


# --- step 1: the update ----------------------------------------------------------------------


def test_an_error_in_an_update_shows_its_line(kernels):
    said = diagnosis(
        VALUES, kernels("p = tl.exp2(scores -", "p = tl.exp2(score -", source=STEP).update
    )
    assert "raised NameError in line" in said
    assert "    p = tl.exp2(score -" in said


@pytest.mark.parametrize(("style", "seed"), [(STEP, 1), (ANOTHER_STYLE, 0)])
def test_right_updates_pass_and_write_nothing_else(style, seed, kernels, capfd):
    student = kernels(source=style).update
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


@pytest.mark.parametrize("mistake", lab.UPDATE_MISTAKES + OTHERS, ids=lambda m: m.say[:60])
def test_each_mistake_in_an_update_gets_its_own_diagnosis(mistake, kernels):
    """The table's edits are of the lab's function on tensors; they fit the notebook's kernel."""
    assert mistake.say in diagnosis(UPDATE, kernels(*mistake.edit, source=STEP).update)


def test_sums_in_the_inputs_dtype_are_found(kernels):
    student = kernels("v)\n", "v)\n    acc = acc.to(v.dtype)\n", source=STEP).update
    assert "acc overflows" in diagnosis(checks.check_update_dtype, student)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("tl.max(scores, 1)", "scores.max(dim=1)"), "tl.max(scores, 1)"),
        (("m - shift)", "shift - m)"), "alpha = exp2(m - m_new)"),
    ],
)
def test_a_check_that_runs_alone_names_the_mistake_too(edit, said, kernels):
    assert said in diagnosis(checks.check_update_dtype, kernels(*edit, source=STEP).update)
