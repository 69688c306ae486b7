"""Ring attention: every rank keeps its queries, and all keys and values come past.

A sequence of N tokens is cut over W ranks; each holds Q, K and V of its N / W tokens. A query needs
all keys it may see, and those of other ranks travel: in each step a rank sends the K and V it holds
to the next rank and gets those of the one before. Four ranks, causal, which rank holds which K/V:

              step 0     step 1     step 2     step 3
    rank 0    K0 d       -          -          -            d   its own keys: the diagonal
    rank 1    K1 d       K0         -          -                earlier keys: no mask
    rank 2    K2 d       K1         K0         -            -   later keys: hidden, not even sent
    rank 3    K3 d       K2         K1         K0

Besides its own, a rank holds two ranks' keys at most: those it works on, and those that are coming.
The hop is posted before the compute and awaited after it. A block of n queries and n keys costs n^2
work and n of communication, so with long shards the hop hides behind the compute.

Forward. Each step gives a normalised partial output and its log-sum-exp. `merge_attention` adds it
to what came before, in float32 (the online softmax, between whole results instead of tiles).

Backward. Given L, the log-sum-exp of the WHOLE row, and D = rowsum(dO * O) with the whole output,

    P = exp(S - L)    dV = P^T dO    dS = P * (dO V^T - D)    dQ = dS K    dK = dS^T Q

splits over blocks of keys: each block's P is the right slice of the whole row's. So a kernel's
backward, given L and O from outside, returns this block's exact share of the gradients. dQ adds up
where Q is. dK and dV belong to another rank: a second ring carries them behind their keys, in
float32, each rank adds its share, and the last one that sees the keys sends the sums home:

              step 0     step 1        step 2         step 3
    rank 0    dK0        -             -              -
    rank 1    dK1        dK0           -              -
    rank 2    dK2        dK1           dK0 +          -              +      to what came with it
    rank 3    dK3        dK2, home     dK1 +, home    dK0 +, home    home   to the keys' owner

Nothing of size N exists on any rank, and only Q, K, V, O and L are kept for the backward.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (2023), section 3; the merge and the backward from Dao, "FlashAttention-2" (2023), 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.online_softmax import merge_attention
from labsupport.distributed.ring.blocks import Piece
from labsupport.distributed.ring.kernels import BlockKernel, Options
from labsupport.distributed.ring.plan import Plan, direction
from labsupport.distributed.ring.transport import Ring

Messages = list[tuple[Tensor, int]]


@dataclass(frozen=True)
class RingCall:
    """What a ring is told besides its tensors."""

    ring: Ring
    plan: Plan
    kernel: BlockKernel
    scale: float
    slopes: Tensor | None = None

    def pieces(self, distance: int) -> list[Piece]:
        """What this rank computes with keys that have come `distance` ranks."""
        rank = self.ring.rank
        return self.plan.table[rank][self.plan.owner(rank, distance)]

    def options(self, piece: Piece) -> Options:
        """A piece in the kernel's terms."""
        slopes = None if self.slopes is None else piece.slope_sign * self.slopes
        return Options(self.scale, piece.window, slopes)

    def too_high(self, piece: Piece) -> Tensor | float:
        """By how much the kernel's scores exceed the true ones: (..., heads, 1), or 0."""
        return 0.0 if self.slopes is None else (piece.distance * self.slopes)[..., None]


def ring_forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Out (batch, seqlen_local, heads, head_dim) in q's dtype, lse (batch, heads, seqlen_local)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format)
    lse = torch.full_like(out[..., 0], -torch.inf)
    own = torch.stack((k, v))
    held: Tensor | None = own
    for step, distance in enumerate(call.plan.route):
        sends, receives, arriving = _keys_hop(call, step, own, held)
        wait = call.ring.post(sends, receives)
        for piece in call.pieces(distance):
            rows, cols = piece.rows, piece.cols
            assert held is not None
            part, part_lse = call.kernel.forward(
                q[:, rows], held[0, :, cols], held[1, :, cols], call.options(piece)
            )
            out[:, :, rows], lse[:, :, rows] = merge_attention(
                out[:, :, rows],
                lse[:, :, rows],
                part.transpose(1, 2),
                part_lse - call.too_high(piece),
            )
        wait()
        held = arriving
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse


