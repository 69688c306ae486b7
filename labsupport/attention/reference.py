"""Textbook attention, and the float64 oracle that every other implementation is judged by.

    S = Q K^T * softmax_scale        (seqlen_q, seqlen_k)
    P = softmax(S), row by row       (seqlen_q, seqlen_k)
    O = P V                          (seqlen_q, head_dim)

All three functions store all of S and P: memory grows with seqlen_q * seqlen_k. That is their
purpose.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labsupport.attention.inputs import check_mask, check_math_layout, check_scale, check_softcap
from labsupport.attention.masks import AttentionMask, alibi_bias


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as the textbook writes it, in the dtype of its inputs.

    Args:
        q: (..., seqlen_q, head_dim), any floating dtype.
        k, v: (..., seqlen_k, head_dim), same dtype, device and leading dimensions as `q`.
        mask: broadcastable to (..., seqlen_q, seqlen_k). Boolean: True where a query may look.
            Floating: added to the scaled scores (0 to keep, -inf to hide).
        causal: hide the future; bottom-right for unequal lengths (the sequences end together).
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.

    Returns:
        output (..., seqlen_q, head_dim) and weights (..., seqlen_q, seqlen_k). A query that may
        look at no key gets weights and output 0 (a plain softmax would give NaN).

    Raises:
        AttentionInputError: ranks, shapes, dtypes or devices do not fit together, or an option
            makes no sense.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1.

    >>> q = k = v = torch.eye(3)
    >>> standard_attention(q, k, v, causal=True)[1][0]
    tensor([1., 0., 0.])
    """
    check_math_layout(q, k, v)
    check_mask(mask, (*q.shape[:-1], k.shape[-2]))
    band = AttentionMask.of(q.shape[-2], k.shape[-2], causal=causal)
    return _attention(q, k, v, mask, band, softmax_scale, None)[:2]


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Textbook attention with flash-attn's options: (output, lse (..., seqlen_q) or None)."""
    check_math_layout(q, k, v)
    band = AttentionMask.of(q.shape[-2], k.shape[-2], causal=causal, window_size=window_size)
    output, _, scores = _attention(q, k, v, None, band, softmax_scale, alibi_slopes, softcap)
    return output, _log_sum_exp(scores) if return_lse else None


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same mathematics, computed in float64 for inputs of any dtype.

    Args: as `standard_attention`; `window_size`, `softcap` and `alibi_slopes` (broadcastable to
        the leading dimensions) as in `labsupport.attention.attention`.

    Returns:
        output (..., seqlen_q, head_dim) in float64, and the natural-log log-sum-exp of each row of
        scaled, masked scores, lse (..., seqlen_q) in float64: -inf for a row without any key.

    >>> q = k = v = torch.zeros(3, 8)
    >>> oracle_attention(q, k, v)[1]  # ln 3
    tensor([1.0986, 1.0986, 1.0986], dtype=torch.float64)
    """
    check_math_layout(q, k, v)
    check_mask(mask, (*q.shape[:-1], k.shape[-2]))
    band = AttentionMask.of(q.shape[-2], k.shape[-2], causal=causal, window_size=window_size)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    slopes = None if alibi_slopes is None else alibi_slopes.double()
    output, _, scores = _attention(
        q.double(), k.double(), v.double(), mask, band, softmax_scale, slopes, softcap
    )
    return output, _log_sum_exp(scores)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    band: AttentionMask,
    softmax_scale: float | None,
    alibi_slopes: Tensor | None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the weights, and the masked scores."""
    check_scale(softmax_scale)
    check_softcap(softcap)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    # In place where autograd allows it: a reference should be no slower or larger than necessary.
    scores = (q @ k.mT).mul_(scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        everything = slice(0, band.seqlen_q), slice(0, band.seqlen_k)
        scores += alibi_bias(alibi_slopes, *everything, band.offset, scores.dtype)
    visible = band.full_mask(q.device)
    if visible is not None:
        scores.masked_fill_(~visible, -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
        # Changes no value, but cuts the gradient at hidden entries, where it would be NaN.
        scores = scores.masked_fill(scores == -torch.inf, -torch.inf)

    weights = torch.softmax(scores, dim=-1)
    if mask is not None or band.leading_empty_rows:
        # A fully masked row is all -inf, its softmax NaN: define it as 0, as flash-attn does.
        weights = weights.masked_fill((scores == -torch.inf).all(dim=-1, keepdim=True), 0.0)
    return weights @ v, weights, scores


def _log_sum_exp(scores: Tensor) -> Tensor:
    return torch.logsumexp(scores.float() if scores.dtype.itemsize < 4 else scores, dim=-1)
