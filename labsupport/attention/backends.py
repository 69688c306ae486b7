"""One function over every implementation of attention that can run here.

    attention(q, k, v, causal=True)                        the best backend for these inputs
    attention(q, k, v, backend="sdpa_flash")               this one, or an error with every reason
    flash_attention(q, k, v)                               IO-aware ones only: never the textbook
    attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)  packed sequences of different lengths
    available_backends(q, k, v)                            which ones run these inputs, and why not
    register_backend("mine", function)                     a function of your own, as one more
    last_call()                                            which backend and which kernel ran

Inputs are checked, and a backend is chosen, once for each signature: shapes, strides, dtypes,
devices, options and PyTorch's modes. Further calls with that signature go straight to the kernel.
From here on, inputs and options travel as one `AttentionCall`. Where to read on:

    call             the carrier: inputs, options, and what is computed from them
    implementations  the table of backends, with their limits
    adapters         from a call to PyTorch's, flash-attn's and other kernels
    kernels/autograd from a call to the lab's own kernels
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html import escape
from inspect import signature
from typing import Any, TypeVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

from labsupport.attention.adapters import Kernel
from labsupport.attention.call import AttentionCall, AttentionOptions, BackendUnavailableError
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.implementations import (
    BACKENDS,
    FLOAT_DTYPES,
    Backend,
    Can,
    Limits,
    by_name,
    in_order,
    own,
)
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_packed_layout,
    check_scale,
    check_softcap,
    check_switch,
    check_window,
    refuse_options,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
Result = Tensor | tuple[Tensor, Tensor]


def _torch_function(function: _Function) -> _Function:
    """Let a `torch.overrides.TorchFunctionMode` see calls of a function as one operation.

    A precision tracker or policy then sees `attention` like any function of PyTorch's own, and
    nothing of what its backends do inside.
    """
    known = {*signature(function).parameters, *AttentionOptions.__annotations__} - {"options"}

    def tensors(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Any, ...]:
        if not options.keys() <= known:
            refuse_options(function.__name__, options, sorted(known))
        return q, k, v

    wrapped: Any = wrap_torch_function(tensors)(function)
    return wrapped


@_torch_function
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
    softcap: float = 0.0,
    check_layout: bool = True,
) -> Result:
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
        alibi_slopes: (heads,) or (batch, heads); adds `-slope * |i + seqlen_k - seqlen_q - j|`.
        backend: a name from `available_backends()`, or "auto".
        return_lse: also return the log-sum-exp (not differentiable itself).
        softcap: let no scaled score exceed it: `softcap * tanh(score / softcap)`; 0 means none.
            ALiBi is added, and masks are applied, afterwards.
        check_layout: refuse inputs whose heads and seqlen look swapped: more than 128 heads, and
            more heads than keys. (Shorter swapped inputs look like right ones.)

    Returns:
        out (batch, seqlen_q, heads, head_dim) in q's dtype; with `return_lse` also lse
        (batch, heads, seqlen_q), natural log, float32 (float64 for float64 inputs). A query that
        sees no key gets output 0 and lse -inf. Autocast does not reach inside.

    Raises:
        AttentionInputError: the inputs do not fit together, or the backend's name is unknown.
        BackendUnavailableError: the backend cannot run these inputs here; says every reason.
        TypeError: an option of another function, whose name is given.

    A NaN in a query stays visible, except in PyTorch's kernel for CPUs (`sdpa_flash`) with fewer
    than 16 keys, which makes that row 0.

    >>> q = k = v = torch.randn(1, 16, 4, 8)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 16, 4, 8])
    """
    call = AttentionCall(
        q, k, v, causal, softmax_scale, window_size, alibi_slopes, return_lse, softcap
    )
    return _attend(call, backend, check_layout)


