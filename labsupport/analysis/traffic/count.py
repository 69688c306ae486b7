"""Run an algorithm on real numbers and count what passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from labsupport.analysis.traffic import flash, standard
from labsupport.analysis.traffic.fast_memory import FastMemory
from labsupport.analysis.traffic.formulas import fitting_blocks
from labsupport.analysis.traffic.problem import Head, Sizes

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
        ValueError: an unknown algorithm, shapes or dtypes that do not fit, neither blocks nor a
            capacity.

    >>> q, k, v = torch.randn(3, 64, 8)
    >>> textbook, tiled = (count(one, q, k, v, capacity=1024) for one in ("standard", "version2"))
    >>> textbook.total > 4 * tiled.total
    True
    """
    direction = "forward" if dout is None else "backward"
    known = FORWARD if dout is None else BACKWARD
    if algorithm not in known:
        raise ValueError(f"no algorithm {algorithm!r} for a {direction}; known: {', '.join(known)}")
    dout_like = q if dout is None else dout
    fits = q.ndim == 2 and k.shape == v.shape and k.shape[1:] == q.shape[1:]
    floating = all(tensor.is_floating_point() for tensor in (q, k, v, dout_like))
    if not (fits and floating) or dout_like.shape != q.shape:
        raise ValueError(
            "q and dout must be (N_q, d), k and v (N_k, d), floating; "
            f"{[(tuple(x.shape), x.dtype) for x in (q, dout_like, k, v)]} were given"
        )
    if block_q is None or block_k is None:
        if capacity is None:
            raise ValueError("give block_q and block_k, or the capacity that they must fit into")
        chosen = fitting_blocks(algorithm, direction, capacity, q.shape[-1])
        block_q = chosen[0] if block_q is None else block_q
        block_k = chosen[1] if block_k is None else block_k
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
