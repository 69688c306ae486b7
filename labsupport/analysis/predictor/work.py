"""What a case makes a device do, counted: the features that the predictor weighs.

Each feature is a time in milliseconds: what that part of the work would take at the device's
ceiling. A calibrated weight says how many times as long the implementation needs.

    launch   one call, whatever its size                                (in calls, not a time)
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
block of queries (in the backward: of keys) is one piece of work for one multiprocessor, and the
pass lasts until the last one has finished (`makespan`): 133 equal pieces on 132 multiprocessors
take twice as long as 132.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labsupport.attention.masks import Band
from labsupport.profiling.cases import Case

if TYPE_CHECKING:
    from labsupport.analysis.predictor.device import Device

FEATURES = ("launch", "tiles", "matmul", "exp", "memory", "scores", "spill", "mask", "edge")
# Of the special-function units of a multiprocessor: 16 a clock, 3.9 * 10^12 a second on an H100
# (FlashAttention-3 paper, section 3.1). 1.7 GHz stands for the clock of all GPUs.
EXPONENTIALS_PER_SECOND = 16 * 1.7e9
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Plan:
    """How a backend computes: which features it has, and the tiles of a fused one.

    features: those of FEATURES that it is charged for.
    block_q, block_k: tile sides; 0 where a function below knows better, or no tiles are cut.
    """

    features: tuple[str, ...]
    block_q: int = 0
    block_k: int = 0


FUSED = ("launch", "matmul", "exp", "edge", "memory")
STORED = ("launch", "matmul", "scores", "spill", "mask")
# Tiles of fused kernels: 128 x 128 is what the libraries' kernels for Ampere and newer come close
# to at head_dim 64 and 128; the memory-efficient kernel takes 64 x 64.
PLANS = {
    "fa4": Plan(FUSED, 128, 128),
    "sdpa_cudnn": Plan(FUSED, 128, 128),
    "fa2": Plan(FUSED, 128, 128),
    "sdpa_flash": Plan(FUSED, 128, 128),
    "sdpa_efficient": Plan(FUSED, 64, 64),
    "xformers": Plan(FUSED, 64, 64),
    "flex": Plan(FUSED, 128, 128),
    "flash_triton": Plan(FUSED, 128, 128),
    "flash_torch": Plan(("launch", "tiles", "matmul", "scores", "mask")),
    "sdpa_math": Plan(STORED),
    "standard": Plan(STORED),
}


def tile_sides(case: Case, device_kind: str) -> tuple[int, int]:
    """(block_q, block_k) of a fused backend; (0, 0) for one that stores the scores."""
    if case.backend == "flash_torch":
        return _flash_torch_sides(case.batch * case.heads, device_kind)
    if case.backend == "sdpa_flash" and device_kind == "cpu":
        # PyTorch's CPU kernel: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
        long = 256 if case.seqlen >= 768 else 64 if case.seqlen >= 192 else 32
        return min(long, case.seqlen), min(512, case.kv_seqlen)
    plan = PLANS[case.backend]
    return plan.block_q, plan.block_k


def features(case: Case, device: Device) -> dict[str, float]:
    """The features of a case on a device, by name: those of its backend's plan."""
    found = _count(case, device.kind, device.units)
    float32 = case.backend == "flash_torch" and case.dtype != "float64"
    rate = device.matmul_rate("float32" if float32 else case.dtype)
    itemsize = 4 if float32 else ITEMSIZE[case.dtype]
    copied = device.copy_gb_s * 1e6  # bytes in a millisecond
    every = {
        "launch": 1.0,
        "tiles": found["tiles"],
        "matmul": 2 * case.head_dim * found["products"] / (rate * 1e9),
        "exp": found["exponentials"] / (EXPONENTIALS_PER_SECOND * device.units) * 1e3,
        "memory": fused_bytes(case) / copied,
        "scores": found["score_passes"] * itemsize / copied,
        "spill": found["score_passes"] * itemsize / copied * _beyond_cache(case, device),
        "mask": found["mask_passes"] * itemsize / copied,
        "edge": 2 * case.head_dim * found["edge_products"] / (rate * 1e9),
    }
    return {name: every[name] for name in PLANS[case.backend].features}


def _beyond_cache(case: Case, device: Device) -> float:
    """The part of S and P, over all heads, that the last cache does not hold, from 0 to 1."""
    matrix = case.batch * case.heads * case.seqlen * case.kv_seqlen * ITEMSIZE[case.dtype]
    return max(0.0, 1 - device.cache_mib * 2**20 / (2 * matrix))


