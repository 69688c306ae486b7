"""How one piece of a block is computed: a table of kernels, each forward and backward.

A ring needs more of a kernel than attention does. The forward must return the log-sum-exp, or
partial results cannot be merged. The backward must take the output and the log-sum-exp from
outside: those of the whole row, over the keys of all ranks. A kernel whose backward is reached
through autograd alone uses those of its own block, and gives gradients of another function.

To add a kernel, add an entry to `KERNELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention.adapters_packages import run_fa4
from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.flash_triton.geometry import Geometry
from labsupport.attention.implementations import by_name
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.reports import BackendUnavailableError
from labsupport.distributed.ring.blocks import CAUSAL

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """What a piece is besides its tensors: scale, window (causal is (-1, 0)), ALiBi's slopes."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    slopes: Tensor | None = None


@dataclass(frozen=True)
class BlockKernel:
    """A kernel that can compute a piece of a block. All tensors in flash-attn's layout.

    Attributes:
        name: what users pass as `kernel=`.
        forward: (q, k, v, options) -> out (batch, rows, heads, head_dim), float32 where the kernel
            can, and lse (batch, heads, rows), natural log.
        backward: (dout, q, k, v, out, lse, options) -> dq, dk, dv, with `out` and `lse` of the
            whole rows. None: it has none that takes them, and is for inference only.
        backend: the entry of `labsupport.attention`'s table whose limits apply.
        further_reasons: (call, deterministic) -> what else it cannot do in a ring.
        in_auto: whether `kernel="auto"` may choose it on this device.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients] | None
    backend: str
    further_reasons: Callable[[AttentionCall, bool], list[str]] = lambda call, deterministic: []
    in_auto: Callable[[torch.device], bool] = lambda device: True

    def reasons(self, call: AttentionCall, deterministic: bool) -> list[str]:
        """Every reason why it cannot compute the pieces of `call`; empty when it can."""
        reasons = by_name(self.backend).reasons(call) + self.further_reasons(call, deterministic)
        if self.backward is None and call.needs_grad:
            reasons.append(
                "has no public backward that takes the log-sum-exp from outside, which a ring's "
                "gradients need: its forward only, under torch.no_grad()"
            )
        return reasons


# --- the lab's own --------------------------------------------------------------------------------


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    # Given float32, it returns the output as it was accumulated.
    call = AttentionCall(_wide(q), _wide(k), _wide(v), alibi_slopes=options.slopes)
    *qkv, slopes = call.math_layout()
    out, lse = flash_attention_forward(
        *qkv, softmax_scale=options.scale, window_size=options.window, alibi_slopes=slopes
    )
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


def _torch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> Gradients:
    call = AttentionCall(_wide(q), _wide(k), _wide(v), alibi_slopes=options.slopes)
    *qkv, slopes = call.math_layout()
    by_kv_head = call.kv_heads, call.heads // call.kv_heads
    dq, dk, dv = flash_attention_backward(
        _wide(dout).transpose(1, 2).unflatten(1, by_kv_head),
        *qkv,
        _wide(out).transpose(1, 2).unflatten(1, by_kv_head),
        lse.unflatten(1, by_kv_head),
        softmax_scale=options.scale,
        window_size=options.window,
        alibi_slopes=slopes,
    )
    # Query heads that share a key head add up to its gradient.
    return dq.flatten(1, 2).transpose(1, 2), dk.sum(2).transpose(1, 2), dv.sum(2).transpose(1, 2)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _triton_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    from labsupport.attention.flash_triton.launch import forward

    return forward(q, k, v, _geometry(options), float32_out=True)


def _triton_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> Gradients:
    from labsupport.attention.flash_triton.launch import backward

    return backward(dout, q, k, v, out, lse, _geometry(options))


def _geometry(options: Options) -> Geometry:
    return Geometry(options.scale, *options.window, options.slopes)


# --- PyTorch's own --------------------------------------------------------------------------------


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
    group = q.shape[2] // k.shape[2]
    if group > 1:
        dk, dv = (_wide(x).unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    return dq, dk, dv


def _native_layout(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, seqlen, head_dim), key heads repeated; on a GPU head_dim in multiples of 8."""
    heads = max(x.shape[2] for x in tensors)
    short = 0 if tensors[0].device.type == "cpu" else -tensors[0].shape[-1] % 8
    found = []
    for x in tensors:
        x = x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
        found.append((F.pad(x, (0, short)) if short else x).transpose(1, 2))
    return found


def _native_reasons(call: AttentionCall, deterministic: bool) -> list[str]:
    reasons = []
    if call.windowed:
        reasons.append(
            "cannot do windows in a ring: its kernels take a causal mask or none, not the slanted "
            "edge of a window through a block"
        )
    asked = torch.are_deterministic_algorithms_enabled()
    if deterministic and call.q.device.type == "cuda" and not asked:
        reasons.append(
            "adds dQ up in any order on a GPU: call torch.use_deterministic_algorithms(True), or "
            "take a kernel that is deterministic by itself"
        )
    return reasons


# --- flash-attn-4 ---------------------------------------------------------------------------------


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    left, right = options.window
    causal = right == 0
    window = (left, -1 if causal else right)
    call = AttentionCall(q, k, v, causal, options.scale, window, None, True)
    out, lse = run_fa4(call)
    assert lse is not None
    return out, lse


# --- the table ------------------------------------------------------------------------------------

# In order of preference. On a CPU the lab's own comes first: its partial results are float32, and
# the processes of a lesson are small.
KERNELS: tuple[BlockKernel, ...] = (
    BlockKernel(
        name="native",
        forward=_native_forward,
        backward=_native_backward,
        backend="sdpa_flash",
        further_reasons=_native_reasons,
        in_auto=lambda device: device.type == "cuda",
    ),
    BlockKernel(
        name="flash_triton",
        forward=_triton_forward,
        backward=_triton_backward,
        backend="flash_triton",
        in_auto=lambda device: device.type == "cuda",  # never interpreted unasked
    ),
    BlockKernel(
        name="flash_torch",
        forward=_torch_forward,
        backward=_torch_backward,
        backend="flash_torch",
    ),
    BlockKernel(
        name="fa4",
        forward=_fa4_forward,
        backward=None,
        backend="fa4",
        in_auto=lambda device: False,
    ),
)


def choose(
    name: str, call: AttentionCall, deterministic: bool
) -> tuple[BlockKernel, dict[str, tuple[str, ...]]]:
    """The kernel of that name, or the first that can for "auto"; and why not those before it.

    Raises:
        AttentionInputError: there is no such kernel.
        BackendUnavailableError: it cannot compute this call; says every reason.
    """
    names = [kernel.name for kernel in KERNELS]
    if name not in ("auto", *names):
        raise AttentionInputError(
            f"ring attention has no kernel {name!r}: there are auto, {', '.join(names)}."
        )
    refused: dict[str, tuple[str, ...]] = {}
    for kernel in KERNELS:
        if name not in ("auto", kernel.name):
            continue
        reasons = kernel.reasons(call, deterministic)
        if not reasons and (name != "auto" or kernel.in_auto(call.q.device)):
            return kernel, refused
        refused[kernel.name] = tuple(reasons) or ("runs, but only when asked for by name",)
    listing = "\n".join(f"  {other}: {'; '.join(why)}" for other, why in refused.items())
    able = [kernel.name for kernel in KERNELS if not kernel.reasons(call, deterministic)]
    raise BackendUnavailableError(
        f"kernel {name!r} cannot run this ring:\n{listing}\nKernels that can: "
        f"{', '.join(able) or 'none'}.",
        refused,
    )
