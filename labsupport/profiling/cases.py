"""Cases to measure: one case, a grid of cases, and the FLOPs of each.

Forward: 4 * batch * heads * head_dim * (visible query-key pairs). Forward plus backward counts 3.5
times as much (FlashAttention-2 paper, section 4.1). Every implementation is charged the same FLOPs,
not what it really executes, so that TFLOP/s compare times.
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
        pairs = AttentionMask.of(self.seqlen, self.kv_seqlen, causal=self.causal).visible_pairs()
        forward = 4 * self.batch * self.heads * self.head_dim * pairs
        return forward * (3.5 if self.direction == "forward+backward" else 1)


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
