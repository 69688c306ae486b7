"""The kernels as PyTorch operators and as autograd functions.

The operators `labsupport::flash_triton_forward` and `..._backward` make the kernels opaque to
`torch.compile` (no graph break, no tracing into Triton) and give fake tensors the outputs' shapes.
They have no gradients themselves: only the autograd functions do. These call an operator if one
is needed, and the kernels' launcher otherwise, because an operator costs up to 0.2 ms of Python.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from labsupport.attention.flash_triton.geometry import Geometry, rows_like
from labsupport.attention.flash_triton.launch import backward, forward
from labsupport.attention.flash_triton.mode import interpreted
from labsupport.attention.inputs import AttentionInputError, check_math_layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256
# The attributes of `Geometry`, in their order.
_GEOMETRY = (
    "float scale, int left, int right, Tensor? slopes, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, str precision"
)


@torch.library.custom_op(
    "labsupport::flash_triton_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, bool float32_out, {_GEOMETRY}) -> (Tensor, Tensor)",
)
def forward_operator(
    q: Tensor, k: Tensor, v: Tensor, float32_out: bool, *geometry: Any
) -> tuple[Tensor, Tensor]:
    """Return out and lse, as `launch.forward` does."""
    return forward(q, k, v, Geometry(*geometry), float32_out=float32_out)


@forward_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, float32_out: bool, *geometry: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, dtype=torch.float32 if float32_out else q.dtype)
    return out, rows_like(q)


@torch.library.custom_op(
    "labsupport::flash_triton_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_GEOMETRY}) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *geometry: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, as `launch.backward` does."""
    return backward(dout, q, k, v, out, lse, Geometry(*geometry), dlse=dlse)


@backward_operator.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _is_watched(q: Tensor) -> bool:
    """Whether somebody looks at operators: torch.compile, fake tensors, a dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or type(q) not in (Tensor, torch.nn.Parameter)
        or _get_current_dispatch_mode() is not None
    )


def _fields(geometry: Geometry) -> tuple[Any, ...]:
    g = geometry
    packed = g.cu_seqlens_q, g.cu_seqlens_k, g.max_seqlen_q, g.max_seqlen_k
    return g.scale, g.left, g.right, g.slopes, *packed, g.precision


def _forward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, float32_out: bool
) -> tuple[Tensor, Tensor]:
    ctx.geometry, ctx.watched = geometry, _is_watched(q)
    if ctx.watched:
        return forward_operator(q, k, v, float32_out, *_fields(geometry))
    return forward(q, k, v, geometry, float32_out=float32_out)


def _backward(
    ctx: Any,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    if ctx.watched:
        return backward_operator(dout, dlse, q, k, v, out, lse, *_fields(ctx.geometry))
    return backward(dout, q, k, v, out, lse, ctx.geometry, dlse=dlse)


class _Function(torch.autograd.Function):
    """Attention in flash-attn's layout: out and lse, both differentiable.

    A gradient of the log-sum-exp, which merging partial results needs, only changes the vector D of
    the backward: dS = P * (dP - D + dL). `forward` has the context as its first argument: with
    `setup_context`, PyTorch looks up the signature in each call, which takes longer than the rest.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, float32_out: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(ctx, q, k, v, geometry, float32_out)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # L's gradient is rare: None instead of zeros
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *_backward(ctx, dout, dlse, q, k, v, out, lse), None, None


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
    geometry = Geometry(*band, alibi_slopes, *packed, precision)
    return _Function.apply(q, k, v, geometry, float32_out)


class TritonFlashAttentionFunction(torch.autograd.Function):
    """`FlashAttentionFunction` by the Triton kernels: `.apply(q, k, v, is_causal)`.

    Takes q (..., seqlen_q, head_dim) and k, v (..., seqlen_k, head_dim), float16, bfloat16 or
    float32, and returns the output in q's shape and dtype. Saves q, k, v, out and lse
    (..., seqlen_q) for the backward. `softmax_scale` and `window_size` may follow by position.
    Leading dimensions are joined into one, which copies where their strides do not allow it.

    Raises:
        AttentionInputError: the tensors do not fit together, or the kernels cannot take them.

    >>> q = k = v = torch.randn(2, 5, 16, requires_grad=True)
    >>> TritonFlashAttentionFunction.apply(q, k, v, True).shape
    torch.Size([2, 5, 16])
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Run the forward kernel, and save what the backward recomputes P from."""
        check_math_layout(q, k, v)
        _check(q, k, v)
        left, right = window_size
        scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
        geometry = Geometry(scale, left, 0 if is_causal else right)
        inputs = _as_one_head(q), _as_one_head(k), _as_one_head(v)
        out, lse = _forward(ctx, *inputs, geometry, False)
        out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward kernels: dq, dk, dv, and None for each option."""
        q, k, v, out, lse = ctx.saved_tensors
        dout_, q_, k_, v_, out_ = map(_as_one_head, (dout, q, k, v, out))
        rows = lse.reshape(-1, 1, lse.shape[-1])
        dq, dk, dv = _backward(ctx, dout_, None, q_, k_, v_, out_, rows)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), None, None, None


def _as_one_head(x: Tensor) -> Tensor:
    """(..., seqlen, head_dim) as (batch, seqlen, 1, head_dim)."""
    return x.reshape(-1, *x.shape[-2:]).unsqueeze(2)


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
