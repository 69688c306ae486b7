"""Whatever floating inputs come: one dtype inside, the caller's outside, an honest report."""

import warnings

import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    flash_attention,
    oracle_attention,
)
from labsupport.attention.implementations import BACKENDS
from labsupport.precision import (
    PrecisionWarning,
    auto_fix_precision_for_flash_attention,
    safe_flash_attention,
)
from labsupport.precision.autofix import forget_warnings

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
HALF = (F16, BF16)  # what a GPU's FlashAttention kernels take

MIXED = [(F32, F16, BF16), (F16, BF16, F16), (BF16, F32, F32), (F16, F16, F32)]


@pytest.fixture(autouse=True)
def _tell_everything_again():
    forget_warnings()


def inputs(*dtypes, seqlen=48, scale=1.0, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, seqlen, heads, 32)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for dtype in dtypes]


def exact(q, k, v, **options):
    out, _ = oracle_attention(*(t.transpose(1, 2).double() for t in (q, k, v)), **options)
    return out.transpose(1, 2)


def fixed(q, k, v, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        *_, report = auto_fix_precision_for_flash_attention(q, k, v, return_report=True, **options)
    return report


@pytest.mark.parametrize("dtypes", MIXED)
def test_where_the_kernel_takes_the_widest_dtype_nothing_is_degraded(dtypes):
    q, k, v = inputs(*dtypes)
    report = fixed(q, k, v)
    widest = torch.promote_types(torch.promote_types(*dtypes[:2]), dtypes[2])
    assert report.compute_dtype == widest
    assert report.exact
    assert {cast.name for cast in report.casts} == {
        name for name, dtype in zip("qkv", dtypes, strict=True) if dtype != widest
    }


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_inputs_of_one_dtype_are_returned_as_they_are_and_nothing_is_said(dtype):
    q, k, v = inputs(dtype, dtype, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = auto_fix_precision_for_flash_attention(q, k, v)
        out = safe_flash_attention(q, k, v)
    assert all(a is b for a, b in zip(result, (q, k, v), strict=True))
    assert out.dtype == dtype


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((F32, F32, F32), F16),
        ((F32, F16, F32), F16),
        ((BF16, F32, F32), BF16),
        ((F32, F32, BF16), BF16),
        ((F16, BF16, F16), BF16),
        ((F16, F16, F16), F16),
    ],
)
def test_half_precision_is_bfloat16_if_an_input_is_and_float16_otherwise(dtypes, expected):
    assert fixed(*inputs(*dtypes), dtypes=HALF).compute_dtype == expected


@pytest.mark.parametrize(
    ("name", "outlier", "expected"),
    [("q", 1e5, BF16), ("k", -1e5, BF16), ("v", 65520.0, BF16), ("v", 65519.0, F16)],
)
def test_a_finite_magnitude_that_float16_would_round_to_infinity_asks_for_bfloat16(
    name, outlier, expected
):
    tensors = dict(zip("qkv", inputs(F32, F32, F32), strict=True))
    tensors[name][0, 3, 1, 5] = outlier
    report = fixed(**tensors, dtypes=HALF)
    assert report.compute_dtype == expected
    assert (f"{name} reaches" in report.why) == (expected == BF16)


