"""`labsupport ring bench`: ring attention timed, beside one device and context parallelism.

A step of all ranks takes as long as the slowest: they begin together, and each takes the median of
several repeats. The theoretical optimum is W times what one device needs for a shard of the same
length by the same kernel: under a causal mask, W times the tokens are W^2 times the work, on W
devices. What is between `without_messages_ms` (the same ring, nothing sent) and `median_ms` is
communication that did not hide behind the compute.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention import attention
from labsupport.attention.registry import AttentionCall, BackendUnavailableError
from labsupport.distributed.process_group import RankInfo, all_gather_object
from labsupport.distributed.ring import kernels as table
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingCall
from labsupport.distributed.ring.attention import last_ring_call, ring_attention
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import Ring
from labsupport.distributed.ring_check import advice, attempt, begin_together
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import Timing, format_ms, now
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Any]
CONTEXT_PARALLEL = {  # and the ring's kernel that is the same
    "context_parallel[flash]": "native",
    "context_parallel[cudnn]": "cudnn",
    "context_parallel[efficient]": None,
}
# What may take minutes to compile, or hang where it does not work, comes last.
ON_GPU = (
    *("native", "cudnn", "flash_triton", "fa4"),
    *("context_parallel[cudnn]", "context_parallel[flash]"),
)
ON_CPU = ("native", "flash_torch")
DIRECTIONS = ("forward", "forward+backward")
COLUMNS = [
    *("world", "layout", "implementation", "seqlen_per_rank", "heads", "kv_heads", "head_dim"),
    *("dtype", "direction", "status", "reason"),
    *("median_ms", "q1_ms", "q3_ms", "repeats", "iterations_per_s", "tflops"),
    *("single_ms", "efficiency", "of_native", "without_messages_ms"),
    *("peak_memory_bytes", "single_peak_memory_bytes", "sent_bytes"),
]
FEWEST, MOST = 3, 20  # repeats
STATUS = {  # by the error; other errors: "failed"
    "OutOfMemoryError": "out of memory",
    "BackendUnavailableError": "unsupported",
    "AttentionInputError": "unsupported",
}


@dataclass(frozen=True)
class Case:
    """One causal attention over all ranks, batch 1; the names are the table's columns."""

    layout: str
    implementation: str
    seqlen_per_rank: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    direction: str


@contextmanager
def context_parallel(case: Case, info: RankInfo) -> Iterator[Attend]:
    """PyTorch's context parallelism: `F.scaled_dot_product_attention` replaced for a while.

    It balances the load as zigzag does, and gathers all keys on every rank (its default,
    "allgather"; "alltoall" passes them around). Grouped key heads are repeated for it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as in_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    name = case.implementation.partition("[")[2].rstrip("]").upper()
    mesh = init_device_mesh(info.device.type, (info.world,))
    # It shards what a model would bring, and needs something to shard.
    tokens = torch.zeros(info.world * case.seqlen_per_rank, device=info.device)
    buffers: dict[str, Any] = {"buffers": [tokens], "no_restore_buffers": {tokens}}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    with (
        in_parallel(mesh, buffer_seq_dims=[0], **buffers),
        sdpa_kernel(SDPBackend.__members__[f"{name}_ATTENTION"]),
    ):
        yield attend


def silent_ring(layout: str, kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute a causal ring without messages: a rank alone compiles, allocates, computes alike."""
    ring = _Silent()
    plan = Plan.of(ring.size, q.shape[1], causal=True, zigzag=layout == "zigzag")
    block_kernel = next(entry for entry in table.KERNELS if entry.name == kernel)
    call = RingCall(ring, plan, block_kernel, q.shape[-1] ** -0.5)
    return RingAttentionFunction.apply(q, k, v, call)[0]


class _Silent(Ring):
    def post(self, sends: Any, receives: Any) -> Callable[[], None]:
        """Fill the buffers on a CPU, where leftover numbers cause warnings; a GPU takes any."""
        for tensor, _ in receives:
            if tensor.device.type == "cpu":
                tensor.zero_()
        return lambda: None


