"""The same function in every process, under torchrun or started here, and what they agree on.

A rank that leaves a collective alone hangs all others. So each step that may fail is tried by each
rank for itself first, and then all say how it went (`agree`): if one could not, none goes on. They
say so by gloo, also where tensors travel by NCCL: a GPU that waits does not keep this back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from labsupport.distributed.data_parallel.process_group import Place, cleanup_ddp, setup_ddp
from labsupport.distributed.launch import launch
from labsupport.distributed.ring_tools.trouble import advice

PATIENCE = 120.0  # seconds that a rank waits for another, which may be compiling


class RanksDidNotMeetError(RuntimeError):
    """The process group could not be set up; the message says what helps."""


def in_every_process(
    target: str,
    options: dict[str, Any],
    *,
    backend: str | None = None,
    processes: int | None = None,
    patience: float = PATIENCE,
) -> Any:
    """Run `module:function(**options)` in every process of a group; what it returned on rank 0.

    Under torchrun this is one of the processes, and only its rank 0 gets the result; elsewhere
    they are started here.

    Args:
        target: takes the options; the process group exists when it is called.
        backend: "nccl" or "gloo"; None: NCCL where there are GPUs.
        processes: how many to start: all GPUs, or 2 on a CPU, unless given. Ignored under torchrun.
        patience: seconds that a rank waits for another before the run is given up.

    Raises:
        ValueError: an unknown backend; more processes than GPUs. LaunchError: a process failed.
    """
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f'--backend {backend}: it is "nccl" (GPUs) or "gloo" (CPU)')
    if "RANK" in os.environ:
        return joined(target, options, backend, patience)
    gpus = torch.cuda.device_count() if backend != "gloo" else 0
    if backend == "nccl" and gpus == 0:
        raise ValueError("--backend nccl needs GPUs, and there are none: --backend gloo")
    if gpus and (processes or 0) > gpus:
        raise ValueError(
            f"--processes {processes}: each needs a GPU of its own, and only {gpus} can be had: "
            f"--processes {gpus}, or --backend gloo, which computes on the CPU"
        )
    device = "cuda" if gpus else "cpu"
    results = launch(
        f"{__name__}:joined",
        (target, options, "nccl" if gpus else "gloo", patience),
        processes=processes or gpus or 2,
        device=device,
        timeout=patience,
    )
    return results[0]


def joined(target: str, options: dict[str, Any], backend: str | None, patience: float) -> Any:
    """Set the process group up, run the function, take the group down.

    Raises:
        RanksDidNotMeetError: says what helps.
    """
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    if one_machine and sys.platform == "linux":
        # What the machine's name resolves to need not matter.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Otherwise a message waits until the compute that was to hide it has left the GPU.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    # One queue into the GPU keeps the order of posting: messages first, then the compute.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    module, name = target.split(":")
    try:
        setup_ddp(backend, timeout=patience)
    except RuntimeError as error:  # torch.distributed's own are of this kind
        said = one_line(error)
        remedy = advice(said) or advice("init_process_group")
        raise RanksDidNotMeetError(f"the processes did not meet. {said}. {remedy}") from error
    try:
        return getattr(import_module(module), name)(**options)
    finally:
        cleanup_ddp()


def attempt(action: Callable[[], Any]) -> str | None:
    """Run something on this rank alone; None if it went well, or else why it did not."""
    try:
        action()
    except Exception as error:
        return one_line(error)
    return None


def one_line(error: BaseException) -> str:
    """Which error, and the beginning of what it says."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}"


def agree(reason: str | None) -> str | None:
    """The same answer on all ranks: None if all went well, or else who did not, and why."""
    reasons = everybody(reason)
    bad = [rank for rank, why in enumerate(reasons) if why is not None]
    if not bad:
        return None
    who = "all ranks" if len(bad) == len(reasons) > 1 else f"rank {bad[0]}"
    return f"{who}: {reasons[bad[0]]}"


def everybody(thing: Any) -> list[Any]:
    """What each rank has, on all ranks: numbers, texts, tuples. By gloo."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def meet(place: Place) -> None:
    """Let all ranks' devices begin together. A GPU waits, the program does not."""
    dist.all_reduce(torch.zeros(1, device=place.device))
