"""`labsupport ring check` and `labsupport ring bench`: do several devices work, and how well?

A rank that leaves a collective alone hangs all others. So each step that may fail is tried by each
rank for itself first, and then all say how it went (`attempt`): if one could not, none goes on.

CHECK. Each rank makes the same whole sequence from a seed, and computes its attention alone: in
float64 (the oracle), and by the textbook in the ring's dtype (the yardstick). Then the ring
computes it from shards, by each kernel that can. The output and the three gradients are judged by
their relative errors, and by flash-attn's rule (`labsupport.attention.accuracy`).

BENCH. A step of all ranks takes as long as the slowest: they begin together, and each takes the
median of several repeats. The theoretical optimum is W times what one device needs for a shard of
the same length by the same kernel: under a causal mask, W times the tokens are W^2 times the work,
on W devices. `efficiency` is that optimum over the measured time. `without_messages_ms` is the same
ring when nothing is sent (the result is nonsense then): what is between it and `median_ms` is
communication that did not hide behind the compute.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention import attention
from labsupport.attention.accuracy import compare_with_oracle
from labsupport.attention.call import AttentionCall
from labsupport.attention.reference import banded_attention, oracle_attention
from labsupport.attention.reports import BackendUnavailableError
from labsupport.distributed.launch import launch
from labsupport.distributed.process_group import (
    RankInfo,
    all_gather_object,
    cleanup_ddp,
    setup_ddp,
)
from labsupport.distributed.ring import kernels as table
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingCall
from labsupport.distributed.ring.attention import last_ring_call, ring_attention
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import Ring
from labsupport.distributed.ring.zigzag import gather_sequence, shard_sequence
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import Timing, format_ms, now
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Any]

# --- the processes, and what they agree on --------------------------------------------------------

# (what an error says, what helps); the first that fits is given.
ADVICE = (
    (
        ("out of memory", "outofmemory"),
        "fewer tokens per rank (--seqlen), or more ranks. A ring's buffers are twice K and V, and "
        "twice dK and dV in float32.",
    ),
    (
        ("out of resource", "outofresources", "compilationerror", "ptxas", "passmanager"),
        "a Triton kernel does not fit or compile on this GPU: delete ~/.triton/cache, try another "
        "--kernel, or find tilings by python -m benchmarks tune.",
    ),
    (
        ("address already in use", "eaddrinuse"),
        "another program has the port: torchrun --master-port 29501, or --standalone on one node.",
    ),
    (
        ("init_process_group", "rendezvous", "connection refused", "distnetwork", "tcpstore"),
        "on all nodes the same --nnodes, --rdzv-backend c10d and --rdzv-endpoint HOST:PORT; the "
        "port must be open between them. With several network interfaces: NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME.",
    ),
    (("nccl",), "NCCL_DEBUG=INFO says where NCCL failed; one process a GPU is a must."),
)


class RendezvousError(RuntimeError):
    """The process group could not be set up; the message says what helps."""


def in_every_process(
    function: Callable[..., Any],
    options: dict[str, Any],
    *,
    backend: str | None = None,
    processes: int | None = None,
    timeout: float = 120.0,
) -> Any:
    """Run `function(**options)` in every process of a group; return rank 0's result.

    Under torchrun this is one of the processes, and only its rank 0 gets the result; elsewhere
    they are started here.

    Args:
        function: the process group exists when it is called.
        backend: "nccl" or "gloo"; None: NCCL where there are GPUs.
        processes: number to start: all GPUs, or 2 on a CPU, unless given. Ignored under torchrun.
        timeout: seconds that a rank waits for another, which may be compiling.

    Raises:
        ValueError: an unknown backend; more processes than GPUs. LaunchError: a process failed.
    """
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f'--backend {backend}: it is "nccl" (GPUs) or "gloo" (CPU)')
    if "RANK" in os.environ:
        return _in_a_group(function, options, backend, timeout)
    gpus = torch.cuda.device_count() if backend != "gloo" else 0
    if (backend == "nccl" and (processes or 1) > gpus) or (gpus and (processes or 0) > gpus):
        raise ValueError(
            f"--processes {processes}: each needs a GPU of its own, and there are {gpus}; "
            "--backend gloo computes on the CPU"
        )
    return launch(
        _in_a_group,
        (function, options, "nccl" if gpus else "gloo", timeout),
        processes=processes or gpus or 2,
        device="cuda" if gpus else "cpu",
        timeout=timeout,
    )[0]


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
        raise RendezvousError(
            f"the processes did not meet: {error}. What helps: {helps}"
        ) from error
    try:
        return function(**options)
    finally:
        cleanup_ddp()


def attempt(action: Callable[..., Any], *args: Any) -> str | None:
    """Run something on every rank; None if it went well on all, else who could not, and why."""
    reason = None
    try:
        action(*args)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    reasons = all_gather_object(reason)
    failed = [rank for rank, why in enumerate(reasons) if why]
    if not failed:
        return None
    who = "all ranks" if len(failed) == len(reasons) > 1 else f"rank {failed[0]}"
    return f"{who}: {reasons[failed[0]]}"


def advice(text: str) -> str | None:
    """Return what helps against an error with this text, if it is known."""
    found = (help for signs, help in ADVICE if any(sign in text.lower() for sign in signs))
    return next(found, None)


# --- what is computed -----------------------------------------------------------------------------

CONTEXT_PARALLEL = {
    "context_parallel[flash]": "native",
    "context_parallel[cudnn]": "cudnn",
    "context_parallel[efficient]": None,
}
LAYOUTS = ("contiguous", "zigzag")
DIRECTIONS = ("forward", "forward+backward")
DTYPES = ("bfloat16", "float16", "float32")


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

    @property
    def kernel(self) -> table.BlockKernel | None:
        """The kernel that computes on each device."""
        name = CONTEXT_PARALLEL.get(self.implementation, self.implementation)
        return next((kernel for kernel in table.KERNELS if kernel.name == name), None)

    def program(self, attend: Attend, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """Return what is timed: `attend` forward, or forward and backward."""
        *qkv, dout = inputs
        if self.direction == "forward":
            return lambda: attend(*qkv)
        return lambda: torch.autograd.grad(attend(*qkv), qkv, dout)

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The public function."""
        options = {"layout": self.layout, "kernel": self.implementation, "check_ranks": False}
        return ring_attention(q, k, v, causal=True, **options)

    def silent_ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The ring without messages: compiles, allocates and computes alike."""
        assert self.kernel is not None
        ring = _Silent()
        plan = Plan.of(ring.size, q.shape[1], causal=True, zigzag=self.layout == "zigzag")
        call = RingCall(ring, plan, self.kernel, q.shape[-1] ** -0.5)
        return RingAttentionFunction.apply(q, k, v, call)[0]

    def on_one_device(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """The same kernel without a ring, as `labsupport.attention` calls it."""
        assert self.kernel is not None
        return attention(q, k, v, causal=True, backend=self.kernel.backend)

    @contextmanager
    def context_parallel(self, info: RankInfo) -> Iterator[Attend]:
        """PyTorch's context parallelism: `F.scaled_dot_product_attention` replaced for a while.

        It balances the load as zigzag does, and gathers all keys on every rank (its default,
        "allgather"; "alltoall" passes them around). Grouped key heads are repeated for it.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        name = self.implementation.partition("[")[2].rstrip("]").upper()
        backend = SDPBackend.__members__[f"{name}_ATTENTION"]
        mesh = init_device_mesh(info.device.type, (info.world,))
        # It shards what a model would bring, and needs something to shard.
        tokens = torch.zeros(info.world * self.seqlen_per_rank, device=info.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 2) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        buffers: dict[str, Any] = {"buffers": [tokens], "no_restore_buffers": {tokens}}
        with context_parallel(mesh, buffer_seq_dims=[0], **buffers), sdpa_kernel(backend):
            yield attend


