"""Calls of the kernels with tensors: autograd, `torch.compile` and fake tensors.

Both passes run the Gluon kernels where the geometry says so, the kernels for Hopper where
`hopper_takes` a call, and the plain ones elsewhere. Operators make them opaque to
`torch.compile` and give fake tensors the outputs' shapes; without either the kernels are called
directly, because an operator costs up to 0.2 ms of Python.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from labsupport.attention.inputs import check_kernel_inputs, check_math_layout
from labsupport.attention.kernels.config import HOPPER, Geometry, positive_scale


def hopper_takes(geometry: Geometry, *inputs: Tensor) -> bool:
    """Return whether the kernels for Hopper run a call with q, k, v, and for the backward dout.

    They take half precision, head_dim 64 or 128, and neither packed sequences nor ALiBi.
    """
    q = inputs[0]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in HOPPER["forward"]
        and not geometry.packed
        and geometry.slopes is None
        and _is_hopper(q.device)
        and all(map(can_be_described, inputs))
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def can_be_described(x: Tensor) -> bool:
    """Return whether the TMA unit takes x: contiguous rows, and 16-byte steps between them."""
    return x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride(), x.itemsize)


@lru_cache(4096)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    steps = [step for size, step in zip(shape[:-1], strides, strict=False) if size > 1]
    aligned = all(step > 0 and step * itemsize % 16 == 0 for step in steps)
    return aligned and strides[-1] == 1 and 0 not in shape


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    *,
    float32_out: bool = False,
    hopper: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a forward kernel.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim), any strides.
        float32_out: return the output as it was accumulated, for merging with others.
        hopper: the kernel for Hopper GPUs, or not; unless given, where it runs.

    Returns:
        out like q, and the natural-log lse (batch, heads, seqlen_q) or (heads, total), float32.
    """
    out, lse = _outputs(q, float32_out)
    if q.numel() == 0:
        return out, lse
    if geometry.gluon:
        from labsupport.attention.kernels.forward_gluon import launch
    elif hopper_takes(geometry, q, k, v) if hopper is None else hopper:
        from labsupport.attention.kernels.hopper import launch_forward as launch
    else:
        from labsupport.attention.kernels.forward import launch
    q, scale = positive_scale(q, geometry.scale)
    with torch.cuda.device_of(q):
        launch(q, k, v, out, lse, geometry.with_plain_slopes(), scale)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    geometry: Geometry,
    *,
    dlse: Tensor | None = None,
    hopper: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels: dq, dk, dv like q, k, v.

    Takes the gradients of `out` and, if there is one, of `lse`; the rest as in `forward`. After
    the Gluon forward the Gluon backward runs, and the last bits of dq can differ from call to call;
    the Triton kernels, which `torch.use_deterministic_algorithms` asks for, repeat every bit.
    """
    dq, dk, dv = _gradients(q, k, v, geometry)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if geometry.gluon and not torch.are_deterministic_algorithms_enabled():
        from labsupport.attention.kernels.backward_gluon import launch
    elif hopper_takes(geometry, q, k, v, dout) if hopper is None else hopper:
        from labsupport.attention.kernels.hopper import launch_backward as launch
    else:
        from labsupport.attention.kernels.backward import launch
    with torch.cuda.device_of(q):
        launch(dout, q, k, v, out, lse, dlse, dq, dk, dv, geometry.with_plain_slopes())
    return dq, dk, dv


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    form = torch.contiguous_format if geometry.gluon else torch.preserve_format
    dq, dk, dv = (torch.empty_like(x, memory_format=form) for x in (q, k, v))
    return dq, dk, dv


def _outputs(q: Tensor, float32_out: bool = False) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, dtype=torch.float32) if float32_out else torch.empty_like(q)
    return out, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)


# --- operators ------------------------------------------------------------------------------------

# The attributes of `Geometry`, in their order.
_GEOMETRY = (
    "float scale, int left, int right, Tensor? slopes, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, bool gluon"
)


@torch.library.custom_op(
    "labsupport::flash_triton_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_GEOMETRY}) -> (Tensor, Tensor)",
)
def forward_operator(q: Tensor, k: Tensor, v: Tensor, *geometry: Any) -> tuple[Tensor, Tensor]:
    """Run `forward`."""
    return forward(q, k, v, Geometry(*geometry))


@forward_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *geometry: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@torch.library.custom_op(
    "labsupport::flash_triton_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_GEOMETRY}) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `backward`."""
    out, lse, *geometry = rest
    return backward(dout, q, k, v, out, lse, Geometry(*geometry), dlse=dlse)


