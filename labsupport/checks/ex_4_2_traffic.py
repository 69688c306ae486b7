"""Exercise 4-2: elements that pass between slow and fast memory, counted by hand.

One head of N queries and N keys, forward; blocks divide N. All counts are in elements.
`labsupport.analysis.traffic.count` sees the same while the algorithms run.

    textbook_traffic(seqlen, head_dim, block_q) -> (read, written)

    Three kernels, no mask. S = Q K^T: a block of block_q rows of Q stays while all of K passes. The
    softmax reads S row by row (a row fits) and writes P. O = P V: for each block of rows of O, the
    rows of P pass once, and all of V passes. The scale costs nothing.

    tiled_traffic(seqlen, head_dim, block_q, block_k, *, outside, causal=False) -> (read, written)

    outside="queries" (FlashAttention-2): a block of Q is read once, K and V pass block by block,
    then O and L are written; L has one number a row. outside="keys" (FlashAttention's first
    version): zeros are written to O, m and l first; then a block of K and V is read once, and for
    each block of queries Q, O, m, l are read and O, m, l written; m and l have one number a row.
    With causal=True a tile without a visible pair is skipped: nothing moves for it.
"""

from __future__ import annotations

import math
import random

from labsupport.checks.verdict import Student, judge_numbers, mistakes, passed

ORDERS = ("queries", "keys")
NAMES = ("read", "written")


### BEGIN SOLUTION
def textbook_traffic(seqlen: int, head_dim: int, block_q: int) -> tuple[int, int]:
    """Return the elements read and written by textbook attention; see the top of this file.

    >>> textbook_traffic(256, 32, block_q=64)
    (204800, 139264)
    """
    square, matrix, passes = seqlen**2, seqlen * head_dim, seqlen // block_q
    read = (matrix + passes * matrix) + square + (square + passes * matrix)
    written = square + square + matrix
    return read, written


TEXTBOOK_MISTAKES = mistakes("""
K passes for *each* block of rows of Q, seqlen / block_q times; so does V.
    seqlen // block_q -> 1
K and V both pass for each block of rows; one of them passes once in your count.
    (square + passes * matrix) -> (square + matrix)
S and P are missing: one kernel writes them to slow memory, the next one reads them.
    seqlen**2 -> 0
One matrix of N^2 is not read: the softmax reads S, the second product P.
    (square + passes -> (passes
One matrix of N^2 is not written: the first product writes S, the softmax P.
    square + square -> square
That is in bytes; count elements.
    return read, written -> return 4 * read, 4 * written
The two values are swapped: return read, written.
    return read, written -> return written, read
""")


