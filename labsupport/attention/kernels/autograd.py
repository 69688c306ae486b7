"""From a call to its kernels: which ones run, autograd, `torch.compile` and fake tensors.

    run         both passes, differentiable: the way from `attention`
    choose      the plain kernels, or those for Hopper
    forward, backward   one pass, without autograd

Operators make the kernels opaque to `torch.compile` and give fake tensors the outputs' shapes;
without either the kernels are called directly, because an operator costs up to 0.2 ms of Python.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from labsupport.attention.call import AttentionCall
from labsupport.attention.inputs import (
    check_kernel_inputs,
    check_math_layout,
    check_scale,
    check_window,
    first_derivative_only,
)
from labsupport.attention.kernels.config import HOPPER, can_be_described

Kernels = Literal["plain", "hopper", "gluon"]
# The file and the kernel of each forward.
NAMES: dict[Kernels, str] = {
    "plain": "forward._attn_fwd",
    "hopper": "hopper._hopper_fwd",
    "gluon": "forward_gluon._gluon_fwd",
}


def choose(call: AttentionCall) -> Kernels:
    """Return which of the Triton kernels run a call; the Gluon kernels are asked for by name.

    Those for Hopper take half precision, head_dim 64 or 128, neither packed sequences nor ALiBi.
    """
    q = call.q
    hopper = (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and call.head_dim in HOPPER["forward"]
        and not call.packed
        and call.alibi_slopes is None
        and _is_hopper(q.device)
        and all(map(can_be_described, (q, call.k, call.v)))
    )
    return "hopper" if hopper else "plain"


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def run(call: AttentionCall, kernels: Kernels | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernels: out and lse as of `forward`, both differentiable.

    `kernels` are those that `choose` returns, unless given. Packed calls come from `for_kernels`.
    """
    kernels = kernels or choose(call)
    if call.needs_grad or _needs_operator(call.q):
        return _Attention.apply(call.q, call.k, call.v, kernels, *call.options)
    return forward(call, kernels)


def forward(
    call: AttentionCall, kernels: Kernels | None = None, *, float32_out: bool = False
) -> tuple[Tensor, Tensor]:
    """Run a forward kernel; `float32_out` returns the output as it was accumulated.

    Returns:
        out like q, and the natural-log lse (batch, heads, seqlen_q) or (heads, total), float32.
    """
    kernels = kernels or choose(call)
    out, lse = _outputs(call.q, float32_out)
    if call.q.numel() == 0:
        return out, lse
    if kernels == "gluon":
        from labsupport.attention.kernels.forward_gluon import launch
    elif kernels == "hopper":
        from labsupport.attention.kernels.hopper import launch_forward as launch
    else:
        from labsupport.attention.kernels.forward import launch
    with torch.cuda.device_of(call.q):
        launch(call.with_positive_scale(), out, lse)
    return out, lse


