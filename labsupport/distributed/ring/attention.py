"""Ring attention in flash-attn's layout, one shard of the sequence on each rank.

`shard_sequence` cuts a sequence, `ring_attention` computes a shard of the output (the field's names
are it with a layout and a kernel), `gather_sequence` puts the results together, and
`last_ring_call` says what ran and what was sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.inputs import (
    AttentionInputError,
    check_model_layout,
    check_window,
)
from labsupport.distributed.process_group import all_gather_object
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingCall
from labsupport.distributed.ring.kernels import choose
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import TRANSPORTS, Ring, Traffic
from labsupport.distributed.ring.zigzag import check_even

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True, eq=False)
class RingOptions:
    """Options of `ring_attention`; all ranks must give the same.

    Attributes:
        layout: "contiguous": rank r holds shard r. "zigzag": chunks r and 2W - 1 - r; under a
            causal mask all ranks then compute equally much, in every step. Such shards come from
            `shard_sequence(..., zigzag=True)`, RoPE's positions from `positions_of`.
        kernel: "cudnn" and "native" (PyTorch's own), "flash_triton", "flash_torch", "fa4", or
            "auto", the first of `kernels.KERNELS` that can: on Hopper cuDNN, whose gradients differ
            in the last bits from run to run; torch.use_deterministic_algorithms(True) forbids it.
        causal, window_size: by positions in the whole sequence, as in
            `labsupport.attention.attention`. Keys outside of the window are not sent.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        alibi_slopes, dropout_p: refused unless None and 0.
        group: the process group; all processes unless given. NCCL on GPUs, gloo on CPUs.
        transport: "copy_engines" (GPUs of one machine), "send_receive", or "auto", the first that
            can. A group's first ring on GPUs finds out, with a small message.
        check_ranks: compare shapes and options among the ranks first, so that a difference is an
            error on all of them and not a hang. One small message; a GPU is waited for.
    """

    layout: Literal["contiguous", "zigzag"] = "contiguous"
    kernel: str = "auto"
    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    group: dist.ProcessGroup | None = None
    transport: str = "auto"
    check_ranks: bool = True


@dataclass(frozen=True)
class RingReport:
    """One ring of this process.

    Attributes:
        kernel: the kernel that computed the blocks.
        refused: why the kernels preferred to it did not, and why not copy engines.
        transport: what carried the messages.
        slot_bytes: of the copy engines' slots, which the next ring takes over.
        plan: the schedule: `plan.hops`, `plan.route`, `plan.pairs(rank)`.
        traffic: messages that this rank sent; a backward adds to it when it runs.
    """

    kernel: str
    refused: dict[str, tuple[str, ...]]
    plan: Plan
    traffic: Traffic
    transport: str
    slot_bytes: int

    def __str__(self) -> str:
        layout = LAYOUTS[self.plan.zigzag]
        ranks, hops = self.plan.world_size, self.plan.hops
        lines = [
            f"{self.kernel} ran on {ranks} rank{'s' * (ranks != 1)}, {layout} shards of "
            f"{self.plan.length} tokens, {hops} hop{'s' * (hops != 1)} by {self.transport}; "
            f"{self.traffic}"
        ]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.refused.items()]
        return "\n".join(lines)


# Of the process, not of a thread: on a GPU autograd runs backwards, and layers that are computed
# again for them, in another thread.
_last: RingReport | None = None


def last_ring_call() -> RingReport | None:
    """Return the report of this process's last ring."""
    return _last


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Any
) -> Any:
    """Attention of a sequence that is cut over the ranks of a group.

    All ranks of the group must call, with the same options, and all must run the backward.

    Args:
        q: (batch, seqlen_local, heads, head_dim), this rank's shard; equally long on all ranks.
        k, v: (batch, seqlen_local, kv_heads, head_dim), `heads` a multiple of `kv_heads`.
        return_lse: also return the log-sum-exp over the whole sequence (not differentiable).
        options: the fields of `RingOptions`.

    Returns:
        out (batch, seqlen_local, heads, head_dim) in q's dtype: this rank's shard of the output;
        with `return_lse` also lse (batch, heads, seqlen_local), natural log, float32 (float64 for
        float64 inputs).

    Raises:
        RuntimeError: torch.distributed is not initialised, or this rank is not in the group.
        AttentionInputError: the inputs do not fit together or differ among the ranks; dropout.
        BackendUnavailableError: the kernel cannot compute this call; says every reason.

    >>> info = setup_ddp()
    >>> q = k = v = torch.randn(1, 16, 4, 8)
    >>> ring_attention(q, k, v, causal=True, layout="zigzag").shape
    torch.Size([1, 16, 4, 8])
    >>> cleanup_ddp()
    """
    global _last
    chosen = RingOptions(**options)
    try:
        call, request, refused = _prepared(q, k, v, chosen)
    except Exception as error:
        if chosen.check_ranks and dist.is_initialized() and dist.get_rank(chosen.group) >= 0:
            all_gather_object(str(error), chosen.group)  # the others wait for this rank
        raise
    if chosen.check_ranks and call.ring.size > 1:
        _validate_across_ranks(call, request, chosen.transport)
    transport, why_not = call.ring.connect(chosen.transport, (k, v), call.plan.slots)
    refused = refused | ({"copy_engines": (why_not,)} if why_not else {})
    slot_bytes = call.plan.slots * call.ring.slot_bytes
    _last = RingReport(
        call.kernel.name, refused, call.plan, call.ring.traffic, transport, slot_bytes
    )
    out, lse = RingAttentionFunction.apply(q, k, v, call)
    return (out, lse) if return_lse else out


def ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`ring_attention` of contiguous shards, its default.

    >>> info = setup_ddp()
    >>> q = k = v = torch.randn(1, 16, 4, 8)  # this rank's shard
    >>> ring_flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 16, 4, 8])
    >>> cleanup_ddp()
    """
    return ring_attention(q, k, v, **options)


def triton_ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`ring_attention` of contiguous shards by the lab's own Triton kernels.

    >>> info = setup_ddp()
    >>> q = k = v = torch.randn(1, 16, 2, 16)  # this rank's shard
    >>> triton_ring_flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 16, 2, 16])
    >>> cleanup_ddp()
    """
    options.setdefault("kernel", "flash_triton")
    return ring_attention(q, k, v, **options)


def zigzag_ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`ring_attention` of zigzag shards, causal by default.

    >>> info = setup_ddp()
    >>> whole = torch.randn(1, 16, 4, 8)
    >>> q = k = v = shard_sequence(whole, info.rank, info.world, zigzag=True)
    >>> zigzag_ring_flash_attn_func(q, k, v).shape
    torch.Size([1, 16, 4, 8])
    >>> cleanup_ddp()
    """
    options = {"layout": "zigzag", "causal": True, **options}
    return ring_attention(q, k, v, **options)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, options: RingOptions
) -> tuple[RingCall, AttentionCall, dict[str, tuple[str, ...]]]:
    """Checked arguments, without asking the other ranks; raises what this rank refuses."""
    check_model_layout(q, k, v)
    check_window(options.window_size)
    if options.alibi_slopes is not None:
        raise AttentionInputError(
            "ring attention has no ALiBi: leave alibi_slopes out, and use rotary positions, or "
            "attention(..., alibi_slopes=...) on one device."
        )
    if options.layout not in LAYOUTS:
        raise AttentionInputError(f"layout {options.layout!r}: there are {', '.join(LAYOUTS)}.")
    if options.transport not in ("auto", *TRANSPORTS):
        listed = ", ".join(TRANSPORTS)
        raise AttentionInputError(f"transport {options.transport!r}: there are auto, {listed}.")
    if q.shape[1] != k.shape[1]:
        raise AttentionInputError(
            f"a rank holds queries and keys of the same tokens, but q has {q.shape[1]} and k "
            f"{k.shape[1]} of them: ring attention is self-attention."
        )
    zigzag = options.layout == "zigzag"
    check_even(q.shape[1], zigzag=zigzag)
    if options.dropout_p != 0.0:
        raise AttentionInputError(
            f"ring attention has no dropout, but dropout_p={options.dropout_p} was given: pass "
            "0.0, and drop out after attention if you need it."
        )
    ring = Ring(options.group)
    plan = Plan.of(
        ring.size,
        q.shape[1],
        causal=options.causal,
        window_size=tuple(options.window_size),
        zigzag=zigzag,
    )
    # To the plan, a window that covers the whole sequence is none.
    window = (-1 if plan.left is None else plan.left, -1 if plan.right is None else plan.right)
    request = AttentionCall(
        q, k, v, plan.right == 0, options.softmax_scale, window, return_lse=True
    )
    kernel, refused = choose(options.kernel, request)
    return RingCall(ring, plan, kernel, request.scale), request, refused


def _validate_across_ranks(call: RingCall, request: AttentionCall, transport: str) -> None:
    """Raise AttentionInputError, on all ranks, if one of them does something else or refuses."""
    plan = call.plan
    local = {
        **dict(zip(("batch", "seqlen_local", "heads", "head_dim"), request.q.shape, strict=True)),
        "kv_heads": request.kv_heads,
        "dtype": request.q.dtype,
        "window": (plan.left, plan.right),
        "layout": LAYOUTS[plan.zigzag],
        "softmax_scale": call.scale,
        "kernel": call.kernel.name,
        "transport": transport,
        "gradients wanted": request.needs_grad,
    }
    by_rank = all_gather_object(local, call.ring.group)
    for rank, there in enumerate(by_rank):
        if isinstance(there, str):
            raise AttentionInputError(
                f"rank {rank} has refused this call of the ring, so no rank goes on: {there}"
            )
    for name in local:
        values = [there[name] for there in by_rank]
        if len(set(values)) > 1:
            hint = " Pad the sequence to a multiple of the number of ranks."
            raise AttentionInputError(
                f"the ranks of a ring must agree, but {name} on ranks 0 to {len(values) - 1} is "
                f"{', '.join(map(str, values))}.{hint if name == 'seqlen_local' else ''}"
            )