def measure_ring(
    *,
    seqlens: Sequence[int],
    heads: int,
    kv_heads: Sequence[int],
    head_dim: int,
    dtype: str | None = None,
    implementations: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    max_seconds_per_case: float = 2.0,
    limit: float | None = None,
    rows_file: str | Path | None = None,
    say: Callable[[str], Any] = print,
) -> pd.DataFrame | None:
    """Time causal ring attention; all ranks of the default process group call it alike.

    The options are those of `labsupport ring bench`; on rank 0 `say` is given a line for each row.

    Returns:
        on rank 0 the table, with provenance: one row per case, its columns are `COLUMNS`. Times
        and memory are the slowest and the fullest rank's; single_ms and single_peak_memory_bytes
        one device's with the same kernel and a shard's length; sent_bytes the most that one rank
        sent; tflops of each device; of_native the time of "native" over the row's. `status` is
        "ok", "unsupported", "out of memory", "failed" or "skipped", with a reason. None elsewhere.
    """
    import pandas as pd

    info, began = RankInfo.current(), time.monotonic()
    on_gpu = info.device.type == "cuda"
    names = implementations or (ON_GPU if on_gpu else ON_CPU)
    wanted = [(layout, name) for name in names for layout in layouts or ("zigzag",)]
    wanted += [("contiguous", names[0])] if layouts is None else []
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    rows, singles, native = list[Row](), dict[Case, Row](), dict[Case, float]()
    for case in (
        Case(layout, name, length, heads, count, head_dim, dtype, direction)
        for layout, name in wanted
        for length in seqlens
        for count in kv_heads
        for direction in directions
        if name not in CONTEXT_PARALLEL or layout == "zigzag"
    ):
        row: Row = {"world": info.world, "status": "ok", "reason": ""} | asdict(case)
        if limit is not None and max(all_gather_object(time.monotonic() - began)) > limit:
            row |= {"status": "skipped", "reason": f"{limit:g} s are over"}
        elif problem := _measure(info, case, max_seconds_per_case, singles, row):
            status = next((kind for name, kind in STATUS.items() if name in problem), "failed")
            helps = advice(problem) if status != "unsupported" else None
            row |= {"status": status, "reason": f"{problem} | {helps}" if helps else problem}
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        took, same = row.get("median_ms", math.nan), replace(case, implementation="")
        if case.implementation == "native":
            native[same] = took
        rows.append(row | {"of_native": native.get(same, math.nan) / took})
        if info.rank == 0:
            say(line(rows[-1]) if rows[1:] else f"{HEADER}\n{line(rows[-1])}")
            if rows_file is not None:
                pd.DataFrame(rows, columns=COLUMNS).to_csv(rows_file, index=False)
    if info.rank != 0:
        return None
    frame = pd.DataFrame(rows, columns=COLUMNS)
    settings = ("NCCL_", "TORCH_NCCL", "CUDA_DEVICE_MAX_CONNECTIONS")
    frame.attrs["provenance"] = provenance(
        info.device,
        world=info.world,
        context_parallel="allgather, balanced load: its defaults",
        nccl={name: text for name, text in os.environ.items() if name.startswith(settings)},
    )
    return frame