@_torch_function
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = "auto",
    check_layout: bool = True,
    **options: Unpack[AttentionOptions],
) -> Result:
    """`attention`, restricted to IO-aware backends: raises rather than fall back to the textbook.

    Args, returns and errors as in `attention`; a backend that stores the score matrix (`standard`,
    `sdpa_math`) is refused by name.

    >>> q = k = v = torch.randn(1, 16, 4, 8)
    >>> torch.equal(flash_attention(q, k, v, causal=True), attention(q, k, v, causal=True))
    True
    """
    if backend != "auto" and not by_name(backend).io_aware:
        raise BackendUnavailableError(
            f"backend {backend!r} stores the seqlen_q x seqlen_k scores: it is not FlashAttention. "
            f"Use labsupport.attention.attention(..., backend={backend!r}) if you want it.",
            {backend: ("is not IO-aware",)},
        )
    return _attend(AttentionCall(q, k, v, **options), backend, check_layout, io_aware=True)


@_torch_function
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Result:
    """Attention over packed sequences: none sees another one, and nothing is padded.

    Args:
        q: (total_q, heads, head_dim), the sequences one after the other.
        k, v: (total_k, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) integers, offsets 0 .. total of the sequences.
        alibi_slopes: (heads,) or (sequences, heads). Other options as in `attention`, per sequence.

    Returns:
        out (total_q, heads, head_dim); with `return_lse` also lse (heads, total_q).

    Raises: as `attention`.

    >>> q = k = v = torch.randn(7, 4, 8)
    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)  # sequences of 3 and 4 tokens
    >>> attention_varlen(q, k, v, ends, ends, causal=True).shape
    torch.Size([7, 4, 8])
    """
    call = AttentionCall(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return _attend(call, backend)


# --- from a call to a backend ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """The choice for one signature."""

    backend: str
    kernels: list[Kernel]  # one for the call, or for each packed sequence that has keys
    one_by_one: bool
    empty: int  # number of leading queries that see no key
    repeated: bool  # whether key heads are repeated before the call
    report: CallReport


_MOST_PLANS, _MOST_OFFSETS = 4096, 256
_plans: dict[Any, _Plan] = {}
_reports = threading.local()


def _attend(
    call: AttentionCall, requested: str, check_layout: bool = True, io_aware: bool = False
) -> Result:
    _reports.last = None  # a call that raises leaves no report of an older one
    # Before the plans, for which True is 1.0 and (1.0, 0) is (1, 0).
    check_switch("causal", call.causal)
    check_switch("return_lse", call.return_lse)
    check_scale(call.softmax_scale)
    check_window(call.window_size)
    check_softcap(call.softcap)
    signature = _signature(call, requested, check_layout, io_aware)
    plan = None if signature is None else _plans.get(signature)
    if plan is None:
        _check(call, check_layout)
        plan = _make_plan(call, requested, io_aware)
        if signature is not None:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[signature] = plan
    if call.softmax_scale is not None and call.softmax_scale <= 0:
        call = call.with_positive_scale()
    if plan.empty:
        call = replace(call, q=call.q[:, plan.empty :])
    if plan.repeated:
        call = call.with_repeated_heads()
    # Autocast would cast inputs on the way into some backends and not into others.
    with autocast_off(call.q):
        if plan.one_by_one:
            out, lse = _run_each_document(plan.kernels, call)
        else:
            out, lse = plan.kernels[0].run(call.for_kernels() if call.packed else call)
    if plan.empty:
        out = F.pad(out, (0, 0, 0, 0, plan.empty, 0))
    _reports.last = plan.report
    if not call.return_lse:
        return out
    assert lse is not None, f"{plan.backend} promised a log-sum-exp and returned none"
    lse = lse.detach().to(torch.float64 if call.q.dtype == torch.float64 else torch.float32)
    # flash-attn 2 says +inf of a query that sees no key (packed calls may hold some).
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return out, F.pad(lse, (plan.empty, 0), value=-torch.inf) if plan.empty else lse


def _signature(call: AttentionCall, *rest: Any) -> tuple[Any, ...] | None:
    """Everything that checks and choice depend on; None where each call is planned again.

    Packed calls depend on the values of their offsets. While PyTorch traces, sizes may be symbols.
    """
    q, slopes = call.q, call.alibi_slopes
    tensors = (q, call.k, call.v) if slopes is None else (q, call.k, call.v, slopes)
    offsets = [x for x in (call.cu_seqlens_q, call.cu_seqlens_k) if x is not None]
    if (
        torch.compiler.is_compiling()
        or any(not isinstance(x, Tensor) or x.ndim != 1 or len(x) > _MOST_OFFSETS for x in offsets)
        or any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in tensors)
        or type(call.window_size) is not tuple
    ):
        return None
    # Backends for GPUs ask PyTorch, whose answer depends on `sdpa_kernel` and determinism.
    modes = (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    if q.is_cuda:
        cuda = torch.backends.cuda
        modes += (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled())
        modes += (cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled())
        if q.itemsize == 2:  # the TMA unit takes aligned tensors
            modes += tuple([x.data_ptr() % 16 == 0 for x in tensors])
    return (
        *[(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors],
        *[(x.dtype, tuple(x.tolist())) for x in offsets],
        *(call.causal, call.softmax_scale, call.window_size, call.return_lse, call.softcap),
        *(modes, *rest),
    )


def _check(call: AttentionCall, check_layout: bool) -> None:
    """Raise AttentionInputError for inputs that do not fit together."""
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        check_packed_layout(call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k)
        sequences = len(call.cu_seqlens_q) - 1
    else:
        check_model_layout(call.q, call.k, call.v, check_layout=check_layout)
        sequences = call.q.shape[0]
    check_alibi_slopes(call.alibi_slopes, sequences, call.heads)


def _make_plan(call: AttentionCall, requested: str, io_aware: bool) -> _Plan:
    empty, call = (0, call) if call.packed else call.without_empty_queries()
    candidates = tuple(entry for entry in BACKENDS if entry.io_aware or not io_aware)
    repeated = requested == "auto" and _better_repeated(call)
    if repeated:
        call = call.with_repeated_heads()
    chosen, refused = _choose(call, requested, candidates)
    parts = chosen.parts(call)
    kernels = [chosen.kernel(part) for part in parts]
    one_by_one = call.packed and not chosen.takes_packed
    names = " and ".join(dict.fromkeys(kernel.name for kernel in kernels))
    names += ", once per sequence" if one_by_one else ""
    names += ", key heads repeated" if repeated else ""
    io_aware = chosen.io_aware and not any(map(chosen.stores_mask, parts))
    report = CallReport(chosen.name, names, io_aware, requested, refused)
    return _Plan(chosen.name, kernels, one_by_one, empty, repeated, report)


def _better_repeated(call: AttentionCall) -> bool:
    """Return whether to repeat key heads: in float32 the fastest kernel on GPUs can't share them.

    On an H100 `sdpa_efficient` on repeated heads takes 0.1 to 0.8 of the time of those that can.
    A long cache is not repeated for each new token.
    """
    grouped = call.heads != call.kv_heads and not call.packed
    square = grouped and call.q.shape[1] == call.k.shape[1]
    return square and call.q.is_cuda and call.q.dtype == torch.float32


def _choose(
    call: AttentionCall, requested: str, candidates: tuple[Backend, ...]
) -> tuple[Backend, dict[str, tuple[str, ...]]]:
    """Choose the first backend that runs a call, and collect why earlier ones do not."""
    refused: dict[str, tuple[str, ...]] = {}
    order = in_order(candidates, call) if requested == "auto" else [by_name(requested)]
    if call.packed:  # kernels that take all sequences together come before a loop over them
        order.sort(key=lambda entry: not entry.takes_packed)
    for entry in order:
        reasons = tuple(entry.reasons(call))
        if not reasons and (requested != "auto" or all(map(entry.for_auto, entry.parts(call)))):
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


def _run_each_document(kernels: list[Kernel], call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    outs, lses, kernel = [], [], iter(kernels)
    for rows, empty, document in call.documents:
        outs.append(torch.zeros_like(call.q[rows][:empty]))
        lses.append(call.q.new_full((call.heads, empty), -torch.inf, dtype=torch.float32))
        if document is not None:
            out, lse = next(kernel).run(document)
            outs.append(out[0])
            lses += [] if lse is None else [lse[0]]
    return torch.cat(outs), torch.cat(lses, dim=-1) if call.return_lse else None


# --- what can run, and what ran -------------------------------------------------------------------


@dataclass(frozen=True)
class CallReport:
    """The backend and kernel that ran the last call, and why better ones did not."""

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
    """Return the report of this thread's last call of one of the three functions.

    >>> q = k = v = torch.randn(1, 16, 4, 8)
    >>> out = attention(q, k, v, backend="flash_torch")
    >>> last_call().backend
    'flash_torch'
    """
    return getattr(_reports, "last", None)


@dataclass(frozen=True)
class BackendStatus:
    """One backend's answer: it can run a call here, or every reason why it cannot."""

    name: str
    runs: bool
    reasons: tuple[str, ...]
    description: str
    io_aware: bool


class BackendTable(list[BackendStatus]):
    """The backends' states, in order of preference; prints as a table."""

    def __getitem__(self, key: Any) -> Any:
        """Return a state by position or name: `available_backends()["sdpa_flash"].runs`."""
        if isinstance(key, str):
            return next(status for status in self if status.name == by_name(key).name)
        return super().__getitem__(key)

    def __str__(self) -> str:
        width = max(len(status.name) for status in self)
        return "\n".join(
            f"{one.name:{width}}  {'runs' if one.runs else 'no: ' + '; '.join(one.reasons)}"
            for one in self
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
    check_layout: bool = True,
    **options: Any,
) -> BackendTable:
    """List every backend, and all reasons why it cannot run a call here.

    Args:
        q, k, v: the inputs in question, as for `attention` (or packed, with `cu_seqlens_q` and
            `cu_seqlens_k` among the options). Without them: plain attention of a small tensor
            in this device's usual dtype (bfloat16 or float16 on a GPU, float32 on a CPU).
        device: where, if no tensors are given; a GPU if there is one.
        check_layout, options: causal, window_size, ..., as in `attention`.

    >>> available_backends(device="cpu")["sdpa_flash"].runs
    True
    """
    if q is None or k is None or v is None:
        if any(x is not None for x in (q, k, v)):
            raise AttentionInputError("available_backends takes q, k and v together, or not at all")
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = torch.float32
        if where.type == "cuda":
            ampere = torch.cuda.get_device_capability(where) >= (8, 0)
            dtype = torch.bfloat16 if ampere else torch.float16
        q = k = v = torch.zeros(1, 128, 4, 64, dtype=dtype, device=where)
    call = AttentionCall(q, k, v, **options)
    _check(call, check_layout)
    call = call if call.packed else call.without_empty_queries()[1]
    return BackendTable(
        BackendStatus(entry.name, not why, why, entry.description, entry.io_aware)
        for entry in (*BACKENDS, *own.values())
        for why in (tuple(entry.reasons(call)),)
    )


def register_backend(name: str, function: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> None:
    """Make a function of your own a backend: calls, tables and models then take it by its name.

    Args:
        name: a new one, or one that was registered before; its function is replaced.
        function: (q, k, v, causal) -> out, all (batch, heads, seqlen, head_dim), with the
            default scale and bottom-right causal masks. Shared key/value heads are repeated before.
            For training it needs its own gradients (`torch.autograd.Function`).

    Raises:
        ValueError: the name of one of the lab's backends.

    >>> register_backend("mine", lambda q, k, v, causal: v)
    >>> q = k = v = torch.ones(1, 5, 2, 8)
    >>> torch.equal(attention(q, k, v, backend="mine"), v)
    True
    """
    if name == "auto" or any(entry.name == name for entry in BACKENDS):
        raise ValueError(f"{name!r} is a backend of the lab's: choose another name")

    def run(call: AttentionCall) -> tuple[Tensor, None]:
        shared = call.kv_heads < call.heads
        call = call.with_repeated_heads() if shared else call
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        return function(q, k, v, call.causal).transpose(1, 2), None

    def reasons(call: AttentionCall) -> list[str]:
        usual = call.scale == 1 / math.sqrt(call.head_dim)
        return [] if usual else ["takes the default softmax_scale only"]

    own[name] = Backend(
        name=name,
        description="registered with register_backend",
        limits=Limits(
            dtypes={"*": FLOAT_DTYPES},
            can=frozenset({Can.UNEQUAL_CAUSAL, Can.GROUPED_HEADS, Can.GRADIENT_ON_CPU}),
        ),
        further_reasons=reasons,
        kernel=lambda call: Kernel(getattr(function, "__name__", name), run),
    )
    _plans.clear()
