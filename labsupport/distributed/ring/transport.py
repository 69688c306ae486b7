"""Messages between ranks: posted before the compute, awaited after it.

There are two transports, and `Ring.connect` says which one carries a ring.

SEND AND RECEIVE. All messages of one step are posted together (`batch_isend_irecv`), on every rank
in the same order: NCCL runs them as one group, which cannot wait in a circle. On a GPU nothing here
waits: NCCL copies on a separate stream, and awaiting a message makes the compute's stream wait. A
hop hides behind a step's compute only if NCCL gets some multiprocessors while a kernel with
thousands of blocks has them all: give its stream priority by TORCH_NCCL_HIGH_PRIORITY=1 before the
process group is made, as `labsupport ring` does.

COPY ENGINES, on GPUs of one machine. Each rank has slots that the others have mapped, too, and the
sender's copy engine writes into the receiver's slot, while the multiprocessors compute. Two
barriers of all ranks, each a kernel of one block, frame the copies of a step:

    copy stream       barrier | copy, copy           barrier |
    compute stream    attention of this step ..................| attention of the next step ...

After the first one, slots may be overwritten; after the second, all messages of this step have
arrived. It is posted after the compute, which would wait for it if all streams share one queue.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from labsupport.attention.call import BackendUnavailableError
from labsupport.distributed.process_group import all_gather_object
from labsupport.distributed.ring.plan import Message

Pair = tuple[Tensor, Tensor]
TRANSPORTS = ("copy_engines", "send_receive")
_MINUTES = 10  # that a rank waits for the others in a barrier


@dataclass
class Traffic:
    """Messages that this rank has sent, and their bytes: of K and V, of dK and dV."""

    kv_messages: int = 0
    kv_bytes: int = 0
    gradient_messages: int = 0
    gradient_bytes: int = 0

    def count(self, pair: Sequence[Tensor], *, gradients: bool) -> None:
        """Add one message: K and V, or dK and dV."""
        size = sum(x.nbytes for x in pair)
        if gradients:
            self.gradient_messages += 1
            self.gradient_bytes += size
        else:
            self.kv_messages += 1
            self.kv_bytes += size

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


class PeerCopies:
    """Slots in the memory of each rank of one machine, mapped by all; a group's rings share them.

    They are PyTorch's symmetric memory.

    Attributes:
        nbytes: of this rank's slots.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.nbytes = 0
        self.grow(group, 256)

    def grow(self, group: dist.ProcessGroup, nbytes: int) -> None:
        """Give each rank `nbytes` for its slots; all ranks call it alike."""
        if nbytes <= self.nbytes:
            return
        failed = ""
        try:
            with torch.cuda.device(self.stream.device):
                self._map(group, self.stream.device, nbytes)
        except Exception as error:
            failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if reasons := [why for why in all_gather_object(failed, group) if why]:
            raise RuntimeError(f"no symmetric memory of {nbytes:,} bytes: {reasons[0]}")
        self.nbytes = nbytes

    def _map(self, group: Any, device: torch.device, nbytes: int) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        # Nothing here needs NVLink's multicast, and not every machine can.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        name = group.group_name
        own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, name)
        handle = _SymmetricMemory.rendezvous(own, name)
        ranks = range(handle.world_size)
        self._peers = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in ranks]
        self._barrier = lambda: handle.barrier(0, _MINUTES * 60_000)
        self._own = own, handle

    def slot(self, rank: int, begin: int, like: Pair) -> Pair:
        """Return the slot of a rank that begins at this byte, as two tensors like these."""
        ends = begin + like[0].nbytes, begin + like[0].nbytes + like[1].nbytes
        parts = self._peers[rank][begin : ends[0]], self._peers[rank][ends[0] : ends[1]]
        k, v = (part.view(x.dtype).view(x.shape) for part, x in zip(parts, like, strict=True))
        return k, v

    def post(self, ring: Ring, sends: Messages, receives: Messages) -> Posted:
        """Start all messages of a step; as `Ring.post`."""
        compute = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            self._barrier()
            for message, pair in sends:
                there = self.slot(message.receiver, message.slot * ring.slot_bytes, pair)
                for target, x in zip(there, pair, strict=True):
                    target.copy_(x, non_blocking=True)

        def wait() -> None:
            with torch.cuda.stream(self.stream):
                self._barrier()
            compute.wait_stream(self.stream)

        return {
            message.what: self.slot(ring.rank, message.slot * ring.slot_bytes, like)
            for message, like in receives
        }, wait


