"""The public functions: flash-attn's layout and options, one shard of the sequence on each rank.

    out = ring_flash_attn_func(q, k, v, causal=True)              on each rank, with its shard
    out = triton_ring_flash_attn_func(q, k, v, causal=True)       the same by the lab's own kernel
    out = zigzag_ring_flash_attn_func(q, k, v, causal=True)       shards with balanced work

They are exchangeable: same arguments, same result. `shard_sequence` cuts a sequence (with
`zigzag=True` for the last one), `gather_sequence` puts the results together, `last_ring_call` says
what ran and what was sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_window,
)
from labsupport.attention.registry import AttentionCall
from labsupport.distributed.ring.agreement import check_same, say_refused
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingCall
from labsupport.distributed.ring.kernel import BlockKernel
from labsupport.distributed.ring.kernels import KERNELS, choose
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import Ring, Traffic, sent_in_all
from labsupport.distributed.ring.zigzag import check_even

Result = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RingReport:
    """What this process's last ring did.

    Attributes:
        kernel: which kernel computed the blocks.
        refused: why the kernels preferred to it did not.
        plan: the schedule: `plan.hops`, `plan.route`, `plan.pairs(rank)`.
        traffic: what this rank sent; a backward adds to it when it runs.
    """

    kernel: str
    refused: dict[str, tuple[str, ...]]
    plan: Plan
    traffic: Traffic

    def __str__(self) -> str:
        layout = "zigzag" if self.plan.zigzag else "contiguous"
        ranks, hops = self.plan.world_size, self.plan.hops
        lines = [
            f"{self.kernel} ran on {ranks} rank{'s' * (ranks != 1)}, {layout} shards of "
            f"{self.plan.length} tokens, {hops} hop{'s' * (hops != 1)}; {self.traffic}"
        ]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.refused.items()]
        return "\n".join(lines)


# Of the process, not of a thread: on a GPU autograd runs backwards, and layers that are computed
# again for them, in a thread of its own.
_last: RingReport | None = None


def last_ring_call() -> RingReport | None:
    """The report of this process's last ring attention."""
    return _last


def all_ring_calls() -> RingReport | None:
    """The last report, with the traffic of all rings of this process so far.

    A layer under activation checkpointing is several rings: that of the forward, to which the
    backward belongs, and one for each time that it is computed again.
    """
    return None if _last is None else replace(_last, traffic=sent_in_all())


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    kernel: str = "auto",
    check_ranks: bool = True,
) -> Result:
    """Attention of a sequence that is cut over the ranks of a group: rank r holds shard r.

    All ranks of the group must call, with the same options, and all must run the backward.

    Args:
        q: (batch, seqlen_local, heads, head_dim), this rank's shard; equally long on all ranks.
        k, v: (batch, seqlen_local, kv_heads, head_dim), `heads` a multiple of `kv_heads`.
        causal, window_size, alibi_slopes: by positions in the whole sequence, as in
            `labsupport.attention.attention`. Keys outside of the window are not sent.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        dropout_p: must be 0.
        deterministic: refuse kernels whose gradients differ from run to run.
        return_lse: also return the log-sum-exp over the whole sequence (not differentiable).
        group: the process group; all processes unless given. NCCL on GPUs, gloo on CPUs.
        kernel: "cudnn" and "native" (PyTorch's own), "flash_triton", "flash_torch", "fa4", or
            "auto", the first that can: see `available_ring_kernels`. "auto" is cuDNN on Hopper;
            its gradients differ in the last bits from run to run, unless `deterministic`.
        check_ranks: compare shapes and options among the ranks first, so that a difference, or a
            call that one rank refuses, is an error on all of them and not a hang. One small
            message; a GPU is waited for.

    Returns:
        out (batch, seqlen_local, heads, head_dim) in q's dtype: this rank's shard of the output;
        with `return_lse` also lse (batch, heads, seqlen_local), natural log, float32 (float64 for
        float64 inputs).

    Raises:
        RuntimeError: torch.distributed is not initialised, or this rank is not in the group.
        AttentionInputError: the inputs do not fit together or differ among the ranks; dropout.
        BackendUnavailableError: the kernel cannot compute this call; says every reason.

    >>> out = ring_flash_attn_func(q, k, v, causal=True)  # doctest: +SKIP
    """
    options = (
        causal, softmax_scale, window_size, alibi_slopes, dropout_p, deterministic, return_lse,
        group, kernel, check_ranks,
    )  # fmt: skip
    return _ring(q, k, v, *options, zigzag=False)


