"""One head of attention in slow memory, cut into blocks: what all counted algorithms share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from labsupport.analysis.traffic.memory import FastMemory, Slow
from labsupport.attention.masks import Band


@dataclass(frozen=True)
class Sizes:
    """One head: N_q queries and N_k keys of d numbers; tiles of B_r rows and B_c columns.

    Raises:
        ValueError: a size below 1.
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    block_q: int
    block_k: int
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("seqlen_q", "seqlen_k", "head_dim", "block_q", "block_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5

    @property
    def band(self) -> Band:
        """Which keys a query sees."""
        return Band.of(self.seqlen_q, self.seqlen_k, causal=self.causal)

    @property
    def divisible(self) -> bool:
        """Whether the blocks cut both lengths without a rest."""
        return self.seqlen_q % self.block_q == 0 and self.seqlen_k % self.block_k == 0

    def all_rows(self) -> list[slice]:
        """The blocks of queries."""
        return _cut(0, self.seqlen_q, self.block_q, self.seqlen_q)

    def all_cols(self) -> list[slice]:
        """The blocks of keys."""
        return _cut(0, self.seqlen_k, self.block_k, self.seqlen_k)

    def cols_seen(self, rows: slice) -> list[slice]:
        """The blocks of keys of which the queries `rows` see at least one; blocks stay whole."""
        return _cut(*self.band.keys_seen(rows.start, rows.stop), self.block_k, self.seqlen_k)

    def rows_seeing(self, cols: slice) -> list[slice]:
        """The blocks of queries that see at least one of the keys `cols`."""
        return _cut(*self.band.queries_seeing(cols.start, cols.stop), self.block_q, self.seqlen_q)

    def tiles(self) -> int:
        """How many tiles are not hidden altogether."""
        return sum(len(self.cols_seen(rows)) for rows in self.all_rows())


@dataclass
class Head:
    """The tensors of one head, in slow memory; results appear there too.

    lse, m and l are (N, 1). The backward needs `dout`, and what the forward left.
    """

    sizes: Sizes
    q: Slow
    k: Slow
    v: Slow
    out: Slow
    m: Slow
    l: Slow
    lse: Slow
    dout: Slow
    dq: Slow
    dk: Slow
    dv: Slow

    @classmethod
    def of(cls, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None) -> Head:
        """Put (N_q, d) and (N_k, d) tensors into slow memory, and room for the results."""
        column = torch.empty(sizes.seqlen_q, 1, dtype=q.dtype, device=q.device)
        empty = {"out": q, "m": column, "l": column, "lse": column, "dq": q, "dk": k, "dv": v}
        given = {"q": q, "k": k, "v": v, "dout": torch.zeros_like(q) if dout is None else dout}
        tensors = given | {name: torch.full_like(like, torch.nan) for name, like in empty.items()}
        return cls(sizes, **{name: Slow(_NAMES[name], x) for name, x in tensors.items()})

    def square(self, chip: FastMemory, name: str) -> Slow:
        """Room for an N_q x N_k matrix in slow memory."""
        return chip.room(name, self.sizes.seqlen_q, self.sizes.seqlen_k, self.q.values.dtype)


_NAMES = {
    "q": "Q", "k": "K", "v": "V", "out": "O", "m": "m", "l": "l", "lse": "L",
    "dout": "dO", "dq": "dQ", "dk": "dK", "dv": "dV",
}  # fmt: skip


def hide(chip: FastMemory, scores: Tensor, sizes: Sizes, rows: slice, cols: slice) -> Tensor:
    """-inf where a query may not look, in place. Positions are known; they take no room."""
    with chip.aside():
        visible = sizes.band.mask(rows, cols, scores.device)
        if visible is not None:
            scores.masked_fill_(~visible, -torch.inf)
    return scores


def finite(x: Tensor) -> Tensor:
    """0 where x is -inf, which happens in rows that have seen no key yet; in place."""
    return x.masked_fill_(x == -torch.inf, 0.0)


def nonzero(x: Tensor) -> Tensor:
    """1 where x is 0, a copy."""
    return x.masked_fill(x == 0, 1.0)


def _cut(start: int, stop: int, size: int, end: int) -> list[slice]:
    return list(_whole_blocks(start, stop, size, end))


def _whole_blocks(start: int, stop: int, size: int, end: int) -> Iterator[slice]:
    for i in range(start // size * size, stop, size):
        yield slice(i, min(i + size, end))