def ring_backward(
    call: RingCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of this rank's shard, in the dtypes of q, k and v."""
    backward = call.kernel.backward
    assert backward is not None  # a kernel without one was refused before the forward
    wide, dout = torch.promote_types(q.dtype, torch.float32), dout.contiguous()
    dq = torch.zeros_like(q, dtype=wide)
    own = torch.stack((k, v))
    held: Tensor | None = own
    at_home = torch.zeros_like(own, dtype=wide)  # dK and dV of this rank's own keys
    finished: Tensor | None = None  # what the step before added to: it leaves in this one
    for step, distance in enumerate((*call.plan.route, None)):
        sends, receives, arriving = _keys_hop(call, step, own, held)
        onward, back = _gradient_hop(call, step, finished, at_home, sends, receives)
        wait = call.ring.post(sends, receives)
        share = at_home if distance == 0 else None
        for piece in [] if distance is None else call.pieces(distance):
            rows, cols = piece.rows, piece.cols
            share = torch.zeros_like(at_home) if share is None else share
            assert held is not None
            dq_part, dk_part, dv_part = backward(
                dout[:, rows],
                q[:, rows],
                held[0, :, cols],
                held[1, :, cols],
                out[:, rows],
                lse[:, :, rows] + call.too_high(piece),
                call.options(piece),
            )
            dq[:, rows] += dq_part
            share[0, :, cols] += dk_part
            share[1, :, cols] += dv_part
        wait()
        if back is not None:
            at_home += back
        if onward is not None:
            share = onward if share is None else onward.add_(share)
        finished, held = share, arriving
    return dq.to(q.dtype), at_home[0].to(k.dtype), at_home[1].to(v.dtype)


def _keys_hop(
    call: RingCall, step: int, own: Tensor, held: Tensor | None
) -> tuple[Messages, Messages, Tensor | None]:
    """The hop that the next step needs: what to send, what to receive, and where that will be."""
    plan, rank = call.plan, call.ring.rank
    if step + 1 >= len(plan.route):
        return [], [], None
    coming = plan.route[step + 1]
    way = direction(coming)
    sends, receives, arriving = [], [], None
    leaving = own if coming == way else held  # each direction begins with a rank's own keys
    if plan.travels(plan.owner(rank, coming - way), coming):
        assert leaving is not None
        sends.append((leaving, rank + way))
        call.ring.traffic.kv_messages += 1
        call.ring.traffic.kv_bytes += leaving.nbytes
    if plan.travels(plan.owner(rank, coming), coming):
        arriving = torch.empty_like(own)
        receives.append((arriving, rank - way))
    return sends, receives, arriving


def _gradient_hop(
    call: RingCall,
    step: int,
    finished: Tensor | None,
    at_home: Tensor,
    sends: Messages,
    receives: Messages,
) -> tuple[Tensor | None, Tensor | None]:
    """Add this step's messages of dK and dV, one step behind their keys.

    Returns:
        where the sums so far will be for the keys that this step works on, and a complete part of
        this rank's own; None where none is coming.
    """
    plan, rank = call.plan, call.ring.rank
    onward = back = None
    now = plan.route[step] if step < len(plan.route) else 0
    if abs(now) > 1:
        way = direction(now)
        if plan.goes_on(plan.owner(rank, now), now - way):
            onward = torch.empty_like(at_home)
            receives.append((onward, rank - way))
    before = plan.route[step - 1] if step else 0
    if before:
        owner = plan.owner(rank, before)
        goes_on = plan.goes_on(owner, before)
        if goes_on or plan.goes_home(owner, before):
            assert finished is not None
            sends.append((finished, rank + direction(before) if goes_on else owner))
            call.ring.traffic.gradient_messages += 1
            call.ring.traffic.gradient_bytes += finished.nbytes
        if plan.goes_home(rank, before):
            back = torch.empty_like(at_home)
            receives.append((back, rank + before))
    return onward, back


class RingAttentionFunction(torch.autograd.Function):
    """`RingAttentionFunction.apply(q, k, v, call)`: out and lse; lse is not differentiable.

    All ranks must run the backward, or the others wait for the missing one.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor]:
        """Run the ring, and save what the backward recomputes P from."""
        with autocast_off(q):
            out, lse = ring_forward(call, q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        """Run the ring again, with the gradients behind the keys."""
        q, k, v, out, lse = ctx.saved_tensors
        with autocast_off(q):
            return *ring_backward(ctx.call, dout, q, k, v, out, lse), None
