"""Bytes of the lab's own Triton kernels, by their tiling: what counters on a GPU should show.

Two counts for each kernel. *To the multiprocessors*: whatever tiles its programs ask for. This is
what theorem 2 is about: the fast memory is one multiprocessor's, and everything else is slow. *To
the large memory*: each tensor once; repeated reads are the L2 cache's affair.

    forward   a program: Q_i once, then K_j, V_j for each tile; writes O_i, L_i
    rows      dO, O, L; writes two numbers a query (shift and D)
    keys      a program: K_j, V_j once, then Q_i, dO_i and the two numbers; writes dK_j, dV_j
    queries   a program: Q_i, dO_i, the two numbers once, then K_j, V_j; writes dQ_i
"""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.analysis.traffic.problem import Sizes
from labsupport.profiling.cases import Case

KERNELS = ("forward", "rows", "keys", "queries")
NUMBER = 4  # bytes of a float32: L, shift, D


@dataclass(frozen=True)
class KernelBytes:
    """read, written: between L2 and the multiprocessors; compulsory: each tensor's bytes once."""

    kernel: str
    read: int
    written: int
    compulsory: int

    @property
    def total(self) -> int:
        """Between L2 and the multiprocessors, both ways."""
        return self.read + self.written


def kernel_bytes(kernel: str, case: Case, block_q: int, block_k: int) -> KernelBytes:
    """Bytes of one launch of a kernel of `flash_triton` or its version for Hopper.

    Args:
        kernel: "forward", "rows", "keys" or "queries".
        case: gives shape, mask and dtype; its backend and direction do not matter.
        block_q, block_k: the tiling, as `attention.kernels.config.tiling` chooses it.

    Raises:
        ValueError: no such kernel.
    """
    if kernel not in KERNELS:
        raise ValueError(f"no kernel {kernel!r}; known: {', '.join(KERNELS)}")
    itemsize = {"float64": 8, "float32": 4}.get(case.dtype, 2)
    sizes = Sizes(case.seqlen, case.kv_seqlen, case.head_dim, block_q, block_k, case.causal)
    heads, kv_heads = case.batch * case.heads, case.batch * case.kv_heads
    of_q = heads * case.seqlen * case.head_dim * itemsize  # bytes of Q, of O, of dO, of dQ
    of_k = kv_heads * case.kv_seqlen * case.head_dim * itemsize
    numbers = heads * case.seqlen * NUMBER
    row = case.head_dim * itemsize
    if kernel == "rows":
        read, written = 2 * of_q + numbers, 2 * numbers
        return KernelBytes(kernel, read, written, read + written)
    if kernel == "keys":
        passing = heads * _rows_passing(sizes) * (2 * row + 2 * NUMBER)
        return KernelBytes(kernel, 2 * of_k + passing, 2 * of_k, 2 * of_q + 2 * numbers + 4 * of_k)
    passing = heads * _cols_passing(sizes) * 2 * row
    if kernel == "forward":
        return KernelBytes(kernel, of_q + passing, of_q + numbers, 2 * of_q + numbers + 2 * of_k)
    staying = 2 * of_q + 2 * numbers
    return KernelBytes(kernel, staying + passing, of_q, staying + of_q + 2 * of_k)


def _rows_passing(sizes: Sizes) -> int:
    """Queries that pass by all blocks of keys, one head."""
    blocks = (rows for cols in sizes.all_cols() for rows in sizes.rows_seeing(cols))
    return sum(rows.stop - rows.start for rows in blocks)


def _cols_passing(sizes: Sizes) -> int:
    """Keys that pass by all blocks of queries, one head."""
    blocks = (cols for rows in sizes.all_rows() for cols in sizes.cols_seen(rows))
    return sum(cols.stop - cols.start for cols in blocks)
