"""From tensors to kernels: shapes, strides, grids. The only door to the kernels of this folder.

Tensors are in flash-attn's layout, (batch, seqlen, heads, head_dim), with whatever strides they
have; nothing is copied. Packed ones are (total tokens, heads, head_dim) with `cu_seqlens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.flash_triton.mode import interpreted
from labsupport.attention.flash_triton.tuning import padded, tiling


@dataclass(frozen=True)
class Geometry:
    """What a call is besides its tensors.

    Attributes:
        scale: factor on the scores.
        left, right: the window; -1 means no limit. A causal mask is right = 0.
        slopes: ALiBi's, float32, (heads,) or (batch, heads).
        cu_seqlens_q, cu_seqlens_k: int32 offsets of packed sequences, both or none.
        max_seqlen_q, max_seqlen_k: the longest packed sequence; ignored otherwise.
        precision: "ieee" or "tf32", for float32 inputs.
    """

    scale: float
    left: int = -1
    right: int = -1
    slopes: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    precision: str = "ieee"

    @property
    def packed(self) -> bool:
        """Sequences lie one after the other, without a batch dimension."""
        return self.cu_seqlens_q is not None


def forward(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, *, float32_out: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the forward kernel.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim).
        geometry: everything else.
        float32_out: return the output as it was accumulated, for merging with others.

    Returns:
        out like q, and the natural-log lse (batch, heads, seqlen_q) or (heads, total), float32.
        A query that sees no key gets output 0 and lse -inf.
    """
    out = torch.empty_like(q, dtype=torch.float32 if float32_out else q.dtype)
    lse = _rows_like(q)
    if q.numel() == 0:
        return out, lse
    plan = tiling("forward", q.shape[-1], q.dtype, interpreted())
    blocks = -(-_longest(q, geometry.max_seqlen_q) // plan.block_q)
    launch = _kernel("forward", "forward_kernel")[(blocks * _sequences(q, geometry) * q.shape[-2],)]
    slopes, stride_slope = _slopes(geometry)
    with autocast_off(q), torch.cuda.device_of(q):
        launch(
            q, k, v, out, lse, slopes, geometry.cu_seqlens_q, geometry.cu_seqlens_k, geometry.scale,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), *_row_strides(lse),
            stride_slope, *_shape(q, k, geometry), blocks, **_constants(q, geometry, plan),
        )  # fmt: skip
    return out, lse


