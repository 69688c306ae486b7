"""Work of a case on a device, counted: the features that the predictor weighs.

Each feature is a time in milliseconds: what that part of the work would take at the device's
ceiling. A calibrated weight says how many times as long the implementation needs.

    launch   one call of any size                                       (in calls, not a time)
    tiles    small kernels started one after the other by a Python loop (in tiles, not a time)
    matmul   products of the tiles that are computed, at the rate of a large matrix product
    exp      one exponential for each computed score, at 16 a clock and multiprocessor (a GPU)
    memory   tensors that must be read and written, at the rate of a copy
    scores   the score matrices' traffic of an implementation that stores them, at the same rate
    spill    the part of that traffic that the last cache cannot hold
    mask     the part of that traffic that hides scores
    edge     products of a fused kernel's tiles on the causal diagonal, once more: what a causal
             mask costs in proportion to its edge (hiding, and waiting for the longest rows)

A fused kernel cuts the scores into tiles; a causal mask lets it skip those above the diagonal. A
block of queries (in the backward: of keys) is the work of one multiprocessor, and the pass lasts
until the last one has finished (`makespan`): 133 equal blocks on 132 multiprocessors take twice as
long as 132.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import torch

from labsupport.attention.flash_torch import _block_sizes
from labsupport.attention.masks import AttentionMask
from labsupport.profiling.grids import ITEMSIZE, Case

# Of the special-function units of a multiprocessor: 16 a clock, 3.9 * 10^12 a second on an H100
# (FlashAttention-3 paper, section 3.1). 1.7 GHz stands for the clock of all GPUs.
EXPONENTIALS_PER_SECOND = 16 * 1.7e9

LOOP = ("launch", "tiles", "matmul", "scores", "mask")
STORED = ("launch", "matmul", "scores", "spill", "mask")
FUSED = ("launch", "matmul", "exp", "edge", "memory")
FEATURES = {"flash_torch": LOOP, "sdpa_math": STORED, "standard": STORED}  # others: FUSED
# Side of a fused kernel's tiles: 128 is what the libraries' kernels for Ampere and newer come close
# to at head_dim 64 and 128; the memory-efficient kernel takes 64.
SIDES = {"sdpa_efficient": 64, "xformers": 64}


@dataclass(frozen=True)
class Device:
    """Ceilings and size of a device.

    name: as the driver or the operating system reports it, or the row's name in hardware.csv.
    kind: "cuda" or "cpu".
    units: multiprocessors, or threads that compute.
    copy_gb_s: bytes read plus written a second, in 10^9.
    matmul_tflops: by dtype name, in 10^12 FLOPs a second.
    memory_gib: what it holds.
    cache_mib: the last cache that all units share.
    compute_capability: of a GPU, as (major, minor).
    specified: True where the rates come from a specification and not from a measurement.
    """

    name: str
    kind: str
    units: int
    copy_gb_s: float
    matmul_tflops: dict[str, float]
    memory_gib: float
    cache_mib: float = 0.0
    compute_capability: tuple[int, ...] = (0, 0)
    specified: bool = False


def features(case: Case, device: Device) -> dict[str, float]:
    """Return the features of a case on a device, by name: those of its backend's kind."""
    counts = _count(case, device.kind, device.units)
    wide = case.backend == "flash_torch" and case.dtype != "float64"  # computes in float32
    dtype = "float32" if wide else case.dtype
    flops = device.matmul_tflops[dtype] * 1e9 / (2 * case.head_dim)  # products in a millisecond
    copied = device.copy_gb_s * 1e6  # bytes in a millisecond
    scores = counts.score_passes * ITEMSIZE[dtype] / copied
    # The part of S and P, over all heads, that the last cache does not hold.
    matrix = case.batch * case.heads * case.seqlen * case.kv_seqlen * ITEMSIZE[case.dtype]
    beyond_cache = max(0.0, 1 - device.cache_mib * 2**20 / (2 * matrix))
    every = {
        "launch": 1.0,
        "tiles": counts.tiles,
        "matmul": counts.products / flops,
        "exp": counts.exponentials / (EXPONENTIALS_PER_SECOND * device.units) * 1e3,
        "memory": fused_bytes(case) / copied,
        "scores": scores,
        "spill": scores * beyond_cache,
        "mask": counts.mask_passes * ITEMSIZE[dtype] / copied,
        "edge": counts.edge_products / flops,
    }
    return {name: every[name] for name in FEATURES.get(case.backend, FUSED)}


def tensor_bytes(case: Case) -> tuple[int, int]:
    """Return the bytes of q (as many as of the output), and of k and v together."""
    row = ITEMSIZE[case.dtype] * case.batch * case.head_dim
    return case.seqlen * case.heads * row, 2 * case.kv_seqlen * case.kv_heads * row