@pytest.mark.parametrize("half", [None, HALF])
@pytest.mark.parametrize("dtypes", [(F32, BF16, F16), (F16, F16, F32), (BF16, BF16, F16)])
def test_the_result_has_the_querys_dtype_and_is_near_the_truth(dtypes, half):
    q, k, v = inputs(*dtypes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        out, lse, report = safe_flash_attention(
            q, k, v, dtypes=half, causal=True, return_lse=True, return_report=True
        )
    assert out.dtype == q.dtype
    assert lse.dtype == F32
    # 48 queries are all looked at: the bound is the error itself, up to the last rounding.
    error = (out.double() - exact(q, k, v, causal=True)).abs().max().item()
    assert error <= 1.01 * report.error_bound


@pytest.mark.parametrize("half", [None, HALF])
def test_gradients_come_back_in_each_inputs_own_dtype_and_near_the_truth(half):
    q, k, v = (t.requires_grad_() for t in inputs(F32, BF16, F16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        safe_flash_attention(q, k, v, dtypes=half, causal=True).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact(*wide, causal=True).sum().backward()
    for given, oracle in zip((q, k, v), wide, strict=True):
        assert given.grad.dtype == given.dtype
        relative = (given.grad.double() - oracle.grad).norm() / oracle.grad.norm()
        assert relative < 4 * 2**-8  # bfloat16's unit roundoff, three products deep


@pytest.mark.parametrize(
    ("scale", "half", "causal"),
    [
        (1e-8, HALF, True),
        (0.01, None, False),
        (1.0, HALF, True),
        (10.0, HALF, False),
        (1e6, None, True),
    ],
)
def test_scaled_inputs_stay_finite_with_an_honest_bound_or_a_warning(scale, half, causal):
    q, k, v = inputs(F32, F32, F32, seqlen=600, scale=scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, report = safe_flash_attention(q, k, v, dtypes=half, causal=causal, return_report=True)
    assert out.isfinite().all()
    error = (out.double() - exact(q, k, v, causal=causal)).abs().max().item()
    if 0.01 <= scale <= 10:
        assert error <= report.error_bound <= 10 * error
    if scale > 10:
        assert any("near-ties may flip" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (40, 0)},
        {"window_size": (40, 20)},
        {"window_size": (40, -1)},
        {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25])},
        {"alibi_slopes": torch.tensor([0.5, 0.25])},
        {"softmax_scale": 0.5},
    ],
    ids=str,
)
def test_the_bound_is_measured_with_the_calls_own_options(options):
    """A sample that misplaced the mask would report an error of about 1."""
    q, k, v = inputs(F32, F32, F32, seqlen=500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        out, report = safe_flash_attention(
            q[:, :400], k, v, dtypes=(BF16,), return_report=True, **options
        )
    error = (out.double() - exact(q[:, :400], k, v, **options)).abs().max().item()
    assert error < 0.1
    assert 0.5 * error <= report.error_bound <= 10 * error


@pytest.mark.parametrize(
    ("causal", "half", "seed"),
    [(False, None, 0), (False, (BF16,), 1), (True, (F16,), 2), (True, (BF16,), 3)],
)
def test_one_long_query_in_a_thousand_is_not_missed(causal, half, seed):
    """Its scores are five times as large, and so is its error: a spread sample does not see it."""
    q, k, v = inputs(F32, F32, F32, seqlen=1000, seed=seed)
    q[0, 517 + seed] *= 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        out, report = safe_flash_attention(q, k, v, dtypes=half, causal=causal, return_report=True)
    error = (out.double() - exact(q, k, v, causal=causal)).abs().max().item()
    assert error <= report.error_bound <= 10 * error


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda q, k, v: (q, k, v.double() * 1e300), {"float64": "cast"}, "v reaches .*e.300"),
        (lambda q, k, v: (q, k, v.sign() * 3.4e38), {"dtypes": HALF}, "v reaches 3.4e.38"),
        (lambda q, k, v: (q, k, v.sign() * 2e38), {}, "such values add up to more"),
    ],
)
def test_finite_inputs_give_a_finite_result_or_an_error_that_says_why_not(change, options, message):
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
    assert (out - exact(**tensors, softmax_scale=1e9 / 32**0.5)).abs().max() < 0.1


def test_a_result_that_the_querys_dtype_cannot_hold_is_refused_with_a_way_out():
    q, k, v = inputs(F16, F32, F32)
    v *= 1e6
    with pytest.warns(PrecisionWarning), pytest.raises(AttentionInputError, match="out_dtype"):
        safe_flash_attention(q, k, v)
    assert safe_flash_attention(q, k, v, out_dtype=F32).isfinite().all()


def test_scores_beyond_the_accumulators_range_are_refused():
    q, k, v = inputs(BF16, BF16, BF16, scale=1e20)
    with pytest.raises(AttentionInputError, match="beyond the float32"):
        safe_flash_attention(q, k, v)


