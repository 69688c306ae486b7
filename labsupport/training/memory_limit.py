"""Enforce a limit on memory: PyTorch's allocator on a GPU, Linux's RLIMIT_DATA on a CPU."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from labsupport.profiling.memory import cap_gpu_memory
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes, parse_bytes

_REMEDIES = (
    "What helps, the cheapest first: the loss in chunks (loss_chunk), activation checkpointing "
    "(checkpoint), the MLP in chunks (mlp_chunk), a shorter sequence."
)


@contextmanager
def memory_limit(limit: str | int, device: torch.device | str | None = None) -> Iterator[None]:
    """Let this process use at most `limit` bytes of a device, inside the `with` block.

    Args:
        limit: bytes, as `parse_bytes` takes them.
        device: by default the current GPU if there is one, else the CPU.

    On a GPU the limit counts what PyTorch's allocator reserves; CUDA's context and libraries, some
    hundred MiB, and other programs come on top. On a CPU (Linux) it counts the whole process: what
    Python, its libraries and its threads' stacks had before counts too. Limits may be nested: the
    smallest holds. An allocation that does not fit leaves the block as `torch.OutOfMemoryError`, on
    both devices, with the limit and what helps: a notebook goes on.

    Raises:
        RuntimeError: this system cannot limit a process (macOS, Windows).
        ValueError: the process uses more already; the GPU has less.

    >>> with memory_limit("4GiB", "cpu"):
    ...     ones = torch.ones(1000)
    """
    count, chosen = parse_bytes(limit), resolve_device(device)
    gpu = chosen.type == "cuda"
    try:
        with cap_gpu_memory(count / 2**30, chosen) if gpu else _limited_process(count):
            yield
    except (RuntimeError, MemoryError) as error:
        # Inside of another limit the inner one has explained it already. A GPU's limit does not
        # explain what the CPU's memory was too small for.
        foreign = gpu and not isinstance(error, torch.OutOfMemoryError)
        if foreign or not is_out_of_memory(error) or _REMEDIES in str(error):
            raise
        counted = f"PyTorch's allocator on {chosen}" if gpu else "the whole process"
        raise torch.OutOfMemoryError(
            f"out of memory: an allocation does not fit into the limit of {format_bytes(count)} "
            f"for {counted}. {_REMEDIES}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the process, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator raises a RuntimeError like any other: only its words tell. For a few bytes
    # it is C++ that fails.
    words = ("DefaultCPUAllocator", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


@contextmanager
def _limited_process(limit: int) -> Iterator[None]:
    """Limit what belongs to the process alone and can be written (proc(5): VmData)."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError("memory_limit can limit a CPU process on Linux only: use a container")
    import resource  # not on Windows

    # Start PyTorch's threads while there is memory for their stacks: OpenMP ends the process when
    # it cannot start one.
    with torch.enable_grad():
        x = torch.ones(512, 512, requires_grad=True)
        (x @ x).exp().sum().backward()
    if limit <= (used := private_bytes()):
        raise ValueError(
            f"the process takes {format_bytes(used)} already, Python and its libraries included: "
            f"a limit of {format_bytes(limit)} leaves it nothing."
        )
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lowest = min([limit, *(old for old in (before, hard) if old != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        try:  # some systems accept the limit and ignore it; this writes to no memory
            mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, MemoryError):
            pass
        else:
            raise RuntimeError("this system ignores the limit on a process's memory (RLIMIT_DATA)")
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def private_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024
