"""One front door over every implementation of attention that can run here.

    attention(q, k, v, causal=True)                        the best backend for these inputs
    attention(q, k, v, backend="sdpa_flash")               this one, or an error with every reason
    flash_attention(q, k, v)                               IO-aware ones only: never the textbook
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)  packed sequences of different lengths
    available_backends(q, k, v)                            who can run these inputs, who cannot, why
    last_call()                                            which backend and which kernel ran

Layout, names and conventions are flash-attn's: (batch, seqlen, heads, head_dim), `softmax_scale`,
`causal` aligned bottom-right, `window_size`, grouped-query heads. To add an implementation, add an
entry to `BACKENDS`.
"""

from __future__ import annotations

import difflib
import threading
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from labsupport.attention import adapters_packages as packages
from labsupport.attention import adapters_torch as builtin
from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_packed_layout,
    check_window,
)
from labsupport.attention.registry import (
    EVERYTHING,
    FLOAT_DTYPES,
    HALF_DTYPES,
    Backend,
    Can,
    Limits,
)


class BackendUnavailableError(RuntimeError):
    """No backend asked for can run this call here; `reasons` maps each to all of its reasons."""

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]]) -> None:
        super().__init__(message)
        self.reasons = reasons


def _on_hopper_or_newer(call: AttentionCall) -> bool:
    return torch.cuda.get_device_capability(call.q.device) >= (9, 0)


