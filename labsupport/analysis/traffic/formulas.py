"""What the counts must be: closed forms, block sizes that fit, and theorem 2.

With T_r = N_q / B_r, T_c = N_k / B_c blocks and t tiles that the mask leaves (t = T_r T_c without
one), in elements, one head:

    version1 forward    read     2 N_k d + t (2 B_r d + 2 B_r)
                        written  N_q d + 2 N_q + t (B_r d + 2 B_r)
    version2 forward    read     N_q d + t 2 B_c d
                        written  N_q d + N_q
    version1 backward   read     2 N_k d + t (4 B_r d + 2 B_r)
                        written  N_q d + t B_r d + 2 N_k d
    version2 backward   read     2 N_q d + 2 N_k d + t (2 B_r d + 2 B_r)
                        written  N_q + N_q d + t B_r d + 2 N_k d
    two_pass backward   read     4 N_q d + 2 N_q + 2 N_k d + t (2 B_r d + 2 B_r + 2 B_c d)
                        written  N_q + 2 N_k d + N_q d

The N_q d + 2 N_q written by version 1, and one N_q d of the backward passes, are the zeros that the
sums begin with.
"""

from __future__ import annotations

from labsupport.analysis.traffic.problem import Sizes
from labsupport.analysis.traffic.standard import ROW_VECTORS, row_fits


def closed_form(
    algorithm: str, direction: str, sizes: Sizes, capacity: int | None = None
) -> tuple[int, int]:
    """Elements read and written, for blocks that divide the lengths.

    Args:
        algorithm: "standard", "version1", "version2", or "two_pass" (a backward).
        direction: "forward" or "backward".
        capacity: M, which only the textbook's softmax asks for: does a whole row fit?

    Raises:
        ValueError: blocks that do not divide the lengths, or no such algorithm.
    """
    if not sizes.divisible:
        raise ValueError("the closed forms hold for blocks that divide the lengths")
    if (algorithm, direction) not in _FORMS:
        known = ", ".join(" ".join(pair) for pair in _FORMS)
        raise ValueError(f"no formula for {algorithm!r} {direction!r}; known: {known}")
    return _FORMS[algorithm, direction](sizes, capacity)