def triton_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    kernel: str = "flash_triton",
    check_ranks: bool = True,
) -> Result:
    """`ring_flash_attn_func` by the lab's own Triton kernels; partial outputs in float32."""
    options = (
        causal, softmax_scale, window_size, alibi_slopes, dropout_p, deterministic, return_lse,
        group, kernel, check_ranks,
    )  # fmt: skip
    return _ring(q, k, v, *options, zigzag=False)


def zigzag_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    kernel: str = "auto",
    check_ranks: bool = True,
) -> Result:
    """`ring_flash_attn_func` of zigzag shards: rank r holds chunks r and 2W - 1 - r.

    Under a causal mask all ranks compute equally much, in every step. Shards come from
    `shard_sequence(..., zigzag=True)`, RoPE's positions from `positions_of(..., zigzag=True)`.
    """
    options = (
        causal, softmax_scale, window_size, alibi_slopes, dropout_p, deterministic, return_lse,
        group, kernel, check_ranks,
    )  # fmt: skip
    return _ring(q, k, v, *options, zigzag=True)


def available_ring_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Every kernel, and why it cannot compute a ring of these shards here: () where it can."""
    call = AttentionCall(q, k, v, causal, None, window_size, alibi_slopes, True)
    return {kernel.name: tuple(kernel.reasons(call, deterministic)) for kernel in KERNELS}


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
    group: dist.ProcessGroup | None,
    kernel: str,
    check_ranks: bool,
    *,
    zigzag: bool,
) -> Result:
    global _last
    options = causal, softmax_scale, window_size, alibi_slopes, dropout_p, deterministic
    try:
        ring, plan, call, chosen, refused = _prepared(q, k, v, *options, group, kernel, zigzag)
    except Exception:
        if check_ranks and isinstance(q, Tensor):
            say_refused(group, q.device)
        raise
    if check_ranks and ring.size > 1:
        check_same(ring, call, plan, chosen.name)
    slopes = None if alibi_slopes is None else alibi_slopes.detach().to(q.device, torch.float32)
    _last = RingReport(chosen.name, refused, plan, ring.traffic)
    out, lse = RingAttentionFunction.apply(
        q, k, v, RingCall(ring, plan, chosen, call.scale, slopes)
    )
    return (out, lse) if return_lse else out


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    dropout_p: float,
    deterministic: bool,
    group: dist.ProcessGroup | None,
    kernel: str,
    zigzag: bool,
) -> tuple[Ring, Plan, AttentionCall, BlockKernel, dict[str, tuple[str, ...]]]:
    """What can be said without the other ranks; raises what this rank refuses."""
    _check(q, k, v, window_size, alibi_slopes, dropout_p, zigzag)
    ring = Ring(group)
    plan = Plan.of(
        ring.size,
        q.shape[1],
        causal=causal,
        window_size=tuple(window_size),
        zigzag=zigzag,
        alibi=alibi_slopes is not None,
    )
    # The plan has looked: a window that covers the whole sequence is none.
    window = (-1 if plan.left is None else plan.left, -1 if plan.right is None else plan.right)
    call = AttentionCall(q, k, v, plan.right == 0, softmax_scale, window, alibi_slopes, True)
    chosen, refused = choose(kernel, call, deterministic)
    return ring, plan, call, chosen, refused


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    dropout_p: float,
    zigzag: bool,
) -> None:
    check_model_layout(q, k, v)
    check_window(window_size)
    if alibi_slopes is not None:
        check_alibi_slopes(alibi_slopes, q.shape[0], q.shape[2])
    if q.shape[1] != k.shape[1]:
        raise AttentionInputError(
            f"a rank holds queries and keys of the same tokens, but q has {q.shape[1]} and k "
            f"{k.shape[1]} of them: ring attention is self-attention."
        )
    check_even(q.shape[1], zigzag=zigzag)
    if dropout_p != 0.0:
        raise AttentionInputError(
            f"ring attention has no dropout, but dropout_p={dropout_p} was given: the backward "
            "recomputes each block, and would have to draw the forward's random mask again on "
            "every rank. Pass dropout_p=0.0, and drop out after attention if you need it."
        )