class _Silent(Ring):
    """A ring that sends nothing: a rank by itself does all that it does in the real one."""

    def post(self, sends: Any, receives: Any) -> Callable[[], None]:
        """Fill the buffers on a CPU, where leftover numbers cause warnings; a GPU takes any."""
        for tensor, _ in receives:
            if tensor.device.type == "cpu":
                tensor.zero_()
        return lambda: None


def check_known(**options: tuple[Sequence[str], Sequence[str]]) -> None:
    """Raise ValueError for names that do not exist: option=(given, known)."""
    for option, (names, known) in options.items():
        for name in names:
            if name not in known:
                raise ValueError(f"--{option} {name}: there are {', '.join(known)}")


def check_heads(heads: int, kv_heads: Sequence[int]) -> None:
    """Raise ValueError for heads that cannot be grouped."""
    for count in kv_heads:
        if count < 1 or heads < 1 or heads % count:
            raise ValueError(
                f"--heads {heads} --kv-heads {count}: each key/value head serves equally many "
                f"query heads, so --heads is a multiple of --kv-heads (--kv-heads {max(heads, 1)} "
                "always fits)"
            )


# --- check ----------------------------------------------------------------------------------------

# Largest relative errors: of the output, and of a gradient.
MARKS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 5e-2), "float16": (1e-2, 5e-2)}


