"""One attention call in flash-attn's layout: its tensors, its options, and what follows from them."""

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
        return self.cu_seqlens_q is not None

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def needs_grad(self) -> bool:
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

    def math_layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (batch, heads, seqlen, head_dim), with k and v expanded to q's heads (no copy)."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (self.q, self.k, self.v))
        if self.heads != self.kv_heads:
            group = self.heads // self.kv_heads
            k, v = (t.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (k, v))
        return q, k, v

    def without_empty_queries(self) -> tuple[int, AttentionCall]:
        """Drop the leading queries that see no key; returns how many, and the call on the rest.

        Backends disagree about such rows (output 0 or NaN, log-sum-exp 0, +inf or -inf). So none is ever
        asked about them.
        """
        count = self.band.leading_empty_rows
        return count, replace(self, q=self.q[:, count:]) if count else self

    def documents(self) -> Iterator[tuple[slice, AttentionCall | None]]:
        """Cut a packed call into one call a sequence; None for one that has queries but no keys.

        Yields:
            the sequence's slice of the packed queries, and its call of batch 1.
        """
        assert self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
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
