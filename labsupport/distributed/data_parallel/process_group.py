"""Who am I: the process group, this process's rank in it, and its device.

    setup_ddp()         reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which
                        torchrun and `labsupport.distributed.launch` set
    ...                 every rank runs the same program
    cleanup_ddp()

Started by hand as one process, it makes a group of one: the same program runs in a notebook.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """This process among the others.

    rank: 0 ... world - 1. world: how many there are. device: where it computes.
    """

    rank: int
    world: int
    device: torch.device

    @classmethod
    def current(cls) -> Place:
        """The place in the process group that is set up.

        Raises:
            RuntimeError: none is.
        """
        if not dist.is_initialized():
            raise RuntimeError("there is no process group: call setup_ddp() first")
        on_gpu = "nccl" in str(dist.get_backend_config())
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        return cls(dist.get_rank(), dist.get_world_size(), torch.device(device))

    @property
    def ranks(self) -> str:
        """How many there are, in words: "1 rank", "2 ranks"."""
        return f"{self.world} rank{'s' * (self.world != 1)}"

    def wait_for_all(self) -> None:
        """Return when all ranks have come here."""
        here = torch.zeros(1, device=self.device)
        dist.all_reduce(here)
        here.item()  # on a GPU the line above only asks for it


def setup_ddp(backend: str | None = None, timeout: float | None = None) -> Place:
    """Join the process group, and choose this rank's device.

    Args:
        backend: "nccl" (GPUs, one for each process), "gloo" (CPU); None: "nccl" if there are GPUs.
            With "nccl" tensors on the CPU travel by gloo: FSDP's offloading needs that.
        timeout: seconds that a collective may wait for the other ranks; None: what
            `launch(timeout=...)` said, else PyTorch's (10 minutes with NCCL, 30 with gloo). With
            gloo the rank that waited raises; with NCCL its process is ended.

    Raises:
        RuntimeError: the group exists already.
        ValueError: an unknown backend; fewer GPUs than processes on this machine, which NCCL does
            not accept.

    >>> place = setup_ddp()
    >>> model = Decoder(config).to(place.device)
    """
    if dist.is_initialized():
        raise RuntimeError("the process group exists already: cleanup_ddp() closes it")
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f'backend is {backend!r}, and must be "gloo" or "nccl"')
    if backend == "nccl":
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"local rank {local} needs a GPU of its own, and there are {gpus}: start {gpus} "
                'processes, or take backend="gloo", which computes on the CPU'
            )
        # Before anything is put on "cuda": otherwise all ranks would share GPU 0.
        torch.cuda.set_device(local)
    if timeout is None and "LABSUPPORT_COLLECTIVE_TIMEOUT" in os.environ:
        timeout = float(os.environ["LABSUPPORT_COLLECTIVE_TIMEOUT"])
    limit = None if timeout is None else timedelta(seconds=timeout)
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(both, timeout=limit)
    else:
        dist.init_process_group(both, timeout=limit, store=dist.HashStore(), rank=0, world_size=1)
    return Place.current()


def cleanup_ddp() -> None:
    """Leave the process group; nothing happens if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks: to try a launch with."""
    place = setup_ddp()
    cleanup_ddp()
    return place.rank, place.world
