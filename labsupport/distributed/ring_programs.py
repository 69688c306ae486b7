"""Programs of `labsupport ring`, for each rank: tests of links and rings, and their times.

CHECK. Each rank makes the same whole sequence from a seed, and computes its attention alone, in
float64 (the oracle). Then the ring computes it from shards, by each kernel that can. The output and
the three gradients are judged by their relative errors.

BENCH. A step of all ranks takes as long as the slowest: they begin together, and each takes the
median of many repeats. The theoretical optimum is W times what one device needs for a shard of the
same length by the same kernel: under a causal mask, W times the tokens are W^2 times the work, on W
devices. What is between `without_messages_ms` (the same ring, nothing sent) and `median_ms` is
communication that did not hide behind the compute.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor

from labsupport.attention import attention
from labsupport.attention.call import AttentionCall, BackendUnavailableError
from labsupport.distributed.failures import short
from labsupport.distributed.launch import LaunchError, launch
from labsupport.distributed.process_group import (
    RankInfo,
    all_gather_object,
    cleanup_ddp,
    setup_ddp,
)
from labsupport.distributed.ring import kernels as table
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingRun
from labsupport.distributed.ring.attention import SHARD_LAYOUTS, last_ring_call, ring_attention
from labsupport.distributed.ring.oracle import errors_of, one_device, whole_ring
from labsupport.distributed.ring.plan import Message, Plan
from labsupport.distributed.ring.transport import Ring
from labsupport.interrupt import interrupted_status
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import Timing, now
from labsupport.profiling.units import format_bytes, format_ms, format_rate

if TYPE_CHECKING:
    import pandas as pd

# Largest relative errors: of the output, and of a gradient. Growth of the memory.
MARKS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 5e-2), "float16": (1e-2, 5e-2)}
MEMORY_MARK = 0.2
DIRECTIONS = ("forward", "forward+backward")
CONTEXT_PARALLEL = {  # PyTorch's own, and the ring's kernel that is the same
    "context_parallel[flash]": "native",
    "context_parallel[cudnn]": "cudnn",
}
# What may take minutes to compile, or hang where it does not work, comes last.
ON_GPU = (
    *("native", "cudnn", "flash_triton", "flash_gluon", "fa4"),
    *("context_parallel[cudnn]", "context_parallel[flash]"),
)
ON_CPU = ("native", "flash_torch")
# (what an error says, what helps); the first that fits is given.
ADVICE = (
    ("outofmemory", "fewer tokens per rank (--seqlen), or more ranks: a ring's buffers are three "
     "times K and V, and with more than two ranks its sums are float32."),
    ("outofresources compilationerror passmanager", "a Triton kernel does not fit or compile on "
     "this GPU: delete ~/.triton/cache, try another --kernel, or python -m benchmarks tune."),
    ("eaddrinuse", "another program has the port: torchrun --standalone, or --master-port 29501."),
    ("init_process_group rendezvous distnetwork tcpstore", "on all nodes the same --nnodes, "
     "--rdzv-backend c10d and --rdzv-endpoint HOST:PORT, an open port; with several network "
     "interfaces NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."),
    ("nccl", "NCCL_DEBUG=INFO says where NCCL failed; each process needs its own GPU."),
    ("relative error", "if every kernel fails, suspect the messages; if one, suspect that "
     "kernel: try it on one device with labsupport compare."),
)  # fmt: skip

# --- processes ------------------------------------------------------------------------------------


def in_every_process(
    function: Callable[..., Any],
    options: dict[str, Any],
    backend: str | None,
    processes: int | None,
    timeout: float,
) -> Any:
    """Run `function(**options)` in every process of a group; return rank 0's result.

    Under torchrun this is one of the processes, and only its rank 0 gets the result; elsewhere
    they are started here: `processes`, or one for each GPU, or 2 on a CPU. What ends a run early is
    printed, and sets the exit status.
    """

    try:
        if "RANK" in os.environ:
            return _in_a_group(function, options, backend, timeout)
        gpus = torch.cuda.device_count() if backend != "gloo" else 0
        device = "cuda" if gpus or backend == "nccl" else "cpu"
        job = function, options, backend or ("nccl" if gpus else "gloo"), timeout
        count = processes or gpus or 2
        return launch(_in_a_group, job, timeout=timeout, processes=count, device=device)[0]
    except LaunchError as error:
        typer.echo(short(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(interrupted_status()) from None


def _in_a_group(
    function: Callable[..., Any], options: dict[str, Any], backend: str | None, timeout: float
) -> Any:
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    if one_machine and sys.platform == "linux":
        # What the machine's name resolves to need not matter.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Otherwise a message waits until the compute that was to hide it has left the GPU.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    # One queue into the GPU keeps the order of posting: messages first, then the compute.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        setup_ddp(backend, timeout)
    except RuntimeError as error:  # torch.distributed's own are of this kind
        helps = advice(str(error)) or advice("init_process_group")
        raise RuntimeError(f"the processes did not meet: {error}. What helps: {helps}") from error
    try:
        return function(**options)
    finally:
        cleanup_ddp()


def attempt(action: Callable[..., Any], *args: Any) -> str | None:
    """Run something on every rank; None if it went well on all, else who could not, and why.

    A rank that leaves a collective alone would let the others wait for it.
    """
    reason = None
    try:
        action(*args)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    reasons = all_gather_object(reason)
    if not any(reasons):
        return None
    rank, why = next((rank, why) for rank, why in enumerate(reasons) if why)
    who = "all ranks" if all(reasons) and len(reasons) > 1 else f"rank {rank}"
    return f"{who}: {why}"


def advice(text: str) -> str | None:
    """Return the remedy for an error with this text, if known."""
    text = text.lower()
    return next((help for signs, help in ADVICE if any(s in text for s in signs.split(" "))), None)


def begin_together(info: RankInfo, action: Callable[[], Any]) -> float:
    """Return the milliseconds of one run on this rank, begun with the others."""

    dist.all_reduce(torch.zeros(1, device=info.device))  # a GPU waits, the program does not
    if info.device.type == "cpu":
        start = time.perf_counter()
        action()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda._sleep(10**6)  # half a millisecond in which the program gets ahead of the GPU
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


# --- check ----------------------------------------------------------------------------------------


def check(
    *,
    kernels: list[str] | None = None,
    dtype: str | None = None,
    seqlen: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
) -> int:
    """Check the devices of the default process group, on every rank; rank 0 prints.

    The options are those of `labsupport ring check`; None for seqlen: 256 tokens a rank on GPUs, 16
    on CPUs.

    Returns:
        0, or 1 if something failed: the same on all ranks.
    """

    info, failed = RankInfo.current(), list[str]()
    on_gpu = info.device.type == "cuda"
    dtype, head_dim = dtype or ("bfloat16" if on_gpu else "float32"), head_dim or 16 + 48 * on_gpu
    seqlen = seqlen or info.world * (256 if on_gpu else 16)

    def say(text: str) -> None:
        if info.rank == 0:
            print(text, flush=True)

    name = torch.cuda.get_device_name(info.device) if on_gpu else f"{os.cpu_count()} cores"
    about = f"{platform.node()}, process {os.getpid()}, {info.device}, {name}"
    for rank, line in enumerate(all_gather_object(about)):
        say(f"rank {rank}: {line}")
    for line in _links(info) if info.world > 1 else ():
        say(line)
    if short := -seqlen % (2 * info.world):
        say(f"FAILED: {seqlen} tokens, two chunks for each rank: --seqlen {seqlen + short} can")
        return 1
    say(
        f"\n{seqlen} tokens over {info.ranks}, causal, {heads} heads ({kv_heads} of keys) of "
        f"{head_dim}, {dtype}: each ring against one device in float64\n"
        f"{'':24} {'':4} {'maximum':>9} {'RMSE':>9} {'relative':>9}"
    )
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn((1, seqlen, count, head_dim), generator=generator).to(
            info.device, getattr(torch, dtype)
        )
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    oracle = one_device(whole)
    q, k, v, _ = whole
    call = AttentionCall(q.clone().requires_grad_(), k, v, causal=True, return_lse=True)
    for kernel in table.KERNELS:
        if kernels is not None and kernel.name not in kernels:
            continue
        if reasons := "; ".join(kernel.reasons(call)):
            say(f"{'':11} {kernel.name:12} {'FAILED' if kernels else '-'}: {reasons}")
            failed += [f"{kernel.name} cannot run here: {reasons}"] if kernels else []
            continue
        for layout in SHARD_LAYOUTS:
            of, got = f"{layout:11} {kernel.name:12}", list[Tensor]()
            ring = partial(whole_ring, info, whole, layout=layout, kernel=kernel.name)
            if problem := attempt(lambda ring, got: got.extend(ring()), ring, got):
                say(f"{of} FAILED: {problem}")
                failed.append(f"{of}: {problem}")
                continue
            for error in errors_of(got, oracle):
                name, most, rmse, relative = error.values()
                mark = MARKS[dtype][name != "out"]
                right = relative <= mark  # NaN is not
                fault = "" if right else f"relative error {relative:.1e} is above {mark:g}"
                say(f"{of} {name:4} {most:9.1e} {rmse:9.1e} {relative:9.1e}  {fault or 'ok'}")
                failed += [f"{of} {name}: {fault}"] if fault else []
    if failed:
        more = f" (and {len(failed) - 1} more)" if failed[1:] else ""
        helps = next(filter(None, map(advice, failed)), "theory chapter 11, what goes wrong.")
        say(f"\nFAILED: {failed[0]}{more}\nWhat helps: {helps}")
    else:
        say("\nall is well")
    return int(bool(failed))


def _links(info: RankInfo) -> Iterator[str]:
    """Lines: latency; bandwidth of a hop around the ring and of an all-reduce."""

    def slowest(action: Callable[[], Any]) -> float:
        samples = [begin_together(info, action) for _ in range(12)][2:]
        return max(all_gather_object(statistics.median(samples)))

    def hop(nbytes: int) -> Callable[[], None]:
        ring, half = Ring(), torch.zeros(nbytes // 2, dtype=torch.uint8, device=info.device)
        ring.connect("auto", (half, half), 1)
        next_rank, previous = ((info.rank + way) % info.world for way in (1, -1))
        sends = [(Message("keys", info.rank, next_rank, 0), (half, half))]
        receives = [(Message("keys", previous, info.rank, 0), (half, half))]
        return lambda: ring.post(sends, receives)[1]()

    size = 2**26 if info.device.type == "cuda" else 2**20
    message = torch.zeros(size // 4, device=info.device)
    each, total = slowest(hop(size)), slowest(lambda: dist.all_reduce(message))
    # Each rank sends and receives 2 (W - 1) / W of the bytes: NCCL's "bus bandwidth".
    bus = 2 * (info.world - 1) / info.world * size
    yield f"a hop of 8 bytes to the next rank: {1e3 * slowest(hop(8)):.0f} us"
    yield (
        f"{format_bytes(size)}: a hop {format_rate(1e3 * size / each, 'B/s')} each way, "
        f"all-reduce {format_rate(1e3 * bus / total, 'B/s')}"
    )


# --- bench ----------------------------------------------------------------------------------------

Row = dict[str, Any]
Attend = Callable[..., Any]
STATUS = {  # by the error; other errors: "failed"
    "OutOfMemoryError": "out of memory",
    "BackendUnavailableError": "unsupported",
    "AttentionInputError": "unsupported",
}


class Setting(NamedTuple):
    """One causal attention over all ranks, batch 1; the names are the table's columns."""

    layout: str
    implementation: str
    seqlen_per_rank: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    direction: str


