"""FLOPs and compulsory bytes of a case's passes.

    pass       FLOPs       bytes that must move, each once
    forward    4 pairs d   Q, K, V in; O, L out
    backward   10 pairs d  Q, K, V, O, dO, L in; dQ, dK, dV out

`pairs` are the visible (query, key) pairs of all heads. Keys that no query sees need not move, and
a group of query heads shares one head of K and V. The bytes are compulsory: a kernel whose tiles
read K and V again and again moves more, unless a cache helps (`labsupport.analysis.traffic`).

Source: FlashAttention-2 (2023), section 4.1, for the FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.attention.masks import AttentionMask
from labsupport.profiling.cases import ITEMSIZE, NO_WINDOW, Case


@dataclass(frozen=True)
class Pass:
    """FLOPs and compulsory bytes of one direction."""

    flops: float
    bytes: int


def passes_of(case: Case, window_size: tuple[int, int] = NO_WINDOW) -> list[Pass]:
    """The case's forward, and where it has one its backward.

    Args:
        window_size: (left, right) neighbours that a query sees, -1 for no limit.
    """
    band = AttentionMask.of(
        case.seqlen, case.kv_seqlen, causal=case.causal, window_size=window_size
    )
    pairs = case.batch * case.heads * band.visible_pairs()
    first, last = band.keys_seen(0, case.seqlen)
    row = case.head_dim * ITEMSIZE[case.dtype]
    of_q = case.batch * case.heads * case.seqlen * row
    of_k = case.batch * case.kv_heads * (last - first) * row
    lse = case.batch * case.heads * case.seqlen * (8 if case.dtype == "float64" else 4)
    # The gradients of keys that nobody sees are zeros, and still have to be written.
    of_dk = case.batch * case.kv_heads * case.kv_seqlen * row
    forward = Pass(4 * pairs * case.head_dim, 2 * of_q + 2 * of_k + lse)
    if case.direction == "forward":
        return [forward]
    backward = Pass(10 * pairs * case.head_dim, 4 * of_q + 2 * of_k + 2 * of_dk + lse)
    return [forward, backward]


def bytes_of(case: Case, window_size: tuple[int, int] = NO_WINDOW) -> int:
    """Bytes that must pass between a fused kernel and the large memory: each tensor once."""
    return sum(part.bytes for part in passes_of(case, window_size))
