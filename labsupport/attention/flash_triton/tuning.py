"""Block sizes, warps and pipeline stages: a small table, and why.

    BLOCK_Q, BLOCK_K   rows and columns of a tile. Larger tiles read K and V less often, and need
                       more registers: the output block alone is BLOCK_Q x D float32 numbers.
    warps              of 32 threads, which share a program's registers: 65,536 a multiprocessor,
                       255 a thread at most. Where that does not suffice, numbers spill to memory.
    stages             how many tiles are on their way from memory at once, in shared memory.

The tables for half precision with head_dim 64 and 128 come from measurements on an NVIDIA H200
(`python -m benchmarks tune`); those for Hopper's kernels were at most 3% slower than the
fastest (`data/runs/tune-forward-h200`, `tune-backward-h200`). Of the plain kernels' tilings those
were taken that also suit other GPUs by `resources.py`, which needs none: they spill little on
compute capability 8.0, and fit in the 99 KiB of shared memory that a program has on 8.6 and 8.9.
head_dim 256 and float32 were chosen by `resources.py` alone, and have not been timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiling:
    """What a kernel is compiled for."""

    block_q: int
    block_k: int
    warps: int
    stages: int


# Interpreted, a program costs some milliseconds of Python whatever its size.
INTERPRETED = Tiling(64, 64, 4, 1)

# kernel -> padded head_dim -> tiling, for float16 and bfloat16.
HALF: dict[str, dict[int, Tiling]] = {
    "forward": {
        64: Tiling(128, 64, 8, 3),
        128: Tiling(128, 64, 8, 3),
        256: Tiling(64, 32, 8, 2),
    },
    "keys": {
        64: Tiling(32, 64, 4, 3),
        128: Tiling(32, 64, 4, 3),
        256: Tiling(32, 32, 8, 1),
    },
    "queries": {
        64: Tiling(64, 32, 4, 3),
        128: Tiling(64, 32, 4, 3),
        256: Tiling(64, 16, 8, 2),
    },
}

# The same for the kernels for Hopper.
HOPPER: dict[str, dict[int, Tiling]] = {
    "forward": {64: Tiling(64, 64, 4, 3), 128: Tiling(64, 64, 4, 3)},
    "keys": {64: Tiling(64, 64, 4, 3), 128: Tiling(64, 64, 4, 2)},
    "queries": {64: Tiling(128, 64, 8, 3), 128: Tiling(128, 64, 8, 3)},
}
# Their forward for head_dim 64 from so many keys on: wide tiles pay once there are several of them.
MANY_KEYS = 1024
HOPPER_MANY_KEYS = Tiling(64, 128, 4, 2)

# float32 without TF32 runs outside of the tensor cores, and each number takes twice the room.
SINGLE: dict[str, dict[int, Tiling]] = {
    "forward": {64: Tiling(64, 32, 8, 1), 128: Tiling(32, 32, 8, 1), 256: Tiling(16, 16, 4, 1)},
    "keys": {64: Tiling(32, 32, 8, 1), 128: Tiling(32, 16, 8, 1), 256: Tiling(16, 16, 8, 1)},
    "queries": {64: Tiling(32, 32, 8, 1), 128: Tiling(32, 32, 8, 2), 256: Tiling(16, 16, 8, 1)},
}


def tiling(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    interpreted: bool,
    *,
    hopper: bool = False,
    keys: int = 0,
) -> Tiling:
    """The tiling of "forward", "keys" or "queries" for one head_dim and dtype.

    Args:
        hopper: for the kernels of `launch_hopper.py`.
        keys: how many there are; 0 where it is not known.
    """
    if (chosen := overridden(kernel)) is not None:
        return chosen
    if interpreted:
        return INTERPRETED
    if hopper and kernel == "forward" and head_dim == 64 and keys >= MANY_KEYS:
        return HOPPER_MANY_KEYS
    table = HOPPER if hopper else SINGLE if dtype == torch.float32 else HALF
    return table[kernel][max(64, padded(head_dim))]


_overridden: dict[str, Tiling] = {}


@contextmanager
def override(**tilings: Tiling) -> Iterator[None]:
    """Use other tilings while this is active, for whatever head_dim: to measure them.

    Args:
        tilings: by kernel: forward, keys, queries, decode.

    >>> with override(forward=Tiling(64, 64, 4, 2)):
    ...     tiling("forward", 128, torch.bfloat16, interpreted=False).warps
    4
    """
    before = dict(_overridden)
    _overridden.update(tilings)
    try:
        yield
    finally:
        _overridden.clear()
        _overridden.update(before)


def overridden(kernel: str) -> Tiling | None:
    """What `override` says of a kernel."""
    return _overridden.get(kernel)


def padded(head_dim: int) -> int:
    """The next power of two from 16 on: what `tl.arange` and `tl.dot` can be made of."""
    return max(16, 1 << (head_dim - 1).bit_length())
