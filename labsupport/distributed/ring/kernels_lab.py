"""The lab's own kernels in a ring: `flash_torch` and `flash_triton`. They take all options."""

from __future__ import annotations

from torch import Tensor

from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.kernels.config import Geometry
from labsupport.attention.registry import AttentionCall
from labsupport.distributed.ring.kernel import BlockKernel, Gradients, Options, widened


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    # Given float32, it returns the output as it was accumulated.
    call = AttentionCall(widened(q), widened(k), widened(v), alibi_slopes=options.slopes)
    *qkv, slopes = call.math_layout()
    out, lse = flash_attention_forward(
        *qkv, softmax_scale=options.scale, window_size=options.window, alibi_slopes=slopes
    )
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


def _torch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> Gradients:
    call = AttentionCall(widened(q), widened(k), widened(v), alibi_slopes=options.slopes)
    *qkv, slopes = call.math_layout()
    by_kv_head = call.kv_heads, call.heads // call.kv_heads
    dq, dk, dv = flash_attention_backward(
        widened(dout).transpose(1, 2).unflatten(1, by_kv_head),
        *qkv,
        widened(out).transpose(1, 2).unflatten(1, by_kv_head),
        lse.unflatten(1, by_kv_head),
        softmax_scale=options.scale,
        window_size=options.window,
        alibi_slopes=slopes,
    )
    # Query heads that share a key head add up to its gradient.
    return dq.flatten(1, 2).transpose(1, 2), dk.sum(2).transpose(1, 2), dv.sum(2).transpose(1, 2)


def _triton_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    from labsupport.attention.kernels.autograd import forward

    return forward(q, k, v, _geometry(options), float32_out=True)


def _triton_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> Gradients:
    from labsupport.attention.kernels.autograd import backward

    return backward(dout, q, k, v, out, lse, _geometry(options))


def _geometry(options: Options) -> Geometry:
    return Geometry(options.scale, *options.window, options.slopes)


FLASH_TRITON = BlockKernel(
    name="flash_triton",
    forward=_triton_forward,
    backward=_triton_backward,
    backend="flash_triton",
    in_auto=lambda device: device.type == "cuda",  # never interpreted unasked
)

FLASH_TORCH = BlockKernel(
    name="flash_torch",
    forward=_torch_forward,
    backward=_torch_backward,
    backend="flash_torch",
)
