"""Where the preferred kernel takes half precision only, as on GPUs: played on a CPU.

The registry gets one more entry in front: PyTorch's CPU flash kernel, which declares that it takes
float16 and bfloat16 (or float16 alone, as GPUs before Ampere). All decisions are the real ones.
"""

import dataclasses
import warnings

import pytest
import torch

from labsupport.attention import backends, implementations
from labsupport.precision import (
    PrecisionWarning,
    auto_fix_precision_for_flash_attention,
    autofix,
    safe_flash_attention,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def only(monkeypatch):
    """Put a kernel in front that takes nothing but the given dtypes."""
    real = implementations.by_name("sdpa_flash")
    autofix.forget_warnings()

    def put(*dtypes):
        limits = dataclasses.replace(real.limits, dtypes={"cpu": dtypes})
        table = (
            dataclasses.replace(real, name="half_only", limits=limits),
            *implementations.BACKENDS,
        )
        for module in (implementations, backends, autofix):
            monkeypatch.setattr(module, "BACKENDS", table)

    return put


def inputs(*dtypes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 32, 2, 16, generator=generator).to(dtype) for dtype in dtypes]


def report_on(q, k, v, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return auto_fix_precision_for_flash_attention(q, k, v, return_report=True, **options)[-1]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((F32, F32, F32), F16),
        ((F32, F16, F16), F16),
        ((F32, BF16, F16), BF16),
        ((F16, BF16, F16), BF16),
        ((BF16, BF16, BF16), BF16),
    ],
)
def test_float32_is_degraded_to_what_the_kernel_takes_rather_than_sent_to_a_slower_one(
    only, dtypes, expected
):
    only(F16, BF16)
    report = report_on(*inputs(*dtypes))
    assert (report.backend, report.compute_dtype) == ("half_only", expected)


def test_the_warning_says_who_wants_half_precision_and_what_it_costs(only):
    only(F16, BF16)
    with pytest.warns(PrecisionWarning) as caught:
        out = safe_flash_attention(*inputs(F32, F32, F32))
    assert out.dtype == F32
    (said,) = [str(w.message) for w in caught]
    assert "half_only is to run in half precision; float16, because nothing is too large" in said
    assert "at most about" in said


def test_a_backend_asked_for_by_name_keeps_float32(only):
    only(F16, BF16)
    assert report_on(*inputs(F32, F32, F32), backend="sdpa_flash").compute_dtype == F32


def test_without_bfloat16_kernels_float16_serves_where_the_numbers_fit(only):
    only(F16)
    report = report_on(*inputs(BF16, BF16, F32))
    assert (report.backend, report.compute_dtype) == ("half_only", F16)
    assert "no bfloat16 kernel" in report.why


def test_without_bfloat16_kernels_large_numbers_go_to_a_kernel_that_holds_them(only):
    only(F16)
    q, k, v = inputs(F32, F32, F32)
    v[0, 0, 0, 0] = 1e5
    report = report_on(q, k, v)
    assert (report.backend, report.compute_dtype) == ("sdpa_flash", F32)
    assert safe_flash_attention(q, k, v).isfinite().all()


def test_float64_that_is_to_be_kept_goes_to_a_kernel_that_computes_in_it(only):
    only(F16, BF16)
    q, k, v = inputs(torch.float64, F32, F32)
    assert report_on(q, k, v, float64="keep").compute_dtype == torch.float64
    assert report_on(q, k, v, float64="cast").compute_dtype == F16
