"""Whatever floating inputs come: one dtype inside, the caller's outside, an honest report."""

import dataclasses
import warnings

import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    backends,
    implementations,
    oracle_attention,
)
from labsupport.precision import (
    PrecisionWarning,
    auto_fix_precision_for_flash_attention,
    autofix,
    safe_flash_attention,
)

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
HALF = (F16, BF16)  # what a GPU's FlashAttention kernels take
quietly = pytest.mark.filterwarnings("ignore::labsupport.precision.PrecisionWarning")


def inputs(*dtypes, seqlen=48, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    shape = (1, seqlen, 2, 32)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for dtype in dtypes]


def exact(q, k, v, **options):
    out, _ = oracle_attention(*(t.transpose(1, 2).double() for t in (q, k, v)), **options)
    return out.transpose(1, 2)


def largest_error(out, q, k, v, **options):
    return (out.double() - exact(q, k, v, **options)).abs().max().item()


def report_on(q, k, v, **options):
    return auto_fix_precision_for_flash_attention(q, k, v, return_report=True, **options)[-1]


@quietly
@pytest.mark.parametrize(
    ("dtypes", "half", "expected"),
    [
        ((F32, F16, BF16), None, F32),
        ((F16, BF16, F16), None, F32),
        ((F32, F16, F32), HALF, F16),
        ((F32, F32, BF16), HALF, BF16),
        ((F16, BF16, F16), HALF, BF16),
    ],
)
def test_the_dtype_follows_from_inputs_and_kernel_and_the_result_is_near_the_truth(
    dtypes, half, expected
):
    q, k, v = inputs(*dtypes)
    out, lse, report = safe_flash_attention(
        q, k, v, dtypes=half, causal=True, return_lse=True, return_report=True
    )
    assert (report.compute_dtype, report.exact) == (expected, half is None)
    cast = {name for name, dtype in zip("qkv", dtypes, strict=True) if dtype != expected}
    assert {each[0] for each in report.casts} == cast
    assert (out.dtype, lse.dtype) == (q.dtype, F32)
    # 48 queries are all looked at: the bound is the error itself, up to the last rounding.
    assert largest_error(out, q, k, v, causal=True) <= 1.01 * report.error_bound


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_inputs_of_one_dtype_are_returned_as_they_are_and_nothing_is_said(dtype):
    q, k, v = inputs(dtype, dtype, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = auto_fix_precision_for_flash_attention(q, k, v)
        out = safe_flash_attention(q, k, v)
    assert all(a is b for a, b in zip(result, (q, k, v), strict=True))
    assert out.dtype == dtype


@quietly
@pytest.mark.parametrize(
    ("name", "outlier", "expected"),
    [("q", 1e5, BF16), ("k", -1e5, BF16), ("v", 65520.0, BF16), ("v", 65519.0, F16)],
)
def test_a_finite_magnitude_that_float16_would_round_to_infinity_asks_for_bfloat16(
    name, outlier, expected
):
    tensors = dict(zip("qkv", inputs(F32, F32, F32), strict=True))
    tensors[name][0, 3, 1, 5] = outlier
    report = report_on(**tensors, dtypes=HALF)
    assert report.compute_dtype == expected
    assert (f"{name} reaches" in report.why) == (expected == BF16)


@quietly
@pytest.mark.parametrize("half", [None, HALF])
def test_gradients_come_back_in_each_inputs_own_dtype_and_near_the_truth(half):
    q, k, v = (t.requires_grad_() for t in inputs(F32, BF16, F16))
    safe_flash_attention(q, k, v, dtypes=half, causal=True).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact(*wide, causal=True).sum().backward()
    for given, oracle in zip((q, k, v), wide, strict=True):
        assert given.grad.dtype == given.dtype
        relative = (given.grad.double() - oracle.grad).norm() / oracle.grad.norm()
        assert relative < 4 * 2**-8  # bfloat16's unit roundoff, three products deep


@pytest.mark.parametrize(
    ("scale", "half", "causal"),
    [(1e-8, HALF, True), (0.01, None, False), (1.0, HALF, True), (10.0, HALF, False),
     (1e6, None, True)],
)  # fmt: skip
def test_scaled_inputs_stay_finite_with_an_honest_bound_or_a_warning(scale, half, causal):
    q, k, v = inputs(F32, F32, F32, seqlen=600, scale=scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, report = safe_flash_attention(q, k, v, dtypes=half, causal=causal, return_report=True)
    assert out.isfinite().all()
    if 0.01 <= scale <= 10:
        error = largest_error(out, q, k, v, causal=causal)
        assert error <= report.error_bound <= 10 * error
    assert any("near-ties may flip" in str(w.message) for w in caught) == (scale > 10)


@quietly
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (40, 20)},
        {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25]), "softmax_scale": 0.5},
        {"alibi_slopes": torch.tensor([0.5, 0.25])},
    ],
    ids=str,
)
def test_the_bound_is_measured_with_the_calls_own_options(options):
    """A sample that misplaced the mask would report an error of about 1.

    One query in 300 has scores five times as large: a spread sample does not see it.
    """
    q, k, v = inputs(F32, F32, F32, seqlen=400)
    q[0, 117] *= 5
    out, report = safe_flash_attention(
        q[:, :300], k, v, dtypes=(BF16,), return_report=True, **options
    )
    error = largest_error(out, q[:, :300], k, v, **options)
    assert error < 0.5
    assert error <= report.error_bound <= 10 * error


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda q, k, v: (q, k, v.double() * 1e300), {"float64": "cast"}, "v reaches .*e.300"),
        (lambda q, k, v: (q, k, v.sign() * 3.4e38), {"dtypes": HALF}, "v reaches 3.4e.38"),
        (lambda q, k, v: (q, k, v.sign() * 1e5), {"dtypes": (F16,)}, r"1e\+05.*does not fit"),
        (lambda q, k, v: (q, k.int(), v), {}, "k has dtype torch.int32.*floating"),
        (lambda q, k, v: (q, k[:, :7], v), {}, "k has length 7 and v 48"),
        (lambda q, k, v: (q, k.double(), v), {}, r"k is float64.*float64=\"cast\""),
        (lambda q, k, v: (q, k, v), {"float64": "maybe"}, "'maybe' was given"),
    ],
)
def test_what_gives_no_right_result_is_refused_with_the_reason(change, options, message):
    with pytest.raises(AttentionInputError, match=message):
        safe_flash_attention(*change(*inputs(F32, F32, F32)), **options)


