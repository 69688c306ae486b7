"""One front door over every implementation of attention that can run here.

    attention(q, k, v, causal=True)                        the best backend for these inputs
    attention(q, k, v, backend="sdpa_flash")               this one, or an error with every reason
    flash_attention(q, k, v)                               IO-aware ones only: never the textbook
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)  packed sequences of different lengths
    available_backends(q, k, v)                            who can run these inputs, who cannot, why
    last_call()                                            which backend and which kernel ran

Layout, names and conventions are flash-attn's: (batch, seqlen, heads, head_dim), `softmax_scale`,
`causal` aligned bottom-right, `window_size`, grouped-query heads. To add an implementation, add an
entry to `implementations.BACKENDS`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.implementations import BACKENDS, by_name
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_packed_layout,
    check_window,
)
from labsupport.attention.registry import Backend
from labsupport.attention.reports import (
    BackendStatus,
    BackendTable,
    BackendUnavailableError,
    CallReport,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def overridable(function: _Function) -> _Function:
    """Let a `torch.overrides.TorchFunctionMode` see calls of the front door as one operation.

    A precision tracker or policy then meets `attention` like any function of PyTorch's own, and
    not what its backends do inside.
    """
    wrapped: Any = wrap_torch_function(lambda q, k, v, *args, **options: (q, k, v))(function)
    return wrapped


@overridable
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


@overridable
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
    if backend != "auto" and not by_name(backend).io_aware:
        raise BackendUnavailableError(
            f"backend {backend!r} stores the seqlen_q x seqlen_k scores: it is not FlashAttention. "
            f"Use labsupport.attention.attention(..., backend={backend!r}) if you want it.",
            {backend: ("is not IO-aware",)},
        )
    call = AttentionCall(q, k, v, causal, softmax_scale, window_size, alibi_slopes, return_lse)
    io_aware = tuple(entry for entry in BACKENDS if entry.io_aware)
    return _dispatch(_checked(call, check_layout), backend, io_aware)


@overridable
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
    order = candidates if requested == "auto" else (by_name(requested),)
    if call.packed:  # kernels that take all sequences at once come before a loop over them
        order = tuple(sorted(order, key=lambda entry: entry.run_packed is None))
    for entry in order:
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


def _example(device: torch.device | str | None) -> Tensor:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float32
    if chosen.type == "cuda":
        ampere = torch.cuda.get_device_capability(chosen) >= (8, 0)
        dtype = torch.bfloat16 if ampere else torch.float16
    return torch.zeros(1, 128, 4, 64, dtype=dtype, device=chosen)