def fused_bytes(case: Case) -> int:
    """Return the bytes that a fused implementation reads and writes.

    Forward: q, k, v read, out written. The backward reads them all again with dout and lse, writes
    dq, dk, dv, and sums dq in float32 (written and read once).
    """
    of_q, of_kv = tensor_bytes(case)
    if case.direction == "forward":
        return 2 * of_q + of_kv
    rows = 4 * case.batch * case.heads * case.seqlen
    return 6 * of_q + 3 * of_kv + 2 * of_q * 4 // ITEMSIZE[case.dtype] + 4 * rows


@dataclass(frozen=True)
class _Counts:
    """Counts that the features are made of: scores computed, moved and hidden, over all heads."""

    products: float
    tiles: float = 0.0
    exponentials: float = 0.0
    score_passes: float = 0.0
    mask_passes: float = 0.0
    edge_products: float = 0.0


def _tile_sides(case: Case, device_kind: str) -> tuple[int, int]:
    """Return (block_q, block_k)."""
    if case.backend == "flash_torch":
        # A tensor without memory is asked: only its leading dimensions and its device count.
        device = "meta" if device_kind == "cuda" else "cpu"
        like = torch.empty(case.batch * case.heads, 1, 1, device=device)
        return _block_sizes(like, like, None, None)
    if case.backend == "sdpa_flash" and device_kind == "cpu":
        # PyTorch's CPU kernel: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
        long = 256 if case.seqlen >= 768 else 64 if case.seqlen >= 192 else 32
        return min(long, case.seqlen), min(512, case.kv_seqlen)
    return (SIDES.get(case.backend, 128),) * 2


@functools.lru_cache(maxsize=4096)
def _count(case: Case, device_kind: str, units: int) -> _Counts:
    heads, both = case.batch * case.heads, case.direction == "forward+backward"
    # Where scores are stored: S written, scaled, softmax, P read are 6 passes; the backward's dP,
    # dS, and both once more for the products 8. Hiding scores reads and writes them.
    passes, mask_passes = (14, 4) if both else (6, 2)
    if FEATURES.get(case.backend) == STORED:
        area = heads * case.seqlen * case.kv_seqlen
        return _Counts(
            area * (6 if both else 2),
            score_passes=area * passes,
            mask_passes=area * mask_passes * case.causal,
        )
    block_q, block_k = _tile_sides(case, device_kind)
    band = AttentionMask.of(case.seqlen, case.kv_seqlen, causal=case.causal)
    by_query, area, hidden = [], 0, 0
    for top in range(0, case.seqlen, block_q):
        rows = min(block_q, case.seqlen - top)
        _, last = band.keys_seen(top, top + rows)
        by_query.append(-(-last // block_k))
        area += heads * rows * last
        if case.causal:  # from the tile on that holds the first key hidden from the first query
            edge = max(0, top + band.offset + 1) // block_k * block_k
            hidden += heads * rows * max(0, last - edge)
    seeing = (
        band.queries_seeing(start, min(start + block_k, case.kv_seqlen))
        for start in range(0, case.kv_seqlen, block_k)
    )
    by_key = [-(-max(0, stop - start) // block_q) for start, stop in seeing]
    if case.backend == "flash_torch":
        # One tile over all heads at a time, with every core or multiprocessor at work on it.
        return _Counts(
            area * (7 if both else 2),
            tiles=sum(by_query) + both * sum(by_key),
            score_passes=area * passes,
            mask_passes=hidden * mask_passes,
        )
    forward = makespan(tuple(by_query), heads, units) * units * block_q * block_k
    backward = makespan(tuple(by_key), heads, units) * units * block_q * block_k if both else 0.0
    return _Counts(
        2 * forward + 5 * backward,
        exponentials=forward + backward,
        edge_products=hidden * (7 if both else 2),
    )


def makespan(costs: tuple[int, ...], copies: int, units: int) -> float:
    """Return the time until `copies` times these blocks are done, the longest first.

    Args:
        costs: of the blocks of one head, in tiles.
        copies: batch times heads.
        units: blocks computed at a time.

    Returns:
        tiles after which all are done. Beyond 64 blocks a unit, where the last wave is below 2%
        of the time, their average.

    >>> makespan((1,), 133, 132)
    2.0
    """
    total = sum(costs) * copies
    if units == 1 or len(costs) * copies > 64 * units:
        return max(total / units, float(max(costs, default=0)))
    free_at = [0] * units
    for cost in sorted(costs, reverse=True):
        for _ in range(copies):
            heapq.heapreplace(free_at, free_at[0] + cost)
    return float(max(free_at))
