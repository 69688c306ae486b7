"""Ring attention: every rank keeps its queries, and all keys and values pass by.

`labsupport.distributed.minimal_ring` has the table of who holds whose keys when, and the same
algorithm in 60 lines: read it first. Besides its own, a rank holds two ranks' keys at most: those
it works on, and those that are coming. `merged` adds each step's result to what came before, in
float32.

Backward. Given L, the log-sum-exp of the WHOLE row, and D = rowsum(dO * O) with the whole output,

    P = exp(S - L)    dV = P^T dO    dS = P * (dO V^T - D)    dQ = dS K    dK = dS^T Q

splits over blocks of keys: each block's P is the right slice of the whole row's. dQ adds up where Q
is. dK and dV belong to another rank: a second ring carries them after their keys, in float32, each
rank adds its share, and the last one that sees the keys sends the sums home:

              step 0     step 1        step 2         step 3
    rank 0    dK0        -             -              -
    rank 1    dK1        dK0           -              -
    rank 2    dK2        dK1           dK0 +          -              +      to what came with it
    rank 3    dK3        dK2, home     dK1 +, home    dK0 +, home    home   to the keys' owner

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
from labsupport.distributed.ring.kernels import BlockKernel, BlockOptions
from labsupport.distributed.ring.merging import added, merged
from labsupport.distributed.ring.plan import BlockPair, Plan
from labsupport.distributed.ring.transport import TOTAL, Ring

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RingCall:
    """One ring, besides its tensors."""

    ring: Ring
    plan: Plan
    kernel: BlockKernel
    scale: float
    slopes: Tensor | None = None

    def block_pairs(self, distance: int) -> list[BlockPair]:
        """Return what this rank computes with keys from `distance` ranks away."""
        rank = self.ring.rank
        return self.plan.table[rank][self.plan.owner(rank, distance)]

    def options(self, pair: BlockPair) -> BlockOptions:
        """Return a block pair in the kernel's terms."""
        slopes = None if self.slopes is None else pair.slope_sign * self.slopes
        return BlockOptions(self.scale, pair.window, slopes)

    def alibi_offset(self, pair: BlockPair) -> Tensor | float:
        """Return by how much the kernel's scores are too high: (..., heads, 1), or 0."""
        return 0.0 if self.slopes is None else (pair.alibi_offset * self.slopes)[..., None]


def ring_forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (batch, seqlen_local, heads, head_dim) and lse (batch, heads, seqlen_local)."""
    own = k.contiguous(), v.contiguous()
    here: Pair | None = own
    result: Pair | None = None  # out and lse so far
    for step, distance in enumerate(call.plan.route):
        sends, receives, arriving = _hop(call, step, own, here)
        with call.ring.in_flight(sends, receives):
            for pair in call.block_pairs(distance):
                assert here is not None
                keys, values = (x[:, pair.cols] for x in here)
                out, lse = call.kernel.forward(q[:, pair.rows], keys, values, call.options(pair))
                result = merged(result, q, pair.rows, out, lse - call.alibi_offset(pair))
        here = arriving.get("keys")
    assert result is not None  # a rank sees its own keys
    return result[0].to(q.dtype).contiguous(), result[1]


def ring_backward(
    call: RingCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of this rank's shard, in the dtypes of q, k and v."""
    dout, own = dout.contiguous(), (k.contiguous(), v.contiguous())
    here: Pair | None = own
    dq: Tensor | None = None
    at_home: Pair | None = None  # dK and dV of this rank's own keys
    leaving: Pair | None = None  # what the step before added to
    for step, distance in enumerate((*call.plan.route, None)):
        sends, receives, arriving = _hop(call, step, own, here, backward=True, leaving=leaving)
        shares: list[tuple[slice, Pair]] = []
        with call.ring.in_flight(sends, receives):
            for pair in [] if distance is None else call.block_pairs(distance):
                assert here is not None
                rows, (keys, values) = pair.rows, (x[:, pair.cols] for x in here)
                dq_part, dk_part, dv_part = call.kernel.backward(
                    dout[:, rows], q[:, rows], keys, values,
                    out[:, rows], lse[:, :, rows] + call.alibi_offset(pair), call.options(pair),
                )  # fmt: skip
                dq = added(dq, q, rows, dq_part)
                shares.append((pair.cols, (dk_part, dv_part)))
        sums = at_home if distance == 0 else arriving.get("sums")
        for cols, share in shares:
            sums = _both_added(sums, own, cols, share)
        if distance == 0:
            at_home = sums
        if "home" in arriving:
            at_home = _both_added(at_home, own, slice(0, k.shape[1]), arriving["home"])
        leaving, here = sums, arriving.get("keys")
    assert dq is not None  # a rank sees its own keys
    assert at_home is not None
    return dq.to(q.dtype), at_home[0].to(k.dtype), at_home[1].to(v.dtype)


def _both_added(sums: Pair | None, own: Pair, cols: slice, share: Pair) -> Pair:
    """dK and dV so far, with this rank's share for some of the keys."""
    dk, dv = sums or (None, None)
    return added(dk, own[0], cols, share[0]), added(dv, own[1], cols, share[1])


def _hop(
    call: RingCall,
    step: int,
    own: Pair,
    here: Pair | None,
    *,
    backward: bool = False,
    leaving: Pair | None = None,
) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]], dict[str, Pair]]:
    """Return this rank's messages of a step: sends, receives, and the latter's buffers by name.

    `here` are this step's keys and values, which go on. In a backward dK and dV follow the keys;
    `leaving` are those that the step before added to.
    """
    plan, rank = call.plan, call.ring.rank
    coming = plan.route[step + 1] if step + 1 < len(plan.route) else 0
    keys = own if abs(coming) == 1 else here  # each direction begins with a rank's own keys
    sends: list[tuple[Tensor, int]] = []
    receives: list[tuple[Tensor, int]] = []
    arriving: dict[str, Pair] = {}
    for what, sender, receiver in plan.messages[step]:
        gradients = what != "keys"
        if gradients and not backward:
            continue
        if sender == rank:
            pair = leaving if gradients else keys
            assert pair is not None
            sends += [(x, receiver) for x in pair]
            for traffic in (call.ring.traffic, TOTAL):
                traffic.count(pair, gradients=gradients)
        if receiver == rank:
            k, v = own
            dtype = torch.promote_types(k.dtype, torch.float32) if gradients else k.dtype
            arriving[what] = torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
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
        """Run the ring again; the gradients follow the keys."""
        q, k, v, out, lse = ctx.saved_tensors
        with autocast_off(q):
            return *ring_backward(ctx.call, dout, q, k, v, out, lse), None
