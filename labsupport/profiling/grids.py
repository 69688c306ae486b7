"""Cases of attention, and a grid of them measured: time, memory and error, as a table.

A case has FLOPs and compulsory bytes in each of its passes:

    pass       FLOPs       bytes that must move, each once
    forward    4 pairs d   Q, K, V in; O, L out
    backward   10 pairs d  Q, K, V, O, dO, L in; dQ, dK, dV out

`pairs` are the visible (query, key) pairs of all heads. Keys that no query sees need not move, and
a group of query heads shares one head of K and V. The bytes are compulsory: a kernel whose tiles
read K and V again and again moves more, unless a cache helps (`labsupport.analysis.traffic`). Every
implementation is charged the same FLOPs, not what it really executes, so that TFLOP/s compare
times. Source: FlashAttention-2 (2023), section 4.1.

Each row of the table is one case. A case that does not run is a row as well, and `status` and
`reason` say why:

    ok              measured
    out of memory   it ran out, or (on a CPU, where that would take the whole machine down) its
                    predicted need exceeds what is available
    unsupported     the backend refuses these inputs here
    failed          it raised something unexpected: a bug, worth reporting
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from labsupport.attention.accuracy import compare_with_oracle, max_error, relative_error
from labsupport.attention.backends import (
    AttentionInputError,
    BackendUnavailableError,
    attention,
    available_backends,
    last_call,
)
from labsupport.attention.masks import AttentionMask
from labsupport.attention.reference import oracle_attention
from labsupport.profiling.hardware import raise_beaten
from labsupport.profiling.health import warn_if_busy
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.provenance import provenance
from labsupport.profiling.runs import load_run
from labsupport.profiling.timing import measure_time, resolve_device
from labsupport.profiling.units import format_bytes, format_ms

if TYPE_CHECKING:
    import pandas as pd

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
DTYPES = tuple(ITEMSIZE)
DIRECTIONS = ("forward", "forward+backward")
NO_WINDOW = (-1, -1)


@dataclass(frozen=True)
class Case:
    """One measurement to make.

    q is (batch, seqlen, heads, head_dim); k and v are (batch, kv_seqlen, kv_heads, head_dim).
    kv_heads and kv_seqlen default to heads and seqlen.

    Raises:
        ValueError: a size that is not positive, causal that is no bool, or an unknown dtype or
            direction.

    >>> Case("sdpa_flash", 4096, heads=8, causal=True).flops()
    17184063488
    """

    backend: str
    seqlen: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    direction: str = "forward"
    kv_seqlen: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "kv_seqlen", self.kv_seqlen or self.seqlen)
        for field in ("seqlen", "kv_seqlen", "batch", "heads", "kv_heads", "head_dim"):
            size = getattr(self, field)
            if size < 1 or size % 1:
                raise ValueError(f"{field} must be a whole number, at least 1, got {size}")
        if self.causal not in (True, False):
            raise ValueError(f"causal must be True or False, got {self.causal!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.direction not in DIRECTIONS:
            raise ValueError(
                f"unknown direction {self.direction!r}; known: {', '.join(DIRECTIONS)}"
            )

    def __str__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f" ({self.kv_heads} of keys and values)"
        mask = "causal" if self.causal else "not causal"
        return (
            f"{self.backend}, {self.direction}, batch {self.batch}, {self.seqlen} tokens, "
            f"{self.heads} heads{shared}, head_dim {self.head_dim}, {self.dtype}, {mask}"
        )

    def flops(self) -> float:
        """Return the FLOPs of all passes."""
        return sum(part.flops for part in passes_of(self))


def case_of(row: Mapping[Any, Any]) -> Case:
    """Return the case of a row of a table of measurements."""
    values = {field.name: row[field.name] for field in fields(Case) if field.name in row}
    for name in {"seqlen", "kv_seqlen", "batch", "heads", "kv_heads", "head_dim"} & set(values):
        # A column with gaps is of floats; a gap leaves the case's default.
        values[name] = int(values[name]) if values[name] == values[name] else 0
    return Case(**dict[str, Any](values))


def grid(backends: str | Sequence[str], seqlens: Sequence[int], **axes: Any) -> list[Case]:
    """All combinations, as cases; backends vary fastest, so that one shape is compared at a time.

    Args:
        backends, seqlens: lists of names and of lengths; a string is one name.
        axes: any further field of `Case`, a single value or several: a list, a set, a range.

    Example:
        >>> len(grid(["standard", "sdpa_flash"], [512, 1024], causal=[False, True]))
        8
    """
    backends = [backends] if isinstance(backends, str) else backends
    known = [field.name for field in fields(Case)]
    unknown = sorted(set(axes) - set(known))
    if unknown:
        raise ValueError(f"no such axis: {', '.join(unknown)}; known: {', '.join(known)}")
    lists = {
        name: list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        for name, value in axes.items()
    }
    return [
        Case(backend=backend, seqlen=seqlen, **dict[str, Any](zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
        for seqlen in seqlens
        for backend in backends
    ]


@dataclass(frozen=True)
class Pass:
    """FLOPs of one direction, and bytes that a fused kernel must move: each tensor once."""

    flops: float
    bytes: int


def passes_of(case: Case, window_size: tuple[int, int] = NO_WINDOW) -> list[Pass]:
    """The case's forward, and where it has one its backward.

    Args:
        window_size: (left, right) neighbours that a query sees, -1 for no limit.
    """
    band = AttentionMask.of(
        case.seqlen, case.kv_seqlen, causal=case.causal, window_size=window_size
    )
    pairs = case.batch * case.heads * band.visible_pairs()
    first, last = band.keys_seen(0, case.seqlen)
    row = case.head_dim * ITEMSIZE[case.dtype]
    of_q = case.batch * case.heads * case.seqlen * row
    of_k = case.batch * case.kv_heads * (last - first) * row
    lse = case.batch * case.heads * case.seqlen * (8 if case.dtype == "float64" else 4)
    # The gradients of keys that nobody sees are zeros, and still have to be written.
    of_dk = case.batch * case.kv_heads * case.kv_seqlen * row
    forward = Pass(4 * pairs * case.head_dim, 2 * of_q + 2 * of_k + lse)
    if case.direction == "forward":
        return [forward]
    backward = Pass(10 * pairs * case.head_dim, 4 * of_q + 2 * of_k + 2 * of_dk + lse)
    return [forward, backward]


# --- the runner ----------------------------------------------------------------------------------

Tensors = tuple[torch.Tensor, ...]

QUADRATIC_BACKENDS = ("standard", "sdpa_math")  # these write the seqlen x seqlen matrices

# How many seqlen x seqlen matrices exist at the peak, at most, over both quadratic backends and
# all dtypes, in elements of at least 4 bytes (masks and float32 copies included).
SQUARES_AT_PEAK = {"forward": 4, "forward+backward": 6}
ORACLE_TOKENS = 4096  # longer ones are not compared: it computes whole score matrices in float64


def run_grid(
    cases: Case | Iterable[Case],
    *,
    device: torch.device | str | None = None,
    measure_error: bool = True,
    max_seconds: float = 1.0,
    repeats: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure each case; one row each, with provenance in `.attrs["provenance"]`.

    Cases of the same shape and dtype get the same inputs: unit normal, from seed 0.

    Args:
        cases: what to measure, in this order; see `grid`.
        device: by default the current GPU if there is one, else the CPU.
        measure_error: compare the output with the float64 oracle, up to 4,096 tokens; above that
            the error columns are empty.
        max_seconds: time limit for the repeats of one case (at least three are made).
        repeats: exact number, however long they take, in place of the time limit.
        progress: show a tqdm bar, which names the backend at work.

    Returns:
        `COLUMNS`; tflops are at the median, peak_memory_bytes as `measure_peak_memory` says, and
        relative_error the norm of the output's error over that of the oracle. After Control-C the
        rows measured so far, with `interrupted: true` in the provenance.

    Raises:
        ValueError: a backend that does not exist; repeats below 1, or negative max_seconds.

    >>> table = run_grid(grid(["standard", "sdpa_flash"], [64]), repeats=3, progress=False)
    >>> table.status.tolist()
    ['ok', 'ok']
    """
    import pandas as pd
    from tqdm.auto import tqdm

    if not max_seconds >= 0 or (repeats is not None and repeats < 1):
        raise ValueError(f"max_seconds {max_seconds} is at least 0, repeats {repeats} at least 1")
    cases = [cases] if isinstance(cases, Case) else list(cases)
    where = resolve_device(device)
    known = [status.name for status in available_backends(device=where)]
    unknown = sorted({case.backend for case in cases} - set(known))
    if unknown:
        raise ValueError(f"unknown backend: {', '.join(unknown)}; known: {', '.join(known)}")

    record = provenance(where, seed=0, cases=len(cases))
    options = {"max_seconds": max_seconds, "repeats": repeats, "measure_error": measure_error}
    rows: list[dict[str, Any]] = []
    with warn_if_busy(lambda: _recorded(rows) if where.type == "cpu" else ""):
        try:
            bar = tqdm(cases, disable=not progress, unit="case", leave=False)
            for case in bar:
                bar.set_postfix_str(f"{case.backend}, {case.seqlen:,} tokens")
                rows.append(run_case(case, where, **options))
        except KeyboardInterrupt:
            record["interrupted"] = True
    table = pd.DataFrame(rows, columns=COLUMNS)
    table.attrs["provenance"] = record
    if said := raise_beaten(where, table.groupby("dtype").tflops.max().dropna().to_dict()):
        print(said, file=sys.stderr)  # stdout may be a program's JSON
    return table


