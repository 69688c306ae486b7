"""From tensors to kernels: the only door to those of the forward and the backward pass.

The kernels for Hopper take the calls that they can (`launch_hopper.takes`); the plain ones take the
rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labsupport.attention.flash_triton import launch_hopper, launch_plain
from labsupport.attention.flash_triton.geometry import (
    Geometry,
    kernel,
    positive,
    row_strides,
    rows_like,
    strides,
)
from labsupport.attention.flash_triton.mode import interpreted
from labsupport.attention.flash_triton.tuning import padded, tiling


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
        q, k, v: (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim).
        geometry: everything else.
        float32_out: return the output as it was accumulated, for merging with others.
        hopper: the kernel for Hopper GPUs, or not; unless given, where it runs.

    Returns:
        out like q, and the natural-log lse (batch, heads, seqlen_q) or (heads, total), float32.
        A query that sees no key gets output 0 and lse -inf.
    """
    out = torch.empty_like(q, dtype=torch.float32 if float32_out else q.dtype)
    lse = rows_like(q)
    if q.numel() == 0:
        return out, lse
    if hopper is None:
        hopper = launch_hopper.takes(geometry, q, k, v)
    q, scale = positive(q, geometry.scale)
    launch = launch_hopper.forward if hopper else launch_plain.forward
    with torch.cuda.device_of(q):
        launch(q, k, v, out, lse, geometry, scale)
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
    """Run the backward kernels; the same bits every time.

    Args:
        dout: gradient of `out`.
        q, k, v, out, lse: what went into and came out of `forward`.
        geometry: as there.
        dlse: gradient of `lse`, if there is one.
        hopper: as in `forward`; the two passes need not agree.

    Returns:
        dq, dk, dv in the dtypes of q, k, v.
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if hopper is None:
        hopper = launch_hopper.takes(geometry, q, k, v, dout)
    launch = launch_hopper.backward if hopper else launch_plain.backward
    with torch.cuda.device_of(q):
        launch(dout, q, k, v, out, lse, dlse, dq, dk, dv, geometry)
    return dq, dk, dv


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
    lse, largest = rows_like(q).zero_(), rows_like(q).fill_(-torch.inf)
    plan = tiling("forward", q.shape[-1], q.dtype, interpreted())
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    with torch.cuda.device_of(q):
        kernel("version1", "version1_kernel")[(q.shape[0] * q.shape[2],)](
            q, k, v, out, largest, lse, scale,
            *strides(q), *strides(k), *strides(v), *strides(out), *row_strides(lse),
            q.shape[2], q.shape[2] // k.shape[2], q.shape[1], k.shape[1],
            HEAD_DIM=q.shape[-1], D=padded(q.shape[-1]), BLOCK_Q=min(64, plan.block_q),
            BLOCK_K=min(64, plan.block_k), CAUSAL=causal, PRECISION="ieee",
            num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
    return out, lse
