"""Messages between ranks: posted before the compute, awaited after it.

All messages of one step are posted together (`batch_isend_irecv`), on every rank in the same order:
NCCL runs them as one group, which cannot wait in a circle. On a GPU nothing here waits: NCCL copies
on a separate stream, and awaiting a message makes the compute's stream wait. A hop hides behind a
step's compute only if NCCL gets some multiprocessors while a kernel with thousands of blocks has
them all: give its stream priority by TORCH_NCCL_HIGH_PRIORITY=1 before the process group is made,
as `labsupport ring` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

Messages = Sequence[tuple[Tensor, int]]


@dataclass
class Traffic:
    """Messages that this rank has sent, and their bytes: of K and V, of dK and dV."""

    kv_messages: int = 0
    kv_bytes: int = 0
    gradient_messages: int = 0
    gradient_bytes: int = 0

    def count(self, pair: Sequence[Tensor], *, gradients: bool) -> None:
        """Add one message: K and V, or dK and dV."""
        what = "gradient" if gradients else "kv"
        vars(self)[f"{what}_messages"] += 1
        vars(self)[f"{what}_bytes"] += sum(x.nbytes for x in pair)

    def __str__(self) -> str:
        return (
            f"sent {self.kv_messages} K/V message{'s' * (self.kv_messages != 1)} "
            f"({self.kv_bytes:,} bytes) and {self.gradient_messages} of gradients "
            f"({self.gradient_bytes:,} bytes)"
        )


TOTAL = Traffic()
"""Traffic of all rings of this process so far.

A layer under activation checkpointing is several rings: that of the forward, to which the backward
belongs, and one for each time that it is computed again.
"""


class Ring:
    """The ranks of one process group as a ring.

    Raises:
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "ring attention needs a process group. Start the program with torchrun and call "
                "labsupport.distributed.setup_ddp(), or "
                "torch.distributed.init_process_group(), first."
            )
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise RuntimeError(
                f"rank {dist.get_rank()} is not in the process group that was given: only the "
                "group's own ranks may call."
            )
        self.size = dist.get_world_size(self.group)
        self.traffic = Traffic()

    def post(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Start all messages of a step; the returned function waits for them.

        Args:
            sends: contiguous tensors and to whom; unchanged until they have been awaited.
            receives: contiguous tensors to be filled, and from whom.
        """
        operations = [
            dist.P2POp(action, tensor, group=self.group, group_peer=peer % self.size)
            for action, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in messages
        ]
        requests = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for request in requests:
                request.wait()

        return wait

    @contextmanager
    def in_flight(self, sends: Messages, receives: Messages) -> Iterator[None]:
        """Let the messages of `post` travel while the body runs; after it they have arrived.

        Also when the body fails: their memory must not be freed before.
        """
        wait = self.post(sends, receives)
        try:
            yield
        finally:
            wait()
