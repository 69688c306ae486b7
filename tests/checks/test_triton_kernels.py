"""The checks of whole kernels: the notebook's pass, mistakes are named, PyTorch cannot stand in."""

import importlib.util
import sys

import pytest

from labsupport import checks

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.checks import ex_4_3_triton_kernels as lab
from tests.checks.solutions import diagnosis, each, solution_source

FLASH = (
    checks.check_triton_flash_values,
    checks.check_triton_flash_edges,
    checks.check_triton_flash_skips,
)
IMPORTS = """
import math, torch, triton
import triton.language as tl
from labsupport.attention.kernels.guard import check_guard, guarded_zeros

"""
STEPS = ("add", "softmax", "kernel", "flash")


@pytest.fixture
def kernels(tmp_path):
    """The notebook's four cells as a module: Triton reads kernels from a file."""

    def define(*edit):
        source = "\n\n".join(solution_source("04", f"ex-4-3-{step}") for step in STEPS)
        for old, new in zip(edit[::2], edit[1::2], strict=True):
            assert old in source, f"the solution no longer contains {old!r}"
            source = source.replace(old, new)
        file = tmp_path / "cells.py"
        file.write_text(IMPORTS + source)
        spec = importlib.util.spec_from_file_location("cells", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return define


def test_the_notebooks_kernels_pass_with_another_seed(kernels, capfd):
    cells = kernels()
    checks.check_triton_add(cells.add, seed=5)
    checks.check_triton_softmax(cells.row_softmax, seed=5)
    for check in FLASH:
        check(cells.my_triton_flash, seed=5)
    printed, warned = capfd.readouterr()
    assert printed.count("(other inputs)") == 5
    assert warned == ""


@each(
    (checks.check_triton_add, lab.add, lab.ADD_MISTAKES),
    (checks.check_triton_softmax, lab.row_softmax, lab.SOFTMAX_MISTAKES),
    (FLASH[:2], lab.flash, lab.FLASH_MISTAKES),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said, monkeypatch):
    monkeypatch.setattr(lab.RowWatch, "OTHERS", ())  # the tables' edits are of PyTorch's code
    monkeypatch.setattr(lab.RowWatch, "MAXIMA", ())
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
        ("the queries of head 0", ("Q + head * stride_qh", "Q")),
        ("not written yet", ("    divisor =", "    raise NotImplementedError\n    divisor =")),
    ],
)
def test_mistakes_in_the_kernel_itself_are_named(said, edit, kernels):
    assert said in diagnosis(FLASH, kernels(*edit).my_triton_flash)


def test_a_store_without_a_mask_is_noticed(kernels):
    for step, check, edit in (
        ("add", checks.check_triton_add, ("x + y, mask=inside)", "x + y)")),
        ("row_softmax", checks.check_triton_softmax, ("/ l, mask=start + c < n)", "/ l)")),
    ):
        assert "wrote beyond the end" in diagnosis(check, getattr(kernels(*edit), step))


def test_pytorch_cannot_do_the_kernels_work():
    assert "PyTorch's bmm did the work" in diagnosis(FLASH, lab.flash)
