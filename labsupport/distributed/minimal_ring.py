"""Ring attention in its shortest form: contiguous shards, a causal mask, plain torch.distributed.

Each of W ranks holds one shard of the sequence: its queries stay, keys and values travel to the
next rank, one hop a step. Four ranks, and whose keys each has in which step:

              step 0     step 1     step 2     step 3
    rank 0    K0 d       (K3)       (K2)       (K1)         d   its own: the diagonal is masked
    rank 1    K1 d       K0         (K3)       (K2)         K   of earlier tokens: no mask
    rank 2    K2 d       K1         K0         (K3)        (K)  of later tokens: hidden
    rank 3    K3 d       K2         K1         K0

Forward: each step gives attention over some keys, with its log-sum-exp; they are merged exactly.
Backward: given the whole row's output and log-sum-exp, a block's backward returns its exact share
of the gradients. dQ adds up where Q is; dK and dV travel with their keys, W hops in all.

`labsupport.distributed.ring` is the complete version: windows, zigzag shards, any kernel, no
unnecessary hops, dK and dV sent straight to their own rank, errors instead of hangs.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context" (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.inputs import (
    AttentionInputError,
    check_math_layout,
    first_derivative_only,
)
from labsupport.attention.online_softmax import merge_attention

Pair = tuple[Tensor, Tensor]


def send_on(pair: Pair) -> Callable[[], Pair]:
    """Start sending two tensors to the next rank; the returned function waits for the previous's.

    Neither tensor may change until then.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return lambda: pair
    arriving = torch.empty_like(pair[0]), torch.empty_like(pair[1])
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % world) for x in pair]
        + [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in arriving]
    )

    def wait() -> Pair:
        for request in requests:
            request.wait()
        return arriving

    return wait


class MinimalRing(torch.autograd.Function):
    """The ring as one differentiable function; `minimal_ring_attention` calls it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values go around once."""
        rank, world = dist.get_rank(), dist.get_world_size()
        keys = k.contiguous(), v.contiguous()
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)  # of no keys yet
        for step in range(world):
            arriving = send_on(keys)  # travel while this step computes
            if step <= rank:
                part = flash_attention_forward(q, *keys, step == 0)
                out, lse = merge_attention(out, lse, *part)
            keys = arriving()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values go around again; dK and dV follow them, one hop later."""
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = dist.get_rank(), dist.get_world_size()
        keys = k.contiguous(), v.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys[0]), torch.zeros_like(keys[1])
        for step in range(world):
            arriving = send_on(keys)
            if step <= rank:
                share = flash_attention_backward(dout, q, *keys, out, lse, step == 0)
                dq, dk, dv = dq + share[0], dk + share[1], dv + share[2]
            dk, dv = send_on((dk, dv))()
            keys = arriving()
        return dq, dk, dv


def minimal_ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a sequence that is cut over all ranks in equal, contiguous shards.

    Args:
        q, k, v: (batch, heads, seqlen / world, head_dim), this rank's shard; equally long on all
            ranks. 16-bit ones travel and add up in float32.

    Returns:
        this rank's shard of the output. All ranks must run the backward, too.

    >>> out = minimal_ring_attention(q, k, v)  # doctest: +SKIP
    """
    check_math_layout(q, k, v)
    if q.shape != k.shape:
        raise AttentionInputError(
            f"the ring is self-attention of one shard, but q {tuple(q.shape)} and k "
            f"{tuple(k.shape)} were given"
        )
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, tuple(q.shape))
    if len(set(shapes)) > 1:
        raise AttentionInputError(f"the ranks' shards must have one shape, but they have {shapes}")
    wide = torch.promote_types(q.dtype, torch.float32)
    return MinimalRing.apply(q.to(wide), k.to(wide), v.to(wide)).to(q.dtype)
