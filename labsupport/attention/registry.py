"""What a backend is, and how one says why it cannot run a call.

A backend is data: one `Backend` entry in the table of `implementations.py`. All of its `Limits` are
checked, so that a refusal lists every reason at once and a reader need not mend them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from labsupport.attention.call import AttentionCall

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = (torch.float16, torch.bfloat16)


class Can(Enum):
    """Options beyond plain attention that a backend may support."""

    UNEQUAL_CAUSAL = "bottom-right causal masks for seqlen_q != seqlen_k"
    WINDOW = "sliding windows (window_size)"
    ALIBI = "alibi_slopes"
    GROUPED_HEADS = "grouped-query heads (kv_heads < heads)"
    LSE = "return_lse"
    GRADIENT_ON_CPU = "gradients on a CPU"
    LSE_ON_CPU = "return_lse on a CPU"
    PACKED = "packed sequences (cu_seqlens)"


EVERYTHING = frozenset(Can)


@dataclass(frozen=True)
class Limits:
    """What a backend takes.

    Attributes:
        dtypes: for each device type it runs on, the dtypes it takes there; "*" is any device type.
        min_capability: the oldest CUDA compute capability.
        min_capability_bfloat16: the same for bfloat16 inputs.
        max_head_dim, head_dim_multiple: the head sizes it takes; 0 means any.
        can: the options it supports.
    """

    dtypes: dict[str, tuple[torch.dtype, ...]]
    min_capability: tuple[int, int] = (0, 0)
    min_capability_bfloat16: tuple[int, int] = (0, 0)
    max_head_dim: int = 0
    head_dim_multiple: int = 1
    can: frozenset[Can] = EVERYTHING

    def hardware_reasons(self, call: AttentionCall) -> list[str]:
        """Every reason why the device or the dtype excludes `call`."""
        device, dtype = call.q.device.type, call.q.dtype
        allowed = self.dtypes.get(device, self.dtypes.get("*"))
        if allowed is None:
            return [f"runs on {' and '.join(self.dtypes)}, not on {device}"]
        reasons = []
        if dtype not in allowed:
            names = ", ".join(short(other) for other in allowed)
            reasons.append(f"takes {names} on {device}, not {short(dtype)}")
        if device == "cuda":
            capability = torch.cuda.get_device_capability(call.q.device)
            needed = self.min_capability
            if dtype == torch.bfloat16:
                needed = max(needed, self.min_capability_bfloat16)
            if capability < needed:
                reasons.append(
                    f"needs compute capability {version(needed)} for {short(dtype)}, "
                    f"this GPU has {version(capability)}"
                )
        return reasons

    def option_reasons(self, call: AttentionCall) -> list[str]:
        """Every reason why a size or an option excludes `call`."""
        reasons = []
        if self.max_head_dim and call.head_dim > self.max_head_dim:
            reasons.append(f"takes head_dim up to {self.max_head_dim}, not {call.head_dim}")
        if call.head_dim % self.head_dim_multiple:
            reasons.append(
                f"needs head_dim to be a multiple of {self.head_dim_multiple}, not {call.head_dim}"
            )
        asked = {
            Can.PACKED: call.packed,
            Can.WINDOW: call.windowed,
            Can.ALIBI: call.alibi_slopes is not None,
            Can.GROUPED_HEADS: call.heads != call.kv_heads,
            Can.LSE: call.return_lse,
            Can.GRADIENT_ON_CPU: call.needs_grad and call.q.device.type == "cpu",
            Can.LSE_ON_CPU: call.return_lse and call.q.device.type == "cpu",
        }
        if not call.packed:
            asked[Can.UNEQUAL_CAUSAL] = (
                call.causal and call.band.offset != 0 and not call.band.unlimited
            )
        reasons += [
            f"cannot do {o.value}" for o, wanted in asked.items() if wanted and o not in self.can
        ]
        return reasons


Run = Callable[[AttentionCall], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: what users pass as `backend=`.
        description: one line for tables.
        io_aware: True when no matrix of seqlen_q x seqlen_k scores is ever stored.
        limits: what it takes.
        run: call -> (out, lse or None) for a call that `reasons` does not exclude.
        kernel: call -> the name of the kernel that `run` launches.
        run_packed: the same as `run` for packed calls; None when packed calls run one per document.
        missing: () -> why it is not installed here, or None.
        further_reasons: call -> reasons that `limits` cannot express.
        in_auto: whether `backend="auto"` may choose it for this call.
        stores_mask: whether this call makes it store a mask of seqlen_q x seqlen_k.
    """

    name: str
    description: str
    io_aware: bool
    limits: Limits
    run: Run
    kernel: Callable[[AttentionCall], str]
    run_packed: Run | None = None
    missing: Callable[[], str | None] = lambda: None
    further_reasons: Callable[[AttentionCall], list[str]] = lambda call: []
    in_auto: Callable[[AttentionCall], bool] = lambda call: True
    stores_mask: Callable[[AttentionCall], bool] = lambda call: False

    def reasons(self, call: AttentionCall) -> list[str]:
        """Every reason why this backend cannot run `call` here; empty when it can."""
        missing = self.missing()
        hardware = self.limits.hardware_reasons(call)
        found = ([] if missing is None else [missing]) + hardware + self.limits.option_reasons(call)
        for part in self.parts(call):
            if part is not call:
                found += self.limits.option_reasons(part)
            if (
                not hardware
            ):  # on a device that it does not know, a kernel's own reasons mean nothing
                found += self.further_reasons(part)
        return list(dict.fromkeys(found))

    def parts(self, call: AttentionCall) -> list[AttentionCall]:
        """The calls that this backend really gets: one per document where it packs none itself."""
        if not call.packed or self.run_packed is not None:
            return [call]
        documents = (document for _, document in call.documents() if document is not None)
        return [document.without_empty_queries()[1] for document in documents]


def short(dtype: torch.dtype) -> str:
    """`torch.float32` as `float32`."""
    return str(dtype).removeprefix("torch.")


def version(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it: 8.0."""
    return f"{capability[0]}.{capability[1]}"
