"""What a dtype costs one attention call, found on the inputs themselves.

A bound from worst cases ("every rounding error points the same way") is hundreds of times too large
to be of use. So the error is measured, on a sample of the queries: the backend computes their
outputs from the cast inputs, the float64 oracle from the inputs as given. Half of the sample is
spread evenly, half are the longest queries, whose scores are the largest. The largest difference,
times 4 for the queries that were not looked at, is reported: an estimate from above, not a proof.

How far the scores reach says how much the inputs' rounding is amplified: relative errors e of q
and k move a score q.k by up to 2 e |q| |k|, and its weight by the exponential of that. Where this
passes 1, two keys of nearly the same score may change places, and the output jumps from one value
to another: no dtype conversion is harmless there, and no sample sees every such query.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.overrides
from torch import Tensor

from labsupport.attention.backends import flash_attention
from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.reference import oracle_attention

SAMPLED_BLOCKS, BLOCK = 8, 32
SAFETY = 4.0


def score_bound(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """No scaled score is larger: scale * max ||q_i|| * max ||k_j|| (Cauchy-Schwarz).

    Args:
        q, k: (batch, seqlen, heads, head_dim); non-finite entries count as 0.
        scale: the factor on the scores.

    Returns:
        a float64 scalar on the tensors' device.
    """
    with torch.no_grad():
        return abs(scale) * _lengths(q).max() * _lengths(k).max()


def _lengths(x: Tensor) -> Tensor:
    """Norm of each row of a (batch, seqlen, heads, head_dim) tensor, in float64."""
    clean = x.nan_to_num(0.0, 0.0, 0.0)
    scale = clean.abs().amax().double().clamp(min=torch.finfo(torch.float64).tiny)
    # Squares of float32's largest numbers would overflow: bring the largest entry to 1.
    return torch.linalg.vector_norm((clean / scale).to(_wide(x)), dim=-1).double() * scale


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def sampled_error(
    call: AttentionCall, backend: str, compute: torch.dtype, out: torch.dtype
) -> float:
    """The maximum error of running `call` on `backend` in dtype `compute`, estimated from above.

    Args:
        call: the inputs as given; mixed dtypes are allowed.
        backend: takes `compute`.
        out: the dtype that the result is rounded to.

    Returns:
        the largest error of the sampled queries against float64 attention of the inputs as given,
        times 4 unless all were looked at; infinity if a result is not finite.
    """
    if call.q.numel() == 0:
        return 0.0
    worst = torch.zeros((), dtype=torch.float64, device=call.q.device)
    sampled = 0
    with torch.no_grad(), autocast_off(call.q), _unwatched():
        for part in _sample(call):
            sampled += part.q.shape[1]
            options = {
                "causal": part.causal,
                "softmax_scale": part.scale,
                "window_size": part.window_size,
            }
            cast = (x.to(compute) for x in (part.q, part.k, part.v))
            result = flash_attention(
                *cast,
                backend=backend,
                alibi_slopes=part.alibi_slopes,
                check_layout=False,
                **options,
            )
            *given, slopes = part.math_layout()
            exact, _ = oracle_attention(
                *(x.double() for x in given), alibi_slopes=slopes, **options
            )
            exact = exact.flatten(1, 2).transpose(1, 2)
            assert isinstance(result, Tensor)
            error = (result.to(out).double() - exact).abs().amax()
            worst = torch.maximum(worst, error.nan_to_num(math.inf, math.inf))
    return worst.item() * (SAFETY if sampled < call.q.shape[1] else 1.0)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Put torch function modes aside: trackers and policies watch a model, not this measurement.

    (DisableTorchFunction would do too much: PyTorch's own causal bias is a tensor subclass.)
    """
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield


def _sample(call: AttentionCall) -> Iterator[AttentionCall]:
    """Some queries, each with the keys that it sees, as calls of their own.

    Masks are aligned at the last query and the last key, so a causal block ends where its keys end.
    """
    _, call = call.without_empty_queries()
    seqlen, size = call.q.shape[1], SAMPLED_BLOCKS * BLOCK
    if seqlen <= size:
        yield call
        return
    longest = _lengths(call.q).amax(dim=(0, 2)).argsort(descending=True)
    if call.band.unlimited and call.alibi_slopes is None:
        spread = torch.linspace(0, seqlen - 1, size // 2, device=call.q.device).round().long()
        rows = torch.cat([spread, longest[: size // 2]])
        yield AttentionCall(call.q[:, rows], call.k, call.v, False, call.scale)
        return
    if call.causal:
        spread = torch.linspace(0, seqlen - BLOCK, SAMPLED_BLOCKS // 2).int().tolist()
        holding = [min(row // BLOCK * BLOCK, seqlen - BLOCK) for row in longest[:size].tolist()]
        starts = [*spread, *list(dict.fromkeys(holding))[: SAMPLED_BLOCKS // 2]]
    else:  # only the last queries keep their places when others are cut away
        starts = [seqlen - size]
    for start in dict.fromkeys(starts):
        stop = start + BLOCK if call.causal else seqlen
        end = stop + call.band.offset if call.causal else call.k.shape[1]
        yield AttentionCall(
            call.q[:, start:stop],
            call.k[:, :end],
            call.v[:, :end],
            call.causal,
            call.scale,
            call.window_size,
            call.alibi_slopes,
        )
