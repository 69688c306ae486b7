"""One attention call, and the description of a backend: its limits and reasons to refuse a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

from labsupport.attention.masks import AttentionMask

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = (torch.float16, torch.bfloat16)


class BackendUnavailableError(RuntimeError):
    """None of the chosen backends can run this call here; `reasons` lists why, by backend."""

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]]) -> None:
        super().__init__(message)
        self.reasons = reasons


class AttentionOptions(TypedDict, total=False):
    """The options of `attention`, for functions that pass them on."""

    causal: bool
    softmax_scale: float | None
    window_size: tuple[int, int]
    alibi_slopes: Tensor | None
    return_lse: bool


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Inputs and options of one attention call.

    q (batch, seqlen_q, heads, head_dim); k, v (batch, seqlen_k, kv_heads, head_dim). Packed, when
    `cu_seqlens_q` and `cu_seqlens_k` are given: (total tokens, heads, head_dim).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    return_lse: bool = False
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that change the mathematics, by flash-attn's names."""
        return {
            "causal": self.causal, "softmax_scale": self.softmax_scale,
            "window_size": self.window_size, "alibi_slopes": self.alibi_slopes,
        }  # fmt: skip

    @property
    def packed(self) -> bool:
        """True when sequences of different lengths lie one after the other, without a batch."""
        return self.cu_seqlens_q is not None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.q.shape[-1]

    @property
    def scale(self) -> float:
        """The factor on the scores: `softmax_scale`, or 1 / sqrt(head_dim) unless given."""
        return 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale

    @property
    def needs_grad(self) -> bool:
        """True when autograd will need this call's backward."""
        wanted = self.q.requires_grad or self.k.requires_grad or self.v.requires_grad
        return torch.is_grad_enabled() and wanted

    @cached_property
    def band(self) -> AttentionMask:
        """The visible pairs of a call that is not packed."""
        lengths = self.q.shape[1], self.k.shape[1]
        return AttentionMask.of(*lengths, causal=self.causal, window_size=self.window_size)

    @property
    def windowed(self) -> bool:
        """True when a sliding window hides more than the causal mask does."""
        left, right = self.window_size
        return left >= 0 or (right >= 0 and not self.causal)

    def math_layout(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v as (batch, kv_heads, group, seqlen, head_dim), without a copy, and the slopes.

        `group` query heads share a key/value head. Slopes come as ([batch,] kv_heads, group).
        """
        group = self.heads // self.kv_heads
        q = self.q.transpose(1, 2).unflatten(1, (self.kv_heads, group))
        k, v = (
            tensor.transpose(1, 2).unsqueeze(2).expand(-1, -1, group, -1, -1)
            for tensor in (self.k, self.v)
        )
        slopes = self.alibi_slopes
        return q, k, v, None if slopes is None else slopes.unflatten(-1, (self.kv_heads, group))

    def without_empty_queries(self) -> tuple[int, AttentionCall]:
        """Count and drop the leading queries that see no key: backends disagree about them."""
        count = self.band.leading_empty_rows
        return count, replace(self, q=self.q[:, count:]) if count else self

    def documents(self) -> Iterator[tuple[slice, AttentionCall | None]]:
        """Yield each packed sequence's slice of queries, and its call (None without keys)."""
        assert self.cu_seqlens_q is not None
        assert self.cu_seqlens_k is not None
        edges_q, edges_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        slopes = self.alibi_slopes
        for i in range(len(edges_q) - 1):
            rows, cols = slice(*edges_q[i : i + 2]), slice(*edges_k[i : i + 2])
            if rows.start == rows.stop:
                continue
            q, k, v = self.q[rows][None], self.k[cols][None], self.v[cols][None]
            own = slopes[i] if slopes is not None and slopes.ndim == 2 else slopes
            options = self.causal, self.softmax_scale, self.window_size, own, self.return_lse
            yield rows, AttentionCall(q, k, v, *options) if k.shape[1] else None


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
    """The inputs that a backend takes.

    `dtypes` lists those of each device type, "*" for any; capabilities are CUDA's, the least that
    will do; a `max_head_dim` of 0 is no limit.
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
            reasons.append(
                f"takes {', '.join(map(short, allowed))} on {device}, not {short(dtype)}"
            )
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
            multiple = self.head_dim_multiple
            reasons.append(f"needs head_dim to be a multiple of {multiple}, not {call.head_dim}")
        on_cpu = call.q.device.type == "cpu"
        wanted = {
            Can.PACKED: call.packed,
            Can.WINDOW: call.windowed,
            Can.ALIBI: call.alibi_slopes is not None,
            Can.GROUPED_HEADS: call.heads != call.kv_heads,
            Can.LSE: call.return_lse,
            Can.GRADIENT_ON_CPU: call.needs_grad and on_cpu,
            Can.LSE_ON_CPU: call.return_lse and on_cpu,
        }
        if not call.packed:
            unequal = call.causal and call.band.offset != 0
            wanted[Can.UNEQUAL_CAUSAL] = unequal and not call.band.unlimited
        missing = [option for option, asked in wanted.items() if asked and option not in self.can]
        return reasons + [f"cannot do {option.value}" for option in missing]


Run = Callable[[AttentionCall], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        run: call -> (out, lse or None) for a call that `reasons` does not exclude.
        kernel: call -> the name of the kernel that `run` launches.
        io_aware: True when no matrix of seqlen_q x seqlen_k scores is ever stored.
        run_packed: the same as `run` for packed calls; None when packed calls run one per document.
        missing: () -> why it is not installed here, or None.
        further_reasons: call -> reasons that `limits` cannot express.
        in_auto: whether `backend="auto"` may choose it for this call.
        stores_mask: whether this call makes it store a mask of seqlen_q x seqlen_k.
    """

    name: str
    description: str
    limits: Limits
    run: Run
    kernel: Callable[[AttentionCall], str]
    io_aware: bool = True
    run_packed: Run | None = None
    missing: Callable[[], str | None] = lambda: None
    further_reasons: Callable[[AttentionCall], list[str]] = lambda call: []
    in_auto: Callable[[AttentionCall], bool] = lambda call: True
    stores_mask: Callable[[AttentionCall], bool] = lambda call: False

    def reasons(self, call: AttentionCall) -> list[str]:
        """Every reason why this backend cannot run `call` here; empty when it can."""
        missing = self.missing()
        hardware = self.limits.hardware_reasons(call)
        found = [*([missing] if missing else []), *hardware, *self.limits.option_reasons(call)]
        for part in self.parts(call):
            options = self.limits.option_reasons(part)
            found += options
            # On an unknown device a kernel's own reasons mean nothing. PyTorch would print that it
            # cannot do what `limits` excludes.
            if not hardware and not options:
                found += self.further_reasons(part)
        return list(dict.fromkeys(found))

    def for_auto(self, call: AttentionCall) -> bool:
        """Return whether "auto" may choose it: not if it stores a mask of a million entries."""
        large = call.q.shape[-3] * call.k.shape[-3] > 2**20
        return self.in_auto(call) and not (large and self.stores_mask(call))

    def parts(self, call: AttentionCall) -> list[AttentionCall]:
        """The calls that this backend gets: one per document if it takes no packed sequences."""
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