Messages = Sequence[tuple[Message, Pair]]
Posted = tuple[dict[str, Pair], Callable[[], None]]
_connected: WeakKeyDictionary[Any, PeerCopies | str] = WeakKeyDictionary()  # or why not, by group


def _peer_copies(group: dist.ProcessGroup, device: torch.device) -> PeerCopies | str:
    if device.type != "cuda" or "nccl" not in str(dist.get_backend_config(group)):
        return "between GPUs in a process group of NCCL only"
    if group not in _connected:
        connected: PeerCopies | str = "the ranks are on several machines"
        if len(set(all_gather_object(platform.node(), group))) == 1:
            try:
                connected = PeerCopies(group, device)
            except RuntimeError as error:  # on all ranks alike
                connected = str(error)
        _connected[group] = connected
    return _connected[group]


class Ring:
    """The ranks of one process group as a ring.

    Attributes:
        copies: the slots, where copy engines carry the messages; None: send and receive.
        slot_bytes: of the largest message.

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
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise RuntimeError(
                f"rank {dist.get_rank()} is not in the process group that was given: only the "
                "group's own ranks may call."
            )
        self.size = dist.get_world_size(self.group)
        self.traffic = Traffic()
        self.copies: PeerCopies | None = None
        self.slot_bytes = 0

    def connect(self, transport: str, like: Pair, slots: int) -> tuple[str, str]:
        """Choose what carries the messages; all ranks call it alike.

        Args:
            transport: "copy_engines", "send_receive", or "auto", the first that can.
            like: K and V of a rank; no message is larger. slots: messages that a rank holds.

        Returns:
            its name, and why not copy engines ("" if nobody asked for them, or they do it).

        Raises:
            BackendUnavailableError: copy engines cannot; says why.
        """
        if transport == "send_receive" or self.size == 1:
            return "send_receive", ""
        device = like[0].device
        copies = _peer_copies(self.group, device)
        if isinstance(copies, str):
            if transport == "copy_engines":
                raise BackendUnavailableError(f"copy engines carry no ring here: {copies}", {})
            return "send_receive", copies if device.type == "cuda" else ""
        self.slot_bytes = -(-sum(x.nbytes for x in like) // 256) * 256
        copies.grow(self.group, slots * self.slot_bytes)
        self.copies = copies
        return "copy_engines", ""

    def post(self, sends: Messages, receives: Messages) -> Posted:
        """Start all messages of a step; every rank calls it, if any has a message.

        Args:
            sends: messages and their contiguous tensors, unchanged until they have been awaited.
            receives: messages and tensors like theirs.

        Returns:
            what arrives, by `Message.what`; and a function that waits for all of it.
        """
        if self.copies is not None:
            return self.copies.post(self, sends, receives)
        arriving: dict[str, Pair] = {
            m.what: (k.new_empty(k.shape), v.new_empty(v.shape)) for m, (k, v) in receives
        }
        operations = [
            dist.P2POp(action, x, group=self.group, group_peer=peer)
            for action, messages in (
                (dist.isend, [(m.receiver, pair) for m, pair in sends]),
                (dist.irecv, [(m.sender, arriving[m.what]) for m, _ in receives]),
            )
            for peer, pair in messages
            for x in pair
        ]
        requests = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for request in requests:
                request.wait()

        return arriving, wait

    @contextmanager
    def in_flight(self, sends: Messages, receives: Messages) -> Iterator[dict[str, Pair]]:
        """Let the messages of `post` travel while the body runs; after it they have arrived.

        Also when the body fails: their memory must not be freed before.
        """
        arriving, wait = self.post(sends, receives)
        try:
            yield arriving
        finally:
            wait()