def check(
    *,
    kernels: Sequence[str] | None = None,
    dtype: str | None = None,
    seqlen: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    speeds: bool = True,
) -> int:
    """Check the devices of the default process group, on every rank; rank 0 prints.

    Args:
        kernels: the ring's kernels; None: all that can run here.
        dtype: "bfloat16", "float16", "float32"; None: bfloat16 on GPUs, float32 on CPUs.
        seqlen: tokens of the whole sequence; None: 256 a rank on GPUs, 16 on CPUs.
        heads, kv_heads, head_dim: of the tensors.
        speeds: measure latency and bandwidth, too.

    Returns:
        0, or 1 if something failed: the same on all ranks.
    """
    info = RankInfo.current()
    on_gpu = info.device.type == "cuda"
    dtype, head_dim = dtype or _dtype(info), head_dim or (64 if on_gpu else 16)
    seqlen = seqlen or info.world * (256 if on_gpu else 16)
    failed: list[str] = []

    def say(text: str) -> None:
        if info.rank == 0:
            print(text, flush=True)

    for rank, line in enumerate(all_gather_object(_description(info))):
        say(f"rank {rank}: {line}")
    if on_gpu:
        say(_topology())
    problem = attempt(lambda: _check_all_reduce(info))
    say(f"all-reduce: {problem or 'right'}")
    if problem:
        failed.append(problem)
    elif speeds and info.world > 1:
        for line in _speeds(info):
            say(line)
    if seqlen % (2 * info.world):
        longer = seqlen + -seqlen % (2 * info.world)
        say(f"FAILED: {seqlen} tokens cannot be cut into two chunks a rank: --seqlen {longer} can")
        return 1
    say(
        f"\n{seqlen} tokens over {info.ranks}, causal, {heads} heads ({kv_heads} of keys) of "
        f"{head_dim}, {dtype}: each ring against one device in float64\n"
        f"{'':24} {'':4} {'maximum':>9} {'RMSE':>9} {'relative':>9}"
    )
    generator = torch.Generator().manual_seed(0)
    *whole, dout = (
        torch.randn((1, seqlen, count, head_dim), generator=generator).to(
            info.device, getattr(torch, dtype)
        )
        for count in (heads, kv_heads, kv_heads, heads)
    )
    oracle = _one_device(oracle_attention, [x.double() for x in whole], dout)
    textbook = _one_device(banded_attention, whole, dout)
    for kernel in table.KERNELS:
        if kernels is not None and kernel.name not in kernels:
            continue
        q, k, v = (x[:, : seqlen // info.world].detach().requires_grad_() for x in whole)
        if reasons := kernel.reasons(AttentionCall(q, k, v, causal=True, return_lse=True)):
            say(f"{'':11} {kernel.name:12} {'FAILED' if kernels else '-'}: {'; '.join(reasons)}")
            failed += [f"{kernel.name} cannot run here: {'; '.join(reasons)}"] if kernels else []
            continue
        for layout in LAYOUTS:
            shape = seqlen // info.world, heads, kv_heads, head_dim
            case = Case(layout, kernel.name, *shape, dtype, "forward+backward")
            of, got = f"{layout:11} {kernel.name:12}", list[Tensor]()
            if problem := attempt(_whole_ring, got, info, case, whole, dout):
                say(f"{of} FAILED: {problem}")
                failed.append(f"{of}: {problem}")
            for name, *three in zip(("out", "dq", "dk", "dv"), got, textbook, oracle, strict=False):
                line, fault = _judge(name, *three, MARKS[dtype][name != "out"])
                say(f"{of} {name:4} {line}  {fault or 'ok'}")
                failed += [f"{of} {name}: {fault}"] if fault else []
    if failed:
        helps = next(filter(None, map(advice, failed)), None)
        say(f"\nFAILED: {failed[0]}" + (f" (and {len(failed) - 1} more)" if failed[1:] else ""))
        say(f"What helps: {helps}" if helps else "See theory chapter 7, what goes wrong.")
        return 1
    say("\nall is well")
    return 0


def _whole_ring(
    got: list[Tensor], info: RankInfo, case: Case, whole: list[Tensor], dout: Tensor
) -> None:
    """Put the whole out, dq, dk and dv of a ring into `got`, on every rank."""
    zigzag = case.layout == "zigzag"
    parts = [shard_sequence(x, info.rank, info.world, zigzag=zigzag) for x in (*whole, dout)]
    qkv = [x.requires_grad_() for x in parts[:3]]
    # Silently first: what does not compile or fit must not leave the others waiting.
    silent = case.program(case.silent_ring, [*qkv, parts[3]])
    if problem := attempt(lambda: (silent(), now(info.device))):
        raise RuntimeError(problem)
    out = case.ring(*qkv)
    results = [out, *torch.autograd.grad(out, qkv, parts[3])]
    got += [gather_sequence(x, zigzag=zigzag) for x in results]


def _judge(
    name: str, got: Tensor, textbook: Tensor, oracle: Tensor, mark: float
) -> tuple[str, str]:
    """Return a tensor's errors as text, and why it does not pass."""
    report = compare_with_oracle(got, textbook, oracle, gradient=name != "out")
    rmse = (got.double() - oracle).square().mean().sqrt().item()
    faults = []
    if not report.relative_error <= mark:
        faults.append(f"relative error {report.relative_error:.1e} is above {mark:g}")
    if not report.ok:
        faults.append(
            f"maximum error {report.max_error:.1e} is above {report.allowed:.1e}, which the "
            "textbook's errors allow"
        )
    line = f"{report.max_error:9.1e} {rmse:9.1e} {report.relative_error:9.1e}"
    return line, "; ".join(faults)


def _one_device(attend: Callable[..., Any], qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in qkv]
    group = inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    out = attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), causal=True)
    out = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def _description(info: RankInfo) -> str:
    """Host, process and device of this rank."""
    device = f"{info.device}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    if info.device.type == "cuda":
        about = torch.cuda.get_device_properties(info.device)
        device = f"{info.device}, {about.name}, {format_bytes(about.total_memory)}"
    return f"{platform.node()}, process {os.getpid()}, {device}"


