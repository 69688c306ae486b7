"""The forward pass: one program computes one block of queries of one head.

    for each tile of keys j that the block sees:            (the inner loop; Q_i stays on the chip)
        S  = Q_i K_j^T                                        tensor cores, accumulated in float32
        m' = max(m, rowmax S)
        P  = exp(S - m')
        l  = exp(m - m') l + rowsum P
        O  = exp(m - m') O + P V_j                            tensor cores
    O = O / l,   LSE = m + log l

Scores carry a factor log2(e), so that exp is exp2. Nothing of size seqlen_q x seqlen_k exists.

Source: Dao, "FlashAttention-2" (2023), algorithm 1.
"""

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
from labsupport.attention.kernels.config import tiling


@triton.jit
def softmax_update(m, l, o, s, v, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Take one tile of scores, still to be multiplied by scale > 0, into m, l and o."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    # A row that has seen no key yet has m = -inf, and -inf - (-inf) is NaN.
    shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(s * scale - shift[:, None])  # scaled here, it is one instruction: multiply-add
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    o = tl.dot(p.to(v.dtype), v, o * alpha[:, None], input_precision=PRECISION)
    return m_new, l, o


@triton.jit
def epilogue(m, l, o):
    """Return the output and the natural log-sum-exp; 0 and -inf where no key was seen."""
    divisor = tl.where(l == 0.0, 1.0, l)
    return o / divisor[:, None], (m + tl.log2(divisor)) / LOG2_E  # m is -inf there


@triton.jit
def _attn_fwd_inner(
    m, l, o, q, K, V, i, start, stop, scale, slope, band,
    stride_kn, stride_kd, stride_vn, stride_vd,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys start..stop into the running maximum m, sum l and output o of a block.

    band: (offset, seqlen_k, left, right), as in `apply_mask`.
    """
    offset, seqlen_k = band[0], band[1]
    c = tl.arange(0, BLOCK_K)
    d = tl.arange(0, D)
    first = tl.cast(start, tl.int64)  # 32 bits end at 2^31 elements
    k_at = K + first * stride_kn + c[None, :] * stride_kn + d[:, None] * stride_kd  # transposed
    v_at = V + first * stride_vn + c[:, None] * stride_vn + d[None, :] * stride_vd
    for j in tl.range(start, stop, BLOCK_K):
        inside = (c < seqlen_k - j) if MASKED else (c < BLOCK_K)
        k = tl.load(k_at, mask=inside[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
        if ALIBI:
            s = s * scale - alibi_penalty(slope, i[:, None], (j + c)[None, :], offset)
        if MASKED:
            s = apply_mask(s, i[:, None], (j + c)[None, :], band, LEFT, RIGHT)
        v = tl.load(v_at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        m, l, o = softmax_update(m, l, o, s, v, 1.0 if ALIBI else scale, MASKED, PRECISION)
        k_at += BLOCK_K * stride_kn
        v_at += BLOCK_K * stride_vn
    return m, l, o


@triton.jit(do_not_specialize=SIZES)
def _attn_fwd(
    Q, K, V, O, LSE, slopes, cu_q, cu_k, scale,
    stride_qb, stride_qn, stride_qh, stride_qd, stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd, stride_ob, stride_on, stride_oh, stride_od,
    stride_lb, stride_lh, stride_slope, heads, group, seqlen_q, seqlen_k, left, right, blocks,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of queries x heads x batch, on one axis (the others end at 65,535)."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # causal: the longest rows first, so that none is late
    head = (program // blocks % heads).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    first = block * BLOCK_Q
    start_q, seqlen_q = sequence(cu_q, batch, seqlen_q, PACKED)
    start_k, seqlen_k = sequence(cu_k, batch, seqlen_k, PACKED)
    if first < seqlen_q:
        kv_head = head // group
        rows = start_q + first
        Q += batch * stride_qb + head * stride_qh + rows * stride_qn
        O += batch * stride_ob + head * stride_oh + rows * stride_on
        LSE += batch * stride_lb + head * stride_lh + rows
        K += batch * stride_kb + kv_head * stride_kh + start_k * stride_kn
        V += batch * stride_vb + kv_head * stride_vh + start_k * stride_vn
        slope = tl.load(slopes + batch * stride_slope + head) * LOG2_E if ALIBI else 0.0

        offset = seqlen_k - seqlen_q
        r = tl.arange(0, BLOCK_Q)
        i = first + r
        last = tl.minimum(first + BLOCK_Q, seqlen_q) - 1
        q = load_rows(Q, seqlen_q - first, stride_qn, stride_qd, HEAD_DIM, D, BLOCK_Q)
        m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
        l = tl.zeros([BLOCK_Q], tl.float32)
        o = tl.zeros([BLOCK_Q, D], tl.float32)
        starts, stops = tile_ranges(
            first + offset, last + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
        )
        for part in tl.static_range(0 if LEFT else 1, 3):
            m, l, o = _attn_fwd_inner(
                m, l, o, q, K, V, i, starts[part], stops[part], scale * LOG2_E, slope,
                (offset, seqlen_k, left, right), stride_kn, stride_kd, stride_vn, stride_vd,
                HEAD_DIM, D, BLOCK_K, part != 1, LEFT, RIGHT, ALIBI, PRECISION,
            )  # fmt: skip
        o, lse = epilogue(m, l, o)
        store_rows(O, o, seqlen_q - first, stride_on, stride_od, HEAD_DIM, D, BLOCK_Q)
        tl.store(LSE + r, lse, mask=i < seqlen_q)


def launch(call: AttentionCall, out: Tensor, lse: Tensor) -> None:
    """Fill out and lse; shapes and strides as in `autograd.forward`, scale > 0."""
    q, k, v = call.q, call.k, call.v
    config = tiling("forward", call.head_dim, q.dtype)

    def rest() -> tuple[int, Arguments]:
        blocks, programs = blocks_of(q, call.max_seqlen_q, config.block_q, call)
        return programs, {
            "scale": call.scale, "blocks": blocks, **strides(q=q, k=k, v=v, o=out),
            **row_strides(l=lse), **sizes(call), **others(call, config),
        }  # fmt: skip

    tensors = {"Q": q, "K": k, "V": v, "O": out, "LSE": lse, **rest_of_call(call)}
    run_kernel(_attn_fwd, tensors, (config, numbers(call)), rest)
