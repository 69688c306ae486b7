"""Bytes of the lab's own Triton kernels, by their tiles: what counters on a GPU should show.

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
from labsupport.profiling.work import ITEMSIZE

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
        """Bytes between L2 and the multiprocessors, both ways."""
        return self.read + self.written


def kernel_bytes(kernel: str, case: Case, block_q: int, block_k: int) -> KernelBytes:
    """Bytes of one launch of a Triton kernel of the lab, or of its version for Hopper.

    Args:
        kernel: "forward", "rows", "keys" or "queries".
        case: gives shape, mask and dtype; its backend and direction do not matter.
        block_q, block_k: the tile's sides.

    Raises:
        ValueError: no such kernel.
    """
    sizes = Sizes(case.seqlen, case.kv_seqlen, case.head_dim, block_q, block_k, case.causal)
    heads, row = case.batch * case.heads, case.head_dim * ITEMSIZE[case.dtype]
    q = heads * case.seqlen * row  # bytes of Q, of O, of dO, of dQ
    k = case.batch * case.kv_heads * case.kv_seqlen * row
    numbers = heads * case.seqlen * NUMBER
    if kernel == "rows":
        return KernelBytes(kernel, 2 * q + numbers, 2 * numbers, 2 * q + 3 * numbers)
    if kernel == "keys":
        passing = sum(_length(sizes.rows_seeing(cols)) for cols in sizes.all_cols())
        read = 2 * k + heads * passing * (2 * row + 2 * NUMBER)
        return KernelBytes(kernel, read, 2 * k, 2 * q + 2 * numbers + 4 * k)
    passing = sum(_length(sizes.cols_seen(rows)) for rows in sizes.all_rows())
    passing *= heads * 2 * row
    if kernel == "forward":
        return KernelBytes(kernel, q + passing, q + numbers, 2 * q + numbers + 2 * k)
    if kernel == "queries":
        staying = 2 * q + 2 * numbers
        return KernelBytes(kernel, staying + passing, q, staying + q + 2 * k)
    raise ValueError(f"no kernel {kernel!r}; known: forward, rows, keys, queries")


def _length(blocks: list[slice]) -> int:
    return sum(block.stop - block.start for block in blocks)
