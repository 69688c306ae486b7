"""How results of a ring's steps come together: in place, in float32, in as few passes as possible.

The first piece that covers all rows is taken as it is. What follows is merged (outputs, by their
log-sum-exps) or added (gradients) to the rows that it is about. On a GPU one Triton kernel does
each of the two; elsewhere, and for what the kernels do not take, PyTorch does the same.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.kernels import mode
from labsupport.attention.online_softmax import merge_attention

Result = tuple[Tensor, Tensor]


def merged(so_far: Result | None, like: Tensor, rows: slice, part: Tensor, lse: Tensor) -> Result:
    """The output and log-sum-exp so far, with a piece of attention for some of the rows in it.

    Args:
        so_far: out (batch, seqlen, heads, head_dim) and lse (batch, heads, seqlen), float32 or
            wider, changed in place; None before the first piece.
        like: a tensor of out's shape: the queries.
        rows: which of them the piece is about.
        part, lse: the piece, (batch, rows, heads, head_dim) in any dtype and (batch, heads, rows).
    """
    if so_far is None:
        wide = torch.promote_types(like.dtype, torch.float32)
        if part.shape == like.shape:
            return part.to(wide), lse.to(wide)
        out = torch.zeros_like(like, dtype=wide, memory_format=torch.contiguous_format)
        so_far = out, out.new_full(out.shape[:1] + out.shape[2:0:-1], -torch.inf)
    out, whole_lse = so_far
    merge_into(out[:, rows], whole_lse[:, :, rows], part, lse)
    return so_far


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse), in place; shapes as in `merged`."""
    if _kernels_take(out, part) and _kernels_take(lse, part_lse):
        launch_merge(out, lse, part, part_lse)
        return
    new_out, new_lse = merge_attention(out.transpose(1, 2), lse, part.transpose(1, 2), part_lse)
    out.copy_(new_out.transpose(1, 2))
    lse.copy_(new_lse)


def added(total: Tensor | None, like: Tensor, rows: slice, part: Tensor) -> Tensor:
    """A gradient so far, with a part for some of its rows added: contiguous, float32 or wider.

    Args:
        total: (batch, seqlen, heads, head_dim), changed in place; None before the first part.
        like: a tensor of its shape: what the gradient is of.
        rows: which of them the part is about.
        part: (batch, rows, heads, head_dim), any dtype.
    """
    if total is None:
        wide = torch.promote_types(like.dtype, torch.float32)
        if part.shape == like.shape:
            fits = part.dtype == wide and part.is_contiguous()
            return part if fits else part.new_empty(part.shape, dtype=wide).copy_(part)
        total = torch.zeros_like(like, dtype=wide, memory_format=torch.contiguous_format)
    add_into(total[:, rows], part)
    return total


def add_into(total: Tensor, part: Tensor) -> None:
    """Total += part, in place."""
    if _kernels_take(total, part) and total[0].is_contiguous() and part[0].is_contiguous():
        launch_add(total, part)
    else:
        total += part


# --- the kernels ----------------------------------------------------------------------------------


def _kernels_take(total: Tensor, part: Tensor) -> bool:
    return (
        total.device.type == "cuda"
        and total.dtype == torch.float32
        and part.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and total.stride(-1) == part.stride(-1) == 1
        and total.numel() > 0
        and _triton_is_missing() is None
    )


@cache
def _triton_is_missing() -> str | None:
    return mode.missing()


@cache
def _kernel(name: str) -> Any:
    return getattr(import_module("labsupport.distributed.ring.merge_kernel"), name)


def launch_merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge_into` by the Triton kernel; all last strides must be 1, the sums float32."""
    batch, rows, heads, head_dim = out.shape
    block = 32
    with torch.cuda.device_of(out):
        _kernel("merge_kernel")[(-(-rows // block), heads, batch)](
            out, lse, part, part_lse, *out.stride()[:3], *lse.stride()[:2],
            *part.stride()[:3], *part_lse.stride()[:2], rows, head_dim,
            D=1 << (head_dim - 1).bit_length(), ROWS=block, num_warps=4,
        )  # fmt: skip


def launch_add(total: Tensor, part: Tensor) -> None:
    """`add_into` by the Triton kernel; each batch entry must be contiguous."""
    numbers, block = total[0].numel(), 4096
    with torch.cuda.device_of(total):
        _kernel("add_kernel")[(-(-numbers // block), total.shape[0])](
            total, part, total.stride(0), part.stride(0), numbers, BLOCK=block, num_warps=8
        )