COLUMNS = [
    *("world", *Setting._fields, "status", "reason", "transport"),
    *("median_ms", "q1_ms", "q3_ms", "repeats", "iterations_per_s", "tflops"),
    *("single_ms", "efficiency", "of_native", "without_messages_ms"),
    *("peak_memory_bytes", "single_peak_memory_bytes", "memory_growth", "sent_bytes"),
]


def measure_ring(
    *, settings: list[Setting], seconds: float = 1.0, say: Callable[[str], Any] = print
) -> pd.DataFrame | None:
    """Time causal ring attention; all ranks of the default process group call it alike.

    Args:
        seconds: for the repeats of each setting.
        say: on rank 0, is given a line for each row.

    Returns:
        on rank 0 the table, with provenance: one row per setting, its columns are `COLUMNS`. Times
        and memory are the slowest and the fullest rank's; single_ms and single_peak_memory_bytes
        one device's with the same kernel and a shard's length; memory_growth over it and
        `buffer_bytes`; sent_bytes the most that one rank sent; tflops of each device; of_native the
        time of "native" over the row's; transport what carried the messages (NaN for PyTorch's).
        `status` is "ok", "unsupported", "out of memory" or "failed", with a reason. None elsewhere.
    """
    import pandas as pd

    info = RankInfo.current()
    rows, known, native = list[Row](), dict[Setting, Row](), dict[Setting, float]()
    for setting in settings:
        row: Row = {"world": info.world, "status": "ok", "reason": ""} | setting._asdict()
        if problem := _measure(info, setting, seconds, known, row):
            status = next((kind for name, kind in STATUS.items() if name in problem), "failed")
            helps = advice(problem) if status != "unsupported" else None
            row |= {"status": status, "reason": f"{problem} | {helps}" if helps else problem}
        gc.collect()
        if info.device.type == "cuda":
            torch.cuda.empty_cache()
        same, took = setting._replace(implementation=""), row.get("median_ms", math.nan)
        if setting.implementation == "native":
            native[same] = took
        rows.append(row | {"of_native": native.get(same, math.nan) / took})
        if info.rank == 0:
            say(line(rows[-1]) if rows[1:] else f"{HEADER}\n{line(rows[-1])}")
    if info.rank != 0:
        return None
    if growths := [row["memory_growth"] for row in rows if "memory_growth" in row]:
        verdict = "kept" if max(growths) < MEMORY_MARK else "MISSED"
        say(
            f"memory above one device's shard plus buffers: {max(growths):+.0%} at most; the mark "
            f"of {MEMORY_MARK:+.0%} is {verdict}"
        )
    frame = pd.DataFrame(rows, columns=COLUMNS)
    frame.attrs["provenance"] = provenance(info.device, world=info.world)
    return frame


