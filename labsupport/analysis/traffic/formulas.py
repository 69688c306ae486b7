"""Closed forms of the counts, block sizes that fit, and theorem 2."""

from __future__ import annotations

from labsupport.analysis.traffic.problem import Sizes
from labsupport.analysis.traffic.standard import ROW_VECTORS, row_fits

# Elements (read), (written): multiples of N_q d, N_q, N_k d, and for each tile with a visible pair
# B_r d, B_r, B_c d. The zeros that sums begin with are written, too.
_FORMS = {
    ("version1", "forward"): ((0, 0, 2, 2, 2, 0), (1, 2, 0, 1, 2, 0)),
    ("version2", "forward"): ((1, 0, 0, 0, 0, 2), (1, 1, 0, 0, 0, 0)),
    ("version1", "backward"): ((0, 0, 2, 4, 2, 0), (1, 0, 2, 1, 0, 0)),
    ("version2", "backward"): ((2, 0, 2, 2, 2, 0), (1, 1, 2, 1, 0, 0)),
    ("two_pass", "backward"): ((4, 2, 2, 2, 2, 2), (1, 1, 2, 0, 0, 0)),
}
# At the fullest moment of each pass: blocks of rows and of columns with d numbers each, tiles,
# numbers a row. The tests compare them with the peak of running algorithms.
_NEEDS: dict[tuple[str, str], tuple[tuple[int, int, int, int], ...]] = {
    ("standard", "forward"): ((1, 1, 1, ROW_VECTORS),),
    ("standard", "backward"): ((1, 1, 2, ROW_VECTORS),),
    ("version1", "forward"): ((2, 2, 1, 6),),  # Q, O; K, V; S
    ("version2", "forward"): ((2, 2, 1, 5),),
    ("version1", "backward"): ((3, 4, 2, 2),),  # Q, dO, dQ; K, V, dK, dV; P, dS
    ("version2", "backward"): ((3, 4, 2, 2),),
    ("two_pass", "backward"): ((2, 4, 2, 2), (3, 2, 2, 2)),
}


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

    >>> from labsupport.analysis.traffic import Sizes
    >>> closed_form("version2", "forward", Sizes(64, 64, 8, block_q=32, block_k=8))
    (2560, 576)
    """
    if not sizes.divisible:
        raise ValueError("the closed forms hold for blocks that divide the lengths")
    _needs(algorithm, direction)
    if algorithm == "standard":
        return _standard(sizes, capacity, backward=direction == "backward")
    n, d, tiles = sizes.seqlen_q, sizes.head_dim, visible_tiles(sizes)
    units = [n * d, n, sizes.seqlen_k * d]
    units += [tiles * sizes.block_q * d, tiles * sizes.block_q, tiles * sizes.block_k * d]
    read, written = (
        sum(times * unit for times, unit in zip(form, units, strict=True))
        for form in _FORMS[algorithm, direction]
    )
    return read, written


def _needs(algorithm: str, direction: str) -> tuple[tuple[int, int, int, int], ...]:
    if (algorithm, direction) not in _NEEDS:
        known = ", ".join(" ".join(pair) for pair in _NEEDS)
        raise ValueError(f"no formula for {algorithm!r} {direction!r}; known: {known}")
    return _NEEDS[algorithm, direction]


def _standard(s: Sizes, capacity: int | None, backward: bool) -> tuple[int, int]:
    square, q, k = s.seqlen_q * s.seqlen_k, s.seqlen_q * s.head_dim, s.seqlen_k * s.head_dim
    passes = 1 if row_fits(capacity, s.seqlen_k, 1 + backward) else 2  # of softmax
    by_rows = s.seqlen_q // s.block_q * k  # K, or V, for each block of queries
    if backward:
        by_cols = s.seqlen_k // s.block_k * q
        # dV, dQ and dK read a square; dP does not.
        return (3 + 2 * passes) * square + q + 2 * by_rows + 2 * by_cols, 2 * square + q + 2 * k
    read, written = (1 + passes) * square + q + 2 * by_rows, 2 * square + q
    return (read + 2 * square, written + square) if s.causal else (read, written)


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

    Raises:
        ValueError: capacity is below 1.

    >>> from labsupport.analysis.traffic import Sizes
    >>> theorem(Sizes(1024, 1024, 64, block_q=64, block_k=64), capacity=65_536)
    65536.0
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}: at least 1 element")
    return sizes.seqlen_q * sizes.seqlen_k * sizes.head_dim**2 / capacity


def elements_needed(algorithm: str, direction: str, sizes: Sizes) -> int:
    """Largest number of elements that an algorithm needs at a time, with these blocks.

    Raises:
        ValueError: no such algorithm.
    """
    br, bc, d = sizes.block_q, sizes.block_k, sizes.head_dim
    return max(
        (rows * br + cols * bc) * d + tiles * br * bc + vectors * br
        for rows, cols, tiles, vectors in _needs(algorithm, direction)
    )


def fitting_blocks(
    algorithm: str, direction: str, capacity: int, head_dim: int, *, power_of_two: bool = False
) -> tuple[int, int]:
    """B_r and B_c that fit: the paper's rule, counting everything in fast memory.

    The block that decides the traffic is as large as fits (of keys where those are outside, else of
    queries); the other has as many rows, but d at most.

    Args:
        power_of_two: the large one is rounded down to a power of two, so that it divides lengths.

    Raises:
        ValueError: not even one row fits, or no such algorithm.

    >>> fitting_blocks("version2", "forward", capacity=4096, head_dim=16)
    (67, 16)
    """
    keys_stay = algorithm == "version1" or (algorithm, direction) == ("version2", "backward")

    def blocks(large: int) -> tuple[int, int]:
        small = min(large, head_dim)
        return (small, large) if keys_stay else (large, small)

    def fits(large: int) -> bool:
        sizes = Sizes(1, 1, head_dim, *blocks(large))
        return elements_needed(algorithm, direction, sizes) <= capacity

    large = 0
    # The largest that fits, bit by bit: needs grow with blocks.
    for power in reversed(range(int(capacity).bit_length())):
        large += (1 << power) * fits(large + (1 << power))
    if not large:
        raise ValueError(f"a memory of {capacity} elements holds no block of head_dim {head_dim}")
    return blocks(1 << (large.bit_length() - 1) if power_of_two else large)
