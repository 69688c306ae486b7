"""`labsupport ring check`: are these devices linked, and do rings on them compute right?

Each rank makes the same whole sequence from a seed, and computes its attention alone, in float64
(the oracle). Then the ring computes it from shards, by each kernel that can. The output and the
three gradients are judged by their relative errors.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.attention.reference import oracle_attention
from labsupport.attention.registry import AttentionCall
from labsupport.distributed.launch import launch
from labsupport.distributed.process_group import (
    RankInfo,
    all_gather_object,
    cleanup_ddp,
    setup_ddp,
)
from labsupport.distributed.ring import kernels as table
from labsupport.distributed.ring.attention import LAYOUTS, ring_attention
from labsupport.distributed.ring.transport import Ring
from labsupport.distributed.ring.zigzag import gather_sequence, shard_sequence
from labsupport.profiling.timing import format_ms
from labsupport.profiling.units import format_bytes

# Largest relative errors: of the output, and of a gradient.
MARKS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 5e-2), "float16": (1e-2, 5e-2)}
# (what an error says, what helps); the first that fits is given.
ADVICE = (
    ("outofmemory", "fewer tokens per rank (--seqlen), or more ranks: a ring's buffers are twice K "
     "and V, and twice dK and dV in float32."),
    ("outofresources compilationerror passmanager", "a Triton kernel does not fit or compile on "
     "this GPU: delete ~/.triton/cache, try another --kernel, or python -m benchmarks tune."),
    ("eaddrinuse", "another program has the port: torchrun --standalone, or --master-port 29501."),
    ("init_process_group rendezvous distnetwork tcpstore", "on all nodes the same --nnodes, "
     "--rdzv-backend c10d and --rdzv-endpoint HOST:PORT, an open port; with several network "
     "interfaces NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."),
    ("nccl", "NCCL_DEBUG=INFO says where NCCL failed; one process a GPU is a must."),
    ("relative error", "if every kernel fails, suspect the messages; if one, that kernel: try it "
     "on one device by python -m labsupport.profiling.accuracy."),
)  # fmt: skip


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
    they are started here: `processes`, or one for each GPU, or 2 on a CPU.

    Raises:
        ValueError: more processes than GPUs. LaunchError: a process failed.
    """
    if "RANK" in os.environ:
        return _in_a_group(function, options, backend, timeout)
    gpus = torch.cuda.device_count() if backend != "gloo" else 0
    device = "cuda" if gpus or backend == "nccl" else "cpu"
    job = function, options, backend or ("nccl" if gpus else "gloo"), timeout
    count = processes or gpus or 2
    return launch(_in_a_group, job, timeout=timeout, processes=count, device=device)[0]


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
    """Return what helps against an error with this text, if it is known."""
    text = text.lower()
    return next((help for signs, help in ADVICE if any(s in text for s in signs.split(" "))), None)


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

    def all_reduce() -> None:
        total = torch.full((1000,), float(info.rank), device=info.device)
        dist.all_reduce(total)
        if (total != info.world * (info.world - 1) // 2).any():
            raise ValueError("a sum over all ranks is wrong")

    for line in _devices(info):
        say(line)
    problem = attempt(all_reduce)
    say(f"all-reduce: {problem or 'right'}")
    if problem:
        failed.append(problem)
    elif speeds and info.world > 1:
        for line in _speeds(info):
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
    oracle = _one_device([x.double() for x in whole])
    q, k, v, _ = whole
    call = AttentionCall(q.clone().requires_grad_(), k, v, causal=True, return_lse=True)
    for kernel in table.KERNELS:
        if kernels is not None and kernel.name not in kernels:
            continue
        if reasons := "; ".join(kernel.reasons(call)):
            say(f"{'':11} {kernel.name:12} {'FAILED' if kernels else '-'}: {reasons}")
            failed += [f"{kernel.name} cannot run here: {reasons}"] if kernels else []
            continue
        for layout in LAYOUTS:
            of, got = f"{layout:11} {kernel.name:12}", list[Tensor]()
            if problem := attempt(_whole_ring, got, info, layout, kernel.name, whole):
                say(f"{of} FAILED: {problem}")
                failed.append(f"{of}: {problem}")
                continue
            for name, result, exact in zip(("out", "dq", "dk", "dv"), got, oracle, strict=True):
                wrong, mark = result.double() - exact, MARKS[dtype][name != "out"]
                most, rmse = wrong.abs().max().item(), wrong.square().mean().sqrt().item()
                relative = (wrong.norm() / exact.norm()).item()
                right = relative <= mark  # NaN is not
                fault = "" if right else f"relative error {relative:.1e} is above {mark:g}"
                say(f"{of} {name:4} {most:9.1e} {rmse:9.1e} {relative:9.1e}  {fault or 'ok'}")
                failed += [f"{of} {name}: {fault}"] if fault else []
    if failed:
        more = f" (and {len(failed) - 1} more)" if failed[1:] else ""
        helps = next(filter(None, map(advice, failed)), "theory chapter 7, what goes wrong.")
        say(f"\nFAILED: {failed[0]}{more}\nWhat helps: {helps}")
    else:
        say("\nall is well")
    return int(bool(failed))


def _whole_ring(
    got: list[Tensor], info: RankInfo, layout: str, kernel: str, whole: list[Tensor]
) -> None:
    """Put the whole out, dq, dk and dv of a ring into `got`, on every rank."""
    zigzag = layout == "zigzag"
    *qkv, dout = (shard_sequence(x, info.rank, info.world, zigzag=zigzag) for x in whole)
    qkv = [x.requires_grad_() for x in qkv]
    out = ring_attention(*qkv, causal=True, layout=layout, kernel=kernel)
    results = [out, *torch.autograd.grad(out, qkv, dout)]
    got += [gather_sequence(x, zigzag=zigzag) for x in results]


def _one_device(whole: list[Tensor]) -> list[Tensor]:
    """Out, dq, dk and dv by the oracle."""
    *inputs, dout = (x.clone().requires_grad_() for x in whole)
    group = inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = oracle_attention(q, k, v, causal=True)[0].transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def _devices(info: RankInfo) -> Iterator[str]:
    """Lines: host, process and device of each rank; links of this host's GPUs."""
    device = f"{info.device}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    if info.device.type == "cuda":
        about = torch.cuda.get_device_properties(info.device)
        device = f"{info.device}, {about.name}, {format_bytes(about.total_memory)}"
    lines = all_gather_object(f"{platform.node()}, process {os.getpid()}, {device}")
    yield from (f"rank {rank}: {line}" for rank, line in enumerate(lines))
    if info.device.type == "cuda":
        try:
            topology = ["nvidia-smi", "topo", "-m"]
            yield subprocess.run(topology, capture_output=True, text=True, timeout=15).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            yield f"links: unknown ({error})"


def begin_together(info: RankInfo, action: Callable[[], Any]) -> float:
    """Return the milliseconds of one run on this rank, begun with the others."""
    dist.all_reduce(torch.zeros(1, device=info.device))  # a GPU waits, the program does not
    if info.device.type == "cpu":
        start = time.perf_counter()
        action()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _speeds(info: RankInfo) -> Iterator[str]:
    """Lines: latency; bandwidth of a hop around the ring and of an all-reduce, by size."""

    def slowest(action: Callable[[], Any], repeats: int = 5) -> float:
        samples = [begin_together(info, action) for _ in range(repeats + 2)][2:]
        return max(all_gather_object(statistics.median(samples)))

    def hop(message: Tensor) -> Callable[[], None]:
        sends, receives = [(message, info.rank + 1)], [(message.clone(), info.rank - 1)]
        return lambda: Ring().post(sends, receives)()

    latency = slowest(hop(torch.zeros(2, device=info.device)), repeats=20)
    yield f"a hop of 8 bytes to the next rank: {1e3 * latency:.0f} us"
    for size in (2**20, 2**26, 2**28) if info.device.type == "cuda" else (2**16, 2**20, 2**23):
        message = torch.zeros(size // 4, device=info.device)
        each, total = slowest(hop(message)), slowest(lambda x=message: dist.all_reduce(x))
        # Each rank sends and receives 2 (W - 1) / W of the bytes: NCCL's "bus bandwidth".
        bus = 2 * (info.world - 1) / info.world * size
        yield (
            f"{format_bytes(size)}: a hop {format_ms(each)} ms, {size / each / 1e6:.1f} GB/s each "
            f"way; all-reduce {format_ms(total)} ms, {bus / total / 1e6:.1f} GB/s"
        )
