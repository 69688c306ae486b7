"""Peak memory of a call beyond its inputs, by formula: bytes of what exists at the worst moment.

The symbols, in bytes: `out` one tensor like q, `kv` one like k, `rows` four bytes for each query of
each head (lse and its like), `squares` one seqlen_q x seqlen_k matrix for each head.

    backend         forward                     forward + backward: out, dq, dk, dv, and
    sdpa_cudnn      out                         lse, delta, dq in float32
    fa4             out                         lse, lse in base 2, delta, dq in float32
    sdpa_flash      out, lse; where queries     lse, delta, dq in float32; on a CPU a scratch tile
                    are few, parts of both      for each thread
    sdpa_efficient  out                         lse, delta, dq in float32, 16 bytes for each 64 rows
    flex            out, two rows               two rows, one more tensor like out
    flash_triton    out, lse                    lse, delta, shift
    standard        out, S, P, a copy of v      S, P, their gradients, copies
    sdpa_math       the same in float32         the same in float32

With grouped heads sdpa_flash and sdpa_cudnn write dk and dv for every query head first: 2 out more.

They were read off what `measure_peak_memory` says, to the byte where a test says so; on the H200 at
all sizes of its two recorded runs (attention-h200, memory-h200), so its errors are no test on
unseen shapes. The parts that differ by device: kernels on a CPU work in place where those on a GPU
make a new matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from labsupport.analysis.predictor.work import ITEMSIZE, tile_sides
from labsupport.profiling.cases import Case


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors that a case is about."""

    out: int
    kv: int
    rows: int
    squares: int  # in the inputs' dtype
    squares32: int
    hidden: int  # one seqlen_q x seqlen_k mask of a byte each, if causal
    both: bool
    copies: bool  # heads of a batch, or repeated ones, are copied before a batched product

    @classmethod
    def of(cls, case: Case) -> Sizes:
        """Count them."""
        size = ITEMSIZE[case.dtype]
        rows = case.batch * case.heads * case.seqlen
        return cls(
            out=rows * case.head_dim * size,
            kv=case.batch * case.kv_seqlen * case.kv_heads * case.head_dim * size,
            rows=4 * rows,
            squares=rows * case.kv_seqlen * size,
            squares32=rows * case.kv_seqlen * max(4, size),
            hidden=case.seqlen * case.kv_seqlen * case.causal,
            both=case.direction == "forward+backward",
            copies=case.batch > 1 or case.heads != case.kv_heads,
        )

    @property
    def gradients(self) -> int:
        """dq, dk, dv."""
        return self.out + 2 * self.kv


def inputs_bytes(case: Case) -> int:
    """q, k, v, and for a backward the gradient of the output."""
    sizes = Sizes.of(case)
    return sizes.out + 2 * sizes.kv + (sizes.out if sizes.both else 0)


def peak_memory(case: Case, device_kind: str, threads: int = 1) -> int:
    """Bytes at the peak beyond the inputs.

    Args:
        device_kind: "cuda" or "cpu".
        threads: of PyTorch, on a CPU; on a GPU its multiprocessors.

    Raises:
        ValueError: no formula is known for this backend on this kind of device.
    """
    formula = _FORMULAS.get((device_kind, case.backend))
    if formula is None:
        raise ValueError(f"no memory formula for {case.backend} on {device_kind}")
    return formula(case, Sizes.of(case), threads)


def _fused(
    kept_forward: int, kept_both: int, dq32: bool, constant: int = 0, widened: bool = False
) -> Callable[[Case, Sizes, int], int]:
    """A fused kernel on a GPU: so many `rows` vectors, and dq summed in float32 or copied once.

    widened: whether dk and dv of grouped heads are written for every query head first.
    """

    def peak(case: Case, sizes: Sizes, threads: int) -> int:
        if not sizes.both:
            return sizes.out + kept_forward * sizes.rows + constant
        total = sizes.out * 4 // ITEMSIZE[case.dtype] if dq32 else sizes.out
        wide = 2 * sizes.out if widened and case.heads != case.kv_heads else 0
        return sizes.out + sizes.gradients + total + wide + kept_both * sizes.rows + constant

    return peak


