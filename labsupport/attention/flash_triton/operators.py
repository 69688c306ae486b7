"""The kernels as PyTorch operators: `labsupport::flash_triton_forward` and `..._backward`.

A custom operator is opaque to `torch.compile` (no graph break, no tracing into Triton), says its
outputs' shapes to fake tensors, and has a backward that autograd knows. Both outputs are
differentiable: a gradient of the log-sum-exp, which merging partial results needs, only changes the
vector D of the backward (dS = P * (dP - D + dL)). In eager mode, where nobody looks at operators,
an autograd function launches the same kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from labsupport.attention.flash_triton.geometry import Geometry
from labsupport.attention.flash_triton.launch import backward, forward
from labsupport.attention.flash_triton.mode import interpreted
from labsupport.attention.inputs import AttentionInputError, check_math_layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256


@torch.library.custom_op("labsupport::flash_triton_forward", mutates_args=())
def forward_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    precision: str,
    float32_out: bool,
) -> tuple[Tensor, Tensor]:
    """Out and lse; arguments as in `launch.forward` and `launch.Geometry`."""
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    geometry = Geometry(scale, left, right, slopes, *packed, precision)
    return forward(q, k, v, geometry, float32_out=float32_out)


@forward_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, dtype=torch.float32 if options[-1] else q.dtype)
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    return out, q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("labsupport::flash_triton_backward", mutates_args=())
def backward_operator(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dq, dk and dv; arguments as in `launch.backward` and `launch.Geometry`."""
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    geometry = Geometry(scale, left, right, slopes, *packed, precision)
    return backward(dout, q, k, v, out, lse, geometry, dlse=dlse)


@backward_operator.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slopes, cu_seqlens_q, cu_seqlens_k, *numbers, _ = inputs
    ctx.save_for_backward(q, k, v, *output, slopes, cu_seqlens_q, cu_seqlens_k)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)  # L's gradient is rare: None instead of zeros


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, slopes, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = backward_operator(
        dout, dlse, q, k, v, out, lse, slopes, cu_seqlens_q, cu_seqlens_k, *ctx.numbers
    )
    return (*gradients, *(None for _ in range(10)))


forward_operator.register_autograd(_differentiate, setup_context=_remember)


class _Function(torch.autograd.Function):
    """The same without an operator, which costs up to 0.4 ms of Python a call with its backward.

    `forward` has the context as its first argument: with `setup_context`, PyTorch looks up the
    signature in each call, which takes longer than all else that is done here.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, float32_out: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, geometry, float32_out=float32_out)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *backward(dout, q, k, v, out, lse, ctx.geometry, dlse=dlse), None, None


def _is_watched(q: Tensor) -> bool:
    """Whether somebody looks at operators: torch.compile, fake tensors, a dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or type(q) not in (Tensor, torch.nn.Parameter)
        or _get_current_dispatch_mode() is not None
    )


def flash_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    allow_tf32: bool = False,
    float32_out: bool = False,
) -> tuple[Tensor, Tensor]:
    """FlashAttention by the lab's Triton kernels; `labsupport.attention.attention` checks inputs.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float32, any strides; packed,
            with `cu_seqlens_*`: (total_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim) or (total_k, kv_heads, head_dim), same dtype.
        causal, softmax_scale, window_size, alibi_slopes: as in `attention`.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) offsets of packed sequences.
        max_seqlen_q, max_seqlen_k: at least the longest of them; read from the offsets (which waits
            for the device) where they are 0.
        allow_tf32: let tensor cores round float32 inputs to 11 significant bits.
        float32_out: return the output in float32, as it was accumulated: partial results that are
            to be merged should not be rounded before.

    Returns:
        out like q, and lse, natural log, float32: (batch, heads, seqlen_q), packed (heads,
        total_q). Both are differentiable; the backward is deterministic.

    Raises:
        AttentionInputError: dtypes, devices or head_dims that the kernels cannot take.
    """
    _check(q, k, v)
    left, right = window_size
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        max_seqlen_q = max_seqlen_q or int(cu_seqlens_q.diff().max())
        max_seqlen_k = max_seqlen_k or int(cu_seqlens_k.diff().max())
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.int(), cu_seqlens_k.int()
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    band = scale, left, 0 if causal else right
    precision = "tf32" if allow_tf32 else "ieee"
    if _is_watched(q):
        return forward_operator(q, k, v, alibi_slopes, *packed, *band, precision, float32_out)
    geometry = Geometry(*band, alibi_slopes, *packed, precision)
    return _Function.apply(q, k, v, geometry, float32_out)


class TritonFlashAttentionFunction:
    """`FlashAttentionFunction` by the Triton kernels: `.apply(q, k, v, is_causal)`.

    Takes q (..., seqlen_q, head_dim) and k, v (..., seqlen_k, head_dim), float16, bfloat16 or
    float32, and returns the output in q's shape and dtype. Autograd comes from the operators.
    Leading dimensions are joined into one, which copies where their strides do not allow it.

    >>> q = k = v = torch.randn(2, 5, 16, requires_grad=True)
    >>> TritonFlashAttentionFunction.apply(q, k, v, True).shape
    torch.Size([2, 5, 16])
    """

    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Attention in the papers' layout.

        Raises:
            AttentionInputError: the tensors do not fit together, or the kernels cannot take them.
        """
        check_math_layout(q, k, v)
        one_head = (x.reshape(-1, *x.shape[-2:]).unsqueeze(2) for x in (q, k, v))
        out, _ = flash_attention_triton(
            *one_head, causal=is_causal, softmax_scale=softmax_scale, window_size=window_size
        )
        return out.squeeze(2).reshape(q.shape)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise AttentionInputError(
            f"q, k and v must have one dtype, float16, bfloat16 or float32, but {q.dtype}, "
            f"{k.dtype}, {v.dtype} were given."
        )
    if q.dtype == torch.bfloat16 and interpreted():
        raise AttentionInputError(
            "Triton's interpreter computes bfloat16 wrongly: use float16 or float32 where there is "
            "no GPU."
        )
    if not q.device == k.device == v.device:
        raise AttentionInputError(
            f"q, k and v must be on one device, but {q.device}, {k.device}, {v.device} were given."
        )
    if not 0 < q.shape[-1] <= LARGEST_HEAD_DIM:
        raise AttentionInputError(
            f"head_dim must be 1 to {LARGEST_HEAD_DIM}, but {q.shape[-1]} was given."
        )
