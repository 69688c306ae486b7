"""Ring attention: every rank keeps its queries, and all keys and values pass by.

`labsupport.distributed.minimal_ring` has the table of who holds whose keys when, and the same
algorithm in 60 lines: read it first. Besides its own, a rank holds two ranks' keys at most: those
it works on, and those that are coming. `merged` adds each step's result to what came before, in
float32.

Backward. A kernel that is given the whole row's output and log-sum-exp returns exactly its block's
share of the gradients (theory chapter 11). dQ adds up where Q is. Each rank sends its share of dK
and dV, in their dtype as kernels return it, straight to the keys' owner, one step after its
compute. The owner adds them up:

              step 0     step 1             step 2              step 3              step 4
    rank 0    K0         K3                 K2, share to 3      K1, share to 2      share to 1
    rank 1    K1         K0                 K3, share to 0      K2, share to 3      share to 2
    rank 2    K2         K1                 K0, share to 1      K3, share to 0      share to 3
    rank 3    K3         K2                 K1, share to 2      K0, share to 1      share to 0

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (2023), section 3; the merge and the backward from Dao, "FlashAttention-2" (2023), 3.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.inputs import first_derivative_only
from labsupport.distributed.ring.kernels import BlockKernel, BlockOptions
from labsupport.distributed.ring.merging import Total
from labsupport.distributed.ring.plan import BlockPair, Plan
from labsupport.distributed.ring.transport import TOTAL, Pair, Ring


@dataclass(frozen=True)
class RingRun:
    """One ring, besides its tensors."""

    ring: Ring
    plan: Plan
    kernel: BlockKernel
    scale: float

    def block_pairs(self, distance: int) -> list[BlockPair]:
        """Return what this rank computes with keys from `distance` ranks away."""
        rank = self.ring.rank
        return self.plan.table[rank][self.plan.owner(rank, distance)]

    def options(self, pair: BlockPair) -> BlockOptions:
        """Return a block pair in the kernel's terms."""
        return BlockOptions(self.scale, pair.window)


def ring_forward(run: RingRun, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (batch, seqlen_local, heads, head_dim) and lse (batch, heads, seqlen_local)."""
    own = k.contiguous(), v.contiguous()
    kv: Pair | None = own  # those that this step computes with
    total = Total(q, sum(len(run.block_pairs(distance)) for distance in run.plan.route))
    for step, distance in enumerate(run.plan.route):
        with _hop(run, step, own, kv) as arriving:
            for pair in run.block_pairs(distance):
                assert kv is not None
                k, v = (x[:, pair.cols] for x in kv)
                out, lse = run.kernel.forward(q[:, pair.rows], k, v, run.options(pair))
                total.merge(pair.rows, out, lse)
                del out, lse, k, v
        kv = arriving.get("keys")
    assert total.lse is not None  # a rank sees its own keys
    return total.result().contiguous(), total.lse


def ring_backward(
    run: RingRun, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV of this rank's shard, in the dtypes of q, k and v."""
    saved, own = (dout.contiguous(), q, out, lse), (k.contiguous(), v.contiguous())
    plan, rank = run.plan, run.ring.rank
    kv: Pair | None = own  # those that this step computes with
    dq = Total(q, sum(len(run.block_pairs(distance)) for distance in plan.route))
    users = sum(bool(plan.table[other][rank]) for other in range(plan.world_size))
    dkv = [Total(x, len(plan.table[rank][rank]) + users - 1) for x in own]  # of its own keys
    share: Pair | None = None  # of dK and dV of the keys that the step before had
    for step, distance in enumerate((*plan.route, None)):
        with _hop(run, step, own, kv, backward=True, share=share) as arriving:
            pairs = [] if distance is None else run.block_pairs(distance)
            first, parts = 0, dkv
            if pairs and distance:
                shared = plan.shared(rank, plan.owner(rank, distance))
                first, parts = shared.start, [Total(x[:, shared], len(pairs)) for x in own]
            if kv is not None:
                _add_gradients(run, pairs, saved, kv, (dq, *parts), first)
        share = None
        if pairs and distance:
            share = parts[0].result().contiguous(), parts[1].result().contiguous()
        if "gradients" in arriving:
            shared = plan.shared(plan.owner(rank, -plan.route[step - 1]), rank)
            for total, part in zip(dkv, arriving["gradients"], strict=True):
                total.add(shared, part)
        kv = arriving.get("keys")
    return dq.result(), dkv[0].result(), dkv[1].result()


def _add_gradients(
    run: RingRun,
    pairs: list[BlockPair],
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    kv: Pair,
    totals: tuple[Total, ...],
    first: int,
) -> None:
    """Add what block pairs contribute to dQ, dK and dV.

    Args:
        saved: dout, q, out and lse of this rank's shard.
        kv: the keys and values of the step.
        totals: of dQ; of dK and dV, which begin at key `first`.
    """
    dout, q, out, lse = saved
    for pair in pairs:
        rows, (k, v) = pair.rows, (x[:, pair.cols] for x in kv)
        gradients = run.kernel.backward(
            dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows], run.options(pair)
        )
        cols = slice(pair.cols.start - first, pair.cols.stop - first)
        for total, where, part in zip(totals, (rows, cols, cols), gradients, strict=True):
            total.add(where, part)
        del gradients, part, k, v


def _hop(
    run: RingRun,
    step: int,
    own: Pair,
    kv: Pair | None,
    *,
    backward: bool = False,
    share: Pair | None = None,
) -> AbstractContextManager[dict[str, Pair]]:
    """Let a step's messages travel: `Ring.in_flight`.

    `kv` are this step's keys and values, which go on. In a backward the gradients follow: `share`
    are those of the step before.
    """
    plan, rank = run.plan, run.ring.rank
    coming = plan.route[step + 1] if step + 1 < len(plan.route) else 0
    going = own if abs(coming) == 1 else kv  # each direction begins with a rank's own keys
    messages = [m for m in plan.messages[step] if backward or m.what == "keys"]
    sends, receives = [], []
    for message in messages:
        gradients = message.what == "gradients"
        if message.sender == rank:
            pair = share if gradients else going
            assert pair is not None
            sends.append((message, pair))
            for traffic in (run.ring.traffic, TOTAL):
                traffic.count(pair, gradients=gradients)
        if message.receiver == rank:
            cols = plan.shared(message.sender, rank) if gradients else slice(None)
            receives.append((message, (own[0][:, cols], own[1][:, cols])))
    return run.ring.in_flight(sends, receives) if messages else nullcontext({})


class RingAttentionFunction(torch.autograd.Function):
    """`RingAttentionFunction.apply(q, k, v, run)`: out and lse; lse is not differentiable.

    All ranks must run the backward, or the others wait for the missing one.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: RingRun) -> tuple[Tensor, Tensor]:
        """Run the ring, and save what the backward recomputes P from."""
        with autocast_off(q):
            out, lse = ring_forward(run, q, k, v)
        ctx.run = run
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        """Run the ring again; the gradients follow the keys."""
        q, k, v, out, lse = ctx.saved_tensors
        with autocast_off(q):
            return *ring_backward(ctx.run, dout, q, k, v, out, lse), None
