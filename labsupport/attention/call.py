"""The carrier of one attention call: inputs and options, from `attention` to the kernel.

`backends.attention` makes an `AttentionCall` of its arguments, once. The checks, the limits of the
backends, the adapters and the launchers of the lab's own kernels all take it, and read an option
under the name that the user gave it. What is computed from options (scale, left, right, band) is a
property here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

from labsupport.attention.masks import AttentionMask


class BackendUnavailableError(RuntimeError):
    """None of the chosen backends can run this call here; `reasons` lists why, by backend."""

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]]) -> None:
        super().__init__(message)
        self.reasons = reasons


class AttentionOptions(TypedDict, total=False):
    """The options of `attention`, for functions that pass them on."""

    causal: bool
    softmax_scale: float | None
    window_size: tuple[int, int]
    alibi_slopes: Tensor | None
    return_lse: bool
    softcap: float


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Inputs and options of one attention call.

    Attributes:
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim), or packed (total_k, kv_heads, head_dim).
        causal, softmax_scale, window_size, alibi_slopes, return_lse, softcap: as in
            `backends.attention`.
        cu_seqlens_q, cu_seqlens_k: offsets of packed sequences, both or none.
        max_seqlen_q, max_seqlen_k: the longest packed sequence, where `for_kernels` has found it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    return_lse: bool = False
    softcap: float = 0.0
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def options(self) -> tuple[Any, ...]:
        """All fields but q, k and v: `AttentionCall(q, k, v, *call.options)` is the same call."""
        return tuple([getattr(self, name) for name in OPTIONS])

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
        """Number of key/value heads."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.q.shape[-1]

    @property
    def scale(self) -> float:
        """The factor on the scores: `softmax_scale`, or 1 / sqrt(head_dim) unless given."""
        return 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def left(self) -> int:
        """Number of earlier keys that a query sees; -1 means no limit."""
        return self.window_size[0]

    @property
    def right(self) -> int:
        """Number of later keys that a query sees: 0 if causal; -1 means no limit."""
        return 0 if self.causal else self.window_size[1]

    @property
    def windowed(self) -> bool:
        """True when a sliding window hides more than the causal mask does."""
        return self.left >= 0 or (self.right >= 0 and not self.causal)

    @property
    def band(self) -> AttentionMask:
        """The visible pairs of a call that is not packed."""
        lengths = self.q.shape[1], self.k.shape[1]
        return AttentionMask.of(*lengths, causal=self.causal, window_size=self.window_size)

    @property
    def needs_grad(self) -> bool:
        """True when autograd will need this call's backward."""
        wanted = self.q.requires_grad or self.k.requires_grad or self.v.requires_grad
        return torch.is_grad_enabled() and wanted

    def math_layout(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v as (batch, kv_heads, group, seqlen, head_dim), without a copy, and the slopes.

        `group` query heads share a key/value head. Slopes come as ([batch,] kv_heads, group).
        """
        group = self.heads // self.kv_heads
        q = self.q.transpose(1, 2).unflatten(1, (self.kv_heads, group))
        k, v = (
            tensor.transpose(1, 2).unsqueeze(2).expand(-1, -1, group, -1, -1)
            for tensor in (self.k, self.v)
        )
        slopes = self.alibi_slopes
        return q, k, v, None if slopes is None else slopes.unflatten(-1, (self.kv_heads, group))

    def with_repeated_heads(self) -> AttentionCall:
        """Repeat each key/value head for the query heads that share it."""
        group = self.heads // self.kv_heads
        k, v = (x.repeat_interleave(group, dim=2) for x in (self.k, self.v))
        return replace(self, k=k, v=v)

    def with_positive_scale(self) -> AttentionCall:
        """Move a negative sign of the scale to q, and make a scale of 0 a very small number.

        Kernels hide with -inf, and may multiply afterwards: PyTorch's for CPUs makes NaN of it. The
        lab's own look for the maximum before.
        """
        scale = self.scale
        if scale > 0:
            return self
        return replace(self, q=-self.q, softmax_scale=max(-scale, 1e-30))

    def without_empty_queries(self) -> tuple[int, AttentionCall]:
        """Count and drop the leading queries that see no key: backends disagree about them."""
        count = self.band.leading_empty_rows
        return count, replace(self, q=self.q[:, count:]) if count else self

    def for_kernels(self) -> AttentionCall:
        """Give a packed call int32 offsets on q's device and the longest lengths; others stay."""
        found: dict[str, Any] = {}
        for letter, offsets in (("q", self.cu_seqlens_q), ("k", self.cu_seqlens_k)):
            if offsets is not None:
                found[f"max_seqlen_{letter}"] = int(offsets.diff().max())
                found[f"cu_seqlens_{letter}"] = offsets.to(self.q.device, torch.int32)
        return replace(self, **found) if found else self

    @cached_property
    def documents(self) -> list[tuple[slice, int, AttentionCall | None]]:
        """Each packed sequence: its slice of queries, how many see no key, the call of the rest."""
        assert self.cu_seqlens_q is not None
        assert self.cu_seqlens_k is not None
        edges_q, edges_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        slopes, found = self.alibi_slopes, []
        for i in range(len(edges_q) - 1):
            rows, cols = slice(*edges_q[i : i + 2]), slice(*edges_k[i : i + 2])
            queries = rows.stop - rows.start
            if queries and cols.start == cols.stop:
                found.append((rows, queries, None))
            elif queries:
                q, k, v = self.q[rows][None], self.k[cols][None], self.v[cols][None]
                own = slopes[i] if slopes is not None and slopes.ndim == 2 else slopes
                options = self.causal, self.softmax_scale, self.window_size, own, self.return_lse
                call = AttentionCall(q, k, v, *options, softcap=self.softcap)
                found.append((rows, *call.without_empty_queries()))
        return found


OPTIONS = tuple(field.name for field in fields(AttentionCall)[3:])