@pytest.mark.parametrize("name", "qk")
def test_tiny_queries_or_keys_ask_for_bfloat16_because_the_scale_may_make_up_for_them(name):
    tensors = dict(zip("qkv", inputs(F32, F32, F32), strict=True))
    tensors[name] *= 1e-9
    out, report = safe_flash_attention(
        **tensors, dtypes=HALF, softmax_scale=1e9 / 32**0.5, return_report=True
    )
    assert report.compute_dtype == BF16
    assert largest_error(out, **tensors, softmax_scale=1e9 / 32**0.5) < 0.1


@quietly
def test_a_result_that_the_querys_dtype_cannot_hold_is_refused_with_a_way_out():
    q, k, v = inputs(F16, F32, F32)
    v *= 1e6
    with pytest.raises(AttentionInputError, match="pass q in float32"):
        safe_flash_attention(q, k, v)
    assert safe_flash_attention(q.float(), k, v).isfinite().all()


def test_a_cast_is_reported_with_what_why_and_cost():
    q, k, v = inputs(F32, BF16, F32)
    with pytest.warns(PrecisionWarning) as caught:
        safe_flash_attention(q, k, v, dtypes=HALF, return_report=True)
    (said,) = [str(w.message) for w in caught]
    for part in ("q float32 -> bfloat16, v float32 -> bfloat16", "k came in it", "at most about"):
        assert part in said
    with pytest.warns(PrecisionWarning, match="k bfloat16 -> float32"):
        safe_flash_attention(q, k, v)


@quietly
def test_a_backend_asked_for_by_name_is_the_one_that_the_inputs_are_made_to_fit():
    q, k, v = inputs(F32, BF16, F32)
    assert report_on(q, k, v, backend="flash_torch").backend == "flash_torch"
    absent = next(b.name for b in implementations.BACKENDS if b.missing() and b.io_aware)
    for backend, message in (("standard", "not FlashAttention"), (absent, absent)):
        with pytest.raises(BackendUnavailableError, match=message):
            safe_flash_attention(q, k, v, backend=backend)


@quietly
@pytest.mark.parametrize(
    ("takes", "dtypes", "largest", "options", "expected", "why"),
    [
        (HALF, (F32, F32, F32), 1, {}, ("half_only", F16), "half precision; float16, because"),
        (HALF, (F32, BF16, F16), 1, {}, ("half_only", BF16), "k came in it"),
        (HALF, (BF16, BF16, BF16), 1, {}, ("half_only", BF16), ""),
        (HALF, (F32, F32, F32), 1, {"backend": "sdpa_flash"}, ("sdpa_flash", F32), ""),
        (HALF, (F64, F32, F32), 1, {"float64": "cast"}, ("half_only", F16), "float16"),
        (HALF, (F64, F32, F32), 1, {"float64": "keep"}, ("sdpa_flash", F64), "one dtype"),
        # As GPUs before Ampere:
        ((F16,), (BF16, BF16, F32), 1, {}, ("half_only", F16), "no bfloat16 kernel"),
        ((F16,), (F32, F32, F32), 1e5, {}, ("sdpa_flash", F32), ""),
    ],
)
def test_where_the_preferred_kernel_takes_half_precision_only_as_on_gpus(
    monkeypatch, takes, dtypes, largest, options, expected, why
):
    """Played on a CPU, whose flash kernel is entered once more, with these dtypes only."""
    real = implementations.by_name("sdpa_flash")
    limits = dataclasses.replace(real.limits, dtypes={"cpu": takes})
    half_only = dataclasses.replace(real, name="half_only", limits=limits)
    table = (half_only, *implementations.BACKENDS)
    for module in (implementations, backends, autofix):
        monkeypatch.setattr(module, "BACKENDS", table)
    q, k, v = inputs(*dtypes)
    v[0, 0, 0, 0] = largest
    report = report_on(q, k, v, **options)
    assert (report.backend, report.compute_dtype) == expected
    assert why in report.why
    assert safe_flash_attention(q, k, v, **options).isfinite().all()
