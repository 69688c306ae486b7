"""One head of attention in slow memory, cut into blocks: what all counted algorithms share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labsupport.analysis.traffic.fast_memory import FastMemory, Slow
from labsupport.attention.masks import AttentionMask


@dataclass(frozen=True)
class Sizes:
    """One head: N_q queries and N_k keys of d numbers; tiles of B_r rows and B_c columns.

    Raises:
        ValueError: a size below 1, or causal that is no bool.
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    block_q: int
    block_k: int
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("seqlen_q", "seqlen_k", "head_dim", "block_q", "block_k"):
            size = getattr(self, name)
            if size < 1 or size % 1:
                raise ValueError(f"{name} must be a whole number, at least 1, got {size}")
        if self.causal not in (True, False):
            raise ValueError(f"causal must be True or False, got {self.causal!r}")

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5

    @property
    def band(self) -> AttentionMask:
        """Keys that each query sees."""
        return AttentionMask.of(self.seqlen_q, self.seqlen_k, causal=self.causal)

    @property
    def divisible(self) -> bool:
        """True if the blocks divide both lengths."""
        return self.seqlen_q % self.block_q == 0 and self.seqlen_k % self.block_k == 0

    def all_rows(self) -> list[slice]:
        """Return the blocks of queries."""
        return _blocks(0, self.seqlen_q, self.block_q, self.seqlen_q)

    def all_cols(self) -> list[slice]:
        """Return the blocks of keys."""
        return _blocks(0, self.seqlen_k, self.block_k, self.seqlen_k)

    def cols_seen(self, rows: slice) -> list[slice]:
        """Return the blocks of keys that hold one seen by the queries `rows`; blocks stay whole."""
        return _blocks(*self.band.keys_seen(rows.start, rows.stop), self.block_k, self.seqlen_k)

    def rows_seeing(self, cols: slice) -> list[slice]:
        """Return the blocks of queries that hold one that sees a key of `cols`."""
        seeing = self.band.queries_seeing(cols.start, cols.stop)
        return _blocks(*seeing, self.block_q, self.seqlen_q)


def _blocks(start: int, stop: int, size: int, end: int) -> list[slice]:
    first = start // size * size
    return [slice(i, min(i + size, end)) for i in range(first, stop, size)]


class Head:
    """The tensors of one head in slow memory: inputs, and room for results.

    m, l and lse are (N_q, 1). The backward reads dout, and what the forward left.
    """

    def __init__(
        self, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None
    ) -> None:
        def room(name: str, like: Tensor) -> Slow:
            return Slow(name, torch.full_like(like, torch.nan))

        self.sizes = sizes
        self.q, self.k, self.v = Slow("Q", q), Slow("K", k), Slow("V", v)
        self.dout = Slow("dO", torch.zeros_like(q) if dout is None else dout)
        self.out, self.dq, self.dk, self.dv = map(room, ("O", "dQ", "dK", "dV"), (q, q, k, v))
        self.m, self.l, self.lse = (room(name, q[:, :1]) for name in "mlL")

    def square(self, chip: FastMemory, name: str) -> Slow:
        """Make room for an N_q x N_k matrix in slow memory."""
        return chip.room(name, self.sizes.seqlen_q, self.sizes.seqlen_k, self.q.values.dtype)

    def scores(self, chip: FastMemory, q: Tensor, k: Tensor, rows: slice, cols: slice) -> Tensor:
        """Return a tile of S, -inf where hidden. (Positions are known; they take no room.)"""
        tile = (q @ k.mT).mul_(self.sizes.scale)
        with chip.aside():
            visible = self.sizes.band.mask(rows, cols, tile.device)
            if visible is not None:
                tile.masked_fill_(~visible, -torch.inf)
        return tile


def finite(x: Tensor) -> Tensor:
    """Put 0 where x is -inf, as in rows that have seen no key yet; in place."""
    return x.masked_fill_(x == -torch.inf, 0.0)


def nonzero(x: Tensor) -> Tensor:
    """Return a copy with 1 where x is 0."""
    return x.masked_fill(x == 0, 1.0)