def _recorded(rows: list[dict[str, Any]]) -> str:
    """Times of the longest of these cases that were recorded on a quiet CPU, if any were."""
    run = load_run("calibration-cpu")
    names = [field.name for field in fields(Case)]
    known = {tuple(row[n] for n in names): row for row in run.to_dict("records")}
    found = [known[key] for row in rows if (key := tuple(row[n] for n in names)) in known]
    longest = [row for row in found if row["seqlen"] == max(r["seqlen"] for r in found)]
    if not longest:
        return ""
    times = ", ".join(
        f"{row['backend']}{' causal' * row['causal']} {format_ms(row['median_ms'])} ms"
        for row in longest
    )
    device = run.attrs["provenance"]["device"]
    return f"Recorded on one quiet core ({device}), {longest[0]['seqlen']:,} tokens: {times}."


COLUMNS = [
    *(field.name for field in fields(Case)),
    *("status", "reason", "kernel"),
    *("median_ms", "q1_ms", "q3_ms", "min_ms", "mean_ms", "max_ms", "repeats", "tflops"),
    *("peak_memory_bytes", "max_error", "relative_error"),
]


def run_case(case: Case, device: torch.device, **options: Any) -> dict[str, Any]:
    """Measure one case; `options` are max_seconds, repeats and measure_error of `run_grid`."""
    row: dict[str, Any] = asdict(case) | {"kernel": ""}
    try:
        if device.type == "cpu" and (reason := predicted_shortage(case)):
            return row | {"status": "out of memory", "reason": reason}
        return row | _measure(case, device, **options) | {"status": "ok", "reason": ""}
    except Exception as error:
        row |= refusal(error)
    # What a failed case held must be gone before the next one is measured.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def refusal(error: Exception) -> dict[str, str]:
    """`status` and `reason` of a case that raised."""
    reason = " ".join(str(error).split())
    if isinstance(error, BackendUnavailableError | AttentionInputError | NotImplementedError):
        return {"status": "unsupported", "reason": reason}
    # The CPU allocator has no exception class.
    refused = any(word in str(error) for word in ("can't allocate memory", "std::bad_alloc"))
    if refused or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return {"status": "out of memory", "reason": reason}
    return {"status": "failed", "reason": f"{type(error).__name__}: {reason}"}