@backward_operator.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(q, k, v, Geometry(*rest[2:]))


def _needs_operator(q: Tensor) -> bool:
    """Return whether operators are traced: torch.compile, fake tensors, a dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or type(q) not in (Tensor, torch.nn.Parameter)
        or _get_current_dispatch_mode() is not None
    )


def _values(geometry: Geometry) -> tuple[Any, ...]:
    return tuple(vars(geometry).values())


# --- autograd -------------------------------------------------------------------------------------


class TritonFlashAttentionFunction(torch.autograd.Function):
    """`FlashAttentionFunction` by the Triton kernels: `.apply(q, k, v, is_causal)`.

    Takes q (..., seqlen_q, head_dim) and k, v (..., seqlen_k, head_dim), float16, bfloat16 or
    float32, and returns the output in q's shape and dtype. Saves q, k, v, out and lse
    (..., seqlen_q) for the backward. `softmax_scale` and `window_size` may follow by position.

    With a `Geometry` the tensors are in flash-attn's layout instead, and out and lse are returned,
    both differentiable: a gradient of lse only changes D, dS = P * (dP - D + dLSE).

    Raises:
        AttentionInputError: the tensors do not fit together, or the kernels cannot take them.

    >>> q = k = v = torch.randn(2, 5, 16, requires_grad=True)
    >>> TritonFlashAttentionFunction.apply(q, k, v, True).shape
    torch.Size([2, 5, 16])
    """

    # The context comes first: with `setup_context`, PyTorch would look up the signature each time.
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        geometry: Geometry | None = None,
    ) -> Any:
        """Run the forward kernel, and save what the backward recomputes P from."""
        ctx.math_layout, inputs = geometry is None, (q, k, v)
        if geometry is None:
            check_math_layout(q, k, v)
            check_kernel_inputs(q, k, v)
            left, right = window_size
            scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
            geometry = Geometry(scale, left, 0 if is_causal else right)
            inputs = _as_one_head(q), _as_one_head(k), _as_one_head(v)
        ctx.geometry, ctx.needs_operator = geometry, _needs_operator(q)
        if ctx.needs_operator:
            out, lse = forward_operator(*inputs, *_values(geometry))
        else:
            out, lse = forward(*inputs, geometry)
        if ctx.math_layout:
            out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # a gradient of lse is rare: None instead of zeros
        return out if ctx.math_layout else (out, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        """Run the backward kernels: dq, dk, dv, and None for each option."""
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        shapes = q.shape, k.shape, v.shape
        if ctx.math_layout:
            dout, q, k, v, out = map(_as_one_head, (dout, q, k, v, out))
            lse = lse.reshape(-1, 1, lse.shape[-1])
        if ctx.needs_operator:
            found = backward_operator(dout, dlse, q, k, v, out, lse, *_values(ctx.geometry))
        else:
            found = backward(dout, q, k, v, out, lse, ctx.geometry, dlse=dlse)
        gradients = (dx.reshape(shape) for dx, shape in zip(found, shapes, strict=True))
        return *gradients, None, None, None, None


def _as_one_head(x: Tensor) -> Tensor:
    """Return (..., seqlen, head_dim) as (batch, seqlen, 1, head_dim)."""
    return x.reshape(-1, *x.shape[-2:]).unsqueeze(2)


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
    gluon: bool = False,
) -> tuple[Tensor, Tensor]:
    """FlashAttention by the lab's Triton kernels: (out, lse) as of `forward`, differentiable.

    Args: as in `labsupport.attention.attention`, which checks the inputs.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) offsets of packed sequences.
        gluon: take the Gluon kernels; the backend `flash_gluon` says for which inputs.

    Raises:
        AttentionInputError: dtypes, devices or head_dims that the kernels cannot take.
    """
    max_seqlen_q = max_seqlen_k = 0
    check_kernel_inputs(q, k, v)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        max_seqlen_q, max_seqlen_k = (int(c.diff().max()) for c in (cu_seqlens_q, cu_seqlens_k))
        cu_seqlens_q, cu_seqlens_k = (
            offsets.to(q.device, torch.int32) for offsets in (cu_seqlens_q, cu_seqlens_k)
        )
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    left, right = window_size
    geometry = Geometry(
        scale, left, 0 if causal else right, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, gluon,
    )  # fmt: skip
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if wanted or _needs_operator(q):
        return TritonFlashAttentionFunction.apply(q, k, v, False, None, (-1, -1), geometry)
    return forward(q, k, v, geometry)
