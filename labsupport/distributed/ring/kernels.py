"""The kernels that can compute a block pair of the ring, and the choice among them.

A kernel's forward must return the log-sum-exp, or partial results cannot be merged. Its backward
must take the output and the log-sum-exp of the whole row from outside: autograd's would use those
of one block, and give gradients of another function.

To add a kernel, write its forward and backward, and add an entry to `KERNELS`. All tensors are in
flash-attn's layout, (batch, seqlen, heads, head_dim); lse is (batch, heads, seqlen), natural log.
Theory chapter 11, "Add a kernel to the ring", has an example that runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention.adapters import run_fa4
from labsupport.attention.call import AttentionCall, BackendUnavailableError
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.implementations import by_name
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.kernels.autograd import Kernels, backward, forward

CAUSAL = (-1, 0)
Gradients = tuple[Tensor, Tensor, Tensor]
aten = torch.ops.aten


@dataclass(frozen=True)
class BlockOptions:
    """Scale and window (a causal mask is (-1, 0)) of one block pair."""

    scale: float
    window: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class BlockKernel:
    """A kernel that can compute a block pair.

    Attributes:
        name: what users pass as `kernel=`.
        backend: the entry of `labsupport.attention`'s table whose limits apply.
        forward: (q, k, v, options) -> out (float32 where it can) and lse, the ring's to overwrite.
        backward: (dout, q, k, v, out, lse, options) -> dq, dk, dv; out and lse of whole rows.
        windows: it can compute the slanted edge of a window through a block.
        ordered: its gradients can be the same bits every time, if
            torch.use_deterministic_algorithms(True) asks for it.
        has_backward: False where its package has none that takes the log-sum-exp.
        in_auto: `kernel="auto"` may choose it on this device.
    """

    name: str
    backend: str
    forward: Callable[[Tensor, Tensor, Tensor, BlockOptions], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    windows: bool = True
    ordered: bool = True
    has_backward: Callable[[], bool] = lambda: True
    in_auto: Callable[[torch.device], bool] = lambda device: device.type == "cuda"

    def reasons(self, call: AttentionCall) -> list[str]:
        """Return every reason why it cannot compute the block pairs of a call; [] if it can."""
        reasons = by_name(self.backend).reasons(call)
        if call.windowed and not self.windows:
            reasons.append("cannot do windows in a ring, only a causal mask or none")
        if torch.are_deterministic_algorithms_enabled() and not self.ordered:
            reasons.append("adds dQ up in any order; flash_triton and flash_torch do not")
        if call.needs_grad and not self.has_backward():
            reasons.append(
                "its backward cannot take the log-sum-exp of the whole ring: use it forward only, "
                "under torch.no_grad()"
            )
        return reasons


# --- FlashAttention in PyTorch: the operators that F.scaled_dot_product_attention calls ----------


def _native_forward(
    q: Tensor, k: Tensor, v: Tensor, options: BlockOptions
) -> tuple[Tensor, Tensor]:
    causal, scale = options.window == CAUSAL, options.scale
    heads_first = _native_layout(q, k, v)
    if q.device.type == "cpu":
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = forward(*heads_first, 0.0, causal, scale=scale)
        # It turns a query that is not a number into 0, which would hide where NaNs arise.
        out = out.masked_fill(heads_first[0].isnan().any(-1, keepdim=True), torch.nan)
    else:
        forward = aten._scaled_dot_product_flash_attention
        out, lse, *_ = forward(*heads_first, 0.0, causal, False, scale=scale)
    return out[..., : q.shape[-1]].transpose(1, 2), lse


def _native_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
) -> Gradients:
    causal, scale = options.window == CAUSAL, options.scale
    heads_first, lse = _native_layout(dout, q, k, v, out), lse.contiguous()
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(*heads_first, lse, 0.0, causal, scale=scale)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward
        lengths = None, None, q.shape[1], k.shape[1]  # not packed
        random = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))  # no dropout
        gradients = backward(*heads_first, lse, *lengths, 0.0, causal, *random, scale=scale)
    dq, dk, dv = (x[..., : q.shape[-1]].transpose(1, 2) for x in gradients)
    group = dk.shape[2] // k.shape[2]
    if group > 1:
        dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))  # adds in float32
    return dq, dk, dv


def _native_layout(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, seqlen, head_dim); on a GPU head_dim in multiples of 8, on a CPU heads alike.

    Its kernels for CPUs do not take grouped heads: the key heads are repeated.
    """
    on_cpu = tensors[0].device.type == "cpu"
    heads, short = max(x.shape[2] for x in tensors), 0 if on_cpu else -tensors[0].shape[-1] % 8
    converted = []
    for x in tensors:
        if on_cpu and x.shape[2] != heads:
            x = x.repeat_interleave(heads // x.shape[2], 2)
        converted.append((F.pad(x, (0, short)) if short else x).transpose(1, 2))
    return converted


# --- cuDNN ----------------------------------------------------------------------------------------

# PyTorch keeps one plan of cuDNN's for all calls whose q, k and v have the same shapes and strides,
# and does not look at the strides of out, dout and lse again. So all are made contiguous here.


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *(x.contiguous().transpose(1, 2) for x in (q, k, v)),
        None, True, 0.0, options.window == CAUSAL, False, scale=options.scale,
    )  # fmt: skip
    # (batch, heads, rows, 1) in some releases of PyTorch.
    return out.transpose(1, 2), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
) -> Gradients:
    heads_first = [x.contiguous().transpose(1, 2) for x in (dout, q, k, v, out)]
    no_dropout = [q.new_zeros((), dtype=torch.int64) for _ in range(2)]
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first, lse.contiguous()[..., None], *no_dropout, None, None, None,
        q.shape[1], k.shape[1], 0.0, options.window == CAUSAL, scale=options.scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# --- the lab's own --------------------------------------------------------------------------------


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
    # Given float32, it returns the output as it was accumulated.
    *qkv, _ = AttentionCall(widened(q), widened(k), widened(v)).math_layout()
    out, lse = flash_attention_forward(
        *qkv, softmax_scale=options.scale, window_size=options.window
    )
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