# In order of preference: `auto` takes the first that can run the call. cuDNN comes before
# flash-attn 2's kernels on Hopper and newer only, as in PyTorch's own choice.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="fa4",
        description="flash-attn-4: CuTe DSL kernels for Hopper and Blackwell",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(9, 0),
            max_head_dim=256,
            head_dim_multiple=8,
            can=EVERYTHING - {Can.ALIBI},
        ),
        missing=packages.missing_fa4,
        further_reasons=packages.fa4_reasons,
        run=packages.run_fa4,
        run_packed=packages.run_fa4_packed,
        kernel=lambda call: "flash_attn.cute.flash_attn_func",
    ),
    Backend(
        name="sdpa_cudnn",
        description="PyTorch SDPA with cuDNN's fused attention",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": HALF_DTYPES},
            min_capability=(8, 0),
            max_head_dim=256,
            head_dim_multiple=8,
            can=EVERYTHING - {Can.UNEQUAL_CAUSAL, Can.WINDOW, Can.ALIBI},
        ),
        run=builtin.run_sdpa(SDPBackend.CUDNN_ATTENTION),
        kernel=builtin.sdpa_kernel_name(SDPBackend.CUDNN_ATTENTION),
        further_reasons=builtin.sdpa_reasons(SDPBackend.CUDNN_ATTENTION),
        in_auto=_on_hopper_or_newer,
    ),
    Backend(
        name="fa2",
        description="flash-attn 2: the authors' CUDA kernels",
        io_aware=True,
        limits=Limits(dtypes={"cuda": HALF_DTYPES}, min_capability=(8, 0), max_head_dim=256),
        missing=packages.missing_fa2,
        run=packages.run_fa2,
        run_packed=packages.run_fa2_packed,
        kernel=lambda call: "flash_attn.flash_attn_func",
    ),
    Backend(
        name="sdpa_flash",
        description=(
            "PyTorch SDPA with FlashAttention (version 2 on GPUs; a kernel of its own on CPUs)"
        ),
        io_aware=True,
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": HALF_DTYPES},
            min_capability=(8, 0),
            can=EVERYTHING - {Can.ALIBI},
        ),
        run=builtin.run_sdpa(SDPBackend.FLASH_ATTENTION),
        kernel=builtin.sdpa_kernel_name(SDPBackend.FLASH_ATTENTION),
        in_auto=builtin.in_auto(SDPBackend.FLASH_ATTENTION),
        stores_mask=builtin.stores_mask(SDPBackend.FLASH_ATTENTION),
        further_reasons=builtin.sdpa_reasons(SDPBackend.FLASH_ATTENTION),
    ),
    Backend(
        name="sdpa_efficient",
        description="PyTorch SDPA with memory-efficient attention; runs on GPUs before Ampere too",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": (torch.float32, torch.float16, torch.bfloat16)},
            min_capability=(5, 0),
            min_capability_bfloat16=(8, 0),
            can=EVERYTHING - {Can.GROUPED_HEADS},
        ),
        run=builtin.run_sdpa(SDPBackend.EFFICIENT_ATTENTION),
        kernel=builtin.sdpa_kernel_name(SDPBackend.EFFICIENT_ATTENTION),
        in_auto=builtin.in_auto(SDPBackend.EFFICIENT_ATTENTION),
        stores_mask=builtin.stores_mask(SDPBackend.EFFICIENT_ATTENTION),
        further_reasons=builtin.sdpa_reasons(SDPBackend.EFFICIENT_ATTENTION),
    ),
    Backend(
        name="xformers",
        description="xFormers' memory-efficient attention",
        io_aware=True,
        limits=Limits(
            dtypes={"cuda": (torch.float32, torch.float16, torch.bfloat16)},
            min_capability=(7, 0),
            min_capability_bfloat16=(8, 0),
            head_dim_multiple=8,
            can=EVERYTHING - {Can.WINDOW, Can.ALIBI, Can.GROUPED_HEADS},
        ),
        missing=packages.missing_xformers,
        run=packages.run_xformers,
        kernel=lambda call: "xformers.ops.memory_efficient_attention",
    ),
    Backend(
        name="flex",
        description="PyTorch FlexAttention, compiled (Triton on GPUs, C++ on CPUs)",
        io_aware=True,
        limits=Limits(
            dtypes={
                "cpu": (torch.float32, torch.float16, torch.bfloat16),
                "cuda": (torch.float32, torch.float16, torch.bfloat16),
            },
            min_capability=(8, 0),
            can=EVERYTHING - {Can.GRADIENT_ON_CPU, Can.LSE_ON_CPU, Can.PACKED},
        ),
        run=builtin.run_flex,
        kernel=lambda call: "torch.nn.attention.flex_attention.flex_attention (compiled)",
        further_reasons=builtin.flex_reasons,
        # Its first call for a shape compiles for many seconds: on a CPU only where asked for.
        in_auto=lambda call: call.q.device.type == "cuda",
    ),
    Backend(
        name="flash_torch",
        description="this lab's FlashAttention in plain PyTorch: to read, not for speed on GPUs",
        io_aware=True,
        limits=Limits(dtypes={"*": FLOAT_DTYPES}),
        run=builtin.run_flash_torch,
        kernel=lambda call: "labsupport.attention.flash_torch.FlashAttentionFunction",
    ),
    Backend(
        name="sdpa_math",
        description="PyTorch SDPA's textbook path: stores the scores",
        io_aware=False,
        limits=Limits(
            dtypes={"cpu": FLOAT_DTYPES, "cuda": FLOAT_DTYPES},
            can=EVERYTHING - {Can.LSE},
        ),
        run=builtin.run_sdpa(SDPBackend.MATH),
        kernel=builtin.sdpa_kernel_name(SDPBackend.MATH),
    ),
    Backend(
        name="standard",
        description="textbook attention: stores the scores and their softmax",
        io_aware=False,
        limits=Limits(dtypes={"*": FLOAT_DTYPES}),
        run=builtin.run_standard,
        kernel=lambda call: "labsupport.attention.reference.banded_attention",
    ),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    check_layout: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in flash-attn's layout, by any backend that can run here.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim), `heads` a multiple of `kv_heads`; same dtype
            and device as `q`. With g = heads / kv_heads, query heads g * i ... g * i + g - 1 share
            key/value head i.
        causal: hide the future, aligned bottom-right: query i sees keys up to
            i + seqlen_k - seqlen_q.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        window_size: (left, right) neighbours a query may see; -1 means no limit.
        alibi_slopes: (heads,) or (batch, heads); adds -slope * |i + seqlen_k - seqlen_q - j|.
        backend: a name from `available_backends()`, or "auto".
        return_lse: also return the log-sum-exp (not differentiable itself).
        check_layout: refuse inputs whose heads and seqlen look swapped: more than 128 heads, and
            more heads than keys. (Shorter swapped inputs cannot be told from right ones.)

    Autocast does not reach inside: what is given is what is computed with, and errors name it.

    Returns:
        out (batch, seqlen_q, heads, head_dim) in q's dtype; with `return_lse` also lse
        (batch, heads, seqlen_q), natural log, float32 (float64 for float64 inputs). A query that
        sees no key gets output 0 and lse -inf, whatever the backend's own convention.

    Raises:
        AttentionInputError: the inputs do not fit together, or the backend's name is unknown.
        BackendUnavailableError: the backend cannot run these inputs here; says every reason.

    >>> q = k = v = torch.randn(1, 16, 4, 8)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 16, 4, 8])
    """
    call = AttentionCall(q, k, v, causal, softmax_scale, window_size, alibi_slopes, return_lse)
    return _dispatch(_checked(call, check_layout), backend, BACKENDS)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    check_layout: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention`, restricted to IO-aware backends: raises rather than fall back to the textbook.

    Args, returns and errors as in `attention`; a backend that stores the score matrix (`standard`,
    `sdpa_math`) is refused by name.
    """
    if backend != "auto" and not _by_name(backend).io_aware:
        raise BackendUnavailableError(
            f"backend {backend!r} stores the seqlen_q x seqlen_k scores: it is not FlashAttention. "
            f"Use labsupport.attention.attention(..., backend={backend!r}) if you want it.",
            {backend: ("is not IO-aware",)},
        )
    call = AttentionCall(q, k, v, causal, softmax_scale, window_size, alibi_slopes, return_lse)
    io_aware = tuple(entry for entry in BACKENDS if entry.io_aware)
    return _dispatch(_checked(call, check_layout), backend, io_aware)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences: none sees another one, and nothing is padded.

    Args:
        q: (total_q, heads, head_dim), the sequences one after the other.
        k, v: (total_k, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) integers, the offsets at which each sequence
            starts, and the total last: for lengths 3 and 5, [0, 3, 8].
        alibi_slopes: (heads,) or (sequences, heads). Other options as in `attention`, per sequence.

    Returns:
        out (total_q, heads, head_dim); with `return_lse` also lse (heads, total_q).

    Raises: as `attention`.
    """
    call = AttentionCall(
        q,
        k,
        v,
        causal,
        softmax_scale,
        window_size,
        alibi_slopes,
        return_lse,
        cu_seqlens_q,
        cu_seqlens_k,
    )
    return _dispatch(_checked(call), backend, BACKENDS)


# --- what can run, and what ran -------------------------------------------------------------------


@dataclass(frozen=True)
class BackendStatus:
    """Whether one backend can run a call here, and every reason if it cannot."""

    name: str
    runs: bool
    reasons: tuple[str, ...]
    description: str
    io_aware: bool


class BackendTable(list[BackendStatus]):
    """The backends' states, in order of preference; prints as a table."""

    def __getitem__(self, key: Any) -> Any:
        """By position, or by name: `available_backends()["sdpa_flash"].runs`."""
        if isinstance(key, str):
            return next(status for status in self if status.name == _by_name(key).name)
        return super().__getitem__(key)

    def __str__(self) -> str:
        width = max(len(status.name) for status in self)
        return "\n".join(
            f"{status.name:{width}}  "
            f"{'runs' if status.runs else 'no: ' + '; '.join(status.reasons)}"
            for status in self
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{status.name}</code></td><td>{'runs' if status.runs else 'no'}</td>"
            f"<td style='text-align:left'>"
            f"{escape(status.description if status.runs else '; '.join(status.reasons))}</td></tr>"
            for status in self
        )
        return f"<table><tr><th>backend</th><th>here</th><th></th></tr>{rows}</table>"


