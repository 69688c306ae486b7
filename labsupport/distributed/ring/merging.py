"""The sums of a ring's steps: in place, in float32.

The first result that covers all rows is taken as it is. What follows is added (gradients) or merged
(outputs, by their log-sum-exps; on a GPU by one Triton kernel).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from labsupport.attention.kernels import mode
from labsupport.attention.online_softmax import merge_attention
from labsupport.distributed.ring.kernels import widened

Result = tuple[Tensor, Tensor]
_triton_is_missing = cache(mode.missing)


def merged(so_far: Result | None, like: Tensor, rows: slice, part: Tensor, lse: Tensor) -> Result:
    """Return the output and log-sum-exp so far with a block pair's result for some rows in it.

    `so_far` is out (batch, seqlen, heads, head_dim) and lse (batch, heads, seqlen), float32 or
    wider, changed in place; None before the first part. `like` has out's shape and dtype.
    """
    if so_far is None:
        if part.shape == like.shape:
            return widened(part), lse.to(torch.promote_types(like.dtype, torch.float32))
        out = _zeros(like)
        so_far = out, out.new_full(out.shape[:1] + out.shape[2:0:-1], -torch.inf)
    out, whole_lse = so_far
    merge_into(out[:, rows], whole_lse[:, :, rows], part, lse)
    return so_far


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse), in place; shapes as in `merged`."""
    if _kernels_take(out, part) and _kernels_take(lse, part_lse):
        from labsupport.distributed.ring.merge_kernel import launch_merge

        launch_merge(out, lse, part, part_lse)
        return
    new_out, new_lse = merge_attention(out.transpose(1, 2), lse, part.transpose(1, 2), part_lse)
    out.copy_(new_out.transpose(1, 2))
    lse.copy_(new_lse)


def added(total: Tensor | None, like: Tensor, rows: slice, part: Tensor) -> Tensor:
    """Return a gradient so far with a part added to some of its rows: contiguous, widened.

    `total` (batch, seqlen, heads, head_dim) is changed in place; None before the first part. `like`
    is what the gradient is of.
    """
    if total is None:
        if part.shape == like.shape:
            return widened(part).contiguous()
        total = _zeros(like)
    total[:, rows] += part
    return total


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(
        like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
    )


def _kernels_take(total: Tensor, part: Tensor) -> bool:
    return (
        total.device.type == "cuda"
        and total.dtype == torch.float32
        and part.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and total.stride(-1) == part.stride(-1) == 1
        and total.numel() > 0
        and _triton_is_missing() is None
    )
