"""Decoding: few queries against a long cache of keys, with the keys shared out among programs.

The forward kernel has one program for each block of queries. Generation asks one query at a time:
batch x heads programs, each walking through the whole cache, while most of the GPU waits. But the
keys can be shared out too, because partial results merge exactly (`online_softmax.py`):

    keys       |  split 0  |  split 1  |  split 2  |      splits_kernel: one program each,
                 O_0, L_0    O_1, L_1    O_2, L_2         the forward's loop over its own keys
                        \\       |       /
                            O,  L                         merge_kernel: the same running softmax,
                                                          with L_s for the scores, O_s for V

Each number of the cache is read from memory and used in a handful of operations, so decoding waits
for memory, and the cache should be read once. Query heads that share a key/value head therefore
share a tile: its rows are (query, head of the group), which also fills the 16 rows that a
tensor-core instruction wants.

Source: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023),
https://pytorch.org/blog/flash-decoding/.
"""

import triton
import triton.language as tl

from labsupport.attention.flash_triton.forward import finish, fold_tiles
from labsupport.attention.flash_triton.tiles import LOG2_E, runs


@triton.jit
def splits_kernel(
    Q, K, V, O, L, slopes, cache_seqlens, scale,
    stride_qb, stride_qn, stride_qh, stride_qd, stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd,
    stride_os, stride_ob, stride_on, stride_oh, stride_od,
    stride_ls, stride_lb, stride_lh, stride_slope,
    kv_heads, group, seqlen_q, seqlen_k, left, right, blocks, splits,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows x splits x kv_heads x batch, on one axis."""
    program = tl.program_id(0)
    first = program % blocks * BLOCK_ROWS
    split = program // blocks % splits
    kv_head = (program // blocks // splits % kv_heads).to(tl.int64)
    batch = (program // blocks // splits // kv_heads).to(tl.int64)
    if cache_seqlens is not None:  # a wrong length must not lead out of the cache
        seqlen_k = tl.minimum(tl.maximum(tl.load(cache_seqlens + batch), 0), seqlen_k)
    offset = seqlen_k - seqlen_q

    rows = seqlen_q * group
    r = first + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, D)
    i = r // group
    head = kv_head * group + r % group
    here = r < rows
    here_d = here[:, None] & (d < HEAD_DIM)[None, :]
    q_at = batch * stride_qb + i.to(tl.int64) * stride_qn + head * stride_qh
    q = tl.load(Q + q_at[:, None] + d[None, :] * stride_qd, mask=here_d, other=0.0)
    slope = tl.zeros([BLOCK_ROWS, 1], tl.float32)
    if ALIBI:
        slope = (
            tl.load(slopes + batch * stride_slope + head, mask=here, other=0.0)[:, None] * LOG2_E
        )

    # Of the keys that these rows see (a window leaves few), each split takes as many whole tiles.
    last = tl.minimum(first + BLOCK_ROWS, rows) - 1
    start, _, _, stop = runs(
        first // group + offset, last // group + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
    )
    share = tl.cdiv(tl.cdiv(stop - start, BLOCK_K), splits) * BLOCK_K
    start += split * share
    stop = tl.minimum(stop, start + share)  # not above `start` where no tile is left

    m = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_ROWS], tl.float32)
    o = tl.zeros([BLOCK_ROWS, D], tl.float32)
    # All tiles are masked: a few operations for each score, where the memory sets the pace anyway.
    m, l, o = fold_tiles(
        m, l, o, q, K + batch * stride_kb + kv_head * stride_kh,
        V + batch * stride_vb + kv_head * stride_vh, i, start, stop, scale * LOG2_E, slope,
        offset, seqlen_k, left, right, stride_kn, stride_kd, stride_vn, stride_vd,
        HEAD_DIM, D, BLOCK_K, True, LEFT, RIGHT, ALIBI, PRECISION,
    )  # fmt: skip

    o, lse = finish(m, l, o)
    split = split.to(tl.int64)
    o_at = split * stride_os + batch * stride_ob + i.to(tl.int64) * stride_on + head * stride_oh
    o_at = O + o_at[:, None] + d[None, :] * stride_od
    tl.store(o_at, o.to(O.dtype.element_ty), mask=here_d)
    tl.store(L + split * stride_ls + batch * stride_lb + head * stride_lh + i, lse, mask=here)


@triton.jit
def merge_kernel(
    O_s, L_s, O, L,
    stride_ps, stride_pb, stride_pn, stride_ph, stride_pd,
    stride_ob, stride_on, stride_oh, stride_od,
    stride_ls, stride_lb, stride_lh, heads, seqlen_q, splits,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: queries x heads x batch, on one axis. L has the strides of one split of L_s."""
    program = tl.program_id(0)
    i = (program % seqlen_q).to(tl.int64)
    head = (program // seqlen_q % heads).to(tl.int64)
    batch = (program // seqlen_q // heads).to(tl.int64)
    O_s += batch * stride_pb + i * stride_pn + head * stride_ph
    O += batch * stride_ob + i * stride_on + head * stride_oh
    L_s += batch * stride_lb + head * stride_lh + i
    L += batch * stride_lb + head * stride_lh + i

    d = tl.arange(0, D)
    m = -float("inf")
    l = 0.0
    o = tl.zeros([D], tl.float32)
    for first in tl.range(0, splits, BLOCK_SPLITS):
        s = first + tl.arange(0, BLOCK_SPLITS).to(tl.int64)
        lse = tl.load(L_s + s * stride_ls, mask=s < splits, other=-float("inf")) * LOG2_E
        part = tl.load(
            O_s + s[:, None] * stride_ps + d[None, :] * stride_pd,
            mask=(s < splits)[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(lse - shift)  # 0 for a split without a visible key
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(weight, 0)
        o = o * alpha + tl.sum(weight[:, None] * part, 0)
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    tl.store(O + d * stride_od, (o / l).to(O.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(L, (m + tl.log2(l)) / LOG2_E)