def available_backends(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> BackendTable:
    """Say of every backend whether it can run a call here, and if not, why not.

    Args:
        q, k, v: the inputs in question, as for `attention` (or packed, with `cu_seqlens_q` and
            `cu_seqlens_k` among the options). Without them: plain attention of a small tensor
            in this device's usual dtype (bfloat16 or float16 on a GPU, float32 on a CPU).
        device: where, if no tensors are given; a GPU if there is one.
        options: causal, window_size, alibi_slopes, return_lse, softmax_scale, as in `attention`.
    """
    given = [tensor for tensor in (q, k, v) if tensor is not None]
    if given and len(given) < 3:
        raise AttentionInputError(
            "available_backends takes q, k and v together, or none of them; "
            f"{len(given)} of the three were given."
        )
    check_layout = options.pop("check_layout", True)
    if q is None or k is None or v is None:
        q = k = v = _example(device)
    unknown = set(options) - {entry.name for entry in fields(AttentionCall)}
    if unknown:
        raise AttentionInputError(f"attention has no option {', '.join(sorted(unknown))}.")
    call = _checked(AttentionCall(q, k, v, **options), check_layout)
    if not call.packed:
        _, call = call.without_empty_queries()
    return BackendTable(
        BackendStatus(
            entry.name,
            not (why := tuple(entry.reasons(call))),
            why,
            entry.description,
            entry.io_aware,
        )
        for entry in BACKENDS
    )


@dataclass(frozen=True)
class CallReport:
    """What the last call did: which backend and kernel ran, and why better ones did not."""

    backend: str
    kernel: str
    io_aware: bool
    requested: str
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.backend} ran ({self.kernel}); {self.requested!r} was asked for"]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.refused.items()]
        return "\n".join(lines)


def last_call() -> CallReport | None:
    """The report of this thread's last `attention`, `flash_attention` or `attention_varlen`."""
    return getattr(_reports, "last", None)


_reports = threading.local()


