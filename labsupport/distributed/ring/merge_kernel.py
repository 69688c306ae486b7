"""A Triton kernel that merges a step's result into the sum, in one pass over memory.

PyTorch merges two results in about ten passes (a widened copy, two products, a sum, ...), and at
32,768 tokens of 32 heads a partial output is a quarter of a gigabyte.
"""
# Triton's arguments have no Python types.
# ruff: noqa: ANN001, ANN201

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def merge_kernel(
    OUT, LSE, PART, PART_LSE,
    out_batch, out_row, out_head, lse_batch, lse_head,
    part_batch, part_row, part_head, part_lse_batch, part_lse_head,
    rows, head_dim, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`merge_attention` of OUT and PART, into OUT and LSE. Grid: blocks of rows, heads, batch.

    OUT and PART are (batch, rows, heads, head_dim), LSE and PART_LSE (batch, heads, rows); their
    last strides are 1, the others are given, in elements. LSE and PART_LSE are float32.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    inside = r < rows
    LSE += batch * lse_batch + head * lse_head
    PART_LSE += batch * part_lse_batch + head * part_lse_head
    lse = tl.load(LSE + r, mask=inside, other=0.0)
    part_lse = tl.load(PART_LSE + r, mask=inside, other=0.0)

    m = tl.maximum(lse, part_lse)
    m = tl.where(m == -float("inf"), 0.0, m)
    weight, part_weight = tl.exp(lse - m), tl.exp(part_lse - m)
    total = weight + part_weight
    divisor = tl.where(total == 0.0, 1.0, total)

    mask = inside[:, None] & (d < head_dim)[None, :]
    OUT += batch * out_batch + head * out_head + r[:, None] * out_row + d[None, :]
    PART += batch * part_batch + head * part_head + r[:, None] * part_row + d[None, :]
    out = tl.load(OUT, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(PART, mask=mask, other=0.0).to(tl.float32)
    merged = (weight / divisor)[:, None] * out + (part_weight / divisor)[:, None] * part
    # Several threads may hold the same number: all must have read it before one writes.
    tl.debug_barrier()
    tl.store(LSE + r, tl.where(total == 0.0, -float("inf"), m + tl.log(divisor)), mask=inside)
    tl.store(OUT, merged.to(OUT.dtype.element_ty), mask=mask)


def launch_merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merging.merge_into` on a GPU; all last strides must be 1, the log-sum-exps float32."""
    batch, rows, heads, head_dim = out.shape
    block = 32
    with torch.cuda.device_of(out):
        merge_kernel[(triton.cdiv(rows, block), heads, batch)](
            out, lse, part, part_lse, *out.stride()[:3], *lse.stride()[:2],
            *part.stride()[:3], *part_lse.stride()[:2], rows, head_dim,
            D=triton.next_power_of_2(head_dim), ROWS=block, num_warps=4,
        )  # fmt: skip
