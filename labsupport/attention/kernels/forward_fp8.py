"""The forward pass in FP8, for Hopper GPUs: their tensor cores multiply 8-bit floats twice as fast.

Two kernels. `_quantise` makes e4m3 numbers of Q, K and V: one scale for each block of rows of a
head, the largest absolute value / 448. `_fp8_fwd` attends with them; its tiles are these blocks, so
that a tile has one scale. For each tile of keys j:

    S  = Q_i K_j^T                                        products of e4m3, sums in float32
    m' = max(m, rowmax S * scale_q scale_k scale)
    P  = exp(S * scale_q scale_k scale - m') * 256          rounded to e4m3, whose range ends at 448
    l  = exp(m - m') l + rowsum P
    O  = exp(m - m') (scale_v before / scale_v) O + P V_j   O is in units of this tile's scale_v

Two things about V. The tensor cores take 8-bit operands only with neighbours along the summed
dimension, which for P V are the keys: `_quantise` stores V transposed. And a thread gets S in
pairs of neighbours, 2 t and 2 t + 1 of each 8 keys (t = 0..3), but must pass P on in fours. The
order of the keys in a sum is free, so P takes two pairs 8 keys apart as four neighbours
(`_pairs_to_fours`), and V's keys are stored in that order: no number changes its thread.

With ROTATE, Q and K are multiplied by the same orthogonal matrix before they are rounded. The
scores stay, and a large channel is spread over all.

Source: Shah et al., "FlashAttention-3" (2024), sections 3.3 and 4.3.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.common import (
    LOG2_E,
    SIZES,
    Arguments,
    apply_mask,
    constants,
    describe,
    load_rows,
    numbers,
    row_strides,
    run_kernel,
    sizes,
    strides,
    tile_ranges,
)
from labsupport.attention.kernels.config import tiling
from labsupport.attention.kernels.forward import epilogue

LARGEST = tl.constexpr(448.0)  # of e4m3
P_BITS = tl.constexpr(8.0)  # P is stored times 2^8: e4m3 has few digits below 2^-6


@triton.jit
def _pairs_to_fours(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Reorder the columns of x (ROWS, BLOCK): 16 g + 8 h + 2 t + e becomes 16 g + 4 t + 2 h + e."""
    x = x.reshape(ROWS, BLOCK // 16, 2, 4, 2)
    return x.permute(0, 1, 3, 2, 4).reshape(ROWS, BLOCK)


@triton.jit(do_not_specialize=SIZES)
def _quantise(
    X, Y, Scale, Rotation, stride_xb, stride_xn, stride_xh, stride_xd,
    stride_yb, stride_yn, stride_yh, stride_yd, heads, seqlen, blocks,
    D: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Round X to Y with scales (batch, heads, blocks). Grid: blocks x heads x batch."""
    program = tl.program_id(0).to(tl.int64)
    first = program % blocks * BLOCK
    head = program // blocks % heads
    batch = program // blocks // heads
    X += batch * stride_xb + head * stride_xh + first * stride_xn
    x = load_rows(X, seqlen - first, stride_xn, stride_xd, D, D, BLOCK)
    if ROTATE:  # by a matrix of -1 and 1: its products are exact
        rotation = load_rows(Rotation, D, D, 1, D, D, D)
        x = tl.dot(x, rotation, input_precision="ieee") * (D**-0.5)
    x = x.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = tl.where(largest == 0.0, 1.0, largest / LARGEST)
    tl.store(Scale + program, scale)
    y = tl.trans(x / scale)
    if FOURS:
        y = _pairs_to_fours(y, D, BLOCK)
    n = tl.arange(0, BLOCK)[None, :]
    d = tl.arange(0, D)[:, None]
    Y += batch * stride_yb + head * stride_yh + first * stride_yn
    tl.store(Y + n * stride_yn + d * stride_yd, y.to(Y.dtype.element_ty))  # zeros after the end


@triton.jit
def _fp8_fwd_inner(
    m, l, o, v_scale, q, K, V, K_scale, V_scale, batch, kv_head, i, start, stop, scale, band,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    RIGHT: tl.constexpr,
):  # fmt: skip
    """Take the keys start..stop into m, l and o, which is in units of v_scale."""
    c = tl.arange(0, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        k = K.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        to_log2 = scale * tl.load(K_scale + j // BLOCK_K)
        new_v_scale = tl.load(V_scale + j // BLOCK_K)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            s = apply_mask(s, i[:, None], (j + c)[None, :], band, False, RIGHT)
        m_new = tl.maximum(m, tl.max(s, 1) * to_log2)
        # A row that has seen no key yet has m = -inf, and -inf - (-inf) is NaN.
        shift = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s * to_log2 - (shift - P_BITS)[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        v = V.load([batch, kv_head, 0, j]).reshape(D, BLOCK_K)
        p = _pairs_to_fours(p.to(v.dtype), BLOCK_Q, BLOCK_K)
        o = tl.dot(p, tl.trans(v), o * (alpha * (v_scale / new_v_scale))[:, None])
        m, v_scale = m_new, new_v_scale
    return m, l, o, v_scale


@triton.jit(do_not_specialize=(*SIZES, "k_blocks"))
def _fp8_fwd(
    Q, O, K, V, LSE, Q_scale, K_scale, V_scale, scale, stride_lb, stride_lh, heads, group,
    seqlen_q, seqlen_k, left, right, blocks, k_blocks,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RIGHT: tl.constexpr,
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
    scale *= LOG2_E * tl.load(Q_scale + (batch * heads + head) * blocks + first // BLOCK_Q)
    K_scale += (batch * (heads // group) + kv_head) * k_blocks
    V_scale += (batch * (heads // group) + kv_head) * k_blocks
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    v_scale = 1.0
    last = tl.minimum(first + BLOCK_Q, seqlen_q) - 1
    starts, stops = tile_ranges(
        first + offset, last + offset, seqlen_k, left, right, BLOCK_K, False, RIGHT
    )
    for part in tl.static_range(1, 3):
        m, l, o, v_scale = _fp8_fwd_inner(
            m, l, o, v_scale, q, K, V, K_scale, V_scale, batch, kv_head, i,
            starts[part], stops[part], scale, (offset, seqlen_k, left, right),
            D, BLOCK_Q, BLOCK_K, part != 1, RIGHT,
        )  # fmt: skip
    o, lse = epilogue(m - P_BITS, l, o * v_scale)
    O.store([batch, head, first, 0], o.to(O.dtype).reshape(1, 1, BLOCK_Q, D))
    at = batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
    tl.store(LSE + at + i, lse, mask=i < seqlen_q)


def quantise(
    x: Tensor, block: int, rotation: Tensor | None = None, *, transpose: bool = False
) -> tuple[Tensor, Tensor]:
    """Round (batch, seqlen, heads, head_dim) to e4m3, with a scale for each block of each head.

    Args:
        x: float16 or bfloat16, head_dim 64 or 128.
        rotation: (head_dim, head_dim) of -1 and 1, times sqrt(head_dim) orthogonal; x @ rotation /
            sqrt(head_dim) is rounded.
        transpose: neighbouring keys are neighbours in memory, in the order that P needs.

    Returns:
        (batch, blocks * block, heads, head_dim) with zeros at its end, and float32
        (batch, heads, blocks).
    """
    batch, seqlen, heads, head_dim = x.shape
    blocks = -(-seqlen // block)
    like = {"dtype": torch.float8_e4m3fn, "device": x.device}
    if transpose:
        y = torch.empty(batch, heads, head_dim, blocks * block, **like).permute(0, 3, 1, 2)
    else:
        y = torch.empty(batch, blocks * block, heads, head_dim, **like)
    scale = x.new_empty((batch, heads, blocks), dtype=torch.float32)

    def rest() -> tuple[int, Arguments]:
        return scale.numel(), {
            **strides(x=x, y=y), "heads": heads, "seqlen": seqlen, "blocks": blocks, "D": head_dim,
            "BLOCK": block, "ROTATE": rotation is not None, "FOURS": transpose, "num_warps": 4,
        }  # fmt: skip

    run_kernel(_quantise, {"X": x, "Y": y, "Scale": scale, "Rotation": rotation}, (block,), rest)
    return y, scale


def round_inputs(q: Tensor, k: Tensor, v: Tensor, rotation: Tensor | None) -> list[Tensor]:
    """Return q, k and v in e4m3, and their scales; v is transposed."""
    config = tiling("fp8", q.shape[3], q.dtype, hopper=True)
    q8, q_scale = quantise(q, config.block_q, rotation)
    k8, k_scale = quantise(k, config.block_k, rotation)
    v8, v_scale = quantise(v, config.block_k, transpose=True)
    return [q8, k8, v8, q_scale, k_scale, v_scale]


def launch(call: AttentionCall, out: Tensor, lse: Tensor, rotation: Tensor | None) -> None:
    """Fill out and lse, as `forward.launch` does, after rounding q, k and v."""
    config = tiling("fp8", call.head_dim, call.q.dtype, hopper=True)
    q8, k8, v8, q_scale, k_scale, v_scale = round_inputs(call.q, call.k, call.v, rotation)
    tensors = {
        "Q": describe(q8, config.block_q), "O": describe(out, config.block_q),
        "K": describe(k8, config.block_k),
        "V": describe(v8.permute(0, 2, 3, 1), call.head_dim, config.block_k, plain=True),
        "LSE": lse, "Q_scale": q_scale, "K_scale": k_scale, "V_scale": v_scale,
    }  # fmt: skip

    def rest() -> tuple[int, Arguments]:
        return q_scale.numel(), {
            "scale": call.scale, "blocks": q_scale.shape[2], "k_blocks": k_scale.shape[2],
            "D": call.head_dim, "RIGHT": call.right >= 0, **row_strides(l=lse),
            **sizes(call), **constants(config),
        }  # fmt: skip

    run_kernel(_fp8_fwd, tensors, (config, numbers(call)), rest)