def tiled_traffic(
    seqlen: int, head_dim: int, block_q: int, block_k: int, *, outside: str, causal: bool = False
) -> tuple[int, int]:
    """Return the elements read and written by a tiled loop; see the top of this file.

    >>> tiled_traffic(256, 32, 64, 64, outside="queries")
    (73728, 8448)
    """
    tiles = (seqlen // block_q) * (seqlen // block_k)
    if causal:
        tiles = sum(math.ceil(end / block_k) for end in range(block_q, seqlen + 1, block_q))
    matrix, rows, cols = seqlen * head_dim, block_q * head_dim, block_k * head_dim
    if outside == "queries":
        read = matrix + tiles * 2 * cols
        written = matrix + seqlen
    else:
        read = 2 * matrix + tiles * (2 * rows + 2 * block_q)
        written = (matrix + 2 * seqlen) + tiles * (rows + 2 * block_q)
    return read, written


TILED_MISTAKES = mistakes("""
The loop orders are exchanged: outside='queries' keeps a block of Q, outside='keys' one of K and V.
    "queries" -> "keys"
`outside` is ignored: you count queries outside in either order.
    outside == "queries" -> True
K *and* V pass: 2 * block_k * head_dim for a block of keys.
    tiles * 2 * cols -> tiles * cols
    2 * matrix -> matrix
With queries outside, K and V pass for *each* block of queries: seqlen / block_q times.
    tiles * 2 * cols -> 2 * matrix
You divide by the other block: K and V pass once for each block of *queries* (seqlen / block_q), Q
and O once for each block of *keys* (seqlen / block_k).
    rows, cols -> cols, rows
    2 * block_q) -> 2 * block_k)
With queries outside, L is missing from what is written: one number a row.
    matrix + seqlen -> matrix
With queries outside, O stays in fast memory: it is written once.
    matrix + seqlen -> tiles * rows + seqlen
With queries outside, Q stays in fast memory: it is read once.
    read = matrix + -> read = tiles * rows +
With keys outside, m and l are not only written for each tile: they are read, too.
    2 * rows + 2 * block_q -> 2 * rows
With keys outside, m and l begin with zeros (or -inf) that are written, not O alone.
    (matrix + 2 * seqlen) -> matrix
With keys outside, m and l are read and written together with O.
    + 2 * block_q ->
    + 2 * seqlen ->
With keys outside, O, m and l begin with zeros (or -inf) that are written.
    (matrix + 2 * seqlen) + ->
With keys outside, O, m and l are written for each tile: the next block of keys needs them.
    tiles * (rows + 2 * block_q) -> matrix + 2 * seqlen
That is in bytes; count elements.
    return read, written -> return 4 * read, 4 * written
The two values are swapped: return read, written.
    return read, written -> return written, read
""")
CAUSAL_MISTAKES = mistakes("""
`causal` is ignored: a tile without a visible pair is skipped.
    if causal -> if False
More than half of the tiles have a visible pair: those on the diagonal do, too.
    tiles = sum( -> tiles = tiles / 2 + 0 * sum(
T (T + 1) / 2 holds for square tiles only. A block of queries sees keys up to its *last* row:
ceil((r + 1) * block_q / block_k) blocks, for r = 0, 1, ...
    math.ceil(end / block_k) -> end // block_q
T (T + 1) / 2 with T = seqlen / block_k counts tiles of block_k rows. A tile has block_q of them:
add up ceil((r + 1) * block_q / block_k) for r = 0, 1, ...
    sum(math.ceil(end / block_k) for end in range(block_q, seqlen + 1, block_q)) -> seqlen // block_k * (seqlen // block_k + 1) // 2
A block of keys passes whole even if one key is visible: round up.
    math.ceil(end / block_k) -> end // block_k
""")  # noqa: E501
### END SOLUTION


def check_textbook_traffic(student: Student, seed: int = 0) -> None:
    """Exercise 4-2 (a): what three kernels move."""
    cases = [{key: case[key] for key in ("seqlen", "head_dim", "block_q")} for case in _sizes(seed)]
    judge_numbers(student, cases, textbook_traffic, TEXTBOOK_MISTAKES, NAMES)
    passed("what the textbook's three kernels move", seed)


def check_tiled_traffic(student: Student, seed: int = 0) -> None:
    """Exercise 4-2 (b): what two loop orders move, without a mask."""
    cases = [{**case, "outside": order} for case in _sizes(seed) for order in ORDERS]
    judge_numbers(student, cases, tiled_traffic, TILED_MISTAKES, NAMES)
    passed("what the two loop orders move", seed)


def check_tiled_causal(student: Student, seed: int = 0) -> None:
    """Exercise 4-2 (c): what is left of it under a causal mask."""
    cases = [{**case, "outside": o, "causal": True} for case in _sizes(seed) for o in ORDERS]
    judge_numbers(student, cases, tiled_traffic, CAUSAL_MISTAKES + TILED_MISTAKES, NAMES)
    passed("what the two loop orders move under a causal mask", seed)


def _sizes(seed: int) -> list[dict[str, int]]:
    """Return blocks of queries larger and smaller than blocks of keys."""
    rng = random.Random(seed)
    listed = [(64, 8, 16, 8), (96, 4, 8, 24), (2048, 128, 128, 64)]
    for _ in range(3):
        unit, a, b = rng.choice([8, 16]), rng.choice([2, 4, 6]), rng.choice([3, 5, 7])
        listed.append((unit * a * b * 4, rng.choice([24, 48, 64]), unit * a, unit * b))
    names = ("seqlen", "head_dim", "block_q", "block_k")
    return [dict(zip(names, sizes, strict=True)) for sizes in listed]