def _measure(
    info: RankInfo, case: Setting, seconds: float, known: dict[Setting, Row], row: Row
) -> str | None:
    """Add the measured columns to the row; return what failed: on one rank, so on all.

    `known` has one device's, which rows share. What is new is tried by each rank alone, since one
    that fails inside of a ring would let the others wait.
    """
    inputs = list[Tensor]()
    is_ring = case.implementation not in CONTEXT_PARALLEL
    name = CONTEXT_PARALLEL.get(case.implementation, case.implementation)
    kernel = next(kernel for kernel in table.KERNELS if kernel.name == name)

    def prepare() -> None:
        generator = torch.Generator(info.device).manual_seed(info.rank)
        like: dict[str, Any] = {"device": info.device, "dtype": getattr(torch, case.dtype)}
        for count in (case.heads, case.kv_heads, case.kv_heads, case.heads):
            shape = 1, case.seqlen_per_rank, count, case.head_dim
            inputs.append(torch.randn(shape, generator=generator, **like))
        for x in inputs[:3]:
            x.requires_grad_(case.direction != "forward")
        call = AttentionCall(*inputs[:3], causal=True, return_lse=True)
        if reasons := kernel.reasons(call):
            raise BackendUnavailableError("; ".join(reasons), {})

    def program(attend: Attend) -> Callable[[], Any]:
        *qkv, dout = inputs
        if case.direction == "forward":
            return lambda: attend(*qkv)
        return lambda: torch.autograd.grad(attend(*qkv), qkv, dout)

    def alone(attend: Attend) -> str | None:
        return attempt(lambda: (program(attend)(), now(info.device)))

    if problem := attempt(prepare):
        return problem
    single = partial(attention, causal=True, backend=kernel.backend)
    same = case._replace(layout="", implementation=kernel.name)
    if same not in known:
        known[same] = {}
        if alone(single) is None:
            timings, peak = _timed(info, program(single), seconds)
            middle = statistics.median(timing.median for timing in timings)
            known[same] = {"single_ms": middle, "single_peak_memory_bytes": peak}
    row |= known[same]
    if is_ring:
        silent = partial(silent_ring, case.layout, case.implementation)
        if problem := alone(silent):
            return problem
        timings, _ = _timed(info, program(silent), seconds)
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
            row["transport"] = report.transport
            row["peak_memory_bytes"] += report.slot_bytes  # they were there before
            if single := row.get("single_peak_memory_bytes"):
                needed = single + buffer_bytes(case, info.world)
                row["memory_growth"] = row["peak_memory_bytes"] / needed - 1

    return attempt(measure)


