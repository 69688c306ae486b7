"""FlashAttention in a fast memory of M elements: the loop orders of its versions.

    forward   version1   keys outside; O, m, l are loaded and stored for each block of keys
              version2   queries outside; O stays, K and V pass
    backward  version1   keys outside; dQ is loaded and stored
              version2   keys outside; dQ is sent as atomic additions
              two_pass   dK, dV with keys outside, then dQ with queries outside: the lab's kernels

Sources: Dao et al., "FlashAttention" (2022), algorithms 1 and 4; Dao, "FlashAttention-2" (2023),
algorithms 1 and 2; the lab's own Triton kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labsupport.analysis.traffic.fast_memory import FastMemory, Slow
from labsupport.analysis.traffic.problem import Head, finite, nonzero


def forward_version1(chip: FastMemory, head: Head) -> None:
    """Fill head.out, m and l."""
    for slow, start in ((head.out, 0.0), (head.m, -torch.inf), (head.l, 0.0)):
        chip.store(slow, start)
    for cols in head.sizes.all_cols():
        k, v = chip.load(head.k[cols]), chip.load(head.v[cols])
        for rows in head.sizes.rows_seeing(cols):
            q, o = chip.load(head.q[rows]), chip.load(head.out[rows])
            m, l = chip.load(head.m[rows]), chip.load(head.l[rows])
            s = head.scores(chip, q, k, rows, cols)
            m_new = torch.maximum(m, s.amax(1, keepdim=True))
            chip.store(head.m[rows], m_new)
            p = s.sub_(finite(m_new)).exp_()
            kept = l.mul_(m.sub_(m_new).exp_())
            l_new = p.sum(1, keepdim=True).add_(kept)
            chip.store(head.l[rows], l_new)
            divisor = nonzero(l_new)
            o.mul_(kept.div_(divisor)).addmm_(p.div_(divisor), v)
            chip.store(head.out[rows], o)
            del q, o, m, l, s, m_new, p, kept, l_new, divisor
        del k, v


def forward_version2(chip: FastMemory, head: Head) -> None:
    """Fill head.out and lse."""
    for rows in head.sizes.all_rows():
        q = chip.load(head.q[rows])
        o = torch.zeros_like(q)
        m, l = torch.full_like(q[:, :1], -torch.inf), torch.zeros_like(q[:, :1])
        for cols in head.sizes.cols_seen(rows):
            k, v = chip.load(head.k[cols]), chip.load(head.v[cols])
            s = head.scores(chip, q, k, rows, cols)
            m_new = torch.maximum(m, s.amax(1, keepdim=True))
            shift = finite(m_new.clone())
            p = s.sub_(shift).exp_()
            alpha = m.sub_(shift).exp_()
            l.mul_(alpha).add_(p.sum(1, keepdim=True))
            o.mul_(alpha).addmm_(p, v)
            m = m_new
            del k, v, s, p, m_new, shift, alpha
        chip.store(head.out[rows], o.div_(nonzero(l)))
        chip.store(head.lse[rows], finite(m).add_(l.log()))
        del q, o, m, l


def backward_version1(chip: FastMemory, head: Head) -> None:
    """Fill head.dq, dk and dv from m and l; D is computed again for each tile."""
    chip.store(head.dq, 0.0)
    _keys_outside(chip, head, None, "load dQ")


def backward_version2(chip: FastMemory, head: Head) -> None:
    """Fill head.dq, dk and dv from lse; additions to dQ are the slow memory's work."""
    chip.store(head.dq, 0.0)
    _keys_outside(chip, head, _row_sums(chip, head), "add dQ")


def backward_two_pass(chip: FastMemory, head: Head) -> None:
    """Fill head.dk and dv, then head.dq; S and dP are computed in both passes."""
    row_sums = _row_sums(chip, head)
    _keys_outside(chip, head, row_sums, "no dQ")
    for rows in head.sizes.all_rows():
        q, do = chip.load(head.q[rows]), chip.load(head.dout[rows])
        lse, delta = chip.load(head.lse[rows]), chip.load(row_sums[rows])
        dq = torch.zeros_like(q)
        for cols in head.sizes.cols_seen(rows):
            k, v = chip.load(head.k[cols]), chip.load(head.v[cols])
            p = head.scores(chip, q, k, rows, cols).sub_(finite(lse)).exp_()
            ds = _dscores(p, do, v, delta, head.sizes.scale)
            dq.addmm_(ds, k)
            del k, v, p, ds
        chip.store(head.dq[rows], dq)
        del q, do, lse, delta, dq


def _row_sums(chip: FastMemory, head: Head) -> Slow:
    """D = rowsum(dO * O), in slow memory: a kernel before the loops."""
    result = chip.room("D", head.sizes.seqlen_q, 1, head.q.values.dtype)
    for rows in head.sizes.all_rows():
        product = chip.load(head.out[rows])
        chip.store(result[rows], product.mul_(chip.load(head.dout[rows])).sum(1, keepdim=True))
        del product
    return result


def _keys_outside(chip: FastMemory, head: Head, row_sums: Slow | None, what: str) -> None:
    """Fill head.dk and dv, and sum up dQ as `what` says; without row sums, version 1's way."""
    for cols in head.sizes.all_cols():
        k, v = chip.load(head.k[cols]), chip.load(head.v[cols])
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for rows in head.sizes.rows_seeing(cols):
            q, do = chip.load(head.q[rows]), chip.load(head.dout[rows])
            if row_sums is None:
                delta = chip.load(head.out[rows]).mul_(do).sum(1, keepdim=True)
                shift, l = chip.load(head.m[rows]), chip.load(head.l[rows])
                p = head.scores(chip, q, k, rows, cols).sub_(finite(shift)).exp_()
                p.div_(nonzero(l))
                del l
            else:
                shift, delta = chip.load(head.lse[rows]), chip.load(row_sums[rows])
                p = head.scores(chip, q, k, rows, cols).sub_(finite(shift)).exp_()
            dv.addmm_(p.mT, do)
            ds = _dscores(p, do, v, delta, head.sizes.scale)
            dk.addmm_(ds.mT, q)
            if what == "load dQ":
                dq = chip.load(head.dq[rows])
                chip.store(head.dq[rows], dq.addmm_(ds, k))
                del dq
            elif what == "add dQ":
                chip.store(head.dq[rows], ds @ k, add=True)
            del q, do, shift, delta, p, ds
        chip.store(head.dk[cols], dk)
        chip.store(head.dv[cols], dv)
        del k, v, dk, dv


def _dscores(p: Tensor, do: Tensor, v: Tensor, delta: Tensor, scale: float) -> Tensor:
    """dS = tau * P * (dO V^T - D), in the room of a second tile."""
    return (do @ v.mT).sub_(delta).mul_(p).mul_(scale)
