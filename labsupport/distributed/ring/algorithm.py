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

Forward. Each step gives a normalised partial output and its log-sum-exp. `merged` adds it to what
came before, in float32 (the online softmax, between whole results instead of tiles).

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
from labsupport.distributed.ring.blocks import Piece
from labsupport.distributed.ring.kernel import BlockKernel, Options
from labsupport.distributed.ring.merging import added, merged
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import Ring

Pair = tuple[Tensor, Tensor]
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
    own = k.contiguous(), v.contiguous()
    held: Pair | None = own
    result: Pair | None = None  # out and lse so far
    for step, distance in enumerate(call.plan.route):
        sends, receives, arriving = _hop(call, step, own, held)
        with call.ring.in_flight(sends, receives):
            for piece in call.pieces(distance):
                assert held is not None
                rows, cols = piece.rows, piece.cols
                keys, values = (x[:, cols] for x in held)
                part, lse = call.kernel.forward(q[:, rows], keys, values, call.options(piece))
                result = merged(result, q, rows, part, lse - call.too_high(piece))
        held = arriving.get("keys")
    assert result is not None  # a rank sees its own keys
    return result[0].to(q.dtype).contiguous(), result[1]


def ring_backward(
    call: RingCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of this rank's shard, in the dtypes of q, k and v."""
    backward = call.kernel.backward
    assert backward is not None  # a kernel without one was refused before the forward
    dout, own = dout.contiguous(), (k.contiguous(), v.contiguous())
    held: Pair | None = own
    dq: Tensor | None = None
    at_home: Pair | None = None  # dK and dV of this rank's own keys
    finished: Pair | None = None  # what the step before added to: it leaves in this one
    for step, distance in enumerate((*call.plan.route, None)):
        sends, receives, arriving = _hop(call, step, own, held, backward=True, finished=finished)
        shares: list[tuple[slice, Pair]] = []
        with call.ring.in_flight(sends, receives):
            for piece in [] if distance is None else call.pieces(distance):
                assert held is not None
                rows, cols = piece.rows, piece.cols
                keys, values = (x[:, cols] for x in held)
                whole_rows = out[:, rows], lse[:, :, rows] + call.too_high(piece)
                dq_part, dk_part, dv_part = backward(
                    dout[:, rows], q[:, rows], keys, values, *whole_rows, call.options(piece)
                )
                dq = added(dq, q, rows, dq_part)
                shares.append((cols, (dk_part, dv_part)))
        sums = at_home if distance == 0 else arriving.get("sums")
        for cols, share in shares:
            sums = _both_added(sums, own, cols, share)
        if distance == 0:
            at_home = sums
        if "home" in arriving:
            at_home = _both_added(at_home, own, slice(0, k.shape[1]), arriving["home"])
        finished, held = sums, arriving.get("keys")
    assert dq is not None  # a rank sees its own keys
    assert at_home is not None
    return dq.to(q.dtype), at_home[0].to(k.dtype), at_home[1].to(v.dtype)


def _both_added(sums: Pair | None, own: Pair, cols: slice, share: Pair) -> Pair:
    """dK and dV so far, with this rank's share for some of the keys."""
    dk, dv = (None, None) if sums is None else sums
    return added(dk, own[0], cols, share[0]), added(dv, own[1], cols, share[1])


def _hop(
    call: RingCall,
    step: int,
    own: Pair,
    held: Pair | None,
    *,
    backward: bool = False,
    finished: Pair | None = None,
) -> tuple[Messages, Messages, dict[str, Pair]]:
    """This rank's messages of a step: what it sends, what it receives, and where that will be.

    Args:
        held: the keys and values of this step, which go on.
        backward: dK and dV follow the keys; `finished` are those that the step before added to.

    Returns:
        sends, receives, and by `Message.what` the buffers that the latter fill.
    """
    plan, rank = call.plan, call.ring.rank
    wide = torch.promote_types(own[0].dtype, torch.float32)
    coming = plan.route[step + 1] if step + 1 < len(plan.route) else 0
    leaving = own if abs(coming) == 1 else held  # each direction begins with a rank's own keys
    sends: Messages = []
    receives: Messages = []
    arriving: dict[str, Pair] = {}
    for what, sender, receiver in plan.messages[step]:
        if what != "keys" and not backward:
            continue
        if sender == rank:
            pair = leaving if what == "keys" else finished
            assert pair is not None
            sends += [(x, receiver) for x in pair]
            call.ring.count(pair, gradients=what != "keys")
        if receiver == rank:
            dtype = own[0].dtype if what == "keys" else wide
            arriving[what] = (
                torch.empty_like(own[0], dtype=dtype),
                torch.empty_like(own[1], dtype=dtype),
            )
            receives += [(x, sender) for x in arriving[what]]
    return sends, receives, arriving


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
