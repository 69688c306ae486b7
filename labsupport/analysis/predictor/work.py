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

from labsupport.analysis.predictor.device import Device
from labsupport.attention.masks import AttentionMask
from labsupport.profiling.grids import ITEMSIZE, Case

# Of the special-function units of a multiprocessor: 16 a clock, 3.9 * 10^12 a second on an H100
# (FlashAttention-3 paper, section 3.1). 1.7 GHz stands for the clock of all GPUs.
EXPONENTIALS_PER_SECOND = 16 * 1.7e9

FUSED = ("launch", "matmul", "exp", "edge", "memory")
STORED = ("launch", "matmul", "scores", "spill", "mask")
# Features of a backend, and the side of a fused one's tiles: 128 is what the libraries' kernels for
# Ampere and newer come close to at head_dim 64 and 128; the memory-efficient kernel takes 64.
PLANS: dict[str, tuple[tuple[str, ...], int]] = {
    "fa4": (FUSED, 128),
    "sdpa_cudnn": (FUSED, 128),
    "fa2": (FUSED, 128),
    "sdpa_flash": (FUSED, 128),
    "sdpa_efficient": (FUSED, 64),
    "xformers": (FUSED, 64),
    "flex": (FUSED, 128),
    "flash_gluon": (FUSED, 128),
    "flash_triton": (FUSED, 128),
    "flash_torch": (("launch", "tiles", "matmul", "scores", "mask"), 0),
    "sdpa_math": (STORED, 0),
    "standard": (STORED, 0),
}


def tile_sides(case: Case, device_kind: str) -> tuple[int, int]:
    """(block_q, block_k) of a fused backend; (0, 0) for one that stores the scores."""
    if case.backend == "flash_torch":
        return _flash_torch_sides(case.batch * case.heads, device_kind)
    if case.backend == "sdpa_flash" and device_kind == "cpu":
        # PyTorch's CPU kernel: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
        long = 256 if case.seqlen >= 768 else 64 if case.seqlen >= 192 else 32
        return min(long, case.seqlen), min(512, case.kv_seqlen)
    return PLANS[case.backend][1], PLANS[case.backend][1]


def features(case: Case, device: Device) -> dict[str, float]:
    """The features of a case on a device, by name: those of its backend's plan."""
    counts = _count(case, device.kind, device.units)
    float32 = case.backend == "flash_torch" and case.dtype != "float64"
    rate = (
        device.matmul_tflops["float32" if float32 else case.dtype] * 1e9
    )  # FLOPs in a millisecond
    copied = device.copy_gb_s * 1e6  # bytes per ms
    size = ITEMSIZE[case.dtype]
    scores = counts.score_passes * (4 if float32 else size) / copied
    # The part of S and P, over all heads, that the last cache does not hold.
    matrix = case.batch * case.heads * case.seqlen * case.kv_seqlen * size
    beyond_cache = max(0.0, 1 - device.cache_mib * 2**20 / (2 * matrix))
    every = {
        "launch": 1.0,
        "tiles": counts.tiles,
        "matmul": 2 * case.head_dim * counts.products / rate,
        "exp": counts.exponentials / (EXPONENTIALS_PER_SECOND * device.units) * 1e3,
        "memory": fused_bytes(case) / copied,
        "scores": scores,
        "spill": scores * beyond_cache,
        "mask": counts.mask_passes * (4 if float32 else size) / copied,
        "edge": 2 * case.head_dim * counts.edge_products / rate,
    }
    return {name: every[name] for name in PLANS[case.backend][0]}


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
    return float(forward + (4 * queries + 4 * keys) * size + 2 * 4 * queries + 4 * rows)


@dataclass(frozen=True)
class _Counts:
    """Counts that the features are made of: scores computed, moved and hidden, over all heads."""

    products: float
    tiles: float = 0.0
    exponentials: float = 0.0
    score_passes: float = 0.0
    mask_passes: float = 0.0
    edge_products: float = 0.0


@functools.lru_cache(maxsize=4096)
def _count(case: Case, device_kind: str, units: int) -> _Counts:
    heads, both = case.batch * case.heads, case.direction == "forward+backward"
    block_q, block_k = tile_sides(case, device_kind)
    # Where scores are stored: S written, scaled, softmax, P read are 6 passes; the backward's dP,
    # dS, and both once more for the products 8. Hiding scores reads and writes them.
    passes, mask_passes = (14, 4) if both else (6, 2)
    if not block_q:
        area = float(heads * case.seqlen * case.kv_seqlen)
        return _Counts(
            area * (6 if both else 2),
            exponentials=area,
            score_passes=area * passes,
            mask_passes=area * mask_passes * case.causal,
        )
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
            float(area * (7 if both else 2)),
            tiles=float(sum(by_query) + both * sum(by_key)),
            score_passes=float(area * passes),
            mask_passes=float(hidden * mask_passes),
        )
    forward = makespan(tuple(by_query), heads, units) * units * block_q * block_k
    backward = makespan(tuple(by_key), heads, units) * units * block_q * block_k if both else 0.0
    return _Counts(
        2 * forward + 5 * backward,
        exponentials=forward + backward,
        edge_products=float(hidden * (7 if both else 2)),
    )


@functools.lru_cache(maxsize=4096)
def makespan(costs: tuple[int, ...], copies: int, units: int) -> float:
    """Time until `copies` times these blocks are done, if free units take the longest first.

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


def _flash_torch_sides(heads: int, device_kind: str) -> tuple[int, int]:
    import torch

    from labsupport.attention.flash_torch import _block_sizes

    # A tensor without memory is asked: only its leading dimensions and its device count.
    like = torch.empty(heads, 1, 1, device="meta" if device_kind == "cuda" else "cpu")
    return _block_sizes(like, like, None, None)
