"""Adapters to the lab's own code and to SDPA's four backends.

Each takes an `AttentionCall` that the registry has found runnable and returns (out, lse or None):
out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q), natural log.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from labsupport.attention.band import alibi_bias
from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_torch import FlashAttentionFunction, flash_attention_forward
from labsupport.attention.reference import banded_attention

Result = tuple[Tensor, Tensor | None]


def run_standard(call: AttentionCall) -> Result:
    """Textbook attention of `reference`."""
    q, k, v, slopes = call.math_layout()
    out, lse = banded_attention(
        q,
        k,
        v,
        causal=call.causal,
        softmax_scale=call.softmax_scale,
        window_size=call.window_size,
        alibi_slopes=slopes,
        return_lse=call.return_lse,
    )
    return _from_math_layout(out, lse)


def run_flash_torch(call: AttentionCall) -> Result:
    """The lab's FlashAttention in plain PyTorch."""
    q, k, v, slopes = call.math_layout()
    if call.needs_grad:
        options = call.softmax_scale, call.window_size, slopes
        out = FlashAttentionFunction.apply(q, k, v, call.causal, *options)
        # Reading what was saved makes a checkpoint compute its block again at once: only if asked.
        lse = out.grad_fn.saved_tensors[-1] if call.return_lse else None
        return _from_math_layout(out, lse)
    out, lse = flash_attention_forward(
        q,
        k,
        v,
        call.causal,
        softmax_scale=call.softmax_scale,
        window_size=call.window_size,
        alibi_slopes=slopes,
    )
    return _from_math_layout(out, lse)


def _from_math_layout(out: Tensor, lse: Tensor | None) -> Result:
    out = out.flatten(1, 2).transpose(1, 2)
    return out, None if lse is None else lse.flatten(1, 2)


# --- SDPA -----------------------------------------------------------------------------------------


def run_sdpa(backend: SDPBackend) -> Callable[[AttentionCall], Result]:
    """An adapter to `F.scaled_dot_product_attention`, pinned to one of its backends."""
    # By device. torch.compile cannot guard a dict with SDPBackend keys (it fails with a
    # SyntaxError), so such tables are read here, and not at each call.
    with_lse = _LSE_OPERATORS.get(backend, {})

    def run(call: AttentionCall) -> Result:
        q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
        if call.return_lse:
            out, lse = with_lse[q.device.type](call, q, k, v)
            return out.transpose(1, 2), lse
        mask, is_causal = _sdpa_mask(call)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=is_causal,
                scale=call.scale,
                enable_gqa=call.heads != call.kv_heads,
            )
        return out.transpose(1, 2), None

    return run


def sdpa_kernel_name(backend: SDPBackend) -> Callable[[AttentionCall], str]:
    """The operator that PyTorch's profiler shows for a pinned SDPA call."""
    operator = {
        SDPBackend.FLASH_ATTENTION: "aten::_scaled_dot_product_flash_attention",
        SDPBackend.EFFICIENT_ATTENTION: "aten::_scaled_dot_product_efficient_attention",
        SDPBackend.CUDNN_ATTENTION: "aten::_scaled_dot_product_cudnn_attention",
        SDPBackend.MATH: "aten::_scaled_dot_product_attention_math",
    }[backend]
    is_flash, stores = backend == SDPBackend.FLASH_ATTENTION, stores_mask(backend)

    def name(call: AttentionCall) -> str:
        on_cpu = is_flash and call.q.device.type == "cpu"
        note = " (with a stored seqlen_q x seqlen_k mask)" if stores(call) else ""
        return operator + ("_for_cpu" if on_cpu else "") + note

    return name


def stores_mask(backend: SDPBackend) -> Callable[[AttentionCall], bool]:
    """Whether SDPA's fused kernels need a mask of seqlen_q x seqlen_k for a call."""

    def stores(call: AttentionCall) -> bool:
        if backend == SDPBackend.FLASH_ATTENTION:  # on a GPU it takes no mask at all
            return call.q.device.type == "cpu" and _needs_mask_tensor(call)
        if backend == SDPBackend.EFFICIENT_ATTENTION:  # bottom-right masks are built in
            built_in = call.band.plain_causal and not call.return_lse
            return call.alibi_slopes is not None or (_needs_mask_tensor(call) and not built_in)
        return False

    return stores