def predicted_shortage(case: Case, available: int | None = None) -> str:
    """The reason why the case would not fit into the bytes available on this CPU; empty if not."""
    import psutil

    available = psutil.virtual_memory().available if available is None else available
    itemsize = getattr(torch, case.dtype).itemsize
    tokens = case.batch * (case.seqlen * case.heads + case.kv_seqlen * case.kv_heads)
    # Inputs, output, gradients and their float32 working copies.
    needed = 8 * tokens * case.head_dim * max(4, itemsize)
    if case.backend in QUADRATIC_BACKENDS:
        pairs = case.batch * case.heads * case.seqlen * case.kv_seqlen
        needed += SQUARES_AT_PEAK[case.direction] * pairs * max(4, itemsize)
    if needed <= available:
        return ""
    return f"predicted: needs {format_bytes(needed)}, {format_bytes(available)} available"


def _measure(
    case: Case,
    device: torch.device,
    max_seconds: float = 1.0,
    repeats: int | None = None,
    measure_error: bool = False,
) -> dict[str, Any]:
    inputs = make_inputs(case, device)
    call = call_of(case, inputs)
    # FlexAttention compiles in its first call; the compiler's own tensors are not its memory.
    warmup = 1 if device.type == "cuda" or case.backend == "flex" else 0
    memory = measure_peak_memory(call, device=device, warmup=warmup)
    report = last_call()
    bounds: dict[str, Any] = {"min_repeats": repeats, "max_repeats": repeats}
    if repeats is None:
        seconds = {"min_seconds": min(0.1, max_seconds), "max_seconds": max_seconds}
        bounds = {"min_repeats": 3, **seconds}
    timing = measure_time(call, device=device, **bounds)
    names = ("median", "q1", "q3", "min", "mean", "max")
    row: dict[str, Any] = {f"{name}_ms": getattr(timing, name) for name in names}
    row |= {"repeats": timing.repeats, "tflops": case.flops() / timing.median / 1e9}
    row |= {"kernel": report.kernel if report else "", "peak_memory_bytes": memory.peak_bytes}
    if measure_error and max(case.seqlen, case.kv_seqlen) <= ORACLE_TOKENS:
        exact = _oracle(replace(case, backend="oracle", direction="forward"), device)
        out = call_of(replace(case, direction="forward"), inputs)()[0]
        row |= {"max_error": max_error(out, exact), "relative_error": relative_error(out, exact)}
    return row