@contextmanager
def context_parallel(case: Setting, info: RankInfo) -> Iterator[Attend]:
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
    """Compute a causal ring without messages, as if every rank had this rank's keys."""
    ring = _Silent()
    plan = Plan.of(ring.size, q.shape[1], causal=True, layout=layout)
    block_kernel = next(entry for entry in table.KERNELS if entry.name == kernel)
    run = RingRun(ring, plan, block_kernel, q.shape[-1] ** -0.5)
    return RingAttentionFunction.apply(q, k, v, run)[0]


class _Silent(Ring):
    def post(self, sends: Any, receives: Any) -> Any:
        return {message.what: like for message, like in receives}, lambda: None


def buffer_bytes(case: Setting, world: int) -> int:
    """Return what a rank of the ring needs besides one device's memory for its shard.

    That is slots for what arrives, the results of one block beside the sums so far, and with more
    than two ranks float32 sums and the share that is being sent.
    """
    plan = Plan.of(world, case.seqlen_per_rank, causal=True, layout=case.layout)
    head = case.seqlen_per_rank * case.head_dim * getattr(torch, case.dtype).itemsize
    keys, results = 2 * case.kv_heads * head, case.heads * head
    if case.direction != "forward":
        results += keys
    more = 0 if world <= 2 else results + (keys if case.direction != "forward" else 0)
    return plan.slots * keys + results + more


