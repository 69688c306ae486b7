"""Make three inputs fit one FlashAttention kernel, run it, and report what was done and its cost.

    auto_fix_precision_for_flash_attention(q, k, v)   three tensors that fit
    safe_flash_attention(q, k, v, causal=True)        their attention, in q's dtype

The dtype follows from what can run:

    the kernel takes the widest of the three dtypes   promote the others to it: nothing is lost
    it takes half precision only (most GPU kernels)   bfloat16 if an input is bfloat16 already, or
                                                      does not fit into float16's range;
                                                      float16, with its 3 more bits, otherwise

Relative errors e of q and k move a score q.k by up to 2 e |q| |k|. Where this passes 1, two keys of
nearly the same score may change places; the report warns. The cost is measured, because worst-case
bounds are hundreds of times too large: on a sample of the queries, against the float64 oracle
(theory chapter 6).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from labsupport.attention.backends import flash_attention
from labsupport.attention.call import AttentionCall, BackendUnavailableError
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.implementations import BACKENDS, HALF_DTYPES, Backend, by_name, in_order
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_window,
)
from labsupport.attention.reference import oracle_attention
from labsupport.precision.dtypes import overflow_threshold, range_of, short, unit_roundoff

Float64 = Literal["refuse", "keep", "cast"]

SAMPLE, BLOCK = 256, 32  # queries whose error is measured; in blocks where keys are masked
SAFETY = 4.0
LARGE_SCORE = 2.0**12  # from here on, rounding the inputs costs half of float32's 24 bits


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
        k, v: (batch, seqlen_k, kv_heads, head_dim), the same, each in any dtype.
        backend: the backend to fit; "auto" is the first one in the lab's order of preference that
            can run the call in some acceptable dtype. (`"sdpa_efficient"` keeps float32 on a GPU.)
        dtypes: the dtypes to choose from; None: all that the backend takes. On a laptop,
            `dtypes=(torch.float16, torch.bfloat16)` shows what a GPU's kernels would make of it.
        float64: "refuse" float64 inputs, which are usually NumPy's default and no decision; "keep"
            computing in float64; or "cast" them as if they were float32.
        return_report: also return the `PrecisionReport`, with its error bound.
        options: `causal`, `window_size`, ... as for `labsupport.attention.flash_attention`.

    Inputs that have the right dtype are returned as they are; gradients arrive in each input's own
    dtype. A `PrecisionWarning` says what was cast. Waits for the device.

    Returns:
        (q, k, v), or (q, k, v, report).

    Raises:
        AttentionInputError: integers, complex or quantised numbers, float64 without consent, mixed
            devices, shapes that do not fit; numbers that none of the dtypes can hold.
        BackendUnavailableError: nothing can run the call in an acceptable dtype; lists the reasons.

    >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
    >>> [t.dtype for t in auto_fix_precision_for_flash_attention(q, k, v)]
    [torch.float32, torch.float32, torch.float32]
    """
    call = _checked(q, k, v, options)
    report = _plan(call, backend, dtypes, float64, return_report)
    _warn(report)
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
    return_report: bool = False,
    **options: Any,
) -> Any:
    """Run FlashAttention on inputs in any floating dtypes: cast, run, return in q's dtype.

    Args:
        q, k, v, backend, dtypes, float64, options: as for
            `auto_fix_precision_for_flash_attention`; `return_lse` is allowed among the options.
        return_report: also return the `PrecisionReport`, as the last element.

    Returns:
        out (batch, seqlen_q, heads, head_dim); with `return_lse` also lse (batch, heads, seqlen_q).

    Raises:
        AttentionInputError, BackendUnavailableError: as there; also if the result does not fit into
            the range of q's dtype.

    >>> q, k, v = torch.randn(3, 1, 16, 4, 8)
    >>> safe_flash_attention(q.half(), k, v.bfloat16(), causal=True).dtype
    torch.float16
    """
    call = _checked(q, k, v, options)
    report = _plan(call, backend, dtypes, float64, return_report)
    _warn(report)
    with autocast_off(q):  # the report's dtype is the one to compute in
        fixed = (tensor.to(report.compute_dtype) for tensor in (q, k, v))
        result = flash_attention(*fixed, backend=report.backend, **options)
    out, *lse = result if isinstance(result, tuple) else (result,)
    rounded = out.to(q.dtype)
    narrower = torch.finfo(q.dtype).max < torch.finfo(report.compute_dtype).max
    if narrower and v.dtype != q.dtype and (out.isfinite() & ~rounded.isfinite()).any():
        raise AttentionInputError(
            f"the output reaches {out.abs().max().item():.3g}, but q's dtype, {short(q.dtype)}, "
            f"ends at {torch.finfo(q.dtype).max:,.0f}: pass q in {short(report.compute_dtype)}, "
            "or scale v down and the output up."
        )
    returned = [rounded, *lse] + ([report] if return_report else [])
    return returned[0] if len(returned) == 1 else tuple(returned)


