"""Which dtype q, k and v are to be cast to, for which backend, and why.

The dtype follows from what can run:

    the kernel takes the widest of the three dtypes   promote the others to it: nothing is lost
    it takes half precision only (most GPU kernels)   bfloat16 if an input is bfloat16 already, or
                                                      does not fit into float16's range;
                                                      float16, with its 3 more bits, otherwise

The size of Q K^T does not decide: FlashAttention accumulates scores in float32. Their size matters
in another way, which is reported: large scores amplify the rounding of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.implementations import BACKENDS, by_name
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.registry import HALF_DTYPES, Backend
from labsupport.attention.reports import BackendUnavailableError
from labsupport.precision.autofix.cost import sampled_error, score_bound
from labsupport.precision.autofix.reports import Cast, PrecisionReport, is_new
from labsupport.precision.dtypes import overflow_threshold, short, unit_roundoff

# From here on, half of float32's 24 bits are lost between the inputs and the weights.
LARGE_SCORE = 2.0**12

Float64 = Literal["refuse", "keep", "cast"]


@dataclass(frozen=True)
class Numbers:
    """What the inputs hold: largest finite magnitudes and non-finite entries of q, k, v."""

    largest: dict[str, float]
    nonfinite: dict[str, int]
    score_bound: float


def plan(
    call: AttentionCall,
    backend: str,
    dtypes: Sequence[torch.dtype] | None,
    float64: Float64,
    out_dtype: torch.dtype,
    with_bound: bool,
) -> PrecisionReport:
    """Decide for one call, and report it.

    Args:
        call: the inputs as given; mixed dtypes are allowed.
        backend, dtypes, float64: as in `autofix.auto_fix_precision_for_flash_attention`.
        out_dtype: the dtype of the result.
        with_bound: find the error bound even where every cast is exact, or was reported before.

    Raises: as there.
    """
    given = {"q": call.q.dtype, "k": call.k.dtype, "v": call.v.dtype}
    widest = _widest(given, float64)
    numbers = _numbers(call)
    half, why_half = _half_dtype(given, numbers)
    candidates = [widest, *([] if widest == torch.float64 else half)]
    candidates = [d for d in dict.fromkeys(candidates) if dtypes is None or d in dtypes]
    entry, compute = _choose(call, backend, _holding(candidates, numbers, dtypes))
    _check_accumulator(numbers, call.k.shape[1], compute)

    casts = tuple(Cast(name, d, compute) for name, d in given.items() if d != compute)
    why = ""
    if compute != widest:
        why = f"{entry.name} is to run in half precision; {why_half[compute]}"
    elif len(set(given.values())) > 1:
        names = ", ".join(short(dtype) for dtype in given.values())
        why = f"a kernel wants one dtype, and q, k, v are {names}"
    elif casts:
        why = 'float64="cast" was passed'
    report = PrecisionReport(
        backend=entry.name,
        compute_dtype=compute,
        out_dtype=out_dtype,
        casts=casts,
        why=why,
        score_bound=numbers.score_bound,
        cautions=tuple(_cautions(numbers, compute)),
    )
    # Measuring takes a share of the attention itself: only where somebody will read the figure.
    if with_bound or (not report.exact and is_new(report)):
        bound = sampled_error(call, entry.name, compute, out_dtype)
        report = replace(report, error_bound=bound)
    return report


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
    singles = [torch.float32 if d == torch.float64 else d for d in given.values()]
    if doubles and float64 == "keep":
        return torch.float64
    return torch.promote_types(torch.promote_types(singles[0], singles[1]), singles[2])


def _numbers(call: AttentionCall) -> Numbers:
    """Read what matters in one transfer from the device."""
    if call.q.device.type == "meta":
        raise AttentionInputError("q, k and v are on the meta device: they hold no numbers to cast")
    if call.q.numel() == 0:
        return Numbers(dict.fromkeys("qkv", 0.0), dict.fromkeys("qkv", 0), 0.0)
    with torch.no_grad():
        parts = []
        for tensor in (call.q, call.k, call.v):
            finite = tensor.isfinite()
            parts += [torch.where(finite, tensor, 0).abs().amax(), finite.logical_not().sum()]
        parts.append(score_bound(call.q, call.k, call.scale))
        values = torch.stack([part.double() for part in parts]).tolist()
    return Numbers(
        largest=dict(zip("qkv", values[0:6:2], strict=True)),
        nonfinite=dict(zip("qkv", map(int, values[1:6:2]), strict=True)),
        score_bound=values[6],
    )


def _half_dtype(
    given: dict[str, torch.dtype], numbers: Numbers
) -> tuple[list[torch.dtype], dict[torch.dtype, str]]:
    """The half-precision dtypes to try, the better one first, and a reason for each."""
    limit = torch.finfo(torch.float16)
    large = [n for n, x in numbers.largest.items() if x >= overflow_threshold(torch.float16)]
    tiny = [n for n, x in numbers.largest.items() if 0 < x < limit.smallest_normal]
    already = [name for name, dtype in given.items() if dtype == torch.bfloat16]
    why = {
        torch.float16: "float16, because nothing is too large for it, and its 11 significant bits "
        "are more than bfloat16's 8",
        torch.bfloat16: "this device has no float16 kernel for the call",
    }
    if large:
        text = " and ".join(f"{name} reaches {numbers.largest[name]:.3g}" for name in large)
        why[torch.bfloat16] = f"bfloat16, because {text} and float16 ends at {limit.max:,.0f}"
        return [torch.bfloat16], why
    if tiny:
        why[torch.bfloat16] = (
            f"bfloat16, because {' and '.join(tiny)} {'stays' if len(tiny) == 1 else 'stay'} below "
            f"{limit.smallest_normal:.1e}, where float16 loses bits"
        )
        return [torch.bfloat16], why
    if already:
        why[torch.bfloat16] = f"bfloat16, because {' and '.join(already)} came in it"
        why[torch.float16] = "float16, because this device has no bfloat16 kernel for the call"
        return [torch.bfloat16, torch.float16], why
    return [torch.float16, torch.bfloat16], why


def _holding(
    candidates: Sequence[torch.dtype], numbers: Numbers, allowed: Sequence[torch.dtype] | None
) -> list[torch.dtype]:
    """Those candidates that no input overflows.

    Raises:
        AttentionInputError: there is none.
    """
    largest = max(numbers.largest.values())
    fitting = [dtype for dtype in candidates if largest < overflow_threshold(dtype)]
    if not fitting:
        name = max(numbers.largest, key=lambda name: numbers.largest[name])
        names = ", ".join(short(dtype) for dtype in candidates) or (
            f"none of dtypes={', '.join(short(dtype) for dtype in allowed or ()) or 'nothing'}"
        )
        raise AttentionInputError(
            f"there is no dtype to cast to: {name} reaches {largest:.3g}, and what may be chosen "
            f"for these inputs ({names}) does not fit. Allow a wider one, or scale {name} down."
        )
    return fitting


def _choose(
    call: AttentionCall, backend: str, candidates: Sequence[torch.dtype]
) -> tuple[Backend, torch.dtype]:
    """The first IO-aware backend that takes the call in one of the dtypes, the first of them."""
    calls = {dtype: _probe(call, dtype) for dtype in candidates}
    refused: dict[str, tuple[str, ...]] = {}
    entries = BACKENDS if backend == "auto" else (by_name(backend),)
    for entry in entries:
        if not entry.io_aware:
            if backend == "auto":
                continue
            return entry, candidates[0]  # flash_attention says why it will not do
        for dtype, probe in calls.items():
            reasons = tuple(entry.reasons(probe))
            if not reasons and (backend != "auto" or all(map(entry.in_auto, entry.parts(probe)))):
                return entry, dtype
            refused[entry.name] = (*refused.get(entry.name, ()), *reasons)
    listing = "\n".join(
        f"  {name}: {'; '.join(dict.fromkeys(why)) or 'only when asked for by name'}"
        for name, why in refused.items()
    )
    wanted = " or ".join(short(dtype) for dtype in candidates)
    raise BackendUnavailableError(f"nothing runs this call in {wanted}:\n{listing}", refused)


def _probe(call: AttentionCall, dtype: torch.dtype) -> AttentionCall:
    """The same call in another dtype, without its numbers: some backends ask the tensors."""

    def like(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, dtype=dtype, requires_grad=tensor.requires_grad)

    probe = replace(call, q=like(call.q), k=like(call.k), v=like(call.v))
    return probe.without_empty_queries()[1]


def _check_accumulator(numbers: Numbers, seqlen_k: int, compute: torch.dtype) -> None:
    accumulator = torch.float64 if compute == torch.float64 else torch.float32
    # Kernels divide by the sum of the weights at the end: until then v is added up undivided.
    if seqlen_k * numbers.largest["v"] >= torch.finfo(accumulator).max:
        raise AttentionInputError(
            f"v reaches {numbers.largest['v']:.1e}: {seqlen_k} such values add up to more than the "
            f"{short(accumulator)} in which kernels accumulate can hold. Scale v down."
        )
    if numbers.score_bound >= torch.finfo(accumulator).max:
        raise AttentionInputError(
            f"the scores may reach {numbers.score_bound:.1e}, beyond the {short(accumulator)} in "
            "which kernels accumulate them: the softmax would be NaN. Scale q or k down, or pass a "
            "smaller softmax_scale."
        )


def _cautions(numbers: Numbers, compute: torch.dtype) -> list[str]:
    cautions = []
    for name, count in numbers.nonfinite.items():
        if count:
            cautions.append(
                f"{name} holds {count} entries that are NaN or infinite before anything was done; "
                "outputs that see them mean nothing"
            )
    bound, u = numbers.score_bound, unit_roundoff(compute)
    if bound > LARGE_SCORE or (compute in HALF_DTYPES and bound * u > 1):
        cautions.append(
            f"scores may reach {bound:.2g}: rounding to {short(compute)} (relative {u:.1g}) moves "
            f"them by up to {2 * bound * u:.2g}, so that near-ties may flip: where two keys score "
            "nearly the same, the output may follow the other one, whatever kernel computes it"
        )
    return cautions
