"""Peak memory of a call beyond its inputs on a GPU, by formula: bytes at the worst moment.

The symbols, in bytes: `out` one tensor like q, `kv` one like k, `rows` four bytes for each query of
each head (lse and its like), `squares` one seqlen_q x seqlen_k matrix for each head.

    backend         forward                     forward + backward: out, dq, dk, dv, and
    sdpa_cudnn      out                         lse, delta, dq in float32
    fa4             out                         lse, lse in base 2, delta, dq in float32
    sdpa_flash      out, lse; where queries     lse, delta, dq in float32
                    are few, parts of both
    sdpa_efficient  out                         lse, delta, dq in float32, 16 bytes for each 64 rows
    flex            out, two rows               two rows, one more tensor like out
    flash_triton    out, lse                    lse, delta, shift
    standard        out, S, P, a copy of v      S, P, their gradients, copies
    sdpa_math       the same in float32         the same in float32

With grouped heads sdpa_flash and sdpa_cudnn write dk and dv for every query head first: 2 out more.

They were read off what `measure_peak_memory` says, to the byte where a test says so; on the H200 at
all sizes of its two recorded runs (attention-h200, memory-h200), so its errors are no test on
unseen shapes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from labsupport.analysis.predictor.work import tile_sides
from labsupport.profiling.grids import ITEMSIZE, Case


class _Sizes:
    """Bytes of the tensors of a case, by the symbols above."""

    def __init__(self, case: Case) -> None:
        queries = case.batch * case.heads * case.seqlen
        self.size = ITEMSIZE[case.dtype]
        self.width = max(4, self.size)  # of what is computed in float32 at least
        self.out = queries * case.head_dim * self.size
        self.kv = case.batch * case.kv_seqlen * case.kv_heads * case.head_dim * self.size
        self.rows = 4 * queries
        self.squares = queries * case.kv_seqlen * self.size
        self.squares32 = queries * case.kv_seqlen * self.width
        self.out32 = self.out * 4 // self.size
        self.gradients = self.out + 2 * self.kv
        self.hidden = case.seqlen * case.kv_seqlen * case.causal  # a mask, a byte each
        self.both = case.direction == "forward+backward"
        self.grouped = case.heads != case.kv_heads
        # Heads of a batch, or repeated ones, are copied before a batched product.
        self.copies = case.batch > 1 or self.grouped


def inputs_bytes(case: Case) -> int:
    """q, k, v, and for a backward the gradient of the output."""
    sizes = _Sizes(case)
    return sizes.gradients + (sizes.out if sizes.both else 0)


def peak_memory(case: Case, units: int = 1) -> int | None:
    """Bytes at the peak beyond the inputs, on a GPU; None where no formula is known.

    Args:
        units: its multiprocessors.
    """
    sizes = _Sizes(case)
    if case.backend == "standard":
        tensors = 4 * sizes.squares if sizes.both else 2 * sizes.squares
        outs = (2 if sizes.both else 1) * (2 if sizes.copies else 1)
        return tensors + outs * sizes.out + sizes.hidden
    if case.backend == "sdpa_math":
        return _math(sizes)
    if case.backend == "flash_torch":
        return _flash_torch(case, sizes)
    return _fused(case, sizes, units) if case.backend in _FUSED else None


class _Fused(NamedTuple):
    """A fused kernel on a GPU.

    forward, both: vectors of `rows`; constant: extra bytes; widened: dk and dv of grouped
    heads are written for every query head first.
    """

    forward: int
    both: int
    constant: int = 0
    widened: bool = False


_FUSED = {
    "fa4": _Fused(0, 3),
    "sdpa_cudnn": _Fused(0, 2, constant=272, widened=True),
    "sdpa_flash": _Fused(1, 2, constant=24, widened=True),
    "sdpa_efficient": _Fused(0, 2),
    "flex": _Fused(2, 2),
    "flash_gluon": _Fused(1, 3),
    "flash_triton": _Fused(1, 3),
}


def _fused(case: Case, sizes: _Sizes, units: int) -> int:
    plan = _FUSED[case.backend]
    total = sizes.out + plan.constant + (plan.both if sizes.both else plan.forward) * sizes.rows
    if sizes.both:
        # dq is summed in float32; flex copies out; the lab's Triton kernels sum nothing elsewhere.
        own = {"flex": sizes.out, "flash_triton": 0}
        total += own.get(case.backend, sizes.out32)
        total += sizes.gradients + 2 * sizes.out * (plan.widened and sizes.grouped)
        if case.backend == "sdpa_efficient":  # counters
            total += 16 * -(-case.seqlen // 64) * case.batch * case.heads
    splits = flash_splits(case, units) if case.backend == "sdpa_flash" else 1
    if splits == 1:
        return total
    parts = splits * (sizes.out32 + sizes.rows)
    return max(total, sizes.out + sizes.rows + plan.constant + parts)


def flash_splits(case: Case, units: int) -> int:
    """Number of parts into which flash-attn 2 cuts the keys, so that few queries keep a GPU busy.

    Each part has its own output and lse in float32, which are then merged. The smallest
    number of parts counts that keeps at least 85% as many programs busy as the best. Source:
    num_splits_heuristic in csrc/flash_attn/flash_api.cpp of flash-attention; its forward tiles
    are 64 queries by 256, 128 or 64 keys (head_dim up to 64, up to 128, above).

    Args:
        units: multiprocessors; two programs are taken to run on each.
    """
    keys = 256 if case.head_dim <= 64 else 128 if case.head_dim <= 128 else 64
    programs = case.batch * case.heads * -(-case.seqlen // 64)
    blocks, slots = -(-case.kv_seqlen // keys), 2 * units
    if programs >= 0.8 * slots:
        return 1
    busy = {}
    for splits in range(1, min(128, slots, blocks) + 1):
        if splits == 1 or -(-blocks // splits) != -(-blocks // (splits - 1)):
            waves = programs * splits / slots
            busy[splits] = waves / math.ceil(waves)
    return min(splits for splits, share in busy.items() if share >= 0.85 * max(busy.values()))


def _math(sizes: _Sizes) -> int:
    narrow = sizes.size < 4  # computed in float32
    if sizes.both:
        return 4 * sizes.squares32 + (7 if narrow else 4) * sizes.out
    # Scores, softmax, a byte for each score and each row that asks what is hidden.
    asked = (sizes.squares32 + sizes.rows) // 4 + 4
    asked += (8 + sizes.grouped if narrow else 1 + 2 * sizes.grouped) * sizes.out
    # Shorter than about two head_dims, the last product's copies weigh more than the question.
    last = (10 if narrow else 2) * sizes.out if sizes.copies else 0
    return 2 * sizes.squares32 + max(asked, last) + 4 * sizes.hidden


def _flash_torch(case: Case, sizes: _Sizes) -> int:
    side_q, block_k = tile_sides(case, "cuda")
    block_q, last = min(side_q, case.seqlen), case.seqlen % side_q or side_q
    narrow, vector = sizes.size < 4, case.batch * case.heads * sizes.width
    # Scratch is taken for whole tiles, even where a sequence is shorter.
    tile = vector * side_q * block_k
    queries = vector * case.head_dim * block_q
    keys = vector * case.head_dim * min(block_k, case.kv_seqlen)
    wide = vector * case.head_dim * case.seqlen
    if not sizes.both:
        # q_i, o_i and P V; v_j converted, and copied for the batched product.
        blocks = 3 * queries + (narrow + sizes.copies) * keys
        return sizes.out + tile + blocks + sizes.rows + 6 * vector * block_q
    delta = sizes.out + sizes.rows + (3 if narrow else 1) * wide
    loop = sizes.out + 3 * sizes.rows + wide + 2 * sizes.out + 2 * tile
    if not narrow:
        # dk_j, dv_j, q_i and a product; and the copy that a batched product takes.
        return max(delta, loop + 2 * keys + 2 * queries + sizes.copies * keys)
    rows = min(last, block_k) if case.causal else last
    end = loop + sizes.out + 4 * keys + 2 * vector * case.head_dim * rows
    return max(delta, loop + 4 * keys + 4 * queries, end)
