"""The backward pass: tiles of P are computed again from Q, K and L; none is ever stored.

    D = rowsum(dO * O)             one number a query; minus dLSE, where a gradient reaches it
    P = exp(S - LSE),   dS = P * (dO V^T - D)

    _bwd_preprocess   one program for each block of queries:  D
    _bwd_dkdv         one program for each block of keys:     dV_j = sum_i P^T dO_i,
                                                              dK_j = sum_i dS^T Q_i * scale
    _bwd_dq           one program for each block of queries:  dQ_i = sum_j dS K_j * scale

The last two compute S and P twice (seven matrix products, not five). In return no two programs
write to the same place: no atomic additions, and the same bits every time. Grouped heads add up
inside the program of their keys.

Source: Dao, "FlashAttention-2" (2023), algorithm 2, which adds up dQ with atomics instead.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.common import (
    LOG2_E,
    SIZES,
    Arguments,
    alibi_penalty,
    apply_mask,
    blocks_of,
    load_rows,
    numbers,
    others,
    rest_of_call,
    row_strides,
    run_kernel,
    sequence,
    sizes,
    store_rows,
    strides,
    tile_ranges,
)
from labsupport.attention.kernels.config import KernelConfig, padded, tiling


@triton.jit(do_not_specialize=SIZES)
def _bwd_preprocess(
    O, dO, LSE, dLSE, Shift, Delta, stride_ob, stride_on, stride_oh, stride_od,
    stride_gb, stride_gn, stride_gh, stride_gd, stride_lb, stride_lh, stride_rb, stride_rh,
    heads, seqlen, blocks, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    WITH_DLSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Two numbers a query: Shift, the log-sum-exp as the other kernels want it, and Delta = D.

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
    if WITH_DLSE:
        delta -= tl.load(dLSE + from_l, mask=r < count, other=0.0)
    tl.store(Delta + to, delta, mask=r < count)
    lse = tl.load(LSE + from_l, mask=r < count, other=0.0)
    # exp(S - LSE) must be 0, not NaN, for a query that saw no key.
    shift = tl.where(lse == -float("inf"), float("inf"), lse) * (1.0 if WIDE else LOG2_E)
    tl.store(Shift + to, shift, mask=r < count)


@triton.jit
def recompute_p(s, shift, WIDE: tl.constexpr):
    """P = exp(S - LSE); s and shift carry the factor log2(e), unless WIDE.

    In float32 the difference is taken first: a product rounded at the size of S, not of S - L,
    would cost a digit. In half precision it makes no difference, and saves a multiplication.
    """
    return tl.exp2((s - shift) * LOG2_E) if WIDE else tl.exp2(s - shift)


@triton.jit
def add_to_dkdv(
    dk, dv, s, v, q, do, shift, delta, WIDE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add the share of a tile of queries to dk and dv; s is S^T, (keys, queries)."""
    p = recompute_p(s, shift[None, :], WIDE)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def add_to_dq(dq, s, do, k, v, shift, delta, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Add the share of a tile of keys to dq; s is S, (queries, keys)."""
    p = recompute_p(s, shift[:, None], WIDE)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def _bwd_dkdv_inner(
    dk, dv, k, v, Q, dO, Shift, Delta, j, start, stop, scale, slope, seqlen_q, band,
    stride_qn, stride_qd, stride_gn, stride_gd,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of the queries start..stop to dk and dv of a block of keys, transposed."""
    offset = band[0]
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
            s -= alibi_penalty(slope, (i + r)[None, :], j[:, None], offset)
        if MASKED:
            s = apply_mask(s, (i + r)[None, :], j[:, None], band, LEFT, RIGHT)
        dk, dv = add_to_dkdv(dk, dv, s, v, q, do, shift, delta, WIDE, PRECISION)
        Q += BLOCK_Q * stride_qn
        dO += BLOCK_Q * stride_gn
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _bwd_dkdv(
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
        starts, stops = tile_ranges(
            first - offset, last - offset, seqlen_q, right, left, BLOCK_Q, RIGHT, LEFT
        )
        for g in range(group):
            head = kv_head * group + g
            q_h = Q + batch * stride_qb + head * stride_qh + start_q * stride_qn
            do_h = dO + batch * stride_gb + head * stride_gh + start_q * stride_gn
            shift_h = Shift + batch * stride_lb + head * stride_lh + start_q
            delta_h = Delta + batch * stride_lb + head * stride_lh + start_q
            slope = tl.load(slopes + batch * stride_slope + head) * unit if ALIBI else 0.0
            for part in tl.static_range(3):
                dk, dv = _bwd_dkdv_inner(
                    dk, dv, k, v, q_h, do_h, shift_h, delta_h, j, starts[part], stops[part],
                    scale * unit, slope, seqlen_q, (offset, seqlen_k, left, right),
                    stride_qn, stride_qd, stride_gn, stride_gd,
                    HEAD_DIM, D, BLOCK_Q, part != 1, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
                )  # fmt: skip
        dK += batch * stride_dkb + kv_head * stride_dkh + rows * stride_dkn
        dV += batch * stride_dvb + kv_head * stride_dvh + rows * stride_dvn
        store_rows(dK, dk * scale, count, stride_dkn, stride_dkd, HEAD_DIM, D, BLOCK_K)
        store_rows(dV, dv, count, stride_dvn, stride_dvd, HEAD_DIM, D, BLOCK_K)


@triton.jit
def _bwd_dq_inner(
    dq, q, do, shift, delta, K, V, i, start, stop, scale, slope, band,
    stride_kn, stride_kd, stride_vn, stride_vd,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of the keys start..stop to dq of a block of queries."""
    offset, seqlen_k = band[0], band[1]
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
            s -= alibi_penalty(slope, i[:, None], (j + c)[None, :], offset)
        if MASKED:
            s = apply_mask(s, i[:, None], (j + c)[None, :], band, LEFT, RIGHT)
        dq = add_to_dq(dq, s, do, k, v, shift, delta, WIDE, PRECISION)
        K += BLOCK_K * stride_kn
        V += BLOCK_K * stride_vn
    return dq


@triton.jit(do_not_specialize=SIZES)
def _bwd_dq(
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
        starts, stops = tile_ranges(
            first + offset, last + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
        )
        for part in tl.static_range(0 if LEFT else 1, 3):
            dq = _bwd_dq_inner(
                dq, q, do, shift, delta, K, V, i, starts[part], stops[part],
                scale * unit, slope, (offset, seqlen_k, left, right),
                stride_kn, stride_kd, stride_vn, stride_vd,
                HEAD_DIM, D, BLOCK_K, part != 1, LEFT, RIGHT, ALIBI, WIDE, PRECISION,
            )  # fmt: skip
        dQ += batch * stride_dqb + head * stride_dqh + rows * stride_dqn
        store_rows(dQ, dq * scale, count, stride_dqn, stride_dqd, HEAD_DIM, D, BLOCK_Q)


def launch(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Fill dq, dk and dv; shapes and strides as in `autograd.backward`."""
    q, k, v = call.q, call.k, call.v
    delta, shift = torch.empty_like(lse), torch.empty_like(lse)
    launch_preprocess(dout, out, lse, dlse, shift, delta)
    inputs = {"Q": q, "K": k, "V": v, "dO": dout}
    rows = {"Shift": shift, "Delta": delta, **rest_of_call(call)}

    def run(kernel: Any, config: KernelConfig, blocks: tuple[int, int], **outputs: Tensor) -> None:
        def rest() -> tuple[int, Arguments]:
            named = {name.lower(): x for name, x in outputs.items()}
            return blocks[1], {
                "scale": call.scale, "blocks": blocks[0], "WIDE": q.dtype == torch.float32,
                **strides(q=q, k=k, v=v, g=dout, **named), **row_strides(l=delta),
                **sizes(call), **others(call, config),
            }  # fmt: skip

        run_kernel(kernel, {**inputs, **outputs, **rows}, (config, numbers(call)), rest)

    config = tiling("keys", call.head_dim, q.dtype)
    run(_bwd_dkdv, config, blocks_of(k, call.max_seqlen_k, config.block_k, call), dK=dk, dV=dv)
    config = tiling("queries", call.head_dim, q.dtype)
    run(_bwd_dq, config, blocks_of(q, call.max_seqlen_q, config.block_q, call), dQ=dq)


def launch_preprocess(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, shift: Tensor, delta: Tensor
) -> None:
    """Fill shift and delta, which are shaped like lse."""
    seqlen, heads, head_dim = out.shape[-3:]
    blocks = -(-seqlen // 64)
    tensors = {
        "O": out, "dO": dout, "LSE": lse, "dLSE": None if dlse is None else dlse.contiguous(),
        "Shift": shift, "Delta": delta,
    }  # fmt: skip
    run_kernel(_bwd_preprocess, tensors, (), lambda: (blocks * (lse.numel() // seqlen), {
        **strides(o=out, g=dout), **row_strides(l=lse, r=delta), "heads": heads, "seqlen": seqlen,
        "blocks": blocks, "HEAD_DIM": head_dim, "D": padded(head_dim), "BLOCK": 64,
        "WITH_DLSE": dlse is not None, "WIDE": out.dtype == torch.float32, "num_warps": 4,
    }))  # fmt: skip
