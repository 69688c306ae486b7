"""Run an algorithm on real numbers and count what passes; tables over grids of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from labsupport.analysis.traffic import flash, standard
from labsupport.analysis.traffic.formulas import closed_form, fitting_blocks, theorem
from labsupport.analysis.traffic.memory import FastMemory
from labsupport.analysis.traffic.problem import Head, Sizes

if TYPE_CHECKING:
    import pandas as pd

_FORWARDS = {
    "standard": standard.forward,
    "version1": flash.forward_version1,
    "version2": flash.forward_version2,
}
_BACKWARDS = {
    "version1": flash.backward_version1,
    "version2": flash.backward_version2,
    "two_pass": flash.backward_two_pass,
}
FORWARD = tuple(_FORWARDS)
BACKWARD = ("standard", *_BACKWARDS)


@dataclass(frozen=True)
class Traffic:
    """Elements that passed between fast and slow memory in one run.

    read, written: by the name of the tensor in slow memory.
    peak: elements in fast memory at most; capacity: M, None if it was not limited.
    results: out, or dq, dk, dv: to be compared with the oracle.
    """

    algorithm: str
    direction: str
    sizes: Sizes
    capacity: int | None
    peak: int
    read: dict[str, int]
    written: dict[str, int]
    results: tuple[Tensor, ...] = field(repr=False)

    @property
    def total(self) -> int:
        """Elements in both directions."""
        return sum(self.read.values()) + sum(self.written.values())


def count(
    algorithm: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dout: Tensor | None = None,
    causal: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    capacity: int | None = None,
) -> Traffic:
    """Run one head through an algorithm, in a fast memory that counts.

    Args:
        algorithm: "standard", "version1", "version2"; for a backward also "two_pass".
        q: (N_q, d); k, v: (N_k, d); float64 or float32, on the CPU.
        dout: (N_q, d): count the backward pass instead of the forward.
        block_q, block_k: rows and columns of a tile; `fitting_blocks` of `capacity` unless given.
        capacity: M, in elements; None for a fast memory without limit (blocks must be given then).

    Raises:
        OutOfFastMemoryError: the blocks do not fit.
        ValueError: an unknown algorithm, or neither blocks nor a capacity.

    >>> q, k, v = torch.randn(3, 64, 8)
    >>> textbook, tiled = (count(one, q, k, v, capacity=1024) for one in ("standard", "version2"))
    >>> textbook.total > 4 * tiled.total
    True
    """
    direction = "forward" if dout is None else "backward"
    known = FORWARD if dout is None else BACKWARD
    if algorithm not in known:
        raise ValueError(f"no algorithm {algorithm!r} for a {direction}; known: {', '.join(known)}")
    if block_q is None or block_k is None:
        if capacity is None:
            raise ValueError("give block_q and block_k, or the capacity that they must fit into")
        chosen = fitting_blocks(algorithm, direction, capacity, q.shape[-1])
        block_q, block_k = block_q or chosen[0], block_k or chosen[1]
    block_q, block_k = min(block_q, len(q)), min(block_k, len(k))
    sizes = Sizes(len(q), len(k), q.shape[-1], block_q, block_k, causal)
    head = Head(sizes, q.double(), k.double(), v.double(), None if dout is None else dout.double())
    chip, results = FastMemory(capacity), (head.out,)
    with torch.no_grad():
        forward = _FORWARDS.get(algorithm, flash.forward_version2)
        with chip if dout is None else FastMemory() as first:
            weights = forward(first, head)  # P, which only the textbook leaves
        if dout is not None:
            results = head.dq, head.dk, head.dv
            with chip:
                if weights is None:
                    _BACKWARDS[algorithm](chip, head)
                else:
                    standard.backward(chip, head, weights)
    return Traffic(
        algorithm, direction, sizes, capacity, chip.peak, dict(chip.read), dict(chip.written),
        tuple(slow.values for slow in results),
    )  # fmt: skip


def traffic_table(
    algorithms: Sequence[str] = FORWARD,
    *,
    seqlens: Iterable[int] = (256, 512, 1024),
    head_dims: Iterable[int] = (16,),
    capacities: Iterable[int] = (4096,),
    causal: bool = False,
    direction: str = "forward",
) -> pd.DataFrame:
    """Count every combination of lengths, head dimensions and fast memories.

    Blocks are powers of two that fit into M. Where they divide the length, `formula` must agree.

    Returns:
        A row a run: algorithm, direction, causal, seqlen, head_dim, capacity, block_q, block_k,
        peak, read, written, total, formula, theorem (N^2 d^2 / M), of_theorem (total / theorem).

    >>> table = traffic_table(["version1", "version2"], seqlens=(64,), head_dims=(8,))
    >>> (table.total == table.formula).tolist()
    [True, True]
    """
    import pandas as pd

    rows = []
    for n, d, capacity, name in itertools.product(seqlens, head_dims, capacities, algorithms):
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = torch.randn(4, n, d, generator=generator, dtype=torch.float64)
        blocks = fitting_blocks(name, direction, capacity, d, power_of_two=True)
        run = count(
            name, q, k, v, dout=dout if direction == "backward" else None, causal=causal,
            block_q=blocks[0], block_k=blocks[1], capacity=capacity,
        )  # fmt: skip
        sizes, least = run.sizes, theorem(run.sizes, capacity)
        formula = sum(closed_form(name, direction, sizes, capacity)) if sizes.divisible else None
        rows.append(
            {
                "algorithm": name, "direction": direction, "causal": causal, "seqlen": n,
                "head_dim": d, "capacity": capacity, "block_q": sizes.block_q,
                "block_k": sizes.block_k, "peak": run.peak, "read": sum(run.read.values()),
                "written": sum(run.written.values()), "total": run.total, "formula": formula,
                "theorem": least, "of_theorem": run.total / least,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def exponent(table: pd.DataFrame, along: str, column: str = "total") -> float:
    """The power with which a count grows along "seqlen", "head_dim" or "capacity".

    The slope of a least-squares line through the logarithms.

    Raises:
        ValueError: fewer than two values along that axis, or another one varies as well.

    >>> table = traffic_table(["standard"], seqlens=(64, 128, 256), head_dims=(8,))
    >>> round(exponent(table, "seqlen"), 1)
    1.9
    """
    others = {"algorithm", "direction", "causal", "seqlen", "head_dim", "capacity"} - {along}
    mixed = sorted(name for name in others if name in table and table[name].nunique() > 1)
    if mixed:
        raise ValueError(f"the table mixes {', '.join(mixed)}")
    if table[along].nunique() < 2:
        raise ValueError(f"one value of {along} only")
    x, y = (np.log(table[name].to_numpy(dtype=float)) for name in (along, column))
    return float(np.polyfit(x, y, 1)[0])
