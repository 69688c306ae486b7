"""Make three inputs fit one FlashAttention kernel, run it, and say what was done and what it cost.

    auto_fix_precision_for_flash_attention(q, k, v)   three tensors that fit
    safe_flash_attention(q, k, v, causal=True)        their attention, in q's dtype

`target.py` decides the dtype, `cost.py` finds what it costs, `reports.py` says so.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.backends import attention, flash_attention
from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_window,
)
from labsupport.attention.registry import FLOAT_DTYPES
from labsupport.precision.autofix.reports import say
from labsupport.precision.autofix.target import Float64, plan
from labsupport.precision.dtypes import short


def auto_fix_precision_for_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = "auto",
    dtypes: Sequence[torch.dtype] | None = None,
    float64: Float64 = "refuse",
    return_report: bool = False,
    **options: Any,
) -> Any:
    """Cast q, k and v to one dtype that a FlashAttention backend takes, losing as little as it can.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float32, float16, bfloat16 or float64.
        k, v: (batch, seqlen_k, kv_heads, head_dim), the same, each in a dtype of its own.
        backend: the backend that they shall fit; "auto" is the first one in the lab's order of
            preference that can run the call in some acceptable dtype. (On a GPU that means half
            precision. `backend="sdpa_efficient"` keeps float32 there.)
        dtypes: cast to nothing but these; None: whatever the backend takes. On a laptop,
            `dtypes=(torch.float16, torch.bfloat16)` shows what a GPU's kernels would make of it.
        float64: what to do with float64 inputs, which are usually NumPy's default and no decision:
            "refuse" them, "keep" computing in float64 (needs a backend that does), or "cast" them
            as if they were float32.
        return_report: also return the `PrecisionReport`, with its error bound.
        options: `causal`, `window_size`, ... as for `labsupport.attention.flash_attention`.

    Each input that has the right dtype already is returned as it is; a cast one is connected to the
    original by autograd, so that gradients arrive in each input's own dtype. A `PrecisionWarning`
    says what was cast, once per cause. The magnitudes are read once: on a GPU, one synchronisation.

    Returns:
        (q, k, v), or (q, k, v, report).

    Raises:
        AttentionInputError: integers, complex or quantised numbers, float64 without consent, mixed
            devices, shapes that do not fit; numbers, scores or sums of values that no dtype in
            question can hold.
        BackendUnavailableError: nothing can run the call in an acceptable dtype; says every reason.

    >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
    >>> [t.dtype for t in auto_fix_precision_for_flash_attention(q, k, v)]
    [torch.float32, torch.float32, torch.float32]
    """
    call = _checked(q, k, v, options)
    report = plan(call, backend, _several(dtypes), float64, q.dtype, return_report)
    say(report, stacklevel=2)
    fixed = tuple(tensor.to(report.compute_dtype) for tensor in (q, k, v))
    return (*fixed, report) if return_report else fixed


def safe_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = "auto",
    dtypes: Sequence[torch.dtype] | None = None,
    float64: Float64 = "refuse",
    out_dtype: torch.dtype | None = None,
    return_report: bool = False,
    **options: Any,
) -> Any:
    """FlashAttention of inputs in whatever floating dtypes: cast, run, return in q's dtype.

    Args:
        q, k, v, backend, dtypes, float64, options: as for
            `auto_fix_precision_for_flash_attention`; `return_lse` is allowed among the options.
        out_dtype: the dtype of the result; q's unless given.
        return_report: also return the `PrecisionReport`, as the last element.

    Returns:
        out (batch, seqlen_q, heads, head_dim); with `return_lse` also lse (batch, heads, seqlen_q).

    Raises:
        AttentionInputError, BackendUnavailableError: as there; also if the result does not fit into
            the range of `out_dtype`.
    """
    call = _checked(q, k, v, options)
    out_dtype = _floating("out_dtype", out_dtype or q.dtype)
    report = plan(call, backend, _several(dtypes), float64, out_dtype, return_report)
    say(report, stacklevel=2)
    with autocast_off(q):  # what the report says is what is computed with
        fixed = (tensor.to(report.compute_dtype) for tensor in (q, k, v))
        result = flash_attention(*fixed, backend=report.backend, **options)
    out, *lse = result if isinstance(result, tuple) else (result,)
    rounded = out.to(out_dtype)
    if _may_overflow(v, report.compute_dtype, out_dtype) and _overflowed(out, rounded):
        raise AttentionInputError(
            f"the output reaches {out.abs().max().item():.3g}, but {short(out_dtype)} ends at "
            f"{torch.finfo(out_dtype).max:,.0f}: pass out_dtype=torch.{short(report.compute_dtype)}"
            ", or scale v down and the output up."
        )
    returned = [rounded, *lse] + ([report] if return_report else [])
    return returned[0] if len(returned) == 1 else tuple(returned)


_OPTIONS = {
    name
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "backend"
}


def _checked(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> AttentionCall:
    if unknown := set(options) - _OPTIONS:
        raise AttentionInputError(f"attention has no option {', '.join(sorted(unknown))}.")
    given = dict(options)
    check_layout = given.pop("check_layout", True)
    check_model_layout(q, k, v, check_layout=check_layout, one_dtype=False)
    call = AttentionCall(q, k, v, **given)
    if not math.isfinite(call.scale):
        raise AttentionInputError(f"softmax_scale must be finite, but {call.scale} was given.")
    check_window(call.window_size)
    check_alibi_slopes(call.alibi_slopes, q.shape[0], call.heads)
    return call


def _floating(name: str, dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        names = ", ".join(f"torch.{short(known)}" for known in FLOAT_DTYPES)
        raise AttentionInputError(f"{name} must be one of {names}, but {dtype!r} was given.")
    return dtype


def _several(dtypes: Any) -> tuple[torch.dtype, ...] | None:
    if dtypes is None:
        return None
    given = dtypes if isinstance(dtypes, Sequence) else (dtypes,)
    return tuple(_floating("each of dtypes", dtype) for dtype in given)


def _may_overflow(v: Tensor, compute: torch.dtype, out: torch.dtype) -> bool:
    return torch.finfo(out).max < torch.finfo(compute).max and v.dtype != out


def _overflowed(out: Tensor, rounded: Tensor) -> bool:
    return bool((out.isfinite() & ~rounded.isfinite()).any())
