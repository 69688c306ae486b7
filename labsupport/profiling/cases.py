"""Cases to measure: one case, a grid of cases, and the FLOPs and compulsory bytes of each.

    pass       FLOPs       bytes that must move, each once
    forward    4 pairs d   Q, K, V in; O, L out
    backward   10 pairs d  Q, K, V, O, dO, L in; dQ, dK, dV out

`pairs` are the visible (query, key) pairs of all heads: a causal mask counts only what it leaves
visible. The forward has two matrix products, of 2 FLOPs per multiply-add; the backward recomputes S
and needs four more (FlashAttention-2 paper, section 4.1). Every implementation is charged the same
FLOPs, whatever it really executes, so that TFLOP/s compare times.

Keys that no query sees need not move, and a group of query heads shares one head of K and V. The
bytes are compulsory: a kernel whose tiles read K and V again and again moves more, unless a cache
helps (`labsupport.analysis.traffic`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from labsupport.attention.masks import AttentionMask

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
DTYPES = tuple(ITEMSIZE)
DIRECTIONS = ("forward", "forward+backward")
NO_WINDOW = (-1, -1)


@dataclass(frozen=True)
class Case:
    """One measurement to make.

    q is (batch, seqlen, heads, head_dim); k and v are (batch, kv_seqlen, kv_heads, head_dim).
    kv_heads and kv_seqlen default to heads and seqlen.

    Raises:
        ValueError: a size that is not positive, or an unknown dtype or direction.

    >>> Case("sdpa_flash", 4096, heads=8, causal=True).flops()
    17184063488
    """

    backend: str
    seqlen: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    direction: str = "forward"
    kv_seqlen: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "kv_seqlen", self.kv_seqlen or self.seqlen)
        for field in ("seqlen", "kv_seqlen", "batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.direction not in DIRECTIONS:
            raise ValueError(
                f"unknown direction {self.direction!r}; known: {', '.join(DIRECTIONS)}"
            )

    def flops(self) -> float:
        """FLOPs of the case by the rule above."""
        return sum(part.flops for part in passes_of(self))


def grid(backends: Sequence[str], seqlens: Sequence[int], **axes: Any) -> list[Case]:
    """All combinations, as cases; backends vary fastest, so that one shape is compared at a time.

    Args:
        backends, seqlens: lists of names and of lengths.
        axes: any further field of `Case`, a single value or a list of values.

    Example:
        >>> len(grid(["standard", "sdpa_flash"], [512, 1024], causal=[False, True]))
        8
    """
    known = [field.name for field in fields(Case)]
    unknown = sorted(set(axes) - set(known))
    if unknown:
        raise ValueError(f"no such axis: {', '.join(unknown)}; known: {', '.join(known)}")
    lists = {
        name: list(value) if isinstance(value, (list, tuple, range)) else [value]
        for name, value in axes.items()
    }
    return [
        Case(backend=backend, seqlen=seqlen, **dict[str, Any](zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
        for seqlen in seqlens
        for backend in backends
    ]


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