def _checked(call: AttentionCall, check_layout: bool = True) -> AttentionCall:
    """Return the call, or raise AttentionInputError for whatever does not fit together."""
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        check_packed_layout(call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k)
        sequences = len(call.cu_seqlens_q) - 1
    else:
        check_model_layout(call.q, call.k, call.v, check_layout=check_layout)
        sequences = call.q.shape[0]
    check_window(call.window_size)
    check_alibi_slopes(call.alibi_slopes, sequences, call.heads)
    return call


# --- dispatch -------------------------------------------------------------------------------------


def _dispatch(
    call: AttentionCall, requested: str, candidates: tuple[Backend, ...]
) -> Tensor | tuple[Tensor, Tensor]:
    _reports.last = None  # a call that raises leaves no report of an older one
    empty, call = (0, call) if call.packed else call.without_empty_queries()
    # Autocast would cast inputs on the way into some backends and not into others.
    with autocast_off(call.q):
        chosen, refused = _choose(call, requested, candidates)
        out, lse = _run(chosen, call)
    if empty:
        out = F.pad(out, (0, 0, 0, 0, empty, 0))
        lse = None if lse is None else F.pad(lse, (empty, 0), value=-torch.inf)
    _reports.last = _report(chosen, call, requested, refused)
    if not call.return_lse:
        return out
    assert lse is not None, f"{chosen.name} promised a log-sum-exp and returned none"
    return out, lse


def _report(
    chosen: Backend, call: AttentionCall, requested: str, refused: dict[str, tuple[str, ...]]
) -> CallReport:
    parts = chosen.parts(call)
    kernels = " and ".join(dict.fromkeys(chosen.kernel(part) for part in parts))
    if call.packed and chosen.run_packed is None:
        kernels += ", once per sequence"
    io_aware = chosen.io_aware and not any(chosen.stores_mask(part) for part in parts)
    return CallReport(chosen.name, kernels, io_aware, requested, refused)


def _choose(
    call: AttentionCall, requested: str, candidates: tuple[Backend, ...]
) -> tuple[Backend, dict[str, tuple[str, ...]]]:
    refused: dict[str, tuple[str, ...]] = {}
    for entry in candidates if requested == "auto" else (_by_name(requested),):
        reasons = tuple(entry.reasons(call))
        if not reasons and (requested != "auto" or all(map(entry.in_auto, entry.parts(call)))):
            return entry, refused
        refused[entry.name] = reasons or ("runs, but only when asked for by name",)
    listing = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in refused.items())
    if requested == "auto":
        raise BackendUnavailableError(f"no backend can run this call:\n{listing}", refused)
    others = [entry.name for entry in candidates if not entry.reasons(call)]
    raise BackendUnavailableError(
        f"backend {requested!r} cannot run this call:\n{listing}\n"
        f"Backends that can: {', '.join(others) or 'none'}.",
        refused,
    )


def _run(entry: Backend, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if not call.packed:
        out, lse = entry.run(call)
    elif entry.run_packed is not None:
        out, lse = entry.run_packed(call)
    else:
        return _run_each_document(entry, call)
    return out, None if lse is None else _as_promised(lse, call)


def _as_promised(lse: Tensor, call: AttentionCall) -> Tensor:
    # flash-attn 2 says +inf of a query that sees no key (packed calls may hold some).
    lse = lse.detach().to(torch.float64 if call.q.dtype == torch.float64 else torch.float32)
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _run_each_document(entry: Backend, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    outs, lses = [], []
    for rows, document in call.documents():
        queries = rows.stop - rows.start
        empty, document = (queries, None) if document is None else document.without_empty_queries()
        out = torch.zeros_like(call.q[rows][:empty])
        lse = call.q.new_full((call.heads, empty), -torch.inf, dtype=torch.float32)
        if document is not None:
            batched_out, batched_lse = _run(entry, document)
            out = torch.cat([out, batched_out[0]])
            lse = lse if batched_lse is None else torch.cat([lse, batched_lse[0]], dim=-1)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=-1) if call.return_lse else None


def _by_name(name: str) -> Backend:
    for entry in BACKENDS:
        if entry.name == name:
            return entry
    names = [entry.name for entry in BACKENDS]
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise AttentionInputError(
        f"unknown backend {name!r}.{hint} There are: auto, {', '.join(names)}."
    )


def _example(device: torch.device | str | None) -> Tensor:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float32
    if chosen.type == "cuda":
        ampere = torch.cuda.get_device_capability(chosen) >= (8, 0)
        dtype = torch.bfloat16 if ampere else torch.float16
    return torch.zeros(1, 128, 4, 64, dtype=dtype, device=chosen)
