"""One attention call in flash-attn's layout: its tensors, its options, what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from labsupport.attention.band import Band


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What every backend is asked with.

    q (batch, seqlen_q, heads, head_dim); k, v (batch, seqlen_k, kv_heads, head_dim). Packed, when
    `cu_seqlens_q` and `cu_seqlens_k` are given: (total tokens, heads, head_dim).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    return_lse: bool = False
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def packed(self) -> bool:
        """True when sequences of different lengths lie one after the other, without a batch."""
        return self.cu_seqlens_q is not None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads: fewer than `heads` when query heads share them."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Size of one head: the last dimension."""
        return self.q.shape[-1]

    @property
    def scale(self) -> float:
        """The factor on the scores: `softmax_scale`, or 1 / sqrt(head_dim) unless given."""
        return 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def needs_grad(self) -> bool:
        """True when autograd will want this call's backward."""
        tensors = self.q, self.k, self.v
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    @cached_property
    def band(self) -> Band:
        """The visible pairs of a call that is not packed."""
        return Band.of(
            self.q.shape[1], self.k.shape[1], causal=self.causal, window_size=self.window_size
        )

    @cached_property
    def windowed(self) -> bool:
        """True when a sliding window hides more than the causal mask does."""
        left, right = self.window_size
        return left >= 0 or (right >= 0 and not self.causal)

    def math_layout(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Tensors for the mathematics: (batch, kv_heads, group, seqlen, head_dim), and the slopes.

        `group` query heads share a key/value head: k and v are views repeated along it, not copies.
        The ALiBi slopes come as (kv_heads, group) or (batch, kv_heads, group).
        """
        group = self.heads // self.kv_heads
        q = self.q.transpose(1, 2).unflatten(1, (self.kv_heads, group))
        k, v = (
            tensor.transpose(1, 2).unsqueeze(2).expand(-1, -1, group, -1, -1)
            for tensor in (self.k, self.v)
        )
        slopes = self.alibi_slopes
        return q, k, v, None if slopes is None else slopes.unflatten(-1, (self.kv_heads, group))

    def without_empty_queries(self) -> tuple[int, AttentionCall]:
        """Drop the leading queries that see no key; returns how many, and the call on the rest.

        Backends disagree about such rows (output 0 or NaN, log-sum-exp 0, +inf or -inf), so none
        is ever asked about them.
        """
        count = self.band.leading_empty_rows
        return count, replace(self, q=self.q[:, count:]) if count else self

    def documents(self) -> Iterator[tuple[slice, AttentionCall | None]]:
        """Cut a packed call into one call a sequence; None for one that has queries but no keys.

        Yields:
            the sequence's slice of the packed queries, and its call of batch 1.
        """
        assert self.cu_seqlens_q is not None
        assert self.cu_seqlens_k is not None
        edges_q, edges_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        slopes = self.alibi_slopes
        for i in range(len(edges_q) - 1):
            rows, cols = slice(*edges_q[i : i + 2]), slice(*edges_k[i : i + 2])
            if rows.start == rows.stop:
                continue
            if cols.start == cols.stop:
                yield rows, None
                continue
            yield (
                rows,
                replace(
                    self,
                    q=self.q[rows].unsqueeze(0),
                    k=self.k[cols].unsqueeze(0),
                    v=self.v[cols].unsqueeze(0),
                    alibi_slopes=slopes[i] if slopes is not None and slopes.ndim == 2 else slopes,
                    cu_seqlens_q=None,
                    cu_seqlens_k=None,
                ),
            )
