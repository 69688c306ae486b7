"""The backward pass: tiles of P are computed again from Q, K and L; none is ever stored.

    D  = rowsum(dO * O)            one number a query; minus dL, where a gradient reaches L
    P  = exp(S - L),   dS = P * (dO V^T - D)

    one program for each block of queries:  D
    one program for each block of keys:     dV_j = sum_i P^T dO_i,  dK_j = sum_i dS^T Q_i * scale
    one program for each block of queries:  dQ_i = sum_j dS K_j * scale

Two passes compute S and P twice (seven matrix products, not five). In return no two programs write
to the same place: no atomic additions, and the same bits every time. Grouped heads add up inside
of the program of their keys.

Source: Dao, "FlashAttention-2" (2023), algorithm 2, which adds up dQ with atomics instead.
"""

import triton
import triton.language as tl

from labsupport.attention.flash_triton.tiles import (
    LOG2_E,
    SIZES,
    distance_penalty,
    hide,
    load_rows,
    runs,
    sequence,
    store_rows,
)


@triton.jit(do_not_specialize=SIZES)
def rows_kernel(
    O, dO, L, dL, Shift, Delta, stride_ob, stride_on, stride_oh, stride_od,
    stride_gb, stride_gn, stride_gh, stride_gd, stride_lb, stride_lh, stride_rb, stride_rh,
    heads, seqlen, blocks, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    WITH_DL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Two numbers a query: Shift, which is L as the other kernels want it, and Delta = D.

    Grid: blocks of queries x heads x batch. Packed: all sequences as one.
    """
    program = tl.program_id(0)
    first = (program % blocks * BLOCK).to(tl.int64)
    head = (program // blocks % heads).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    count = (seqlen - first).to(tl.int32)
    O += batch * stride_ob + head * stride_oh + first * stride_on
    dO += batch * stride_gb + head * stride_gh + first * stride_gn
    r = tl.arange(0, BLOCK)
    from_l = batch * stride_lb + head * stride_lh + first + r
    to = batch * stride_rb + head * stride_rh + first + r
    o = load_rows(O, count, stride_on, stride_od, HEAD_DIM, D, BLOCK)
    do = load_rows(dO, count, stride_gn, stride_gd, HEAD_DIM, D, BLOCK)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if WITH_DL:
        delta -= tl.load(dL + from_l, mask=r < count, other=0.0)
    tl.store(Delta + to, delta, mask=r < count)
    lse = tl.load(L + from_l, mask=r < count, other=0.0)
    # exp(S - L) must be 0, not NaN, for a query that saw no key (L = -inf).
    shift = tl.where(lse == -float("inf"), float("inf"), lse) * (1.0 if WIDE else LOG2_E)
    tl.store(Shift + to, shift, mask=r < count)


@triton.jit
def recomputed(s, shift, WIDE: tl.constexpr):
    """P = exp(S - L); s and shift carry the factor log2(e), unless WIDE.

    In float32 the difference is taken first: a product rounded at the size of S, not of S - L,
    would cost a digit. In half precision nobody would see it, and it saves a multiplication.
    """
    return tl.exp2((s - shift) * LOG2_E) if WIDE else tl.exp2(s - shift)


@triton.jit
def fold_queries(
    dk, dv, s, v, q, do, shift, delta, WIDE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add what a tile of queries gives to dk and dv; s is S^T, (keys, queries)."""
    p = recomputed(s, shift[None, :], WIDE)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def fold_keys(dq, s, do, k, v, shift, delta, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Add what a tile of keys gives to dq; s is S, (queries, keys)."""
    p = recomputed(s, shift[:, None], WIDE)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def keys_tiles(
    dk, dv, k, v, Q, dO, Shift, Delta, j, start, stop, scale, slope, offset, seqlen_q, seqlen_k,
    left, right, stride_qn, stride_qd, stride_gn, stride_gd,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries start..stop give to dk and dv of a block of keys; tiles transposed."""
    r = tl.arange(0, BLOCK_Q)
    first = tl.cast(start, tl.int64)
    Q += first * stride_qn
    dO += first * stride_gn
    for i in tl.range(start, stop, BLOCK_Q):
        count = seqlen_q - i
        q = load_rows(Q, count, stride_qn, stride_qd, HEAD_DIM, D, BLOCK_Q)
        do = load_rows(dO, count, stride_gn, stride_gd, HEAD_DIM, D, BLOCK_Q)
        shift = tl.load(Shift + i + r, mask=r < count, other=float("inf"))
        delta = tl.load(Delta + i + r, mask=r < count, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        if ALIBI:
            s -= distance_penalty(slope, (i + r)[None, :], j[:, None], offset)
        if MASKED:
            s = hide(s, (i + r)[None, :], j[:, None], offset, seqlen_k, left, right, LEFT, RIGHT)
        dk, dv = fold_queries(dk, dv, s, v, q, do, shift, delta, WIDE, PRECISION)
        Q += BLOCK_Q * stride_qn
        dO += BLOCK_Q * stride_gn
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def keys_kernel(
    Q, K, V, dO, dK, dV, Shift, Delta, slopes, cu_q, cu_k, scale,
    stride_qb, stride_qn, stride_qh, stride_qd, stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd, stride_gb, stride_gn, stride_gh, stride_gd,
    stride_dkb, stride_dkn, stride_dkh, stride_dkd, stride_dvb, stride_dvn, stride_dvh, stride_dvd,
    stride_lb, stride_lh, stride_slope, heads, group, seqlen_q, seqlen_k, left, right, blocks,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, PACKED: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV. Grid: blocks of keys x key/value heads x batch."""
    unit = 1.0 if WIDE else LOG2_E
    program = tl.program_id(0)
    kv_heads = heads // group
    first = program % blocks * BLOCK_K
    kv_head = (program // blocks % kv_heads).to(tl.int64)
    batch = (program // blocks // kv_heads).to(tl.int64)
    start_q, seqlen_q = sequence(cu_q, batch, seqlen_q, PACKED)
    start_k, seqlen_k = sequence(cu_k, batch, seqlen_k, PACKED)
    if first < seqlen_k:
        offset = seqlen_k - seqlen_q
        count = seqlen_k - first
        rows = start_k + first
        j = first + tl.arange(0, BLOCK_K)
        K += batch * stride_kb + kv_head * stride_kh + rows * stride_kn
        V += batch * stride_vb + kv_head * stride_vh + rows * stride_vn
        k = load_rows(K, count, stride_kn, stride_kd, HEAD_DIM, D, BLOCK_K)
        v = load_rows(V, count, stride_vn, stride_vd, HEAD_DIM, D, BLOCK_K)
        dk = tl.zeros([BLOCK_K, D], tl.float32)
        dv = tl.zeros([BLOCK_K, D], tl.float32)
        # Key j is seen by the queries j - offset - right .. j - offset + left: the band, turned.
        last = tl.minimum(first + BLOCK_K, seqlen_k) - 1
        start, full_start, full_stop, stop = runs(
            first - offset, last - offset, seqlen_q, right, left, BLOCK_Q, RIGHT, LEFT
        )
        for g in range(group):
            head = kv_head * group + g
            q_h = Q + batch * stride_qb + head * stride_qh + start_q * stride_qn
            do_h = dO + batch * stride_gb + head * stride_gh + start_q * stride_gn
            shift_h = Shift + batch * stride_lb + head * stride_lh + start_q
            delta_h = Delta + batch * stride_lb + head * stride_lh + start_q
            slope = tl.load(slopes + batch * stride_slope + head) * unit if ALIBI else 0.0
            dk, dv = keys_tiles(
                dk, dv, k, v, q_h, do_h, shift_h, delta_h, j, start, tl.minimum(full_start, stop),
                scale * unit, slope, offset, seqlen_q, seqlen_k, left, right,
                stride_qn, stride_qd, stride_gn, stride_gd,
                HEAD_DIM, D, BLOCK_Q, True, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
            )  # fmt: skip
            dk, dv = keys_tiles(
                dk, dv, k, v, q_h, do_h, shift_h, delta_h, j, full_start, full_stop,
                scale * unit, slope, offset, seqlen_q, seqlen_k, left, right,
                stride_qn, stride_qd, stride_gn, stride_gd,
                HEAD_DIM, D, BLOCK_Q, False, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
            )  # fmt: skip
            dk, dv = keys_tiles(
                dk, dv, k, v, q_h, do_h, shift_h, delta_h, j, full_stop, stop,
                scale * unit, slope, offset, seqlen_q, seqlen_k, left, right,
                stride_qn, stride_qd, stride_gn, stride_gd,
                HEAD_DIM, D, BLOCK_Q, True, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
            )  # fmt: skip
        dK += batch * stride_dkb + kv_head * stride_dkh + rows * stride_dkn
        dV += batch * stride_dvb + kv_head * stride_dvh + rows * stride_dvn
        store_rows(dK, dk * scale, count, stride_dkn, stride_dkd, HEAD_DIM, D, BLOCK_K)
        store_rows(dV, dv, count, stride_dvn, stride_dvd, HEAD_DIM, D, BLOCK_K)


@triton.jit
def queries_tiles(
    dq, q, do, shift, delta, K, V, i, start, stop, scale, slope, offset, seqlen_k, left, right,
    stride_kn, stride_kd, stride_vn, stride_vd,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys start..stop give to dq of a block of queries."""
    c = tl.arange(0, BLOCK_K)
    first = tl.cast(start, tl.int64)
    K += first * stride_kn
    V += first * stride_vn
    for j in tl.range(start, stop, BLOCK_K):
        count = seqlen_k - j
        k = load_rows(K, count, stride_kn, stride_kd, HEAD_DIM, D, BLOCK_K)
        v = load_rows(V, count, stride_vn, stride_vd, HEAD_DIM, D, BLOCK_K)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if ALIBI:
            s -= distance_penalty(slope, i[:, None], (j + c)[None, :], offset)
        if MASKED:
            s = hide(s, i[:, None], (j + c)[None, :], offset, seqlen_k, left, right, LEFT, RIGHT)
        dq = fold_keys(dq, s, do, k, v, shift, delta, WIDE, PRECISION)
        K += BLOCK_K * stride_kn
        V += BLOCK_K * stride_vn
    return dq


@triton.jit(do_not_specialize=SIZES)
def queries_kernel(
    Q, K, V, dO, dQ, Shift, Delta, slopes, cu_q, cu_k, scale,
    stride_qb, stride_qn, stride_qh, stride_qd, stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd, stride_gb, stride_gn, stride_gh, stride_gd,
    stride_dqb, stride_dqn, stride_dqh, stride_dqd,
    stride_lb, stride_lh, stride_slope, heads, group, seqlen_q, seqlen_k, left, right, blocks,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, PACKED: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ. Grid: blocks of queries x heads x batch."""
    unit = 1.0 if WIDE else LOG2_E
    program = tl.program_id(0)
    first = (blocks - 1 - program % blocks) * BLOCK_Q
    head = (program // blocks % heads).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    start_q, seqlen_q = sequence(cu_q, batch, seqlen_q, PACKED)
    start_k, seqlen_k = sequence(cu_k, batch, seqlen_k, PACKED)
    if first < seqlen_q:
        kv_head = head // group
        rows = start_q + first
        offset = seqlen_k - seqlen_q
        count = seqlen_q - first
        r = tl.arange(0, BLOCK_Q)
        i = first + r
        Q += batch * stride_qb + head * stride_qh + rows * stride_qn
        dO += batch * stride_gb + head * stride_gh + rows * stride_gn
        K += batch * stride_kb + kv_head * stride_kh + start_k * stride_kn
        V += batch * stride_vb + kv_head * stride_vh + start_k * stride_vn
        at = batch * stride_lb + head * stride_lh + rows + r
        q = load_rows(Q, count, stride_qn, stride_qd, HEAD_DIM, D, BLOCK_Q)
        do = load_rows(dO, count, stride_gn, stride_gd, HEAD_DIM, D, BLOCK_Q)
        shift = tl.load(Shift + at, mask=r < count, other=float("inf"))
        delta = tl.load(Delta + at, mask=r < count, other=0.0)
        slope = tl.load(slopes + batch * stride_slope + head) * unit if ALIBI else 0.0
        dq = tl.zeros([BLOCK_Q, D], tl.float32)
        last = tl.minimum(first + BLOCK_Q, seqlen_q) - 1
        start, full_start, full_stop, stop = runs(
            first + offset, last + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
        )
        if LEFT:
            dq = queries_tiles(
                dq, q, do, shift, delta, K, V, i, start, tl.minimum(full_start, stop),
                scale * unit, slope, offset, seqlen_k, left, right,
                stride_kn, stride_kd, stride_vn, stride_vd,
                HEAD_DIM, D, BLOCK_K, True, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
            )  # fmt: skip
        dq = queries_tiles(
            dq, q, do, shift, delta, K, V, i, full_start, full_stop,
            scale * unit, slope, offset, seqlen_k, left, right,
            stride_kn, stride_kd, stride_vn, stride_vd,
            HEAD_DIM, D, BLOCK_K, False, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
        )  # fmt: skip
        dq = queries_tiles(
            dq, q, do, shift, delta, K, V, i, full_stop, stop,
            scale * unit, slope, offset, seqlen_k, left, right,
            stride_kn, stride_kd, stride_vn, stride_vd,
            HEAD_DIM, D, BLOCK_K, True, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
        )  # fmt: skip
        dQ += batch * stride_dqb + head * stride_dqh + rows * stride_dqn
        store_rows(dQ, dq * scale, count, stride_dqn, stride_dqd, HEAD_DIM, D, BLOCK_Q)