FEWEST, MOST = 3, 1000  # repeats


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
    f"{'layout':10} {'implementation':24} {'tokens':>6} {'heads':>6} {'pass':4} "
    f"{'ms':>7} {'its/s':>6} {'silent':>7} {'1 device':>8} {'of best':>7} {'native':>6} "
    f"{'speed':>12} {'memory':>9} {'growth':>6}"
)


def line(row: Row) -> str:
    """Return a row under `HEADER`; silent: without messages; of best: efficiency."""
    start = (
        f"{row['layout']:10} {row['implementation']:24} {row['seqlen_per_rank']:6} "
        f"{row['heads']}/{row['kv_heads']:<3} "
        f"{'f+b' if 'back' in row['direction'] else 'f':4}"
    )
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['reason'][:160]}"
    names = "median_ms", "without_messages_ms", "single_ms"
    ms = [format_ms(row[name]) if name in row else "-" for name in names]
    growth = f"{row['memory_growth']:+.0%}" if "memory_growth" in row else "-"
    return (
        f"{start} {ms[0]:>7} {row['iterations_per_s']:6.4g} {ms[1]:>7} {ms[2]:>8} "
        f"{row['efficiency']:7.0%} {row['of_native']:6.2f} "
        f"{format_rate(1e12 * row['tflops'], 'FLOP/s'):>12} "
        f"{format_bytes(row['peak_memory_bytes']):>9} {growth:>6}"
    )