def forward_version1(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention's first version (`version1.py`), forward only: to be compared with `forward`.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), as for `forward`.

    Returns:
        out in float32, which version 1 rescales in memory at every step, and lse.
    """
    out = torch.zeros_like(q, dtype=torch.float32)
    lse, largest = _rows_like(q).zero_(), _rows_like(q).fill_(-torch.inf)
    plan = tiling("forward", q.shape[-1], q.dtype, interpreted())
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    with torch.cuda.device_of(q):
        _kernel("version1", "version1_kernel")[(q.shape[0] * q.shape[2],)](
            q, k, v, out, largest, lse, scale,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), *_row_strides(lse),
            q.shape[2], q.shape[2] // k.shape[2], q.shape[1], k.shape[1],
            HEAD_DIM=q.shape[-1], D=padded(q.shape[-1]), BLOCK_Q=min(64, plan.block_q),
            BLOCK_K=min(64, plan.block_k), CAUSAL=causal, PRECISION="ieee",
            num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels; the same bits every time.

    Args:
        dout: gradient of `out`.
        q, k, v, out, lse: what went into and came out of `forward`.
        geometry: as there.
        dlse: gradient of `lse`, if there is one.

    Returns:
        dq, dk, dv in the dtypes of q, k, v.
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    with torch.cuda.device_of(q):
        delta = _delta(dout, out, lse, dlse)
    slopes, stride_slope = _slopes(geometry)
    inputs = slopes, geometry.cu_seqlens_q, geometry.cu_seqlens_k, geometry.scale
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(dout))
    rest = (*_row_strides(lse), stride_slope, *_shape(q, k, geometry))
    sequences = _sequences(q, geometry)
    with autocast_off(q), torch.cuda.device_of(q):
        plan = tiling("keys", q.shape[-1], q.dtype, interpreted())
        blocks = -(-_longest(k, geometry.max_seqlen_k) // plan.block_k)
        wide = q.dtype == torch.float32
        _kernel("backward", "keys_kernel")[(blocks * sequences * k.shape[-2],)](
            q, k, v, dout, dk, dv, lse, delta, *inputs, *strides, *_strides(dk), *_strides(dv),
            *rest, blocks, WIDE=wide, **_constants(q, geometry, plan),
        )  # fmt: skip
        plan = tiling("queries", q.shape[-1], q.dtype, interpreted())
        blocks = -(-_longest(q, geometry.max_seqlen_q) // plan.block_q)
        _kernel("backward", "queries_kernel")[(blocks * sequences * q.shape[-2],)](
            q, k, v, dout, dq, lse, delta, *inputs, *strides, *_strides(dq),
            *rest, blocks, WIDE=wide, **_constants(q, geometry, plan),
        )  # fmt: skip
    return dq, dk, dv


def _delta(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """D = rowsum(dO * O) - dL, shaped like `lse`."""
    delta = torch.empty_like(lse)
    block, head_dim = 64, out.shape[-1]
    seqlen = out.shape[-3]
    blocks = -(-seqlen // block)
    batch = out.shape[0] if out.ndim == 4 else 1
    _kernel("backward", "delta_kernel")[(blocks * batch * out.shape[-2],)](
        out, dout, None if dlse is None else dlse.contiguous(), delta,
        *_strides(out), *_strides(dout), *_row_strides(lse), out.shape[-2], seqlen, blocks,
        HEAD_DIM=head_dim, D=padded(head_dim), BLOCK=block, WITH_DL=dlse is not None, num_warps=4,
    )  # fmt: skip
    return delta


def _kernel(file: str, name: str) -> Any:
    return getattr(import_module(f"labsupport.attention.flash_triton.{file}"), name)


def _constants(q: Tensor, geometry: Geometry, plan: Any) -> dict[str, Any]:
    return {
        "HEAD_DIM": q.shape[-1],
        "D": padded(q.shape[-1]),
        "BLOCK_Q": plan.block_q,
        "BLOCK_K": plan.block_k,
        "LEFT": geometry.left >= 0,
        "RIGHT": geometry.right >= 0,
        "ALIBI": geometry.slopes is not None,
        "PACKED": geometry.packed,
        "PRECISION": geometry.precision,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }


def _shape(q: Tensor, k: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """heads, group, seqlen_q, seqlen_k, left, right."""
    group, seqlen_q, seqlen_k = q.shape[-2] // k.shape[-2], q.shape[-3], k.shape[-3]
    # "No limit" is sometimes written as 2^31 - 1, and the kernels add to it in 32 bits.
    left, right = (min(side, seqlen_q + seqlen_k) for side in (geometry.left, geometry.right))
    return q.shape[-2], group, seqlen_q, seqlen_k, left, right


def _sequences(q: Tensor, geometry: Geometry) -> int:
    return q.shape[0] if geometry.cu_seqlens_q is None else len(geometry.cu_seqlens_q) - 1


def _longest(x: Tensor, packed: int) -> int:
    return x.shape[1] if x.ndim == 4 else packed


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Of batch, seqlen, heads and head_dim, in elements; packed tensors have no batch."""
    batch, seqlen, heads, head_dim = x.stride() if x.ndim == 4 else (0, *x.stride())
    return batch, seqlen, heads, head_dim


def _rows_like(q: Tensor) -> Tensor:
    """One float32 number a query and head: (batch, heads, seqlen) or (heads, total)."""
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty(shape, dtype=torch.float32)


def _row_strides(rows: Tensor) -> tuple[int, int]:
    return (rows.stride(0), rows.stride(1)) if rows.ndim == 3 else (0, rows.stride(0))


def _slopes(geometry: Geometry) -> tuple[Tensor | None, int]:
    slopes = geometry.slopes
    if slopes is None:
        return None, 0
    slopes = slopes.to(torch.float32).contiguous()
    return slopes, slopes.stride(0) if slopes.ndim == 2 else 0