def fused_bytes(case: Case) -> float:
    """Bytes that a fused implementation reads and writes: inputs, results, and a sum of dQ.

    Forward: q, k, v read, out written. The backward reads them all again with dout and lse, writes
    dq, dk, dv, and sums dq in float32 (written and read once).
    """
    size = ITEMSIZE[case.dtype]
    queries = case.batch * case.seqlen * case.heads * case.head_dim
    keys = case.batch * case.kv_seqlen * case.kv_heads * case.head_dim
    rows = 4 * case.batch * case.heads * case.seqlen
    forward = (2 * queries + 2 * keys) * size
    if case.direction == "forward":
        return float(forward)
    backward = (4 * queries + 4 * keys) * size + 2 * 4 * queries + 4 * rows
    return float(forward + backward)


@functools.lru_cache(maxsize=4096)
def _count(case: Case, device_kind: str, units: int) -> dict[str, float]:
    """Scores computed and moved, over all heads: the counts behind the features."""
    heads = case.batch * case.heads
    both = case.direction == "forward+backward"
    block_q, block_k = tile_sides(case, device_kind)
    if not block_q:
        area = float(heads * case.seqlen * case.kv_seqlen)
        # Forward: S written, scaled, softmax, P read: 6 passes; the backward's dP, dS, and both
        # once more for the products: 8. Hiding scores reads and writes them.
        return {
            "tiles": 0.0,
            "products": area * (6 if both else 2),
            "exponentials": area,
            "score_passes": area * (14 if both else 6),
            "mask_passes": area * (4 if both else 2) * case.causal,
            "edge_products": 0.0,
        }
    band = Band.of(case.seqlen, case.kv_seqlen, causal=case.causal)
    by_query = [-(-_length(seen) // block_k) for seen in _rows(band, block_q)]
    by_key = [-(-_length(seen) // block_q) for seen in _columns(band, block_k)]
    tile = block_q * block_k
    hidden = _hidden_area(band, block_q, block_k) * heads
    if case.backend == "flash_torch":
        # One tile over all heads at a time, with every core or multiprocessor at work on it.
        visited = sum(by_query) + both * sum(by_key)
        area = sum(_areas(band, block_q, block_k)) * heads
        return {
            "tiles": float(visited),
            "products": float(area * (7 if both else 2)),
            "exponentials": 0.0,
            "score_passes": float(area * (14 if both else 6)),
            "mask_passes": float(hidden * (4 if both else 2)),
            "edge_products": 0.0,
        }
    forward = makespan(tuple(by_query), heads, units) * units * tile
    backward = makespan(tuple(by_key), heads, units) * units * tile if both else 0.0
    return {
        "tiles": 0.0,
        "products": 2 * forward + 5 * backward,
        "exponentials": forward + backward,
        "score_passes": 0.0,
        "mask_passes": 0.0,
        "edge_products": float(hidden * (7 if both else 2)),
    }


@functools.lru_cache(maxsize=4096)
def makespan(costs: tuple[int, ...], copies: int, units: int) -> float:
    """When the last of `copies` times these pieces is done, if free units take the longest first.

    Args:
        costs: of the pieces of one head, in tiles.
        copies: batch times heads.
        units: pieces computed at a time.

    Returns:
        tiles after which all are done. Beyond 64 pieces a unit, where the last wave is below 2%
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


def _rows(band: Band, block_q: int) -> list[tuple[int, int]]:
    return [
        band.keys_seen(start, min(start + block_q, band.seqlen_q))
        for start in range(0, band.seqlen_q, block_q)
    ]


def _columns(band: Band, block_k: int) -> list[tuple[int, int]]:
    return [
        band.queries_seeing(start, min(start + block_k, band.seqlen_k))
        for start in range(0, band.seqlen_k, block_k)
    ]


def _length(seen: tuple[int, int]) -> int:
    return max(0, seen[1] - seen[0])


def _areas(band: Band, block_q: int, block_k: int) -> list[int]:
    """Scores computed by each block of queries, cut to the sequences' lengths."""
    return [
        min(block_q, band.seqlen_q - i * block_q) * _length(seen)
        for i, seen in enumerate(_rows(band, block_q))
    ]


def _hidden_area(band: Band, block_q: int, block_k: int) -> int:
    """Scores in tiles of which a part is hidden: those that a causal mask is made for."""
    area = 0
    for i, (first, last) in enumerate(_rows(band, block_q)):
        top, bottom = i * block_q, min((i + 1) * block_q, band.seqlen_q)
        for start in range(first, last, block_k):
            stop = min(start + block_k, last)
            if band.right is not None and stop - 1 > top + band.offset + band.right:
                area += (bottom - top) * (stop - start)
    return area


def _flash_torch_sides(heads: int, device_kind: str) -> tuple[int, int]:
    import torch

    from labsupport.attention.flash_torch import _block_sizes

    # A tensor without memory is asked: only its leading dimensions and its device count.
    where = torch.empty(heads, 1, 1, device="meta" if device_kind == "cuda" else "cpu")
    return _block_sizes(where, where, None, None)