def _torch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
) -> Gradients:
    call = AttentionCall(widened(q), widened(k), widened(v))
    *qkv, _ = call.math_layout()
    by_kv_head = call.kv_heads, call.heads // call.kv_heads
    dq, dk, dv = flash_attention_backward(
        widened(dout).transpose(1, 2).unflatten(1, by_kv_head),
        *qkv,
        widened(out).transpose(1, 2).unflatten(1, by_kv_head),
        lse.unflatten(1, by_kv_head),
        softmax_scale=options.scale,
        window_size=options.window,
    )
    # Query heads that share a key head add up to its gradient.
    return dq.flatten(1, 2).transpose(1, 2), dk.sum(2).transpose(1, 2), dv.sum(2).transpose(1, 2)


def _triton_forward(
    q: Tensor, k: Tensor, v: Tensor, options: BlockOptions, kernels: Kernels | None = None
) -> tuple[Tensor, Tensor]:
    call = AttentionCall(q, k, v, softmax_scale=options.scale, window_size=options.window)
    return forward(call, kernels, float32_out=True)


def _triton_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions,
    kernels: Kernels | None = None,
) -> Gradients:  # fmt: skip
    call = AttentionCall(q, k, v, softmax_scale=options.scale, window_size=options.window)
    return backward(call, dout, out, lse, kernels)


# --- flash-attn-4: its public forward, and the private backward that autograd calls ---------------


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
    left, right = options.window
    (q, k, v), causal = (x.contiguous() for x in (q, k, v)), right == 0
    window = (left, -1 if causal else right)
    out, lse = run_fa4(AttentionCall(q, k, v, causal, options.scale, window, None, True))
    assert lse is not None
    return out, lse


def _fa4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: BlockOptions
) -> Gradients:
    backward = _private_backward()
    assert backward is not None  # its absence is a reason to refuse
    left, right = (None if side < 0 else side for side in options.window)
    causal = right == 0 and left is None
    dq, dk, dv = backward(
        *(x.contiguous() for x in (q, k, v, out, dout, lse)),
        softmax_scale=options.scale,
        causal=causal,
        window_size_left=left,
        window_size_right=None if causal else right,
    )[:3]
    return dq, dk, dv


def _private_backward() -> Callable[..., Any] | None:
    """The function, in the package that `labsupport.attention` has imported; None without it."""
    module = sys.modules.get("flash_attn.cute.interface")
    return getattr(module, "_flash_attn_bwd", None)


# --- the table ------------------------------------------------------------------------------------


def _on_hopper(device: torch.device) -> bool:
    # On older GPUs native is as fast, and cuDNN makes a plan for each new shape.
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


CUDNN = BlockKernel(
    "cudnn", "sdpa_cudnn", _cudnn_forward, _cudnn_backward,
    windows=False, ordered=False, in_auto=_on_hopper,
)  # fmt: skip
NATIVE = BlockKernel("native", "sdpa_flash", _native_forward, _native_backward, windows=False)
FLASH_TRITON = BlockKernel("flash_triton", "flash_triton", _triton_forward, _triton_backward)
FLASH_GLUON = BlockKernel(
    "flash_gluon", "flash_gluon", partial(_triton_forward, kernels="gluon"),
    partial(_triton_backward, kernels="gluon"), in_auto=lambda device: False,
)  # fmt: skip
FLASH_TORCH = BlockKernel(
    "flash_torch", "flash_torch", _torch_forward, _torch_backward, in_auto=lambda device: True
)
FA4 = BlockKernel(
    "fa4", "fa4", _fa4_forward, _fa4_backward, ordered=False,
    has_backward=lambda: _private_backward() is not None,
    in_auto=lambda device: False,  # its backward is private
)  # fmt: skip

# In order of preference. On Hopper cuDNN is the fastest. On a CPU the lab's own comes first: its
# partial results are float32.
KERNELS: tuple[BlockKernel, ...] = (
    CUDNN, NATIVE, FLASH_TRITON, FLASH_GLUON, FLASH_TORCH, FA4,
)  # fmt: skip


def choose(name: str, call: AttentionCall) -> tuple[BlockKernel, dict[str, tuple[str, ...]]]:
    """Return the kernel of that name, or for "auto" the first that can; and why not those before.

    Raises:
        AttentionInputError: there is no such kernel.
        BackendUnavailableError: it cannot compute this call; says every reason.
    """
    candidates = [kernel for kernel in KERNELS if name in ("auto", kernel.name)]
    if not candidates:
        names = ", ".join(kernel.name for kernel in KERNELS)
        raise AttentionInputError(
            f"ring attention has no kernel {name!r}: there are auto, {names}."
        )
    rejected: dict[str, tuple[str, ...]] = {}
    for kernel in candidates:
        reasons = kernel.reasons(call)
        if not reasons and (name != "auto" or kernel.in_auto(call.q.device)):
            return kernel, rejected
        rejected[kernel.name] = tuple(reasons) or ("runs, but only when asked for by name",)
    listing = "\n".join(f"  {other}: {'; '.join(why)}" for other, why in rejected.items())
    able = [kernel.name for kernel in KERNELS if not kernel.reasons(call)]
    raise BackendUnavailableError(
        f"kernel {name!r} cannot run this ring:\n{listing}\nKernels that can: "
        f"{', '.join(able) or 'none'}.",
        rejected,
    )


def widened(x: Tensor) -> Tensor:
    """Return x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
