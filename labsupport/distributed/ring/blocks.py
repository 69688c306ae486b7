"""The visible pairs of one block, in terms that every kernel understands.

A block is one chunk of n queries against one chunk of n keys. In the whole sequence, query i of the
block stands `delta` places behind key i: delta = 0 on the diagonal, n for the chunk before it, -n
for the one after it. Causal masks and windows look at positions in the whole sequence, so

    query i sees key j    when    delta - left  <=  j - i  <=  delta + right

and a block's visible pairs are a range of its diagonals, low <= j - i <= high. Kernels know windows
around the main diagonal only. A range beside it (low > 0, or high < 0) is one in a smaller square:

    n = 5, left = 6, delta = 8:   2 <= j - i          the square of keys 2.. and queries ..2:
        k 0 1 2 3 4                                       k 2 3 4
    q 0   . . x x x                                   q 0   x x x
    q 1   . . . x x                                   q 1   . x x      window (0, no limit)
    q 2   . . . . x                                   q 2   . . x
    q 3   . . . . .        <- sees none of them
    q 4   . . . . .

There each query sees at least one key: no kernel is asked about empty rows.

ALiBi adds -s * |delta - (j - i)|, while a kernel counts |j - i|. For keys before the queries it is
-s * (delta + i - j): the kernel's own bias plus a constant where i >= j, and where i < j the
kernel's bias for the slope -s. So the block is cut in two along its diagonal; the constant
s * delta changes the log-sum-exp and not the output. (Biases up to s * n are rounded: in float32,
with s = 1/2 and 1024 tokens a shard, the output errs by 1.5e-5 instead of 5e-7.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from labsupport.attention.masks import AttentionMask

UNLIMITED = (-1, -1)
CAUSAL = (-1, 0)


@dataclass(frozen=True)
class BlockPair:
    """One call of a kernel: a rectangle of queries and keys with a window around its diagonal.

    Attributes:
        rows, cols: of the queries and of the keys, within the ranks' shards.
        window: (left, right) as flash-attn's `window_size`; a causal mask is (-1, 0).
        slope_sign: factor on ALiBi's slopes.
        alibi_offset: the kernel's scores are too high by slope * alibi_offset.
    """

    rows: slice
    cols: slice
    window: tuple[int, int]
    slope_sign: int = 1
    alibi_offset: int = 0

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        rows, cols = (part.stop - part.start for part in (self.rows, self.cols))
        return AttentionMask.of(rows, cols, window_size=self.window).visible_pairs()

    def moved(self, rows: int, cols: int) -> BlockPair:
        """Return the same pair, that many rows and columns further on."""
        (top, bottom), (first, last) = ((x.start, x.stop) for x in (self.rows, self.cols))
        return replace(
            self, rows=slice(top + rows, bottom + rows), cols=slice(first + cols, last + cols)
        )


def visible_pairs(
    length: int, delta: int, left: int | None, right: int | None, *, alibi: bool = False
) -> list[BlockPair]:
    """Return the visible part of one block; [] when all of it is hidden.

    `length` is n; `delta` is 0, or at least n either way; `left` and `right` are the window in the
    whole sequence, None without a limit (causal: right = 0).
    """
    low = 1 - length if left is None else max(delta - left, 1 - length)
    high = length - 1 if right is None else min(delta + right, length - 1)
    ranges = [(low, high)]
    if alibi and delta != 0:
        ranges = [(low, min(high, 0)), (max(low, 1), high)]
    return [_pair(length, delta, *ends, alibi) for ends in ranges if ends[0] <= ends[1]]


def _pair(length: int, delta: int, low: int, high: int, alibi: bool) -> BlockPair:
    aside = max(low, 0) + min(high, 0)  # the diagonal that becomes the main one
    size = length - abs(aside)
    row, col = max(-aside, 0), max(aside, 0)
    left, right = (-1 if side >= size - 1 else side for side in (aside - low, high - aside))
    pair = BlockPair(slice(row, row + size), slice(col, col + size), (left, right))
    if not alibi or delta == 0:
        return pair
    sign = 1 if (delta > 0) == (high <= 0) else -1
    return replace(pair, slope_sign=sign, alibi_offset=abs(delta - aside))
