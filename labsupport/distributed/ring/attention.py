"""Ring attention in flash-attn's layout, one shard of the sequence on each rank.

`shard_sequence` cuts a sequence, `ring_attention` computes a shard of the output (`drop_in` has the
field's names for it), `gather_sequence` puts the results together, and `last_ring_call` says what
ran and what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.inputs import (
    AttentionInputError,
    check_model_layout,
    check_scale,
    check_switch,
    check_window,
)
from labsupport.distributed.process_group import all_gather_object
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingRun
from labsupport.distributed.ring.kernels import choose
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import TRANSPORTS, Ring, Traffic

SHARD_LAYOUTS = ("contiguous", "zigzag")  # that `shard_sequence` cuts


@dataclass(frozen=True, eq=False)
class RingOptions:
    """Options of `ring_attention`; all ranks must give the same.

    Attributes:
        layout: "contiguous": rank r holds shard r. "zigzag": chunks r and 2W - 1 - r; under a
            causal mask all ranks then compute equally much, in every step. Such shards come from
            `shard_sequence(..., zigzag=True)`, RoPE's positions from `positions_of`. "striped":
            tokens r, r + W, r + 2W, ...: `x[:, r::W]`.
        kernel: "cudnn" and "native" (PyTorch's own), "flash_triton", "flash_torch", "fa4", or
            "auto", the first of `kernels.KERNELS` that can: on Hopper cuDNN, whose gradients differ
            in the last bits from run to run; torch.use_deterministic_algorithms(True) forbids it.
        causal, window_size: by positions in the whole sequence, as in
            `labsupport.attention.attention`. Keys outside of the window are not sent.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        alibi_slopes, dropout_p: refused unless None and 0.
        deterministic: gradients are the same bits every time: on a GPU, flash_triton's.
        group: the process group; all processes unless given. NCCL on GPUs, gloo on CPUs.
        transport: "copy_engines" (GPUs of one machine), "send_receive", or "auto", the first that
            can. A group's first ring on GPUs finds out, with a small message.
        check_ranks: compare shapes and options among the ranks first, so that a difference is an
            error on all of them and not a hang or the end of a process. One small message; a GPU is
            waited for.
    """

    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous"
    kernel: str = "auto"
    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
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
        ranks, hops = self.plan.world_size, self.plan.hops
        lines = [
            f"{self.kernel} ran on {ranks} rank{'s' * (ranks != 1)}, {self.plan.layout} shards of "
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
    with refused_by_all(options):
        chosen = RingOptions(**options)
        switches = ("causal", "deterministic", "check_ranks")
        for name in switches:
            check_switch(name, getattr(chosen, name))
        check_switch("return_lse (return_attn_probs)", return_lse)
        run, call, refused = _prepared(q, k, v, chosen)
    if chosen.check_ranks and run.ring.size > 1:
        _validate_across_ranks(run, call, chosen.transport)
    transport, why_not = run.ring.connect(chosen.transport, (k, v), run.plan.slots)
    refused = refused | ({"copy_engines": (why_not,)} if why_not else {})
    slot_bytes = run.plan.slots * run.ring.slot_bytes
    _last = RingReport(run.kernel.name, refused, run.plan, run.ring.traffic, transport, slot_bytes)
    out, lse = RingAttentionFunction.apply(call.q, k, v, run)
    return (out, lse) if return_lse else out


@contextmanager
def refused_by_all(options: dict[str, Any]) -> Iterator[None]:
    """Let the other ranks of a ring with these options know an error in the body."""
    try:
        yield
    except Exception as error:
        group = options.get("group")
        checked = options.get("check_ranks", True) and dist.is_available() and dist.is_initialized()
        if checked and dist.get_rank(group) >= 0:
            all_gather_object(str(error), group)  # they wait for this rank
        raise


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, options: RingOptions
) -> tuple[RingRun, AttentionCall, dict[str, tuple[str, ...]]]:
    """Checked arguments, without asking the other ranks; raises what this rank refuses."""
    check_model_layout(q, k, v)
    check_window(options.window_size)
    check_scale(options.softmax_scale)
    if options.alibi_slopes is not None:
        raise AttentionInputError(
            "ring attention has no ALiBi: leave alibi_slopes out, and use rotary positions, or "
            "attention(..., alibi_slopes=...) on one device."
        )
    if options.transport not in ("auto", *TRANSPORTS):
        listed = ", ".join(TRANSPORTS)
        raise AttentionInputError(f"transport {options.transport!r}: there are auto, {listed}.")
    if q.shape[1] != k.shape[1]:
        raise AttentionInputError(
            f"a rank holds queries and keys of the same tokens, but q has {q.shape[1]} and k "
            f"{k.shape[1]} of them: ring attention is self-attention."
        )
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
        layout=str(options.layout),
    )
    # To the plan, a window that covers the whole sequence is none.
    window = (-1 if plan.left is None else plan.left, -1 if plan.right is None else plan.right)
    call = AttentionCall(
        q, k, v, plan.right == 0, options.softmax_scale, window, return_lse=True
    ).with_positive_scale()
    ordered = options.deterministic and q.is_cuda
    name = "flash_triton" if ordered and options.kernel == "auto" else options.kernel
    kernel, refused = choose(name, call)
    if ordered and name not in ("flash_triton", "flash_torch"):
        raise AttentionInputError(
            f"deterministic=True: {name} adds up in any order. Leave kernel out, or ask for "
            "flash_triton."
        )
    return RingRun(ring, plan, kernel, call.scale), call, refused


def _validate_across_ranks(run: RingRun, call: AttentionCall, transport: str) -> None:
    """Raise AttentionInputError, on all ranks, if one of them does something else or refuses."""
    plan = run.plan
    local = {
        **dict(zip(("batch", "seqlen_local", "heads", "head_dim"), call.q.shape, strict=True)),
        "kv_heads": call.kv_heads,
        "dtype": call.q.dtype,
        "device": call.q.device.type,
        "window": (plan.left, plan.right),
        "layout": plan.layout,
        "softmax_scale": run.scale,
        "kernel": run.kernel.name,
        "transport": transport,
        "gradients wanted": call.needs_grad,
    }
    by_rank = all_gather_object(local, run.ring.group)
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
