"""PyTorch's own kernels in a ring: `native`, its FlashAttention, and `cudnn`.

Both are reached through the operators behind `F.scaled_dot_product_attention`, which return the
log-sum-exp, and whose backward takes it. On a GPU both take grouped heads as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention.registry import AttentionCall
from labsupport.distributed.ring.blocks import CAUSAL
from labsupport.distributed.ring.kernel import (
    BlockKernel,
    Gradients,
    Options,
    is_deterministic,
    no_windows,
    widened,
)

# --- FlashAttention -------------------------------------------------------------------------------


def _native_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    causal, scale = options.window == CAUSAL, options.scale
    heads_first = _native_layout(q, k, v)
    if q.device.type == "cpu":
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = forward(*heads_first, 0.0, causal, scale=scale)
    else:
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = forward(*heads_first, 0.0, causal, False, scale=scale)
    return out[..., : q.shape[-1]].transpose(1, 2), lse


def _native_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> Gradients:
    causal, scale = options.window == CAUSAL, options.scale
    heads_first, lse = _native_layout(dout, q, k, v, out), lse.contiguous()
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(*heads_first, lse, 0.0, causal, scale=scale)
    else:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = None, None, q.shape[1], k.shape[1]  # not packed
        random = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))  # no dropout
        gradients = backward(*heads_first, lse, *lengths, 0.0, causal, *random, scale=scale)
    dq, dk, dv = (x[..., : q.shape[-1]].transpose(1, 2) for x in gradients)
    group = dk.shape[2] // k.shape[2]
    if group > 1:
        dk, dv = (widened(x).unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    return dq, dk, dv


def _native_layout(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, seqlen, head_dim); on a GPU head_dim in multiples of 8, on a CPU heads alike.

    Its kernels for CPUs do not take grouped heads: the key heads are repeated.
    """
    on_cpu = tensors[0].device.type == "cpu"
    heads, short = max(x.shape[2] for x in tensors), 0 if on_cpu else -tensors[0].shape[-1] % 8
    found = []
    for x in tensors:
        if on_cpu and x.shape[2] != heads:
            x = x.repeat_interleave(heads // x.shape[2], 2)
        found.append((F.pad(x, (0, short)) if short else x).transpose(1, 2))
    return found


def _native_reasons(call: AttentionCall, deterministic: bool) -> list[str]:
    reasons = no_windows(call)
    asked = torch.are_deterministic_algorithms_enabled()
    if deterministic and call.q.device.type == "cuda" and not asked:
        reasons.append(
            "adds dQ up in any order on a GPU: call torch.use_deterministic_algorithms(True), or "
            "take a kernel that is deterministic by itself"
        )
    return reasons


NATIVE = BlockKernel(
    name="native",
    forward=_native_forward,
    backward=_native_backward,
    backend="sdpa_flash",
    further_reasons=_native_reasons,
    in_auto=lambda device: device.type == "cuda",
)

# --- cuDNN ----------------------------------------------------------------------------------------

# PyTorch keeps one plan of cuDNN's for all calls whose q, k and v have the same shapes and strides,
# and does not look at the strides of out, dout and lse again. So these are always laid out alike
# here: contiguous in flash-attn's layout, but for the batch.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in _one_layout(q, k, v)),
        None, True, 0.0, options.window == CAUSAL, False, scale=options.scale,
    )  # fmt: skip
    # (batch, heads, rows, 1) in some releases of PyTorch.
    return out.transpose(1, 2), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> Gradients:
    heads_first = [x.transpose(1, 2) for x in _one_layout(dout, q, k, v, out)]
    no_dropout = [q.new_zeros((), dtype=torch.int64) for _ in range(2)]
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first, lse.contiguous()[..., None], *no_dropout, None, None, None,
        q.shape[1], k.shape[1], 0.0, options.window == CAUSAL, scale=options.scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


def _one_layout(*tensors: Tensor) -> list[Tensor]:
    """Slices of one batch entry are contiguous as they are; those of several are copied."""
    return [x.contiguous() for x in tensors]


def _cudnn_reasons(call: AttentionCall, deterministic: bool) -> list[str]:
    reasons = no_windows(call)
    if is_deterministic(deterministic):
        reasons.append(
            "adds dQ up in any order, and PyTorch has no switch for cuDNN's ordered way: take "
            "native with torch.use_deterministic_algorithms(True), or flash_triton"
        )
    return reasons


CUDNN = BlockKernel(
    name="cudnn",
    forward=_cudnn_forward,
    backward=_cudnn_backward,
    backend="sdpa_cudnn",
    further_reasons=_cudnn_reasons,
    # On older GPUs native is as fast, and cuDNN makes a plan for each new shape.
    in_auto=lambda device: (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    ),
)
