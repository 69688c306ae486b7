"""Attention in FP8, and the rotation that spreads outliers before the rounding."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.inputs import AttentionInputError, check_model_layout, check_scale
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.config import HOPPER


def hadamard(n: int) -> Tensor:
    """Return the orthogonal Hadamard matrix, (n, n), n a power of two (J. Sylvester, 1867)."""
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


@cache
def random_signs(n: int) -> Tensor:
    """Return the same n numbers -1 and 1 each time."""
    return torch.randn(n, generator=torch.Generator().manual_seed(0)).sign()


@cache
def _rotation(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random signs times Hadamard's matrix, with entries -1 and 1."""
    return (random_signs(n)[:, None] * hadamard(n)).sign().to(device, dtype)


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    rotate: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """FlashAttention's forward pass with both products in FP8 (e4m3): fast, and lossy.

    q, k and v are rounded with a scale for each block of tokens of a head, the weights with one
    fixed scale; sums are in float32. No backend of `attention`, since its errors are some percent.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16 or bfloat16, on a Hopper GPU
            (compute capability 9.0); head_dim 64 or 128.
        k, v: (batch, seqlen_k, kv_heads, head_dim), same dtype; heads is a multiple of kv_heads.
        causal: query i sees the keys up to i + seqlen_k - seqlen_q.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        rotate: turn q and k by random signs times Hadamard's matrix before rounding, which leaves
            the scores and spreads outliers over all channels.
        return_lse: return the natural-log log-sum-exp of the scores, too.

    Returns:
        out like q; with `return_lse` also lse, (batch, heads, seqlen_q), float32. A query without
        any key gets 0 and -inf.

    Raises:
        AttentionInputError: inputs that the kernel does not take, or gradients are wanted.

    Source: Shah et al., "FlashAttention-3" (2024), section 3.3.

    >>> q = torch.zeros(1, 8, 2, 96, dtype=torch.float16)
    >>> fp8_attention(q, q, q)
    Traceback (most recent call last):
    labsupport.attention.inputs.AttentionInputError: ... has head_dim 64 or 128, not 96...
    """
    check_model_layout(q, k, v)
    check_scale(softmax_scale)
    _check_fp8(q, k, v)
    from labsupport.attention.kernels.forward_fp8 import launch

    batch, seqlen, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((batch, heads, seqlen), dtype=torch.float32)
    call = AttentionCall(q, k, v, causal, softmax_scale)
    with torch.cuda.device_of(q):
        rotation = _rotation(head_dim, q.dtype, q.device) if rotate else None
        launch(call.with_positive_scale(), out, lse, rotation)
    return (out, lse) if return_lse else out


def _check_fp8(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check what the kernel takes beyond the layout."""
    problem = None
    if q.shape[-1] not in HOPPER["fp8"]:
        problem = f"attention in FP8 has head_dim 64 or 128, not {q.shape[-1]}."
    elif q.dtype not in (torch.float16, torch.bfloat16):
        problem = f"attention in FP8 rounds float16 or bfloat16, not {q.dtype}: cast q, k and v."
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        problem = (
            "attention in FP8 has no backward pass: call it under torch.no_grad(), or use "
            "labsupport.attention.attention."
        )
    elif not q.is_cuda:
        problem = (
            "attention in FP8 needs a GPU, since Triton's interpreter rounds e4m3 wrongly: "
            "labsupport.checks.ex_1_7_fp8.round_to_fp8 shows its errors on a CPU."
        )
    elif (reason := mode.missing()) is not None:
        problem = f"attention in FP8 is a Triton kernel, but {reason}."
    elif (capability := torch.cuda.get_device_capability(q.device))[0] != 9:
        problem = (
            "attention in FP8 is written for Hopper GPUs (compute capability 9.0), and this one "
            f"has {'.'.join(map(str, capability))}: use labsupport.attention.attention."
        )
    if problem:
        raise AttentionInputError(problem)