def _checked(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> AttentionCall:
    options = dict(options)
    check_model_layout(q, k, v, check_layout=options.pop("check_layout", True), one_dtype=False)
    call = AttentionCall(q, k, v, **options)
    check_window(call.window_size)
    check_alibi_slopes(call.alibi_slopes, q.shape[0], call.heads)
    return call


# --- reports --------------------------------------------------------------------------------------


class PrecisionWarning(UserWarning):
    """Casts of inputs, or numbers that deserve a second look.

    >>> import warnings
    >>> warnings.simplefilter("ignore", PrecisionWarning)  # or "error"
    """


@dataclass(frozen=True)
class PrecisionReport:
    """Casts of one call, their reason, and their cost.

    Attributes:
        backend: the implementation that the inputs were made to fit.
        compute_dtype: the dtype of q, k and v for it.
        out_dtype: the dtype of the result, q's.
        casts: the inputs that were cast, each as "q float32 -> bfloat16".
        exact: True if every cast kept every digit.
        why: the reason for `compute_dtype`; empty if nothing was cast.
        score_bound: an upper bound on the magnitude of scaled scores.
        cautions: other properties of the inputs' numbers that need attention.
        error_bound: the maximum error of the output against exact arithmetic on the inputs as
            given, estimated from a sample of the queries; None if no report was asked for.

    >>> q, k, v = torch.randn(3, 1, 16, 4, 8)
    >>> out, report = safe_flash_attention(q, k.half(), v, return_report=True)
    >>> report.casts
    ('k float16 -> float32',)
    """

    backend: str
    compute_dtype: torch.dtype
    out_dtype: torch.dtype
    casts: tuple[str, ...]
    exact: bool
    why: str
    score_bound: float
    cautions: tuple[str, ...]
    error_bound: float | None

    def __str__(self) -> str:
        done = ", ".join(self.casts) or "nothing was cast"
        lines = [f"{done} for {self.backend}; result in {short(self.out_dtype)}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.casts and self.exact:
            lines.append("  cost: none, the wider dtype holds every number of the narrower one")
        if self.error_bound is not None:
            lines.append(f"  error of the output: at most about {self.error_bound:.1e}")
        return "\n".join([*lines, *(f"  caution: {text}" for text in self.cautions)])


def _warn(report: PrecisionReport) -> None:
    """Warn about casts and cautions, in the name of our caller's caller."""
    casts = [str(report).split("\n  caution")[0]] if report.casts else []
    for text in [*casts, *report.cautions]:
        warnings.warn(text, PrecisionWarning, stacklevel=3)


# --- the decision ---------------------------------------------------------------------------------


def _plan(
    call: AttentionCall,
    backend: str,
    dtypes: Sequence[torch.dtype] | None,
    float64: Float64,
    with_bound: bool,
) -> PrecisionReport:
    """Decide for one call, and report it, with the error bound if somebody will read it."""
    tensors = dict(zip("qkv", (call.q, call.k, call.v), strict=True))
    given = {name: tensor.dtype for name, tensor in tensors.items()}
    widest = _widest(given, float64)
    ranges = {name: range_of(tensor) for name, tensor in tensors.items()}
    largest = {name: held.largest for name, held in ranges.items()}
    cautions = [
        f"{name} holds {held.nonfinite} before anything was done; outputs that see them mean "
        "nothing"
        for name, held in ranges.items()
        if not held.finite
    ]
    bound = score_bound(call.q, call.k, call.scale).item() if call.q.numel() else 0.0
    half = {} if widest == torch.float64 else _half_dtypes(given, largest)
    candidates = [d for d in dict.fromkeys([widest, *half]) if dtypes is None or d in dtypes]
    name = max(largest, key=lambda name: largest[name])
    fitting = [dtype for dtype in candidates if largest[name] < overflow_threshold(dtype)]
    if not fitting:
        raise AttentionInputError(
            f"there is no dtype to cast to: {name} reaches {largest[name]:.3g}, and what may be "
            f"chosen for these inputs ({', '.join(map(short, candidates)) or 'nothing'}) does not "
            f"fit. Allow a wider one, or scale {name} down."
        )
    entry, compute = _choose(call, backend, fitting)
    casts = tuple(
        f"{name} {short(dtype)} -> {short(compute)}"
        for name, dtype in given.items()
        if dtype != compute
    )
    exact = all(torch.promote_types(dtype, compute) == compute for dtype in given.values())
    why = 'float64="cast" was passed' if casts else ""
    if compute != widest:
        why = f"{entry.name} is to run in half precision; {half[compute]}"
    elif len(set(given.values())) > 1:
        why = f"a kernel wants one dtype, and q, k, v are {', '.join(map(short, given.values()))}"
    u = unit_roundoff(compute)
    if bound > LARGE_SCORE or (compute in HALF_DTYPES and bound * u > 1):
        cautions.append(
            f"scores may reach {bound:.2g}: rounding to {short(compute)} (relative {u:.1g}) moves "
            f"them by up to {2 * bound * u:.2g}, so that near-ties may flip: where two keys score "
            "nearly the same, the output may follow the other one, with any kernel"
        )
    # Measuring takes a share of the time of attention itself.
    error = _sampled_error(call, entry.name, compute) if with_bound else None
    return PrecisionReport(
        entry.name, compute, call.q.dtype, casts, exact, why, bound, tuple(cautions), error
    )


def _widest(given: dict[str, torch.dtype], float64: Float64) -> torch.dtype:
    if float64 not in ("refuse", "keep", "cast"):
        raise AttentionInputError(
            f'float64 is "refuse", "keep" or "cast", but {float64!r} was given.'
        )
    doubles = [name for name, dtype in given.items() if dtype == torch.float64]
    if doubles and float64 == "refuse":
        raise AttentionInputError(
            f"{' and '.join(doubles)} {'is' if len(doubles) == 1 else 'are'} float64, which is "
            "rarely meant (NumPy makes it by default) and which no GPU kernel of FlashAttention "
            'takes. Pass float64="cast" to go on as with float32, or float64="keep" to compute in '
            "float64."
        )
    if doubles:
        return torch.float64 if float64 == "keep" else torch.float32
    return torch.promote_types(torch.promote_types(given["q"], given["k"]), given["v"])


def _half_dtypes(
    given: dict[str, torch.dtype], largest: dict[str, float]
) -> dict[torch.dtype, str]:
    """Return the half-precision dtypes to try, the better one first, each with its reason."""
    limit, f16, bf16 = torch.finfo(torch.float16), torch.float16, torch.bfloat16
    large = [n for n, x in largest.items() if x >= overflow_threshold(f16)]
    tiny = [n for n, x in largest.items() if 0 < x < limit.smallest_normal]
    if large:
        text = " and ".join(f"{name} reaches {largest[name]:.3g}" for name in large)
        return {bf16: f"bfloat16, because {text} and float16 ends at {limit.max:,.0f}"}
    if tiny:
        text = f"{' and '.join(tiny)} {'stays' if len(tiny) == 1 else 'stay'}"
        text += f" below {limit.smallest_normal:.1e}, where float16 loses bits"
        return {bf16: f"bfloat16, because {text}"}
    already = [n for n, dtype in given.items() if dtype == bf16]
    if already:
        return {
            bf16: f"bfloat16, because {' and '.join(already)} came in it",
            f16: "float16, because this device has no bfloat16 kernel for the call",
        }
    return {
        f16: "float16, because nothing is too large for it, and its 11 significant bits "
        "are more than bfloat16's 8",
        bf16: "this device has no float16 kernel for the call",
    }


def _choose(
    call: AttentionCall, backend: str, candidates: Sequence[torch.dtype]
) -> tuple[Backend, torch.dtype]:
    """Return the first IO-aware backend that takes the call, and the first dtype that it takes."""
    if backend != "auto" and not by_name(backend).io_aware:
        return by_name(backend), candidates[0]  # flash_attention raises with the reason
    refused: dict[str, tuple[str, ...]] = {}
    for entry in in_order(BACKENDS, call) if backend == "auto" else (by_name(backend),):
        for dtype in candidates if entry.io_aware else ():
            tensors = (call.q, call.k, call.v)
            q, k, v = (  # of that dtype, without any numbers in them
                torch.empty_like(x, dtype=dtype, requires_grad=x.requires_grad) for x in tensors
            )
            probe = replace(call, q=q, k=k, v=v).without_empty_queries()[1]
            reasons = tuple(entry.reasons(probe))
            if not reasons and (backend != "auto" or all(map(entry.for_auto, entry.parts(probe)))):
                return entry, dtype
            refused[entry.name] = (*refused.get(entry.name, ()), *reasons)
    listing = "\n".join(
        f"  {name}: {'; '.join(dict.fromkeys(why)) or 'only when asked for by name'}"
        for name, why in refused.items()
    )
    wanted = " or ".join(map(short, candidates))
    raise BackendUnavailableError(f"nothing runs this call in {wanted}:\n{listing}", refused)


# --- the cost -------------------------------------------------------------------------------------


def score_bound(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return an upper bound on scaled scores: scale * max ||q_i|| * max ||k_j|| (Cauchy-Schwarz).

    Args:
        q, k: (batch, seqlen, heads, head_dim); non-finite entries count as 0.
        scale: the factor on the scores.

    Returns:
        a float64 scalar on the tensors' device.
    """
    with torch.no_grad():
        return abs(scale) * _lengths(q).max() * _lengths(k).max()


def _lengths(x: Tensor) -> Tensor:
    """Return the norm of each row of a (batch, seqlen, heads, head_dim) tensor, in float64."""
    clean = x.nan_to_num(0.0, 0.0, 0.0)
    scale = clean.abs().amax().double().clamp(min=torch.finfo(torch.float64).tiny)
    # Squares of float32's largest numbers would overflow: bring the largest entry to 1.
    scaled = (clean / scale).to(torch.promote_types(x.dtype, torch.float32))
    return torch.linalg.vector_norm(scaled, dim=-1).double() * scale


def _sampled_error(call: AttentionCall, backend: str, compute: torch.dtype) -> float:
    """Estimate the maximum error of `call` on `backend` in dtype `compute`, rounded to q's.

    Returns:
        the largest error of the sampled queries against float64 attention of the inputs as given,
        times 4 unless all were sampled; infinity if a result is not finite.
    """
    worst = torch.zeros((), dtype=torch.float64, device=call.q.device)
    sampled = 0
    with torch.no_grad(), autocast_off(call.q):
        for part in _sample(call) if call.q.numel() else ():
            sampled += part.q.shape[1]
            options: Any = {"causal": part.causal, "window_size": part.window_size}
            options["softmax_scale"] = part.scale
            inputs = (x.to(compute) for x in (part.q, part.k, part.v))
            slopes = part.alibi_slopes
            result: Any = flash_attention(
                *inputs, backend=backend, alibi_slopes=slopes, check_layout=False, **options
            )
            *wide, slopes = part.math_layout()
            exact, _ = oracle_attention(*(x.double() for x in wide), alibi_slopes=slopes, **options)
            error = (
                (result.to(call.q.dtype).double() - exact.flatten(1, 2).transpose(1, 2))
                .abs()
                .amax()
            )
            worst = torch.maximum(worst, error.nan_to_num(math.inf, math.inf))
    return worst.item() * (SAFETY if sampled < call.q.shape[1] else 1.0)


def _sample(call: AttentionCall) -> Iterator[AttentionCall]:
    """Cut out some queries, each with the keys that it sees, as calls of their own.

    Masks are aligned at the last query and the last key, so a causal block ends where its keys end.
    """
    _, call = call.without_empty_queries()
    seqlen, half = call.q.shape[1], SAMPLE // 2
    longest = _lengths(call.q).amax(dim=(0, 2)).argsort(descending=True)
    if seqlen <= SAMPLE:
        yield call
    elif call.band.unlimited and call.alibi_slopes is None:
        spread = torch.linspace(0, seqlen - 1, half, device=call.q.device).round().long()
        yield replace(call, q=call.q[:, torch.cat([spread, longest[:half]])])
    elif call.causal:
        spread = torch.linspace(0, seqlen - BLOCK, half // BLOCK).int().tolist()
        holding = [i // BLOCK * BLOCK for i in longest[:SAMPLE].tolist()]
        for start in dict.fromkeys([*spread, *list(dict.fromkeys(holding))[: half // BLOCK]]):
            end = start + BLOCK + call.band.offset
            block = call.q[:, start : start + BLOCK]
            yield replace(call, q=block, k=call.k[:, :end], v=call.v[:, :end])
    else:  # only the last queries keep their places when others are cut away
        yield replace(call, q=call.q[:, -SAMPLE:])