def _measure(
    info: RankInfo, case: Case, seconds: float, singles: dict[Case, Row], row: Row
) -> str | None:
    """Add the measured columns to the row; return what failed: on one rank, so on all."""
    inputs = list[Tensor]()
    is_ring = case.implementation not in CONTEXT_PARALLEL
    name = CONTEXT_PARALLEL.get(case.implementation, case.implementation)
    kernel = next((kernel for kernel in table.KERNELS if kernel.name == name), None)

    def prepare() -> None:
        generator = torch.Generator(info.device).manual_seed(info.rank)
        like: dict[str, Any] = {"device": info.device, "dtype": getattr(torch, case.dtype)}
        for count in (case.heads, case.kv_heads, case.kv_heads, case.heads):
            shape = 1, case.seqlen_per_rank, count, case.head_dim
            inputs.append(torch.randn(shape, generator=generator, **like))
        for x in inputs[:3]:
            x.requires_grad_(case.direction != "forward")
        call = AttentionCall(*inputs[:3], causal=True, return_lse=True)
        if kernel is not None and (reasons := kernel.reasons(call)):
            raise BackendUnavailableError("; ".join(reasons), {})

    def program(attend: Attend) -> Callable[[], Any]:
        *qkv, dout = inputs
        if case.direction == "forward":
            return lambda: attend(*qkv)
        return lambda: torch.autograd.grad(attend(*qkv), qkv, dout)

    def tried(attend: Attend) -> str | None:
        """Compile, allocate, run: each rank alone."""
        return attempt(lambda: (program(attend)(), now(info.device)))

    if problem := attempt(prepare):
        return problem
    if kernel is not None:
        alone = replace(case, layout="", implementation=kernel.name)
        if alone not in singles:
            single, singles[alone] = partial(attention, causal=True, backend=kernel.backend), {}
            if tried(single) is None:
                timings, peak = _timed(info, program(single), seconds / 2)
                middle = statistics.median(timing.median for timing in timings)
                singles[alone] = {"single_ms": middle, "single_peak_memory_bytes": peak}
        row |= singles[alone]
    if is_ring:
        silent = partial(silent_ring, case.layout, case.implementation)
        if problem := tried(silent):
            return problem
        timings, _ = _timed(info, program(silent), seconds / 2)
        row["without_messages_ms"] = max(timing.median for timing in timings)

    def measure() -> None:
        options = {"layout": case.layout, "kernel": case.implementation, "check_ranks": False}
        ring = partial(ring_attention, causal=True, **options)
        with nullcontext(ring) if is_ring else context_parallel(case, info) as attend:
            timings, peak = _timed(info, program(attend), seconds)
        slowest = max(timings, key=lambda timing: timing.median)
        ms, length = slowest.median, info.world * case.seqlen_per_rank
        # Two matrix products forward, five backward, over the visible pairs of all ranks.
        flops = 2 * case.head_dim * case.heads * length * (length + 1)
        flops *= 1.0 if case.direction == "forward" else 3.5
        row.update(
            median_ms=ms,
            q1_ms=slowest.q1,
            q3_ms=slowest.q3,
            repeats=slowest.repeats,
            iterations_per_s=1e3 / ms,
            tflops=flops / info.world / ms / 1e9,
            efficiency=info.world * row.get("single_ms", math.nan) / ms,
            peak_memory_bytes=peak,
        )
        if is_ring and (report := last_ring_call()) is not None:
            sent = report.traffic.kv_bytes + report.traffic.gradient_bytes
            row["sent_bytes"] = max(all_gather_object(sent))

    return attempt(measure)


def _timed(info: RankInfo, program: Callable[[], Any], seconds: float) -> tuple[list[Timing], int]:
    """Each rank's times of repeats that all begin together, and the fullest rank's memory."""
    peak = measure_peak_memory(program, device=info.device).peak_bytes
    samples = [begin_together(info, program)]
    repeats = int(1e3 * seconds / max(all_gather_object(samples[0])))
    for _ in range(max(FEWEST, min(MOST, repeats)) - 1):
        samples.append(begin_together(info, program))
    own = Timing(tuple(samples), str(info.device)), peak
    timings, peaks = zip(*all_gather_object(own), strict=True)
    return list(timings), max(peaks)


HEADER = (
    f"{'layout':10} {'implementation':24} {'tokens':>6} {'heads':>6} {'pass':5} {'ms':>7} "
    f"{'silent':>7} {'1 device':>8} {'of best':>7} {'native':>6} {'TFLOP/s':>7} {'memory':>9}"
)


def line(row: Row) -> str:
    """Return a row under `HEADER`; silent: without messages; of best: efficiency."""
    start = (
        f"{row['layout']:10} {row['implementation']:24} {row['seqlen_per_rank']:6} "
        f"{row['heads']}/{row['kv_heads']:<3} {'f+b' if 'back' in row['direction'] else 'f':5}"
    )
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['reason'][:160]}"
    names = "median_ms", "without_messages_ms", "single_ms"
    ms = [format_ms(row[name]) if name in row else "-" for name in names]
    return (
        f"{start} {ms[0]:>7} {ms[1]:>7} {ms[2]:>8} {row['efficiency']:7.0%} "
        f"{row['of_native']:6.2f} {row['tflops']:7.3g} {format_bytes(row['peak_memory_bytes']):>9}"
    )