@functools.lru_cache(maxsize=1)  # the backends of one shape come one after the other
def _oracle(case: Case, device: torch.device) -> torch.Tensor:
    q, k, v, _ = make_inputs(case, device)
    return oracle_of_first(q, k, v, case.causal)


def call_of(case: Case, inputs: Tensors) -> Callable[[], Any]:
    """The case as a function without arguments, which returns the output or the gradients."""
    q, k, v, gradient = inputs
    backward = case.direction == "forward+backward"

    def call() -> Any:
        with torch.set_grad_enabled(backward):
            # More heads than tokens is no mistake in a grid: do not guess at swapped dimensions.
            options: dict[str, Any] = {"causal": case.causal, "check_layout": False}
            out: Any = attention(q, k, v, backend=case.backend, **options)
            return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return call


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Tensors:
    """q, k, v and the output's gradient: unit normal, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    queries = (case.batch, case.seqlen, case.heads, case.head_dim)
    keys = (case.batch, case.kv_seqlen, case.kv_heads, case.head_dim)
    q, k, v, gradient = (
        torch.randn(shape, generator=generator).to(device, getattr(torch, case.dtype))
        for shape in (queries, keys, keys, queries)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_(case.direction == "forward+backward")
    return q, k, v, gradient


# --- errors of outputs against the float64 oracle -------------------------------------------------


def errors_by_dtype(
    backends: str | Sequence[str],
    dtypes: str | Sequence[str] = ("float32", "float16", "bfloat16"),
    *,
    seqlen: int = 1024,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """Errors of each backend in each dtype, and what flash-attn's rule allows there.

    One head of unit normal inputs, head_dim 64. A backend that does not take a dtype has no row.

    Args:
        backends, dtypes: names; a string is one.
        seqlen: of queries and keys.
        device: by default the current GPU if there is one, else the CPU.

    Returns:
        columns dtype, backend, max error, allowed (twice the textbook's maximum error in that
        dtype, plus 1e-5), ok, relative error; the errors as text with two digits.

    Raises:
        ValueError: an unknown backend or dtype.

    >>> errors_by_dtype(["sdpa_flash"], ["float32"], seqlen=64, device="cpu").ok.tolist()
    [True]
    """
    import pandas as pd

    where = resolve_device(device)
    backends = [backends] if isinstance(backends, str) else backends
    dtypes = [dtypes] if isinstance(dtypes, str) else dtypes
    for name, known in (
        *((name, [status.name for status in available_backends()]) for name in backends),
        *((name, DTYPES) for name in dtypes),
    ):
        if name not in known:
            raise ValueError(f"unknown: {name}; known: {', '.join(known)}")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, seqlen, 1, 64, generator=generator) for _ in range(3)]
    rows = []
    for dtype in dtypes:
        q, k, v = (tensor.to(where, getattr(torch, dtype)) for tensor in inputs)
        exact = oracle_of_first(q, k, v, causal=False)[None]
        textbook = cast(torch.Tensor, attention(q, k, v, backend="standard"))
        for status in available_backends(q, k, v):
            if not status.runs or status.name not in backends:
                continue
            out = cast(torch.Tensor, attention(q, k, v, backend=status.name))
            report = compare_with_oracle(out, textbook, exact)
            errors = report.max_error, report.allowed, report.relative_error
            most, allowed, relative = (f"{error:.1e}" for error in errors)
            rows.append((dtype, status.name, most, allowed, report.ok, relative))
    columns = ["dtype", "backend", "max error", "allowed", "ok", "relative error"]
    return pd.DataFrame(rows, columns=columns)


def oracle_of_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    """The exact output of the first sequence: (seqlen_q, heads, head_dim) in float64.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim).
    """
    group = q.shape[2] // k.shape[2]
    heads = [
        oracle_attention(q[0, :, h], k[0, :, h // group], v[0, :, h // group], causal=causal)[0]
        for h in range(q.shape[2])
    ]
    return torch.stack(heads, dim=1)