def _flash_gpu(case: Case, sizes: Sizes, units: int) -> int:
    whole = _fused(1, 2, dq32=True, constant=24, widened=True)(case, sizes, units)
    splits = flash_splits(case, units)
    if splits == 1:
        return whole
    parts = splits * (sizes.out * 4 // ITEMSIZE[case.dtype] + sizes.rows)
    return max(whole, sizes.out + sizes.rows + 24 + parts)


def flash_splits(case: Case, units: int) -> int:
    """Into how many parts flash-attn 2 cuts the keys, so that few queries keep a GPU busy.

    Each part has an output and an lse of its own in float32, which are then merged. The smallest
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


def _efficient(case: Case, sizes: Sizes, threads: int) -> int:
    counters = 16 * -(-case.seqlen // 64) * case.batch * case.heads if sizes.both else 0
    return _fused(0, 2, True)(case, sizes, threads) + counters


def _flash_cpu(case: Case, sizes: Sizes, threads: int) -> int:
    block_q, block_k = tile_sides(case, "cpu")
    size = ITEMSIZE[case.dtype]
    tile = block_q * block_k * max(4, size)
    narrow = block_q * block_k * size if size < 4 else 0  # P once more, rounded
    if not sizes.both:
        # Scores, the running maximum and sum, the sum of the output.
        scratch = tile + narrow + max(4, size) * block_q * (2 + case.head_dim)
        return sizes.out + sizes.rows + threads * scratch
    # P and dP of each thread; delta of one block.
    scratch = threads * 2 * (tile + narrow) + max(4, size) * block_q
    return sizes.out + sizes.rows + sizes.gradients + scratch


def _standard(on_cpu: bool) -> Callable[[Case, Sizes, int], int]:
    def peak(case: Case, sizes: Sizes, threads: int) -> int:
        if not sizes.both:
            copy = sizes.out if sizes.copies else 0
            # Fitted: what oneDNN packs operands in bfloat16 into is between 1.5 and 1.75 times out.
            packed = sizes.out * 3 // 2 if on_cpu and case.dtype == "bfloat16" else 0
            return 2 * sizes.squares + sizes.out + max(copy, packed) + sizes.hidden
        if not on_cpu:
            return 4 * sizes.squares + (4 if sizes.copies else 2) * sizes.out + sizes.hidden
        copies = 2 if case.batch > 1 else 1 if case.heads != case.kv_heads else 0
        return 3 * sizes.squares + (2 + copies) * sizes.out + sizes.hidden + 8

    return peak


def _math(on_cpu: bool) -> Callable[[Case, Sizes, int], int]:
    def peak(case: Case, sizes: Sizes, threads: int) -> int:
        narrow = ITEMSIZE[case.dtype] < 4  # computed in float32
        repeated = 2 if case.heads != case.kv_heads else 0
        if sizes.both:
            matrices = 3 if on_cpu else 4
            return matrices * sizes.squares32 + (7 if narrow else 4) * sizes.out
        # Scores, softmax, a byte for each score and each row that asks what is hidden.
        bytes_asked = (sizes.squares32 + sizes.rows) // 4 + 4
        tensors = (8 + repeated // 2 if narrow else 1 + repeated) * sizes.out
        asking = bytes_asked + tensors
        # Shorter than about two head_dims, the last product's copies weigh more than the question.
        last = (10 if narrow else 2) * sizes.out if sizes.copies else 0
        return 2 * sizes.squares32 + max(asking, last) + 4 * sizes.hidden

    return peak


def _flash_torch(on_cpu: bool) -> Callable[[Case, Sizes, int], int]:
    def peak(case: Case, sizes: Sizes, threads: int) -> int:
        block_q, block_k = tile_sides(case, "cpu" if on_cpu else "cuda")
        block_q, last = min(block_q, case.seqlen), case.seqlen % block_q or block_q
        width, narrow = max(4, ITEMSIZE[case.dtype]), ITEMSIZE[case.dtype] < 4
        heads = case.batch * case.heads
        # Scratch is taken for whole tiles, even where a sequence is shorter.
        tile = heads * width * tile_sides(case, "cpu" if on_cpu else "cuda")[0] * block_k
        queries = heads * width * case.head_dim * block_q
        keys = heads * width * case.head_dim * min(block_k, case.kv_seqlen)
        wide = heads * width * case.head_dim * case.seqlen
        if not sizes.both:
            # q_i, o_i and P V; v_j converted, and copied for the batched product.
            blocks = 3 * queries + (narrow + sizes.copies) * keys
            vectors = sizes.rows + 6 * heads * width * block_q
            return sizes.out + tile + blocks + vectors
        delta = sizes.out + sizes.rows + (3 if narrow else 1) * wide
        kept = sizes.out + 3 * sizes.rows + wide + 2 * sizes.out + 2 * tile
        if not narrow:
            # dk_j, dv_j, q_i and a product; and the copy that a batched product takes.
            return max(delta, kept + 2 * keys + 2 * queries + sizes.copies * keys)
        rows = min(last, block_k) if case.causal else last
        end = kept + sizes.out + 4 * keys + 2 * heads * width * case.head_dim * rows
        return max(delta, kept + 4 * keys + 4 * queries, end)

    return peak


def _triton(case: Case, sizes: Sizes, threads: int) -> int:
    """From its code: nothing is summed in another tensor, and grouped heads are not repeated."""
    return sizes.out + sizes.rows + (sizes.gradients + 2 * sizes.rows if sizes.both else 0)


Formula = Callable[[Case, Sizes, int], int]
_FORMULAS: dict[tuple[str, str], Formula] = {
    ("cuda", "fa4"): _fused(0, 3, dq32=True),
    ("cuda", "sdpa_cudnn"): _fused(0, 2, dq32=True, constant=272, widened=True),
    ("cuda", "sdpa_flash"): _flash_gpu,
    ("cuda", "sdpa_efficient"): _efficient,
    ("cuda", "flex"): _fused(2, 2, dq32=False),
    ("cuda", "flash_triton"): _triton,
    ("cuda", "standard"): _standard(on_cpu=False),
    ("cuda", "sdpa_math"): _math(on_cpu=False),
    ("cuda", "flash_torch"): _flash_torch(on_cpu=False),
    ("cpu", "sdpa_flash"): _flash_cpu,
    ("cpu", "standard"): _standard(on_cpu=True),
    ("cpu", "sdpa_math"): _math(on_cpu=True),
    ("cpu", "flash_torch"): _flash_torch(on_cpu=True),
}
