"""The commands `labsupport ring check` and `labsupport ring bench`: PyTorch comes when they run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from labsupport.distributed.failures import short
from labsupport.interrupt import interrupted_status

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
    int | None, Option(help="Number of processes to start here. torchrun sets its own.")
]
Timeout = Annotated[
    float, Option(help="Seconds that a rank waits for another before the run stops.")
]
Dtype = Annotated[
    str | None, Option(help="bfloat16, float16, float32. Default: bfloat16 on GPUs, else float32.")
]
HeadDim = Annotated[int | None, Option(help="Default: 64 to check, 128 to time; less on CPUs.")]


@ring_app.command("check")
def check_command(
    backend: Backend = None,
    processes: Processes = None,
    kernel: Annotated[
        str | None, Option(help="cudnn,native,flash_triton,flash_torch,fa4. Default: what can run.")
    ] = None,
    dtype: Dtype = None,
    seqlen: Annotated[int | None, Option(help="Tokens of the whole sequence.")] = None,
    heads: Annotated[int, Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int, Option(help="Key/value heads.")] = 2,
    head_dim: HeadDim = None,
    speeds: Annotated[bool, Option(help="Measure latency and bandwidth.")] = True,
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
    from labsupport.distributed.ring_programs import MARKS, check, table
    from labsupport.profiling.shapes import listed

    kernels = kernel and listed(kernel, str)
    _check_known("kernel", kernels, [entry.name for entry in table.KERNELS])
    _check_known("dtype", dtype and [dtype], MARKS)
    _check_heads(heads, [kv_heads])
    options = {"kernels": kernels, "dtype": dtype, "seqlen": seqlen, "speeds": speeds}
    options |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    if _in_every_process(check, options, backend, processes, timeout):
        raise typer.Exit(1)


@ring_app.command("bench")
def bench_command(
    seqlen: Annotated[
        str | None, Option(help="Tokens of a rank's shard: 8192,32768; on CPUs 512,1024.")
    ] = None,
    heads: Annotated[int | None, Option(help="Query heads. Default: 32; on CPUs 4.")] = None,
    kv_heads: Annotated[
        str | None, Option(help="Key/value heads. Default: 8,32; on CPUs 4.")
    ] = None,
    head_dim: HeadDim = None,
    dtype: Dtype = None,
    implementations: Annotated[
        str | None,
        Option(
            help="Kernels (see check); PyTorch's own context_parallel, followed by flash, cudnn or "
            "efficient in square brackets. Default: what may run."
        ),
    ] = None,
    layouts: Annotated[
        str | None,
        Option(help="contiguous,zigzag. Default: zigzag, and contiguous for one kernel."),
    ] = None,
    transports: Annotated[
        str, Option(help="copy_engines,send_receive. Default: the first that works.")
    ] = "auto",
    directions: Annotated[
        str, Option(help="forward, forward+backward.")
    ] = "forward,forward+backward",
    max_seconds_per_case: Annotated[
        float, Option(help="Seconds for the repeats of each case.")
    ] = 1.0,
    limit: Annotated[
        float | None, Option(help="Seconds for all cases; those not begun by then are skipped.")
    ] = None,
    rows: Annotated[
        Path | None, Option(help="A CSV file with the rows so far, while it runs.")
    ] = None,
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

    from labsupport.distributed import ring_programs
    from labsupport.distributed.ring_programs import LAYOUTS, MARKS, TRANSPORTS, table
    from labsupport.profiling.provenance import command_line
    from labsupport.profiling.runs import check_run_name, list_runs, save_run
    from labsupport.profiling.shapes import listed

    small = backend == "gloo" or not torch.cuda.is_available()
    options = {
        "seqlens": listed(seqlen or ("512,1024" if small else "8192,32768"), int),
        "heads": heads or (4 if small else 32),
        "kv_heads": listed(kv_heads or ("4" if small else "8,32"), int),
        "head_dim": head_dim or (64 if small else 128),
        "dtype": dtype,
        "implementations": implementations and listed(implementations, str),
        "layouts": layouts and listed(layouts, str),
        "transports": listed(transports, str),
        "directions": listed(directions, str),
        "max_seconds_per_case": max_seconds_per_case,
        "limit": limit,
        "rows_file": None if rows is None else str(rows.absolute()),
    }
    kernels = [*(entry.name for entry in table.KERNELS), *ring_programs.CONTEXT_PARALLEL]
    _check_known("implementations", options["implementations"], kernels)
    _check_known("layouts", options["layouts"], LAYOUTS)
    _check_known("transports", options["transports"], ("auto", *TRANSPORTS))
    _check_known("directions", options["directions"], ring_programs.DIRECTIONS)
    _check_known("dtype", dtype and [dtype], MARKS)
    _check_heads(options["heads"], options["kv_heads"])
    if save is not None:
        check_run_name(save)
        if save in list_runs() and not overwrite:
            raise FileExistsError(f"there is a run {save}: choose another --save, or --overwrite")
    done = _in_every_process(ring_programs.measure_ring, options, backend, processes, timeout)
    if done is not None and save is not None:
        done.attrs["provenance"]["command"] = command_line()
        typer.echo(f"saved: {save_run(done, save, overwrite=overwrite)}")


def _in_every_process(
    function: Any, options: dict[str, Any], backend: str | None, processes: int | None, timeout: Any
) -> Any:
    """Call `ring_programs.in_every_process`; print what ends it early, and set the exit status."""
    from labsupport.distributed.launch import LaunchError
    from labsupport.distributed.ring_programs import in_every_process

    try:
        return in_every_process(
            function, options, backend=backend, processes=processes, timeout=timeout
        )
    except LaunchError as error:
        typer.echo(short(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        rows = options.get("rows_file")
        kept = f"; {rows} holds the rows of the cases that were done" if rows else ""
        typer.echo(f"stopped{kept}", err=True)
        raise typer.Exit(interrupted_status()) from None


def _check_known(option: str, names: Iterable[str] | None, known: Iterable[str]) -> None:
    for name in names or ():
        if name not in known:
            raise ValueError(f"--{option} {name}: there are {', '.join(known)}")


def _check_heads(heads: int, kv_heads: Iterable[int]) -> None:
    for count in kv_heads:
        if count < 1 or heads < 1 or heads % count:
            raise ValueError(f"--heads must be a multiple of --kv-heads: {heads} and {count}")
