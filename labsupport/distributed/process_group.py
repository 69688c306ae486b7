"""The process group: which rank this process is, and on which device it computes.

`setup_ddp` reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun and
`labsupport.distributed.launch` set. Without them it makes a group of one, in a notebook too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankInfo:
    """This process among the others: rank 0 to world - 1, and the device that it computes on.

    Unpacks into rank, world and the rank on this machine: `rank, world, local = setup_ddp()`.
    """

    rank: int
    world: int
    device: torch.device

    def __iter__(self) -> Iterator[int]:
        return iter((self.rank, self.world, int(os.environ.get("LOCAL_RANK", self.rank))))

    @classmethod
    def current(cls) -> RankInfo:
        """Return this process's place in the default process group.

        Raises:
            RuntimeError: there is no process group.
        """
        if not dist.is_initialized():
            raise RuntimeError("there is no process group: call setup_ddp() first")
        on_gpu = "nccl" in str(dist.get_backend_config())
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        return cls(dist.get_rank(), dist.get_world_size(), torch.device(device))

    @property
    def ranks(self) -> str:
        """The number of ranks in words: "1 rank", "2 ranks"."""
        return f"{self.world} rank{'s' * (self.world != 1)}"

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait until all ranks of the group (None: all) have called this."""
        # The value is read, since on a GPU the all-reduce alone only asks for it.
        one = torch.zeros(1, device=self.device)
        dist.all_reduce(one, group=group)
        one.item()


def all_gather_object(local: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's object, in the order of the ranks, on all of them."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    return gathered


def setup_ddp(backend: str | None = None, timeout: float | None = None) -> RankInfo:
    """Join the process group, and choose this rank's device.

    Args:
        backend: "nccl" (GPUs, one for each process), "gloo" (CPU); None: "nccl" if there are GPUs.
            With "nccl" tensors on the CPU travel by gloo: FSDP's offloading needs that.
        timeout: seconds that a collective may wait for the other ranks; None: the timeout of
            `launch`, else PyTorch's (10 minutes with NCCL, 30 with gloo). With gloo the rank that
            waited raises; with NCCL its process is ended.

    Raises:
        RuntimeError: the group exists already.
        ValueError: an unknown backend; a timeout that is not above 0; fewer GPUs than processes on
            this machine, which NCCL does not accept.

    >>> info = setup_ddp()  # under torchrun one of many
    >>> info.rank, info.world
    (0, 1)
    >>> cleanup_ddp()
    """
    if dist.is_initialized():
        raise RuntimeError("the process group exists already: cleanup_ddp() closes it")
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f'backend is {backend!r}, and must be "gloo" or "nccl"')
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is {timeout}, and must be seconds above 0, or None")
    if backend == "nccl":
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(
                f"local rank {local} needs its own GPU, but there are {gpus}: start {gpus} "
                'processes, or use backend="gloo", which computes on the CPU'
            )
        # Before anything is put on "cuda": otherwise all ranks would share GPU 0.
        torch.cuda.set_device(local)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        timeout=None if timeout is None else timedelta(seconds=timeout),
        **({} if "RANK" in os.environ else alone),
    )
    return RankInfo.current()


def cleanup_ddp() -> None:
    """Leave the process group; do nothing if there is none.

    >>> info = setup_ddp()
    >>> cleanup_ddp()
    """
    if dist.is_initialized():
        dist.destroy_process_group()
