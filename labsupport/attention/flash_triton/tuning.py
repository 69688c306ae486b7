"""Block sizes, warps and pipeline stages: a small table, and why.

    BLOCK_Q, BLOCK_K   rows and columns of a tile. Larger tiles read K and V less often, and need
                       more registers: the output block alone is BLOCK_Q x D float32 numbers.
    warps              of 32 threads, which share a program's registers: 65,536 a multiprocessor,
                       255 a thread at most. Where that does not suffice, numbers spill to memory.
    stages             how many tiles are on their way from memory at once, in shared memory.

The table holds, for each kernel and padded head_dim, large tiles that the compiler places without
spilling on compute capability 9.0 (but for `keys` with head_dim 128 and grouped heads), with little
of it on 8.0, and in the 99 KiB of shared memory that a program can have on 8.6 and 8.9: found with
`resources.py`, which needs no GPU. They have not been timed on a GPU yet.
"""

from __future__ import annotations

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
        64: Tiling(128, 128, 8, 3),
        128: Tiling(128, 64, 8, 3),
        256: Tiling(64, 32, 8, 2),
    },
    "keys": {
        64: Tiling(32, 128, 8, 2),
        128: Tiling(32, 64, 8, 2),
        256: Tiling(32, 32, 8, 1),
    },
    "queries": {
        64: Tiling(128, 64, 8, 3),
        128: Tiling(128, 32, 8, 2),
        256: Tiling(64, 16, 8, 2),
    },
}

# float32 without TF32 runs outside of the tensor cores, and each number takes twice the room.
SINGLE: dict[str, dict[int, Tiling]] = {
    "forward": {64: Tiling(64, 32, 8, 1), 128: Tiling(32, 32, 8, 1), 256: Tiling(16, 16, 4, 1)},
    "keys": {64: Tiling(32, 32, 8, 1), 128: Tiling(32, 16, 8, 1), 256: Tiling(16, 16, 8, 1)},
    "queries": {64: Tiling(32, 32, 8, 1), 128: Tiling(32, 32, 8, 2), 256: Tiling(16, 16, 8, 1)},
}


def tiling(kernel: str, head_dim: int, dtype: torch.dtype, interpreted: bool) -> Tiling:
    """The tiling of "forward", "keys" or "queries" for one head_dim and dtype."""
    if interpreted:
        return INTERPRETED
    table = SINGLE if dtype == torch.float32 else HALF
    return table[kernel][max(64, padded(head_dim))]


def padded(head_dim: int) -> int:
    """The next power of two from 16 on: what `tl.arange` and `tl.dot` can be made of."""
    return max(16, 1 << (head_dim - 1).bit_length())