def test_each_cause_is_reported_once_with_what_why_and_cost():
    q, k, v = inputs(F32, BF16, F32)
    with pytest.warns(PrecisionWarning) as caught:
        safe_flash_attention(q, k, v, dtypes=HALF)
    (said,) = [str(w.message) for w in caught]
    for part in ("q float32 -> bfloat16, v float32 -> bfloat16", "k came in it", "at most about"):
        assert part in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safe_flash_attention(q, k, v, dtypes=HALF)
    with pytest.warns(PrecisionWarning, match="k bfloat16 -> float32"):
        safe_flash_attention(q, k, v)


@pytest.mark.parametrize("function", [safe_flash_attention, auto_fix_precision_for_flash_attention])
def test_float64_asks_for_a_decision(function):
    q, k, v = inputs(F32, F64, F32)
    with pytest.raises(AttentionInputError, match=r"k is float64.*float64=\"cast\""):
        function(q, k, v)


def test_float64_can_be_kept():
    q, k, v = inputs(F64, F64, F64)
    out = safe_flash_attention(q, k, v, float64="keep")
    assert out.dtype == F64
    assert (out - exact(q, k, v)).abs().max() < 1e-14


def test_float64_can_be_cast():
    q, k, v = inputs(F32, F64, F32)
    with pytest.warns(PrecisionWarning, match="k float64 -> float32"):
        out, report = safe_flash_attention(q, k, v, float64="cast", return_report=True)
    assert report.compute_dtype == F32
    assert out.dtype == F32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.int(), "k has dtype torch.int32.*floating"),
        (lambda t: t.to(torch.complex64), "k has dtype torch.complex64.*complex"),
        (lambda t: t.to(torch.float8_e4m3fn), "k has dtype torch.float8_e4m3fn.*scales"),
        (lambda t: t.to("meta"), "one device.*cpu, meta, cpu"),
        (lambda t: t.tolist(), "k must be a torch.Tensor"),
        (lambda t: t[:, :7], "k has length 7 and v 48"),
    ],
)
def test_inputs_that_no_cast_can_fix_get_a_clear_error(change, message):
    q, k, v = inputs(F32, BF16, F16)
    with pytest.raises(AttentionInputError, match=message):
        safe_flash_attention(q, change(k), v)


def test_dtypes_that_fit_nothing_and_unknown_options_are_refused():
    q, k, v = inputs(F32, F32, F32)
    v[0, 0, 0, 0] = 1e5
    for dtype in (F16, (F16,)):
        with pytest.raises(AttentionInputError, match=r"v reaches 1e\+05.*does not fit"):
            safe_flash_attention(q, k, v, dtypes=dtype)
    with pytest.raises(AttentionInputError, match="'maybe' was given"):
        safe_flash_attention(q, k, v, float64="maybe")
    with pytest.raises(TypeError, match="dropout"):
        safe_flash_attention(q, k, v, dropout=0.1)


def test_a_backend_asked_for_by_name_is_the_one_that_the_inputs_are_made_to_fit():
    q, k, v = inputs(F32, BF16, F32)
    assert fixed(q, k, v, backend="flash_torch").backend == "flash_torch"
    with (
        pytest.warns(PrecisionWarning),
        pytest.raises(BackendUnavailableError, match="not FlashAttention"),
    ):
        safe_flash_attention(q, k, v, backend="standard")
    absent = next(b.name for b in BACKENDS if b.missing() and b.io_aware)
    with pytest.raises(BackendUnavailableError, match=absent):
        safe_flash_attention(q, k, v, backend=absent)


def test_autocast_changes_nothing():
    q, k, v = inputs(F32, F32, F32)
    with torch.autocast("cpu", dtype=BF16):
        out = safe_flash_attention(q, k, v)
    assert torch.equal(out, safe_flash_attention(q, k, v))


def test_who_watches_the_front_door_sees_one_call_of_one_dtype():
    class Watch(torch.overrides.TorchFunctionMode):
        seen: list = []  # noqa: RUF012

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is flash_attention:
                self.seen.append([tensor.dtype for tensor in args])
            return func(*args, **(kwargs or {}))

    with pytest.warns(PrecisionWarning), Watch() as watch:
        safe_flash_attention(*inputs(F32, BF16, F32), dtypes=HALF, return_report=True)
    assert watch.seen == [[BF16, BF16, BF16]]
