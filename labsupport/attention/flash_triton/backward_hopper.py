"""The backward pass once more, for Hopper GPUs: as `backward.py`, with tiles from the copy engine.

See `forward_hopper.py` for what a descriptor is. Rows holds Shift and Delta. What lies beyond the
end comes as zeros, and adds nothing: dO = 0, and dS = P * (0 - 0). So only limits of the band need
a mask, and for dQ the end of the keys.
"""

import triton
import triton.language as tl

from labsupport.attention.flash_triton.backward import fold_keys, fold_queries
from labsupport.attention.flash_triton.tiles import LOG2_E, SIZES, hide, runs


@triton.jit
def hopper_keys_tiles(
    dk, dv, k, v, Q, dO, Rows, batch, head, j, start, stop, scale, offset, seqlen_k,
    left, right, D: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Add what the queries start..stop give to dk and dv of a block of keys; tiles transposed."""
    r = tl.arange(0, BLOCK_Q)
    for i in tl.range(start, stop, BLOCK_Q):
        q = Q.load([batch, head, i, 0]).reshape(BLOCK_Q, D)
        do = dO.load([batch, head, i, 0]).reshape(BLOCK_Q, D)
        shift = Rows.load([0, batch, head, i]).reshape(BLOCK_Q)
        delta = Rows.load([1, batch, head, i]).reshape(BLOCK_Q)
        s = tl.dot(k, tl.trans(q)) * scale
        if MASKED:
            s = hide(s, (i + r)[None, :], j[:, None], offset, seqlen_k, left, right, LEFT, RIGHT)
        dk, dv = fold_queries(dk, dv, s, v, q, do, shift, delta, False, "ieee")
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def hopper_keys_kernel(
    Q, dO, K, V, dK, dV, Rows, scale, heads, group, seqlen_q, seqlen_k, left, right,
    blocks, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """dK and dV; all tensors are descriptors. Grid: blocks of keys x key/value heads x batch."""
    program = tl.program_id(0)
    kv_heads = heads // group
    first = program % blocks * BLOCK_K
    kv_head = program // blocks % kv_heads
    batch = program // blocks // kv_heads
    offset = seqlen_k - seqlen_q
    j = first + tl.arange(0, BLOCK_K)
    k = K.load([batch, kv_head, first, 0]).reshape(BLOCK_K, D)
    v = V.load([batch, kv_head, first, 0]).reshape(BLOCK_K, D)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    # Key j is seen by the queries j - offset - right .. j - offset + left: the band, turned.
    last = tl.minimum(first + BLOCK_K, seqlen_k) - 1
    start, full_start, full_stop, stop = runs(
        first - offset, last - offset, seqlen_q, right, left, BLOCK_Q, RIGHT, LEFT
    )
    for g in range(group):
        head = kv_head * group + g
        if RIGHT:
            dk, dv = hopper_keys_tiles(
                dk, dv, k, v, Q, dO, Rows, batch, head, j, start,
                tl.minimum(full_start, stop), scale * LOG2_E, offset, seqlen_k, left, right,
                D, BLOCK_Q, True, LEFT, RIGHT,
            )  # fmt: skip
        dk, dv = hopper_keys_tiles(
            dk, dv, k, v, Q, dO, Rows, batch, head, j, full_start,
            full_stop if LEFT else stop, scale * LOG2_E, offset, seqlen_k, left, right,
            D, BLOCK_Q, False, LEFT, RIGHT,
        )  # fmt: skip
        if LEFT:
            dk, dv = hopper_keys_tiles(
                dk, dv, k, v, Q, dO, Rows, batch, head, j, full_stop, stop,
                scale * LOG2_E, offset, seqlen_k, left, right, D, BLOCK_Q, True, LEFT, RIGHT,
            )  # fmt: skip
    dK.store([batch, kv_head, first, 0], (dk * scale).to(dK.dtype).reshape(1, 1, BLOCK_K, D))
    dV.store([batch, kv_head, first, 0], dv.to(dV.dtype).reshape(1, 1, BLOCK_K, D))


@triton.jit
def hopper_queries_tiles(
    dq, q, do, shift, delta, K, V, batch, kv_head, i, start, stop, scale, offset, seqlen_k,
    left, right, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Add what the keys start..stop give to dq of a block of queries."""
    c = tl.arange(0, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        k = K.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        v = V.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        s = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            s = hide(s, i[:, None], (j + c)[None, :], offset, seqlen_k, left, right, LEFT, RIGHT)
        dq = fold_keys(dq, s, do, k, v, shift, delta, False, "ieee")
    return dq


@triton.jit(do_not_specialize=SIZES)
def hopper_queries_kernel(
    Q, dO, dQ, K, V, Rows, scale, heads, group, seqlen_q, seqlen_k, left, right,
    blocks, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """dQ; all tensors are descriptors. Grid: blocks of queries x heads x batch."""
    program = tl.program_id(0)
    first = (blocks - 1 - program % blocks) * BLOCK_Q
    head = program // blocks % heads
    batch = program // blocks // heads
    kv_head = head // group
    offset = seqlen_k - seqlen_q
    i = first + tl.arange(0, BLOCK_Q)
    q = Q.load([batch, head, first, 0]).reshape(BLOCK_Q, D)
    do = dO.load([batch, head, first, 0]).reshape(BLOCK_Q, D)
    shift = Rows.load([0, batch, head, first]).reshape(BLOCK_Q)
    delta = Rows.load([1, batch, head, first]).reshape(BLOCK_Q)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    last = tl.minimum(first + BLOCK_Q, seqlen_q) - 1
    start, full_start, full_stop, stop = runs(
        first + offset, last + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
    )
    if LEFT:
        dq = hopper_queries_tiles(
            dq, q, do, shift, delta, K, V, batch, kv_head, i, start,
            tl.minimum(full_start, stop), scale * LOG2_E, offset, seqlen_k, left, right,
            D, BLOCK_K, True, LEFT, RIGHT,
        )  # fmt: skip
    dq = hopper_queries_tiles(
        dq, q, do, shift, delta, K, V, batch, kv_head, i, full_start, full_stop,
        scale * LOG2_E, offset, seqlen_k, left, right, D, BLOCK_K, False, LEFT, RIGHT,
    )  # fmt: skip
    dq = hopper_queries_tiles(
        dq, q, do, shift, delta, K, V, batch, kv_head, i, full_stop, stop,
        scale * LOG2_E, offset, seqlen_k, left, right, D, BLOCK_K, True, LEFT, RIGHT,
    )  # fmt: skip
    dQ.store([batch, head, first, 0], (dq * scale).to(dQ.dtype).reshape(1, 1, BLOCK_Q, D))
