"""The commands `labsupport ring check` and `labsupport ring bench`: PyTorch comes when they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

ring_app = typer.Typer(
    name="ring",
    help="Ring attention on several devices: does it work, and how fast is it?",
    no_args_is_help=True,
)
Option = typer.Option

Backend = Annotated[
    str | None, Option(help="nccl (GPUs) or gloo (CPU). Default: nccl where there are GPUs.")
]
Processes = Annotated[
    int | None, Option(min=1, help="Number of processes to start here. torchrun sets its own.")
]
Timeout = Annotated[
    float,
    Option(
        min=0.001,
        help="Seconds that a rank waits for another before the run stops.",
    ),
]
Dtype = Annotated[
    str | None, Option(help="bfloat16, float16, float32. Default: bfloat16 on GPUs, else float32.")
]
HeadDim = Annotated[
    int | None, Option(min=1, help="Default: 64 to check, 128 to time; less on CPUs.")
]


@ring_app.command("check")
def check_command(
    backend: Backend = None,
    processes: Processes = None,
    kernel: Annotated[
        str | None, Option(help="cudnn,native,flash_triton,flash_torch,fa4. Default: all that run.")
    ] = None,
    dtype: Dtype = None,
    seqlen: Annotated[int | None, Option(min=1, help="Tokens of the whole sequence.")] = None,
    heads: Annotated[int, Option(min=1, help="Query heads.")] = 4,
    kv_heads: Annotated[int, Option(min=1, help="Key/value heads.")] = 2,
    head_dim: HeadDim = None,
    timeout: Timeout = 120.0,
) -> None:
    """Check several devices: list them and their links, and compare rings with one device.

    Exit status 1 if something is wrong; the last lines say what, and how to fix it.

    \b
    labsupport ring check --processes 2                          on this machine
    torchrun --nproc-per-node 8 -m labsupport.cli ring check     on 8 GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 -m labsupport.cli ring check  on both of 2 nodes
    """
    from labsupport.distributed.ring.kernels import KERNELS
    from labsupport.distributed.ring_programs import MARKS, check, in_every_process
    from labsupport.profiling.shapes import listed

    kernels = kernel and listed(kernel, str)
    _check_known("kernel", kernels, [entry.name for entry in KERNELS])
    _check_known("dtype", dtype and [dtype], MARKS)
    _check_heads(heads, [kv_heads])
    options = {"kernels": kernels, "dtype": dtype, "seqlen": seqlen}
    options |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    if in_every_process(check, options, backend, processes, timeout):
        raise typer.Exit(1)


@ring_app.command("bench")
def bench_command(
    seqlen: Annotated[
        str | None, Option(help="Tokens of a rank's shard: 8192,32768; on CPUs 512,1024.")
    ] = None,
    heads: Annotated[int | None, Option(min=1, help="Query heads. Default: 32; on CPUs 4.")] = None,
    kv_heads: Annotated[
        str | None, Option(help="Key/value heads. Default: 8,32; on CPUs 4.")
    ] = None,
    head_dim: HeadDim = None,
    dtype: Dtype = None,
    implementations: Annotated[
        str | None,
        Option(
            help="Kernels (see check); PyTorch's own context_parallel, followed by flash or cudnn "
            "in square brackets. Default: all that run."
        ),
    ] = None,
    layouts: Annotated[str, Option(help="contiguous,zigzag.")] = "zigzag",
    directions: Annotated[
        str, Option(help="forward, forward+backward.")
    ] = "forward,forward+backward",
    max_seconds: Annotated[
        float, Option(min=0.001, help="Seconds for the repeats of each row.")
    ] = 1.0,
    save: Annotated[str | None, Option(help="Save the table as data/runs/SAVE.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a run of that name.")] = False,
    backend: Backend = None,
    processes: Processes = None,
    timeout: Timeout = 120.0,
) -> None:
    """Time causal ring attention, and compare it with one device and PyTorch's own.

    ms: time of the slowest rank. silent: the same without messages. 1 device: the same kernel on
    one shard, alone. of best: ranks times that, divided by the time: 100% is the optimum. native:
    the time of PyTorch's FlashAttention divided by this one. memory: at the peak, without inputs.
    growth: over one device's for a shard plus the ring's buffers; the mark is 20%.

    \b
    labsupport ring bench --processes 2 --save ring-here
    torchrun --nproc-per-node 8 -m labsupport.cli ring bench --save ring-8-gpus
    """
    import torch

    from labsupport.distributed import ring_programs as programs
    from labsupport.distributed.ring.attention import SHARD_LAYOUTS
    from labsupport.distributed.ring.kernels import KERNELS
    from labsupport.profiling.provenance import command_line
    from labsupport.profiling.runs import check_run_name, list_runs, save_run
    from labsupport.profiling.shapes import listed

    gpu = backend != "gloo" and torch.cuda.is_available()
    usual = programs.ON_GPU if gpu else programs.ON_CPU
    names = listed(implementations, str) if implementations else list(usual)
    kernels = [*(kernel.name for kernel in KERNELS), *programs.CONTEXT_PARALLEL]
    _check_known("implementations", names, kernels)
    _check_known("layouts", listed(layouts, str), SHARD_LAYOUTS)
    _check_known("directions", listed(directions, str), programs.DIRECTIONS)
    _check_known("dtype", dtype and [dtype], programs.MARKS)
    heads = heads or (32 if gpu else 4)
    counts = listed(kv_heads or ("8,32" if gpu else "4"), int)
    _check_heads(heads, counts)
    lengths = listed(seqlen or ("8192,32768" if gpu else "512,1024"), int)
    if min(lengths) < 1:
        raise ValueError(f"--seqlen {seqlen}: at least 1 token")
    if save is not None:
        check_run_name(save)
        if save in list_runs() and not overwrite:
            raise FileExistsError(f"there is a run {save}: choose another --save, or --overwrite")
    head_dim, dtype = head_dim or (128 if gpu else 64), dtype or ("bfloat16" if gpu else "float32")
    settings = [
        programs.Setting(layout, name, length, heads, count, head_dim, dtype, direction)
        for name in names
        for layout in listed(layouts, str)
        for length in lengths
        for count in counts
        for direction in listed(directions, str)
        if name not in programs.CONTEXT_PARALLEL or layout == "zigzag"
    ]
    options = {"settings": settings, "seconds": max_seconds}
    table = programs.in_every_process(programs.measure_ring, options, backend, processes, timeout)
    if table is not None and save is not None:
        table.attrs["provenance"]["command"] = command_line()
        typer.echo(f"saved: {save_run(table, save, overwrite=overwrite)}")


def _check_known(option: str, names: Iterable[str] | None, known: Iterable[str]) -> None:
    for name in names or ():
        if name not in known:
            raise ValueError(f"--{option} {name}: there are {', '.join(known)}")


def _check_heads(heads: int, kv_heads: Iterable[int]) -> None:
    for count in kv_heads:
        if count < 1 or heads < 1 or heads % count:
            raise ValueError(f"--heads must be a multiple of --kv-heads: {heads} and {count}")