def _topology() -> str:
    """Links of this host's GPUs, as nvidia-smi shows them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "links: unknown, since there is no nvidia-smi"
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, check=False)
    return done.stdout.rstrip() or "links: unknown (nvidia-smi topo -m says nothing here)"


def _check_all_reduce(info: RankInfo) -> None:
    """Raise ValueError if a sum over all ranks is wrong on this one."""
    own, world = torch.arange(1000, dtype=torch.float32, device=info.device), info.world
    total = own + info.rank
    dist.all_reduce(total)
    if not torch.equal(total, own * world + world * (world - 1) // 2):
        raise ValueError("a sum over all ranks is wrong")


def _speeds(info: RankInfo) -> Iterator[str]:
    """Lines: latency; bandwidth of a hop around the ring and of an all-reduce, by size."""

    def slowest(action: Callable[[], Any], repeats: int = 5) -> float:
        samples = [_sample(info, action) for _ in range(repeats + 2)][2:]
        return max(all_gather_object(statistics.median(samples))) / 1e3

    def hop(message: Tensor) -> Callable[[], None]:
        arriving = torch.empty_like(message)
        sends, receives = [(message, info.rank + 1)], [(arriving, info.rank - 1)]
        return lambda: Ring().post(sends, receives)()

    latency = slowest(hop(torch.zeros(2, device=info.device)), repeats=20)
    yield f"a hop of 8 bytes to the next rank: {1e6 * latency:.0f} us"
    for size in (2**20, 2**26, 2**28) if info.device.type == "cuda" else (2**16, 2**20, 2**23):
        message = torch.zeros(size // 4, device=info.device)
        each, total = slowest(hop(message)), slowest(lambda x=message: dist.all_reduce(x))
        # Each rank sends and receives 2 (W - 1) / W of the bytes: NCCL's "bus bandwidth".
        share = 2 * (info.world - 1) / info.world
        yield (
            f"{format_bytes(size)}: a hop {format_ms(1e3 * each)} ms, {size / each / 1e9:.1f} GB/s "
            f"each way; all-reduce {format_ms(1e3 * total)} ms, {share * size / total / 1e9:.1f} "
            "GB/s"
        )


# --- bench ----------------------------------------------------------------------------------------

COLUMNS = [
    *("world", "layout", "implementation", "seqlen_per_rank", "heads", "kv_heads", "head_dim"),
    *("dtype", "direction", "status", "reason"),
    *("median_ms", "q1_ms", "q3_ms", "repeats", "iterations_per_s", "tflops"),
    *("single_ms", "efficiency", "of_native", "without_messages_ms"),
    *("peak_memory_bytes", "single_peak_memory_bytes", "sent_bytes"),
]
ON_GPU = (
    *("native", "cudnn", "flash_triton"),
    *("context_parallel[cudnn]", "context_parallel[flash]", "fa4"),
)
ON_CPU = ("native", "flash_torch")
FEWEST, MOST = 3, 20  # repeats


def measure_ring(
    *,
    seqlens: Sequence[int] = (8192, 32768),
    heads: int = 32,
    kv_heads: Sequence[int] = (8, 32),
    head_dim: int = 128,
    dtype: str | None = None,
    implementations: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    max_seconds_per_case: float = 2.0,
    limit: float | None = None,
    rows_file: str | Path | None = None,
    say: Callable[[str], Any] = lambda line: None,
) -> pd.DataFrame | None:
    """Time causal ring attention; all ranks of the default process group call it alike.

    Args:
        seqlens: tokens of each rank's shard.
        heads, kv_heads, head_dim: of the tensors; batch 1.
        dtype: "bfloat16", "float16", "float32"; None: bfloat16 on GPUs, float32 on CPUs.
        implementations: the ring's kernels and "context_parallel[flash|cudnn|efficient]"; None: all
            that may run here.
        layouts: "contiguous", "zigzag"; None: zigzag, and contiguous for the first implementation.
        directions: "forward", "forward+backward".
        max_seconds_per_case: for the repeats of one case; three are made in any case.
        limit: seconds for everything: what has not begun by then is skipped.
        rows_file: a CSV file that holds the rows so far, should the run not reach its end.
        say: is given a line for each row on rank 0.

    Returns:
        on rank 0 the table, with provenance: one row per case, its columns are `COLUMNS`. Times
        and memory are the slowest and the fullest rank's; single_ms and single_peak_memory_bytes
        one device's with the same kernel and a shard's length; sent_bytes the most that one rank
        sent; tflops of each device; of_native the time of "native" over the row's. `status` is
        "ok", "unsupported", "out of memory", "failed" or "skipped", with a reason. None elsewhere.
    """
    import pandas as pd

    info, began = RankInfo.current(), time.monotonic()
    names = implementations or (ON_GPU if info.device.type == "cuda" else ON_CPU)
    wanted = [(name, layout) for name in names for layout in layouts or ("zigzag",)]
    wanted += [(names[0], "contiguous")] if layouts is None else []
    # What may take minutes to compile, or hang where it does not work, comes last.
    late = {"fa4": 1} | dict.fromkeys(CONTEXT_PARALLEL, 2)
    todo = [
        Case(layout, name, length, heads, count, head_dim, dtype or _dtype(info), direction)
        for name, layout in sorted(wanted, key=lambda pair: late.get(pair[0], 0))
        for length in seqlens
        for count in kv_heads
        for direction in directions
        if name not in CONTEXT_PARALLEL or layout == "zigzag"
    ]
    say(HEADER)
    rows: list[Row] = []
    singles: dict[tuple[Any, ...], Row] = {}
    native: dict[tuple[Any, ...], float] = {}
    for case in todo:
        over = limit is not None and max(all_gather_object(time.monotonic() - began)) > limit
        found = {"status": "skipped", "reason": f"{limit} s are over"}
        if not over:
            found = _row(info, case, max_seconds_per_case, singles)
            gc.collect()
            if info.device.type == "cuda":
                torch.cuda.empty_cache()
        row = {"world": info.world, "status": "ok", "reason": ""} | asdict(case) | found
        same = case.layout, *_key(case)[1:]
        if case.implementation == "native":
            native[same] = row.get("median_ms", math.nan)
        row["of_native"] = native.get(same, math.nan) / row.get("median_ms", math.nan)
        rows.append(row)
        if info.rank == 0:
            say(_line(row))
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


def _key(case: Case) -> tuple[Any, ...]:
    """Kernel and sizes of a case."""
    sizes = case.seqlen_per_rank, case.heads, case.kv_heads, case.head_dim
    return case.kernel and case.kernel.name, *sizes, case.dtype, case.direction


def _row(info: RankInfo, case: Case, seconds: float, singles: dict[tuple[Any, ...], Row]) -> Row:
    """The measured columns; what fails on a rank fails on all, with a reason."""
    inputs: list[Tensor] = []

    def prepare() -> None:
        generator = torch.Generator(info.device).manual_seed(info.rank)
        dtype = getattr(torch, case.dtype)
        for count in (case.heads, case.kv_heads, case.kv_heads, case.heads):
            shape = 1, case.seqlen_per_rank, count, case.head_dim
            inputs.append(torch.randn(shape, generator=generator, device=info.device, dtype=dtype))
        for x in inputs[:3]:
            x.requires_grad_(case.direction != "forward")
        call = AttentionCall(*inputs[:3], causal=True, return_lse=True)
        if case.kernel is not None and (reasons := case.kernel.reasons(call)):
            raise BackendUnavailableError("; ".join(reasons), {})

    if problem := attempt(prepare):
        return _failure(problem)
    single = {}
    if case.kernel is not None:
        if _key(case) not in singles:
            program = case.program(case.on_one_device, inputs)
            singles[_key(case)] = {}
            if attempt(lambda: (program(), now(info.device))) is None:
                timings, peak = _timed(info, program, seconds / 2)
                middle = statistics.median(timing.median for timing in timings)
                singles[_key(case)] = {"single_ms": middle, "single_peak_memory_bytes": peak}
        single = dict(singles[_key(case)])
    if case.implementation not in CONTEXT_PARALLEL:
        silent = case.program(case.silent_ring, inputs)
        # Compile, allocate, run: each rank alone.
        if problem := attempt(lambda: (silent(), now(info.device))):
            return single | _failure(problem)
        timings, _ = _timed(info, silent, seconds / 2)
        single["without_messages_ms"] = max(timing.median for timing in timings)
    measured: Row = {}

    def measure() -> None:
        is_ring = case.implementation not in CONTEXT_PARALLEL
        with nullcontext(case.ring) if is_ring else case.context_parallel(info) as attend:
            timings, peak = _timed(info, case.program(attend, inputs), seconds)
        slowest = max(timings, key=lambda timing: timing.median)
        length, report = info.world * case.seqlen_per_rank, last_ring_call()
        # Two matrix products forward, five backward, over the visible pairs of all ranks.
        flops = 2 * case.head_dim * case.heads * length * (length + 1)
        flops *= 1.0 if case.direction == "forward" else 3.5
        measured.update(
            median_ms=slowest.median,
            q1_ms=slowest.q1,
            q3_ms=slowest.q3,
            repeats=slowest.repeats,
            iterations_per_s=1e3 / slowest.median,
            tflops=flops / info.world / slowest.median / 1e9,
            efficiency=info.world * single.get("single_ms", math.nan) / slowest.median,
            peak_memory_bytes=peak,
        )
        if is_ring and report is not None:
            sent = report.traffic.kv_bytes + report.traffic.gradient_bytes
            measured["sent_bytes"] = max(all_gather_object(sent))

    problem = attempt(measure)
    return single | (_failure(problem) if problem else measured)


def _failure(problem: str) -> Row:
    kinds = {
        "OutOfMemoryError": "out of memory",
        "BackendUnavailableError": "unsupported",
        "AttentionInputError": "unsupported",
    }
    status = next((kind for name, kind in kinds.items() if name in problem), "failed")
    helps = advice(problem) if status != "unsupported" else None
    return {"status": status, "reason": f"{problem} | {helps}" if helps else problem}


def _timed(info: RankInfo, program: Callable[[], Any], seconds: float) -> tuple[list[Timing], int]:
    """Each rank's times of repeats that all begin together, and the fullest rank's memory."""
    peak = measure_peak_memory(program, device=info.device).peak_bytes
    samples = [_sample(info, program)]
    repeats = int(1e3 * seconds / max(all_gather_object(samples[0])))
    for _ in range(max(FEWEST, min(MOST, repeats)) - 1):
        samples.append(_sample(info, program))
    own = Timing(tuple(samples), str(info.device)), peak
    timings, peaks = zip(*all_gather_object(own), strict=True)
    return list(timings), max(peaks)


def _sample(info: RankInfo, program: Callable[[], Any]) -> float:
    """Milliseconds of one run on this rank, begun with the others."""
    dist.all_reduce(torch.zeros(1, device=info.device))  # a GPU waits, the program does not
    if info.device.type == "cpu":
        start = time.perf_counter()
        program()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    program()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _dtype(info: RankInfo) -> str:
    return "bfloat16" if info.device.type == "cuda" else "float32"


HEADER = (
    f"{'layout':10} {'implementation':24} {'tokens':>6} {'heads':>6} {'pass':5} {'ms':>7} "
    f"{'silent':>7} {'1 device':>8} {'of best':>7} {'native':>6} {'TFLOP/s':>7} {'memory':>9}"
)


def _line(row: Row) -> str:
    """A row under `HEADER`; silent: without messages; of best: efficiency."""
    start = (
        f"{row['layout']:10} {row['implementation']:24} {row['seqlen_per_rank']:6} "
        f"{row['heads']}/{row['kv_heads']:<3} {'f+b' if 'back' in row['direction'] else 'f':5}"
    )
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['reason'][:160]}"
    ms = [
        format_ms(row[name]) if name in row else "-"
        for name in ("median_ms", "without_messages_ms", "single_ms")
    ]
    return (
        f"{start} {ms[0]:>7} {ms[1]:>7} {ms[2]:>8} {row['efficiency']:7.0%} "
        f"{row['of_native']:6.2f} {row['tflops']:7.3g} {format_bytes(row['peak_memory_bytes']):>9}"
    )


def bench(**options: Any) -> pd.DataFrame | None:
    """`measure_ring` with its lines printed: what `labsupport ring bench` runs in each process."""
    rank = RankInfo.current().rank
    return measure_ring(**options, say=lambda line: rank or print(line, flush=True))