def backward(
    call: AttentionCall,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    kernels: Kernels | None = None,
    *,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels: dq, dk, dv like q, k, v.

    Takes the gradients of `out` and, if there is one, of `lse`. After the Gluon forward the Gluon
    backward runs, and the last bits of dq can differ from call to call; the Triton kernels, which
    `torch.use_deterministic_algorithms` asks for, repeat every bit.
    """
    kernels = kernels or choose(call)
    dq, dk, dv = _gradients(call, kernels)
    if call.q.numel() == 0 or call.k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if kernels == "gluon" and torch.are_deterministic_algorithms_enabled():
        kernels = choose(call)
    if kernels == "gluon":
        from labsupport.attention.kernels.backward_gluon import launch
    elif kernels == "hopper" and can_be_described(dout):
        from labsupport.attention.kernels.hopper import launch_backward as launch
    else:
        from labsupport.attention.kernels.backward import launch
    with torch.cuda.device_of(call.q):
        launch(call, dout, out, lse, dlse, dq, dk, dv)
    return dq, dk, dv


def _gradients(call: AttentionCall, kernels: Kernels) -> tuple[Tensor, Tensor, Tensor]:
    form = torch.contiguous_format if kernels == "gluon" else torch.preserve_format
    dq, dk, dv = (torch.empty_like(x, memory_format=form) for x in (call.q, call.k, call.v))
    return dq, dk, dv


def _outputs(q: Tensor, float32_out: bool = False) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, dtype=torch.float32) if float32_out else torch.empty_like(q)
    return out, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)


# --- operators ------------------------------------------------------------------------------------

# They take the names of kernels and the fields of a call.
_SCHEMA_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "bool": "bool", "int": "int",
    "float": "float", "float | None": "float?", "tuple[int, int]": "int[]",
}  # fmt: skip
_CALL = ", ".join(f"{_SCHEMA_TYPES[str(x.type)]} {x.name}" for x in fields(AttentionCall))


@torch.library.custom_op(
    "labsupport::flash_triton_forward",
    mutates_args=(),
    schema=f"(str kernels, {_CALL}) -> (Tensor, Tensor)",
)
def forward_operator(kernels: Any, *call: Any) -> tuple[Tensor, Tensor]:
    """Run `forward`."""
    # While PyTorch traced, tensors had no addresses to choose by.
    return forward(AttentionCall(*call), kernels if kernels == "gluon" else None)


@forward_operator.register_fake
def _(kernels: Any, *call: Any) -> tuple[Tensor, Tensor]:
    return _outputs(AttentionCall(*call).q)


@torch.library.custom_op(
    "labsupport::flash_triton_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, "
    f"str kernels, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, kernels: Any, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `backward`."""
    kernels = kernels if kernels == "gluon" else None
    return backward(AttentionCall(*call), dout, out, lse, kernels, dlse=dlse)


@backward_operator.register_fake
def _(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, kernels: Any, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(AttentionCall(*call), kernels)


def _needs_operator(q: Tensor) -> bool:
    """Return whether operators are traced: torch.compile, fake tensors, a dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or type(q) not in (Tensor, torch.nn.Parameter)
        or _get_current_dispatch_mode() is not None
    )


# --- autograd -------------------------------------------------------------------------------------


def _forward(ctx: Any, call: AttentionCall, kernels: Kernels) -> tuple[Tensor, Tensor]:
    ctx.kernels, ctx.options, ctx.needs_operator = kernels, call.options, _needs_operator(call.q)
    if ctx.needs_operator:
        return forward_operator(kernels, call.q, call.k, call.v, *call.options)
    return forward(call, kernels)


def _backward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor,
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if ctx.needs_operator:
        return backward_operator(dout, out, lse, dlse, ctx.kernels, q, k, v, *ctx.options)
    call = AttentionCall(q, k, v, *ctx.options)
    return backward(call, dout, out, lse, ctx.kernels, dlse=dlse)


class _Attention(torch.autograd.Function):
    """The kernels with autograd, in flash-attn's layout.

    Takes q, k, v, kernels and the options of a call. out and lse are both differentiable: a
    gradient of lse only changes D, dS = P * (dP - D + dLSE).
    """

    # The context comes first: with `setup_context`, PyTorch would look up the signature each time.
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: Kernels, *options: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the forward kernel, and save what the backward recomputes P from."""
        out, lse = _forward(ctx, AttentionCall(q, k, v, *options), kernels)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # a gradient of lse is rare: None instead of zeros
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Run the backward kernels: dq, dk, dv, and None for each option."""
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = _backward(ctx, q, k, v, dout, out, lse, dlse)
        return *gradients, None, *(None for _ in ctx.options)


class TritonFlashAttentionFunction(torch.autograd.Function):
    """`FlashAttentionFunction` by the Triton kernels: `.apply(q, k, v, is_causal)`.

    Takes q (..., seqlen_q, head_dim) and k, v (..., seqlen_k, head_dim), float16, bfloat16 or
    float32, and returns the output in q's shape and dtype. Saves q, k, v, out and lse
    (..., seqlen_q) for the backward. `softmax_scale` and `window_size` may follow by position.

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
        check_kernel_inputs(q, k, v)
        check_scale(softmax_scale)
        check_window(window_size)
        call = AttentionCall(
            _as_one_head(q), _as_one_head(k), _as_one_head(v), is_causal, softmax_scale, window_size
        )
        out, lse = _forward(ctx, call, choose(call))
        out, lse = out.reshape(q.shape), lse.reshape(q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        """Run the backward kernels: dq, dk, dv, and None for each option."""
        *shaped, lse = ctx.saved_tensors
        q, k, v, out, dout = map(_as_one_head, (*shaped, dout))
        gradients = _backward(ctx, q, k, v, dout, out, lse.reshape(-1, 1, lse.shape[-1]), None)
        dq, dk, dv = (dx.reshape(x.shape) for dx, x in zip(gradients, shaped[:3], strict=True))
        return dq, dk, dv, None, None, None


def _as_one_head(x: Tensor) -> Tensor:
    """Return (..., seqlen, head_dim) as (batch, seqlen, 1, head_dim)."""
    return x.reshape(-1, *x.shape[-2:]).unsqueeze(2)
