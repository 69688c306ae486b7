"""Block sizes, warps, pipeline stages and splits: small tables, and why; what the TMA unit takes.

    BLOCK_Q, BLOCK_K   rows and columns of a tile. Larger tiles read K and V less often, and need
                       more registers: the output block alone is BLOCK_Q x D float32 numbers.
    warps              of 32 threads, which share a program's registers
    stages             tiles on their way from memory at the same time, in shared memory

The tables for half precision with head_dim 64 and 128 come from measurements on an NVIDIA H200
(`python -m benchmarks tune`, `data/runs/tune-forward-h200`, `tune-backward-h200`); the plain
kernels' also fit other GPUs by `python -m benchmarks resources`. head_dim 256 and float32 were
chosen by `resources` alone, and have not been timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from labsupport.attention.kernels.mode import interpreted as is_interpreted


@dataclass(frozen=True)
class KernelConfig:
    """The constants that a kernel is compiled for."""

    block_q: int
    block_k: int
    warps: int
    stages: int


# Interpreted, a program of any size costs some milliseconds of Python.
INTERPRETED = KernelConfig(64, 64, 4, 1)

# kernel -> padded head_dim, for float16 and bfloat16. "keys" is `_bwd_dkdv`, "queries" `_bwd_dq`.
HALF: dict[str, dict[int, KernelConfig]] = {
    "forward": {
        64: KernelConfig(128, 64, 8, 3),
        128: KernelConfig(128, 64, 8, 3),
        256: KernelConfig(64, 32, 8, 2),
    },
    "keys": {
        64: KernelConfig(32, 64, 4, 3),
        128: KernelConfig(32, 64, 4, 3),
        256: KernelConfig(32, 32, 8, 1),
    },
    "queries": {
        64: KernelConfig(64, 32, 4, 3),
        128: KernelConfig(64, 32, 4, 3),
        256: KernelConfig(64, 16, 8, 2),
    },
}
# The same for the kernels for Hopper.
HOPPER: dict[str, dict[int, KernelConfig]] = {
    "forward": {64: KernelConfig(64, 64, 4, 3), 128: KernelConfig(64, 64, 4, 3)},
    "keys": {64: KernelConfig(64, 64, 4, 3), 128: KernelConfig(64, 64, 4, 2)},
    "queries": {64: KernelConfig(128, 64, 8, 3), 128: KernelConfig(128, 64, 8, 3)},
    "fp8": {64: KernelConfig(64, 128, 4, 3), 128: KernelConfig(64, 128, 4, 3)},
}
# Their forward for head_dim 64 from this many keys on: wide tiles pay if there are several.
MANY_KEYS, HOPPER_MANY_KEYS = 1024, KernelConfig(64, 128, 4, 2)
# float32 without TF32 does not use the tensor cores, and each number takes twice the room.
SINGLE: dict[str, dict[int, KernelConfig]] = {
    "forward": {
        64: KernelConfig(64, 32, 8, 1),
        128: KernelConfig(32, 32, 8, 1),
        256: KernelConfig(16, 16, 4, 1),
    },
    "keys": {
        64: KernelConfig(32, 32, 8, 1),
        128: KernelConfig(32, 16, 8, 1),
        256: KernelConfig(16, 16, 8, 1),
    },
    "queries": {
        64: KernelConfig(32, 32, 8, 1),
        128: KernelConfig(32, 32, 8, 2),
        256: KernelConfig(16, 16, 8, 1),
    },
}

_overridden: dict[str, KernelConfig] = {}


def tiling(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    interpreted: bool | None = None,
    *,
    hopper: bool = False,
    keys: int = 0,
) -> KernelConfig:
    """Return the configuration of "forward", "keys" or "queries" for one head_dim and dtype.

    `interpreted` is as this process is, unless given; `keys` is 0 where it is not known.
    """
    if kernel in _overridden:
        return _overridden[kernel]
    if is_interpreted() if interpreted is None else interpreted:
        return INTERPRETED
    if hopper and kernel == "forward" and head_dim == 64 and keys >= MANY_KEYS:
        return HOPPER_MANY_KEYS
    table = HOPPER if hopper else SINGLE if dtype == torch.float32 else HALF
    return table[kernel][max(64, padded(head_dim))]


def decode_tiling(rows: int, head_dim: int, dtype: torch.dtype) -> KernelConfig:
    """Return the configuration of `decode.py` for `rows` = seqlen_q x group.

    Keys: as many as make K and V 32 KiB; with one tile in use and the next on its way, 64 KiB.
    Rows: 16 at least, for the tensor cores; at most what the registers can hold beside the keys.
    """
    if "decode" in _overridden:
        return _overridden["decode"]
    width = max(64, padded(head_dim))
    block_k = 2**14 // dtype.itemsize // width
    if dtype == torch.float32:
        return KernelConfig(16, block_k, warps=8, stages=3)
    most = min(64, 2**13 // width)
    return KernelConfig(min(most, padded(rows)), block_k, warps=4, stages=3)


# Programs of `decode_tiling` that fit on one multiprocessor of Hopper.
RESIDENT = 2
MIN_TILES = 2


def choose_splits(tiles: int, programs: int, multiprocessors: int) -> int:
    """Return the number of parts into which `decode` cuts the keys.

    As many as fill one whole wave: RESIDENT programs on every multiprocessor, and not one more,
    because a second wave would take as long as the first. Each part takes at least MIN_TILES tiles,
    because its partial result is written and read again. A part may be empty: for 8 programs of 128
    tiles, 33 parts take 11.9 us on an H100, and `num_splits=32`, which leaves none empty, 14.3.

    Args:
        tiles: tiles of keys that one program would walk through alone.
        programs: programs without splits: blocks of rows x kv_heads x batch.

    >>> choose_splits(tiles=128, programs=8, multiprocessors=132)
    33
    """
    return max(1, min(RESIDENT * multiprocessors // max(1, programs), tiles // MIN_TILES))


@contextmanager
def override(**tilings: KernelConfig) -> Iterator[None]:
    """Use other configurations (forward, keys, queries, decode) while this is active.

    >>> with override(forward=KernelConfig(64, 64, 4, 2)):
    ...     tiling("forward", 128, torch.bfloat16, interpreted=False).warps
    4
    """
    global _overridden
    before, _overridden = _overridden, _overridden | tilings
    try:
        yield
    finally:
        _overridden = before


def padded(head_dim: int) -> int:
    """Return the next power of two from 16 on, as `tl.arange` and `tl.dot` need it."""
    return max(16, 1 << (head_dim - 1).bit_length())


def can_be_described(x: Tensor) -> bool:
    """Return whether the TMA unit takes x: contiguous rows, and 16-byte steps between them."""
    return x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride(), x.itemsize)


@lru_cache(4096)
def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    steps = [step for size, step in zip(shape[:-1], strides, strict=False) if size > 1]
    aligned = all(step > 0 and step * itemsize % 16 == 0 for step in steps)
    return aligned and strides[-1] == 1 and 0 not in shape
