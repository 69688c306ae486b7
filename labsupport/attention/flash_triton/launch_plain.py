"""From tensors to the plain kernels: `forward.py` and `backward.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labsupport.attention.flash_triton.geometry import (
    Geometry,
    kernel,
    longest,
    row_strides,
    sequences,
    sizes,
    strides,
)
from labsupport.attention.flash_triton.mode import interpreted
from labsupport.attention.flash_triton.tuning import Tiling, padded, tiling

ROWS = 64  # of a program that only reads them


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, scale: float
) -> None:
    """Fill out and lse."""
    plan = tiling("forward", q.shape[-1], q.dtype, interpreted())
    blocks = -(-longest(q, geometry.max_seqlen_q) // plan.block_q)
    slopes, stride_slope = _slopes(geometry)
    kernel("forward", "forward_kernel")[(blocks * sequences(q, geometry) * q.shape[-2],)](
        q, k, v, out, lse, slopes, geometry.cu_seqlens_q, geometry.cu_seqlens_k, scale,
        *strides(q), *strides(k), *strides(v), *strides(out), *row_strides(lse),
        stride_slope, *sizes(q, k, geometry), blocks, **_constants(q, geometry, plan),
    )  # fmt: skip


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    geometry: Geometry,
) -> None:
    """Fill dq, dk and dv."""
    delta, shift = torch.empty_like(lse), torch.empty_like(lse)
    fill_rows(dout, out, lse, dlse, shift, delta)
    slopes, stride_slope = _slopes(geometry)
    inputs = slopes, geometry.cu_seqlens_q, geometry.cu_seqlens_k, geometry.scale
    of_inputs = (*strides(q), *strides(k), *strides(v), *strides(dout))
    rest = (*row_strides(delta), stride_slope, *sizes(q, k, geometry))
    count = sequences(q, geometry)
    wide = q.dtype == torch.float32
    plan = tiling("keys", q.shape[-1], q.dtype, interpreted())
    blocks = -(-longest(k, geometry.max_seqlen_k) // plan.block_k)
    kernel("backward", "keys_kernel")[(blocks * count * k.shape[-2],)](
        q, k, v, dout, dk, dv, shift, delta, *inputs, *of_inputs, *strides(dk), *strides(dv),
        *rest, blocks, WIDE=wide, **_constants(q, geometry, plan),
    )  # fmt: skip
    plan = tiling("queries", q.shape[-1], q.dtype, interpreted())
    blocks = -(-longest(q, geometry.max_seqlen_q) // plan.block_q)
    kernel("backward", "queries_kernel")[(blocks * count * q.shape[-2],)](
        q, k, v, dout, dq, shift, delta, *inputs, *of_inputs, *strides(dq),
        *rest, blocks, WIDE=wide, **_constants(q, geometry, plan),
    )  # fmt: skip


def fill_rows(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, shift: Tensor, delta: Tensor
) -> None:
    """Shift and Delta, shaped like `lse`: see `rows_kernel`."""
    head_dim, seqlen, heads = out.shape[-1], out.shape[-3], out.shape[-2]
    blocks = -(-seqlen // ROWS)
    batch = out.shape[0] if out.ndim == 4 else 1
    kernel("backward", "rows_kernel")[(blocks * batch * heads,)](
        out, dout, lse, None if dlse is None else dlse.contiguous(), shift, delta,
        *strides(out), *strides(dout), *row_strides(lse), *row_strides(delta),
        heads, seqlen, blocks, HEAD_DIM=head_dim, D=padded(head_dim), BLOCK=ROWS,
        WITH_DL=dlse is not None, WIDE=out.dtype == torch.float32, num_warps=4,
    )  # fmt: skip


def _constants(q: Tensor, geometry: Geometry, plan: Tiling) -> dict[str, Any]:
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


def _slopes(geometry: Geometry) -> tuple[Tensor | None, int]:
    slopes = geometry.slopes
    if slopes is None:
        return None, 0
    slopes = slopes.to(torch.float32).contiguous()
    return slopes, slopes.stride(0) if slopes.ndim == 2 else 0
