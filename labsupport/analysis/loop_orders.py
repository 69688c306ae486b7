"""Bytes that FlashAttention's first two loop orders move for O and its statistics.

Version 1 reads and writes O, m and l once for each block of keys; version 2 writes O and L once.
`python -m benchmarks loop_orders` measures what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labsupport.attention.kernels.config import KernelConfig


@dataclass(frozen=True)
class LoopShape:
    """q, k and v are (batch, seqlen, heads, head_dim)."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"


def rewritten_bytes(shape: LoopShape, plan: KernelConfig) -> int:
    """Bytes of O, m and l (float32) that version 1 reads and writes, once for each pair of blocks.

    Theory: N / Bc passes over (head_dim + 2) numbers a row; a causal mask spares nearly half.
    """
    passes = 0
    for j in range(0, shape.seqlen, plan.block_k):
        first = j // plan.block_q * plan.block_q if shape.causal else 0
        passes += shape.seqlen - first
    return 2 * 4 * (shape.head_dim + 2) * passes * shape.batch * shape.heads


def written_bytes(shape: LoopShape) -> int:
    """Bytes of O (in the inputs' dtype) and L (float32) that version 2 writes, once."""
    rows = shape.batch * shape.heads * shape.seqlen
    return rows * (shape.head_dim * getattr(torch, shape.dtype).itemsize + 4)
