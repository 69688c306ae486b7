"""The public functions: flash-attn's layout and options, one shard of the sequence on each rank.

    out = ring_flash_attn_func(q, k, v, causal=True)              on each rank, with its shard
    out = triton_ring_flash_attn_func(q, k, v, causal=True)       the same by the lab's own kernel
    out = zigzag_ring_flash_attn_func(q, k, v, causal=True)       shards with balanced work

They are exchangeable: same arguments, same result. `shard_sequence` cuts a sequence (with
`zigzag=True` for the last one), `gather_sequence` puts the results together, `last_ring_call` says
what ran and what was sent.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_window,
)
from labsupport.attention.registry import FLOAT_DTYPES
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingCall
from labsupport.distributed.ring.kernels import KERNELS, choose
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import Ring, Traffic
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
        lines = [
            f"{self.kernel} ran on {self.plan.world_size} ranks, {layout} shards of "
            f"{self.plan.length} tokens, {self.plan.hops} hops; {self.traffic}"
        ]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.refused.items()]
        return "\n".join(lines)


_reports = threading.local()


def last_ring_call() -> RingReport | None:
    """The report of this thread's last ring attention."""
    return getattr(_reports, "last", None)


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
        check_ranks: compare shapes and options among the ranks first, so that a difference is an
            error on all of them and not a hang. One small message; a GPU is waited for.

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
    if check_ranks and ring.size > 1:
        _check_ranks(ring, call, plan, [entry.name for entry in KERNELS].index(chosen.name))
    slopes = None if alibi_slopes is None else alibi_slopes.detach().to(q.device, torch.float32)
    _reports.last = RingReport(chosen.name, refused, plan, ring.traffic)
    out, lse = RingAttentionFunction.apply(
        q, k, v, RingCall(ring, plan, chosen, call.scale, slopes)
    )
    return (out, lse) if return_lse else out


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


def _check_ranks(ring: Ring, call: AttentionCall, plan: Plan, kernel: int) -> None:
    """Raise on all ranks when the ranks do not agree on what they are doing."""
    names = [
        *("batch", "seqlen_local", "heads", "head_dim", "kv_heads", "dtype", "left", "right"),
        *("zigzag", "alibi_slopes", "softmax_scale", "kernel", "gradients wanted"),
    ]
    scale = struct.unpack("<q", struct.pack("<d", call.scale))[0]
    mine = [
        *(*call.q.shape, call.kv_heads, FLOAT_DTYPES.index(call.q.dtype)),
        *(-1 if side is None else side for side in (plan.left, plan.right)),
        *(int(plan.zigzag), int(plan.alibi), scale, kernel, int(call.needs_grad)),
    ]
    own = torch.tensor(mine, dtype=torch.int64, device=call.q.device)
    gathered = [torch.empty_like(own) for _ in range(ring.size)]
    dist.all_gather(gathered, own, group=ring.group)
    by_rank = torch.stack(gathered).tolist()
    for name, *values in zip(names, *by_rank, strict=True):
        if len(set(values)) > 1:
            hint = ""
            if name == "seqlen_local":
                hint = " Pad the sequence to a multiple of the number of ranks."
            raise AttentionInputError(
                f"the ranks of a ring must agree, but {name} on ranks 0 to {ring.size - 1} is "
                f"{', '.join(_readable(name, values))}.{hint}"
            )


def _readable(name: str, values: list[int]) -> list[str]:
    if name == "softmax_scale":
        return [str(struct.unpack("<d", struct.pack("<q", value))[0]) for value in values]
    if name == "dtype":
        return [str(FLOAT_DTYPES[value]) for value in values]
    if name == "kernel":
        return [KERNELS[value].name for value in values]
    if name in ("zigzag", "alibi_slopes", "gradients wanted"):
        return [str(bool(value)) for value in values]
    return [str(value) for value in values]
