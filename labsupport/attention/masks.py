"""The keys that a query may look at: causal masks and sliding windows, as one band.

Query i and key j of two sequences that END together (bottom-right alignment, as in flash-attn 2.1
and newer) meet when

    i + offset - left  <=  j  <=  i + offset + right          offset = seqlen_k - seqlen_q

`left` and `right` are flash-attn's `window_size`; -1 means "no limit", and causal means right = 0:

    seqlen_q = 3, seqlen_k = 5, causal          seqlen_q = 5, seqlen_k = 3, causal
        k 0 1 2 3 4                                 k 0 1 2
    q 0   x x x . .                             q 0   . . .    <- sees no key at all:
    q 1   x x x x .                             q 1   . . .       output 0, log-sum-exp -inf
    q 2   x x x x x                             q 2   x . .
                                                q 3   x x .
                                                q 4   x x x

A tiled algorithm asks which tiles it may skip, which need a mask, and which need none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labsupport.attention.inputs import check_switch, check_window


@dataclass(frozen=True)
class AttentionMask:
    """The visible (query, key) pairs of a `seqlen_q` by `seqlen_k` score matrix."""

    seqlen_q: int
    seqlen_k: int
    left: int | None = None
    right: int | None = None

    @classmethod
    def of(
        cls, seqlen_q: int, seqlen_k: int, *,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    ) -> AttentionMask:  # fmt: skip
        """Build the band of flash-attn's options `causal` and `window_size`.

        Raises:
            AttentionInputError: `causal` is no bool, or `window_size` not a pair of integers of at
                least -1.
        """
        check_switch("causal", causal)
        check_window(window_size)
        left, right = (None if side < 0 else side for side in window_size)
        return cls(seqlen_q, seqlen_k, left, 0 if causal else right)

    @property
    def offset(self) -> int:
        """Position of query 0 on the keys' axis: the two sequences end together."""
        return self.seqlen_k - self.seqlen_q

    @property
    def unlimited(self) -> bool:
        """True when every query sees every key, for any `left` and `right`."""
        left_open = self.left is None or self.left >= self.seqlen_k - 1
        right_open = self.right is None or self.right >= self.seqlen_k - 1 - self.offset
        return left_open and right_open

    @property
    def plain_causal(self) -> bool:
        """True when the band is exactly the causal mask, without a window on the left."""
        return self.right == 0 and (self.left is None or self.left >= self.seqlen_k - 1)

    def keys_seen(self, start: int, stop: int) -> tuple[int, int]:
        """Range of keys that at least one of the queries `start:stop` sees (may be empty)."""
        first = 0 if self.left is None else max(0, start + self.offset - self.left)
        last = self.seqlen_k
        if self.right is not None:
            last = min(last, stop - 1 + self.offset + self.right + 1)
        return min(first, self.seqlen_k), max(min(first, self.seqlen_k), last)

    def queries_seeing(self, start: int, stop: int) -> tuple[int, int]:
        """Range of queries that see at least one of the keys `start:stop` (may be empty)."""
        first = 0 if self.right is None else max(0, start - self.offset - self.right)
        last = self.seqlen_q
        if self.left is not None:
            last = min(last, stop - 1 - self.offset + self.left + 1)
        return min(first, self.seqlen_q), max(min(first, self.seqlen_q), last)

    def mask(self, rows: slice, cols: slice, device: torch.device | str = "cpu") -> Tensor | None:
        """Boolean mask (rows, cols) of one tile, True where visible; None if all of it is."""
        low = rows.start + self.offset
        high = rows.stop - 1 + self.offset
        inside_left = self.left is None or cols.start >= high - self.left
        inside_right = self.right is None or cols.stop - 1 <= low + self.right
        if inside_left and inside_right:
            return None
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.offset
        j = torch.arange(cols.start, cols.stop, device=device)[None, :]
        visible = torch.ones(len(i), j.shape[1], dtype=torch.bool, device=device)
        if self.left is not None:
            visible &= j >= i - self.left
        if self.right is not None:
            visible &= j <= i + self.right
        return visible

    def full_mask(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Boolean mask (seqlen_q, seqlen_k): quadratic memory, for the textbook and for SDPA."""
        return self.mask(slice(0, self.seqlen_q), slice(0, self.seqlen_k), device)

    @property
    def leading_empty_rows(self) -> int:
        """Number of queries that see no key at all: the first ones, because the band rises."""
        if self.right is None:
            return 0
        return min(self.seqlen_q, max(0, -self.offset - self.right))

    def visible_pairs(self) -> int:
        """Number of visible (query, key) pairs: the work of a kernel that skips the rest."""
        position = torch.arange(self.seqlen_q) + self.offset
        first, last = torch.zeros_like(position), torch.full_like(position, self.seqlen_k - 1)
        if self.left is not None:
            first = torch.maximum(first, position - self.left)
        if self.right is not None:
            last = torch.minimum(last, position + self.right)
        return int((last - first + 1).clamp(min=0).sum())


def alibi_bias(
    slopes: Tensor, rows: slice, cols: slice, offset: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """ALiBi's penalty for distance on one tile: -slope * |i + offset - j|.

    Args:
        slopes: (...), one positive slope per head.
        rows, cols: the tile's queries and keys.
        offset: `seqlen_k - seqlen_q` (bottom-right alignment, as flash-attn has it).

    Returns:
        (..., rows, cols) in `dtype`, to be added to the scaled scores;
        made in float32 or wider, as bfloat16 has no 257.

    Source: Press et al., "Train Short, Test Long" (2022), section 3.
    """
    wide = torch.promote_types(torch.promote_types(slopes.dtype, dtype), torch.float32)
    i = torch.arange(rows.start, rows.stop, device=slopes.device)[:, None] + offset
    j = torch.arange(cols.start, cols.stop, device=slopes.device)[None, :]
    return (-slopes.to(wide)[..., None, None] * (i - j).abs().to(wide)).to(dtype)
