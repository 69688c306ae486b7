"""The forward pass once more, for Hopper GPUs: the copy engine fetches the tiles, not the threads.

A multiprocessor of compute capability 9.0 has an engine that copies whole tiles between memory and
shared memory: the Tensor Memory Accelerator. One thread names a tile by its coordinates in a
*descriptor* of the tensor (base, shape, strides, tile); the engine computes addresses, and fills
what lies beyond the tensor with zeros. In `forward.py` all threads compute addresses and masks for
16 bytes at a time, and hold them in registers that the tiles could use.

The descriptors cover (batch, heads, seqlen, head_dim). What they cannot describe (packed sequences,
odd strides or sizes) and ALiBi are left to `forward.py`; `launch_hopper.py` decides.

Source: NVIDIA, CUDA C++ Programming Guide, "Tensor Memory Access".
"""

import triton
import triton.language as tl

from labsupport.attention.flash_triton.forward import finish, fold
from labsupport.attention.flash_triton.tiles import LOG2_E, SIZES, hide, runs


@triton.jit
def hopper_fold_tiles(
    m, l, o, q, K, V, batch, kv_head, i, start, stop, scale, offset, seqlen_k, left, right,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):  # fmt: skip
    """Fold the keys start..stop into the running maximum m, sum l and output o of a block."""
    c = tl.arange(0, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        k = K.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            s = hide(s, i[:, None], (j + c)[None, :], offset, seqlen_k, left, right, LEFT, RIGHT)
        v = V.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        m, l, o = fold(m, l, o, s, v, scale, MASKED, "ieee")
    return m, l, o


@triton.jit(do_not_specialize=SIZES)
def hopper_forward_kernel(
    Q, O, K, V, L, scale, stride_lb, stride_lh, heads, group, seqlen_q, seqlen_k, left, right,
    blocks, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Q, O, K and V are descriptors. Grid: blocks of queries x heads x batch."""
    program = tl.program_id(0)
    first = (blocks - 1 - program % blocks) * BLOCK_Q  # causal: the longest rows first
    head = program // blocks % heads
    batch = program // blocks // heads
    kv_head = head // group
    offset = seqlen_k - seqlen_q
    i = first + tl.arange(0, BLOCK_Q)
    q = Q.load([batch, head, first, 0]).reshape(BLOCK_Q, D)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    last = tl.minimum(first + BLOCK_Q, seqlen_q) - 1
    start, full_start, full_stop, stop = runs(
        first + offset, last + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
    )
    if LEFT:
        m, l, o = hopper_fold_tiles(
            m, l, o, q, K, V, batch, kv_head, i, start, tl.minimum(full_start, stop),
            scale * LOG2_E, offset, seqlen_k, left, right, D, BLOCK_K, True, LEFT, RIGHT,
        )  # fmt: skip
    m, l, o = hopper_fold_tiles(
        m, l, o, q, K, V, batch, kv_head, i, full_start, full_stop,
        scale * LOG2_E, offset, seqlen_k, left, right, D, BLOCK_K, False, LEFT, RIGHT,
    )  # fmt: skip
    m, l, o = hopper_fold_tiles(
        m, l, o, q, K, V, batch, kv_head, i, full_stop, stop,
        scale * LOG2_E, offset, seqlen_k, left, right, D, BLOCK_K, True, LEFT, RIGHT,
    )  # fmt: skip
    o, lse = finish(m, l, o)
    O.store([batch, head, first, 0], o.to(O.dtype).reshape(1, 1, BLOCK_Q, D))
    at = batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
    tl.store(L + at + i, lse, mask=i < seqlen_q)