def visible_tiles(sizes: Sizes) -> int:
    """Tiles with a visible pair, from a sum: block r of the queries sees its last query's keys."""
    blocks_q, blocks_k = sizes.seqlen_q // sizes.block_q, sizes.seqlen_k // sizes.block_k
    if not sizes.causal:
        return blocks_q * blocks_k
    offset = sizes.seqlen_k - sizes.seqlen_q
    seen = (max(0, (r + 1) * sizes.block_q + offset) for r in range(blocks_q))
    return sum(-(-keys // sizes.block_k) for keys in seen)


def theorem(sizes: Sizes, capacity: int) -> float:
    """N_q N_k d^2 / M: what FlashAttention's count is proportional to (d <= M <= N d).

    Source: "FlashAttention" (2022), theorem 2.
    """
    return sizes.seqlen_q * sizes.seqlen_k * sizes.head_dim**2 / capacity


def elements_needed(algorithm: str, direction: str, sizes: Sizes) -> int:
    """Elements that an algorithm holds at once at most, with these blocks."""
    br, bc, d = sizes.block_q, sizes.block_k, sizes.head_dim
    return max(
        (rows * br + cols * bc) * d + tiles * br * bc + vectors * br
        for rows, cols, tiles, vectors in _NEEDS[algorithm, direction]
    )


def paper_blocks(capacity: int, head_dim: int) -> tuple[int, int]:
    """B_r and B_c by the paper's rule: B_c = ceil(M / 4d), B_r = min(B_c, d).

    Four blocks of B d = M / 4 elements, so that nothing is left for the tile of S: in a memory of
    exactly M elements this does not run. Source: "FlashAttention" (2022), algorithm 1, line 1.
    """
    block_k = -(-capacity // (4 * head_dim))
    return min(block_k, head_dim), block_k


def fitting_blocks(
    algorithm: str, direction: str, capacity: int, head_dim: int, *, power_of_two: bool = False
) -> tuple[int, int]:
    """B_r and B_c that fit: the paper's rule, with everything counted that is held.

    The block that decides the traffic is as large as fits (of keys where those are outside, else of
    queries); the other has as many rows, but d at most.

    Args:
        power_of_two: the large one is rounded down to a power of two, so that it divides lengths.

    Raises:
        ValueError: not even one row fits.
    """
    keys_stay = algorithm == "version1" or (algorithm, direction) == ("version2", "backward")
    large = 0
    step = 1 << 24
    while step:  # the largest that fits, bit by bit: what is needed grows with the block
        sizes = _with_block(large + step, head_dim, keys_stay)
        if elements_needed(algorithm, direction, sizes) <= capacity:
            large += step
        step >>= 1
    if not large:
        raise ValueError(f"a memory of {capacity} elements holds no block of head_dim {head_dim}")
    if power_of_two:
        large = 1 << (large.bit_length() - 1)
    chosen = _with_block(large, head_dim, keys_stay)
    return chosen.block_q, chosen.block_k


def _with_block(large: int, head_dim: int, keys_stay: bool) -> Sizes:
    small = min(large, head_dim)
    blocks = (small, large) if keys_stay else (large, small)
    return Sizes(1, 1, head_dim, *blocks)


# At the fullest moment of each pass: blocks of rows and of columns with d numbers each, tiles,
# numbers a row. The tests compare it with the peak of running algorithms.
_NEEDS: dict[tuple[str, str], tuple[tuple[int, int, int, int], ...]] = {
    ("standard", "forward"): ((1, 1, 1, ROW_VECTORS),),
    ("standard", "backward"): ((1, 1, 2, ROW_VECTORS),),
    ("version1", "forward"): ((2, 2, 1, 6),),  # Q, O; K, V; S
    ("version2", "forward"): ((2, 2, 1, 5),),
    ("version1", "backward"): ((3, 4, 2, 3),),  # Q, dO, dQ; K, V, dK, dV; P, dS
    ("version2", "backward"): ((3, 4, 2, 2),),
    ("two_pass", "backward"): ((2, 4, 2, 2), (3, 2, 2, 2)),
}


def _flash_forward_1(s: Sizes, _: int | None) -> tuple[int, int]:
    n, nd, tile = s.seqlen_q, s.seqlen_q * s.head_dim, visible_tiles(s)
    row_block = s.block_q * s.head_dim
    read = 2 * s.seqlen_k * s.head_dim + tile * (2 * row_block + 2 * s.block_q)
    return read, nd + 2 * n + tile * (row_block + 2 * s.block_q)


def _flash_forward_2(s: Sizes, _: int | None) -> tuple[int, int]:
    nd = s.seqlen_q * s.head_dim
    return nd + visible_tiles(s) * 2 * s.block_k * s.head_dim, nd + s.seqlen_q


def _flash_backward_1(s: Sizes, _: int | None) -> tuple[int, int]:
    kd, tile, row_block = s.seqlen_k * s.head_dim, visible_tiles(s), s.block_q * s.head_dim
    read = 2 * kd + tile * (4 * row_block + 2 * s.block_q)
    return read, s.seqlen_q * s.head_dim + tile * row_block + 2 * kd


def _keys_pass(s: Sizes) -> tuple[int, int]:
    kd = s.seqlen_k * s.head_dim
    per_tile = 2 * s.block_q * s.head_dim + 2 * s.block_q
    return 2 * s.seqlen_q * s.head_dim + 2 * kd + visible_tiles(s) * per_tile, s.seqlen_q + 2 * kd


def _flash_backward_2(s: Sizes, _: int | None) -> tuple[int, int]:
    read, written = _keys_pass(s)
    return read, written + s.head_dim * (s.seqlen_q + visible_tiles(s) * s.block_q)


def _flash_two_pass(s: Sizes, _: int | None) -> tuple[int, int]:
    read, written = _keys_pass(s)
    nd = s.seqlen_q * s.head_dim
    queries = 2 * nd + 2 * s.seqlen_q + visible_tiles(s) * 2 * s.block_k * s.head_dim
    return read + queries, written + nd


def _standard_forward(s: Sizes, capacity: int | None) -> tuple[int, int]:
    square = s.seqlen_q * s.seqlen_k
    right = s.seqlen_q // s.block_q * s.seqlen_k * s.head_dim  # K, or V, for each block of queries
    passes = 1 if row_fits(capacity, s.seqlen_k) else 2
    read = s.seqlen_q * s.head_dim + right + passes * square + square + right
    written = 2 * square + s.seqlen_q * s.head_dim
    return (read + 2 * square, written + square) if s.causal else (read, written)


def _standard_backward(s: Sizes, capacity: int | None) -> tuple[int, int]:
    square, nd, kd = (
        s.seqlen_q * s.seqlen_k,
        s.seqlen_q * s.head_dim,
        s.seqlen_k * s.head_dim,
    )
    by_rows, by_cols = s.seqlen_q // s.block_q * kd, s.seqlen_k // s.block_k * nd
    passes = 1 if row_fits(capacity, s.seqlen_k, 2) else 2
    products = 3 * square + 2 * by_cols + nd + 2 * by_rows  # dV, dQ, dK read a square; dP does not
    return products + passes * 2 * square, 2 * square + nd + 2 * kd


_FORMS = {
    ("standard", "forward"): _standard_forward,
    ("standard", "backward"): _standard_backward,
    ("version1", "forward"): _flash_forward_1,
    ("version2", "forward"): _flash_forward_2,
    ("version1", "backward"): _flash_backward_1,
    ("version2", "backward"): _flash_backward_2,
    ("two_pass", "backward"): _flash_two_pass,
}