def in_auto(backend: SDPBackend) -> Callable[[AttentionCall], bool]:
    """Not chosen unasked where a mask of more than a million entries would be stored."""

    def allowed(call: AttentionCall) -> bool:
        return not stores_mask(backend)(call) or call.q.shape[1] * call.k.shape[1] <= 2**20

    return allowed


def sdpa_reasons(backend: SDPBackend) -> Callable[[AttentionCall], list[str]]:
    """PyTorch's own reasons against a backend on a GPU, asked with the very tensors."""
    can_use = {
        SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
        SDPBackend.EFFICIENT_ATTENTION: can_use_efficient_attention,
        SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
    }[backend]

    def reasons(call: AttentionCall) -> list[str]:
        if call.q.device.type == "cpu":
            unit = all(tensor.stride(-1) == 1 for tensor in (call.q, call.k, call.v))
            return [] if unit else ["needs the last dimension to be contiguous (stride 1)"]
        if call.windowed and backend == SDPBackend.FLASH_ATTENTION:
            return ["cannot do sliding windows on a GPU: its kernel takes no mask there"]
        q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
        is_causal = call.band.plain_causal and call.band.offset == 0
        params = SDPAParams(q, k, v, None, 0.0, is_causal, call.heads != call.kv_heads)
        if can_use(params, False):
            return []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            can_use(params, True)
        said = [str(w.message).split(" (Triggered internally")[0].strip() for w in caught]
        return said or ["PyTorch refuses these inputs without a reason"]

    return reasons


def _needs_mask_tensor(call: AttentionCall) -> bool:
    band = call.band
    return not band.unlimited and not (band.plain_causal and band.offset == 0)


def _sdpa_mask(call: AttentionCall) -> tuple[Tensor | None, bool]:
    """SDPA's (attn_mask, is_causal); `is_causal` is aligned top-left, so for square masks only."""
    band = call.band
    if call.alibi_slopes is not None:
        return _float_mask(call), False
    if not _needs_mask_tensor(call):
        return None, not band.unlimited
    if band.plain_causal:
        # Imported here: it brings torch._dynamo, which doubles the time to import this package.
        from torch.nn.attention.bias import causal_lower_right

        # Keeps CUDA's flash kernel (bottom-right inside); elsewhere it becomes a stored mask.
        return causal_lower_right(band.seqlen_q, band.seqlen_k), False
    return band.full_mask(call.q.device), False


def _float_mask(call: AttentionCall) -> Tensor | None:
    """The band and ALiBi as one additive mask in q's dtype, for operators that take only that."""
    band = call.band
    visible = band.full_mask(call.q.device)
    rows, cols = slice(0, band.seqlen_q), slice(0, band.seqlen_k)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes
        mask = alibi_bias(slopes, rows, cols, band.offset).to(call.q.dtype)
        mask = mask[None] if slopes.ndim == 1 else mask
    elif visible is not None:
        mask = torch.zeros(visible.shape, dtype=call.q.dtype, device=call.q.device)
    else:
        return None
    return mask if visible is None else mask.masked_fill(~visible, -torch.inf)


def _flash_cpu_with_lse(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Result:
    stored = _needs_mask_tensor(call)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k,
        v,
        0.0,
        not stored and not call.band.unlimited,
        attn_mask=_float_mask(call) if stored else None,
        scale=call.scale,
    )
    return out, lse


def _flash_cuda_with_lse(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Result:
    # The operator behind SDPA wants head_dim in multiples of 8; SDPA itself pads and cuts as here.
    q, k, v = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, not call.band.unlimited, False, scale=call.scale
    )
    return out[..., : call.head_dim], lse


def _efficient_with_lse(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Result:
    stored = _needs_mask_tensor(call) or call.alibi_slopes is not None
    bias = _float_mask(call) if stored else None
    if bias is not None:
        # The kernel reads aligned rows: pad each to a multiple of 16, then cut it to length.
        bias = F.pad(bias, (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]]
        bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, not stored and not call.band.unlimited, scale=call.scale
    )
    return out, lse[..., : q.shape[-2]]


def _cudnn_with_lse(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Result:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, not call.band.unlimited, False, scale=call.scale
    )
    return out, lse.reshape(q.shape[:-1])


_LSE_OPERATORS = {
    SDPBackend.FLASH_ATTENTION: {"cpu": _flash_cpu_with_lse, "cuda": _flash_cuda_with_lse},
    SDPBackend.EFFICIENT_ATTENTION: {"cuda": _efficient_with_lse},
    SDPBackend.CUDNN_ATTENTION: {"cuda": _cudnn_with_lse},
}
