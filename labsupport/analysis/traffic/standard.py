"""Textbook attention, one kernel for each step, which loads what the step before has stored.

    forward    S = tau Q K^T     (mask)     P = softmax(S)     O = P V
    backward   dV = P^T dO     dP = dO V^T     dS = P * (dP - rowsum(P * dP))
               dQ = tau dS K     dK = tau dS^T Q

The products are tiled for the fast memory as well: a block of the left operand stays while the
right one passes. Softmax takes whole rows if one fits, and otherwise passes twice over S.
"""

from __future__ import annotations

import torch

from labsupport.analysis.traffic.fast_memory import FastMemory, Slow
from labsupport.analysis.traffic.problem import Head, Sizes

ROW_VECTORS = 4  # numbers beside a row that softmax holds: maximum, sum, and what leads to them


def forward(chip: FastMemory, head: Head) -> Slow:
    """Fill head.out; return P in slow memory, which the backward needs."""
    scores, weights = head.square(chip, "S"), head.square(chip, "P")
    _outer(chip, head, head.q, head.k, scores, head.sizes.scale)
    if head.sizes.causal:
        _mask(chip, head, scores)
    _softmax(chip, head.sizes, scores, weights)
    _product(chip, head, weights, head.v, head.out)
    return weights


def backward(chip: FastMemory, head: Head, weights: Slow) -> None:
    """Fill head.dq, dk and dv from P."""
    dweights, dscores = head.square(chip, "dP"), head.square(chip, "dS")
    _product(chip, head, weights, head.dout, head.dv, transposed=True)
    _outer(chip, head, head.dout, head.v, dweights)
    _softmax_backward(chip, head.sizes, weights, dweights, dscores)
    _product(chip, head, dscores, head.k, head.dq, head.sizes.scale)
    _product(chip, head, dscores, head.q, head.dk, head.sizes.scale, transposed=True)


def row_fits(capacity: int | None, seqlen_k: int, matrices: int = 1) -> bool:
    """Return whether softmax can hold a whole row of `matrices` square matrices."""
    return capacity is None or matrices * seqlen_k + ROW_VECTORS <= capacity


def _outer(
    chip: FastMemory, head: Head, left: Slow, right: Slow, out: Slow, scale: float = 1.0
) -> None:
    """Multiply (N_q, d) by (d, N_k)."""
    for rows in head.sizes.all_rows():
        a = chip.load(left[rows])
        for cols in head.sizes.all_cols():
            chip.store(out[rows, cols], (a @ chip.load(right[cols]).mT).mul_(scale))
        del a


def _product(
    chip: FastMemory, head: Head, square: Slow, right: Slow, out: Slow, scale: float = 1.0,
    transposed: bool = False,
) -> None:  # fmt: skip
    """Multiply (N_q, N_k), or its transpose, by d columns."""
    outside, inside = head.sizes.all_rows(), head.sizes.all_cols()
    if transposed:
        outside, inside = inside, outside
    for own in outside:
        acc = torch.zeros(own.stop - own.start, head.sizes.head_dim, dtype=right.values.dtype)
        for other in inside:
            tile = chip.load(square[(other, own) if transposed else (own, other)])
            acc.addmm_(tile.mT if transposed else tile, chip.load(right[other]))
            del tile
        chip.store(out[own], acc.mul_(scale))
        del acc


def _mask(chip: FastMemory, head: Head, scores: Slow) -> None:
    """Read S and a matrix of zeros and -inf, and write their sum."""
    mask = head.square(chip, "mask")
    with chip.aside():
        visible = head.sizes.band.full_mask()
        if visible is not None:
            mask.values.masked_fill_(~visible, -torch.inf)
    for rows in head.sizes.all_rows():
        for cols in head.sizes.all_cols():
            tile = chip.load(scores[rows, cols]).add_(chip.load(mask[rows, cols]))
            chip.store(scores[rows, cols], tile)
            del tile


def _softmax(chip: FastMemory, sizes: Sizes, scores: Slow, weights: Slow) -> None:
    whole, outside, inside = _passes(chip, sizes, 1)
    for rows in outside:
        m = torch.full((rows.stop - rows.start, 1), -torch.inf, dtype=scores.values.dtype)
        l = torch.zeros_like(m)
        for cols in inside:
            tile = chip.load(scores[rows, cols])
            new = torch.maximum(m, tile.amax(1, keepdim=True))
            l.mul_(m.sub_(new).nan_to_num_(nan=0.0).exp_())
            l.add_(tile.sub_(new.clamp(min=-1e300)).exp_().sum(1, keepdim=True))
            m = new
            if whole:
                chip.store(weights[rows, cols], tile.div_(l.clamp_(min=1e-300)))
            del tile, new
        m.clamp_(min=-1e300)
        for cols in () if whole else inside:
            tile = chip.load(scores[rows, cols])
            chip.store(weights[rows, cols], tile.sub_(m).exp_().div_(l.clamp(min=1e-300)))
            del tile
        del m, l


def _softmax_backward(
    chip: FastMemory, sizes: Sizes, weights: Slow, dweights: Slow, dscores: Slow
) -> None:
    whole, outside, inside = _passes(chip, sizes, 2)
    for rows in outside:
        delta = torch.zeros((rows.stop - rows.start, 1), dtype=weights.values.dtype)
        for cols in inside:
            p, dp = chip.load(weights[rows, cols]), chip.load(dweights[rows, cols])
            delta.add_(dp.mul_(p).sum(1, keepdim=True))  # dp holds p * dp from here on
            if whole:
                chip.store(dscores[rows, cols], dp.sub_(p.mul_(delta)))
            del p, dp
        for cols in () if whole else inside:
            p, dp = chip.load(weights[rows, cols]), chip.load(dweights[rows, cols])
            chip.store(dscores[rows, cols], dp.sub_(delta).mul_(p))
            del p, dp
        del delta


def _passes(chip: FastMemory, sizes: Sizes, matrices: int) -> tuple[bool, list[slice], list[slice]]:
    """Return whether whole rows fit, so that one pass does; the blocks of rows; and of columns."""
    if row_fits(chip.capacity, sizes.seqlen_k, matrices):
        rows = [slice(i, i + 1) for i in range(sizes.seqlen_q)]
        return True, rows, [slice(0, sizes.seqlen_k)]
    return False, sizes.all_rows(), sizes.all_cols()
