"""A bound on memory that really holds: what would not fit on a smaller machine fails here too.

GPU     PyTorch's allocator refuses to reserve more (`cap_gpu_memory`).
CPU     On Linux the kernel refuses to give the process more. Of its limits RLIMIT_DATA is the one
        that fits: since Linux 4.7 it counts what belongs to the process alone and can be written,
        in memory or not yet touched (proc(5): VmData). RLIMIT_AS would count each library's file
        too, and RLIMIT_RSS has had no effect since Linux 2.4.30 (getrlimit(2)).

PyTorch answers a refusal with an exception, so that a notebook goes on. A container's limit
(`docker run --memory`) would kill the process instead, because it counts pages when they are first
written: long after the allocation was granted.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import sys
from fractions import Fraction
from numbers import Integral
from pathlib import Path
from types import TracebackType

import torch

from labsupport.profiling.memory import cap_gpu_memory, format_bytes
from labsupport.profiling.timing import resolve_device

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_REMEDIES = (
    "What helps, the cheapest first: the loss in chunks (loss_chunk), activation checkpointing "
    "(checkpoint), the MLP in chunks (mlp_chunk), a shorter sequence."
)


def parse_bytes(size: str | int) -> int:
    """A number of bytes: of "16GiB" (binary), "8 GB" (decimal), "500 MiB", or of an integer.

    Raises:
        ValueError: not a number with such a unit, or not at least one byte.
        TypeError: neither text nor an integer.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 GB"), parse_bytes(4096)
    (17179869184, 1500000000, 4096)
    """
    if isinstance(size, bool) or not isinstance(size, str | Integral):
        raise TypeError(f'a size is an integer (bytes) or text such as "16GiB", not {size!r}.')
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{size!r} is not a size: a number with B, kB, MB, GB, TB (powers of 1000) or KiB, "
            'MiB, GiB, TiB (powers of 1024), such as "16GiB".'
        )
    count = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if count < 1:
        raise ValueError(f"a size must be at least one byte, not {size!r}.")
    return count


class memory_limit:  # lower case: it reads as a statement, `with memory_limit("16GiB"): ...`
    """Let this process use at most `limit` bytes of a device, inside the `with` block.

    Args:
        limit: bytes, as `parse_bytes` takes them.
        device: by default the current GPU if there is one, else the CPU.

    On a GPU the limit counts what PyTorch's allocator reserves. CUDA's context and libraries, some
    hundred MiB, come on top; so do other programs. `outside_bytes` says how much that was at the
    start of the block.

    On a CPU (Linux) it counts the whole process: what Python, its libraries and its threads'
    stacks had before counts too, and nothing comes on top but the libraries' files. Limits may be
    nested: the smallest holds.

    Inside the block an allocation that does not fit raises an error, which leaves the block as
    `torch.OutOfMemoryError`, on both devices, with the limit, what was asked for, and what helps.
    A process that has used up the last bytes with small Python objects, and not with tensors, is
    slow before it fails: the limit is meant for tensors.

    Raises:
        RuntimeError: this system cannot limit a process (macOS, Windows), or does not.
        ValueError: the process uses more already; the GPU has less.

    >>> with memory_limit("4GiB", "cpu"):  # doctest: +SKIP
    ...     torch.zeros(2**30)
    Traceback (most recent call last):
    OutOfMemoryError: ...
    """

    def __init__(self, limit: str | int, device: torch.device | str | None = None) -> None:
        self.bytes = parse_bytes(limit)
        self.device = resolve_device(device)
        self.outside_bytes = 0
        self._restore = contextlib.ExitStack()
        if self.device.type not in ("cpu", "cuda"):
            raise RuntimeError(
                f"memory_limit limits a CPU's or a CUDA GPU's memory, not that of {self.device}."
            )

    def __enter__(self) -> memory_limit:
        if self.device.type == "cuda":
            self._restore.enter_context(cap_gpu_memory(self.bytes / 2**30, self.device))
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            self.outside_bytes = max(total - free - reserved, 0)
        else:
            before = _limit_process(self.bytes)
            self._restore.callback(_set_soft_limit, before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # First of all: the words below need memory too.
        self._restore.close()
        if error is not None and self._is_ours(error):
            raise torch.OutOfMemoryError(self._explain(error)) from error

    def _is_ours(self, error: BaseException) -> bool:
        """Whether this device had no memory left, and nobody has explained it yet."""
        if self.device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
            return False
        return is_out_of_memory(error) and _REMEDIES not in str(error)

    def _explain(self, error: BaseException) -> str:
        # "you tried to allocate 4096 bytes", "Tried to allocate 2.00 GiB", NumPy's "Unable to ..."
        asked = re.search(r"to allocate ([\d.]+) (bytes|[KMG]?i?B)\b", str(error))
        request = "an allocation"
        if asked is not None:
            size = format_bytes(int(asked[1])) if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
            request = f"another {size}"
        counted = (
            f"for PyTorch's allocator on {self.device}"
            if self.device.type == "cuda"
            else "for the whole process"
        )
        return (
            f"out of memory: {request} does not fit into the limit of "
            f"{format_bytes(self.bytes)} {counted}. {_REMEDIES}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the process, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator raises a RuntimeError like any other: only its words tell. For a few bytes
    # it is C++ that fails.
    words = ("DefaultCPUAllocator", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _limit_process(limit: int) -> int:
    """Let the kernel give this process at most `limit` bytes; returns the limit before."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError(
            "memory_limit can limit a CPU process on Linux only; this system has no limit that "
            "makes an allocation fail. Run it in a Linux container or virtual machine."
        )
    import resource  # not on Windows

    _start_threads()
    used = _private_bytes()
    if limit <= used:
        raise ValueError(
            f"the process takes {format_bytes(used)} already, Python and its libraries included: "
            f"a limit of {format_bytes(limit)} leaves it nothing."
        )
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = [limit, *(old for old in (before, hard) if old != resource.RLIM_INFINITY)]
    _set_soft_limit(min(allowed))
    # Some systems that are nearly Linux accept the limit and do nothing. Nothing is written here.
    try:
        mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return before
    _set_soft_limit(before)
    raise RuntimeError(
        "the kernel accepts a limit on this process's memory (RLIMIT_DATA) and does not keep it. "
        "It needs Linux 4.7 or later, without the boot option ignore_rlimit_data."
    )


def _set_soft_limit(soft: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _private_bytes() -> int:
    """What RLIMIT_DATA counts, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024


def _start_threads() -> None:
    """Start the threads that PyTorch computes with, while there is memory for their stacks.

    OpenMP ends the process when it cannot start a thread.
    """
    with torch.enable_grad():
        x = torch.ones(512, 512, requires_grad=True)
        (x @ x).exp().sum().backward()
