"""What a call is besides its tensors, and what follows from both: shapes, strides, counts.

Tensors are in flash-attn's layout, (batch, seqlen, heads, head_dim), with whatever strides they
have; nothing is copied. Packed ones are (total tokens, heads, head_dim) with `cu_seqlens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


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


@cache
def kernel(file: str, name: str) -> Any:
    """A kernel by name; Triton is imported now, not before."""
    return getattr(import_module(f"labsupport.attention.flash_triton.{file}"), name)


def sizes(q: Tensor, k: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """heads, group, seqlen_q, seqlen_k, left, right."""
    group, seqlen_q, seqlen_k = q.shape[-2] // k.shape[-2], q.shape[-3], k.shape[-3]
    # "No limit" is sometimes written as 2^31 - 1, and the kernels add to it in 32 bits.
    left, right = (min(side, seqlen_q + seqlen_k) for side in (geometry.left, geometry.right))
    return q.shape[-2], group, seqlen_q, seqlen_k, left, right


def sequences(q: Tensor, geometry: Geometry) -> int:
    """How many there are."""
    return q.shape[0] if geometry.cu_seqlens_q is None else len(geometry.cu_seqlens_q) - 1


def longest(x: Tensor, packed: int) -> int:
    """The length of the sequences, or, of packed ones, what was given."""
    return x.shape[1] if x.ndim == 4 else packed


def strides(x: Tensor) -> tuple[int, int, int, int]:
    """Of batch, seqlen, heads and head_dim, in elements; packed tensors have no batch."""
    batch, seqlen, heads, head_dim = x.stride() if x.ndim == 4 else (0, *x.stride())
    return batch, seqlen, heads, head_dim


def rows_like(q: Tensor) -> Tensor:
    """One float32 number a query and head: (batch, heads, seqlen) or (heads, total)."""
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    return q.new_empty(shape, dtype=torch.float32)


def row_strides(rows: Tensor) -> tuple[int, int]:
    """Of batch and heads."""
    return (rows.stride(0), rows.stride(1)) if rows.ndim == 3 else (0, rows.stride(0))


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and the scale, with the sign of a negative one moved to q, and 0 to a very small number.

    The forward kernels multiply after they have looked for the maximum, and hide with -inf before.
    """
    return (q, scale) if scale > 0 else (-q, max(-scale, 1e-30))
