"""FlashAttention's first loop order, to compare with the second one.

    version 1: one program a head                     version 2 (forward.py): one a block of queries
      for each block of keys j:                         for each block of keys j:
        for each block of queries i:                      update m, l, O in registers
          read O_i, m_i, l_i from memory                O_i = O_i / l_i, once
          update; O_i stays divided by l_i
          write O_i, m_i, l_i to memory

K_j and V_j stay on the chip and everything else travels: O is read and written once for each block
of keys. And batch x heads programs are all the parallelism there is, however long the sequence.

Source: Dao et al., "FlashAttention" (2022), algorithm 1.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from labsupport.attention.kernels.common import (
    LOG2_E,
    apply_mask,
    load_rows,
    row_strides,
    store_rows,
    strides,
)
from labsupport.attention.kernels.config import padded, tiling


@triton.jit
def _attn_fwd_version1(
    Q, K, V, O, M, LSE, scale,
    stride_qb, stride_qn, stride_qh, stride_qd, stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd, stride_ob, stride_on, stride_oh, stride_od,
    stride_lb, stride_lh, heads, group, seqlen_q, seqlen_k,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: heads x batch. M begins at -inf, LSE and O (float32) at 0; LSE is l until the end."""
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    batch = (program // heads).to(tl.int64)
    offset = seqlen_k - seqlen_q
    Q += batch * stride_qb + head * stride_qh
    O += batch * stride_ob + head * stride_oh
    M += batch * stride_lb + head * stride_lh
    LSE += batch * stride_lb + head * stride_lh
    K += batch * stride_kb + head // group * stride_kh
    V += batch * stride_vb + head // group * stride_vh
    r = tl.arange(0, BLOCK_Q)
    c = tl.arange(0, BLOCK_K)
    for j in tl.range(0, seqlen_k, BLOCK_K):
        col = tl.cast(j, tl.int64)
        k = load_rows(K + col * stride_kn, seqlen_k - j, stride_kn, stride_kd, HEAD_DIM, D, BLOCK_K)
        v = load_rows(V + col * stride_vn, seqlen_k - j, stride_vn, stride_vd, HEAD_DIM, D, BLOCK_K)
        first = tl.maximum(j - offset, 0) // BLOCK_Q * BLOCK_Q if CAUSAL else 0
        for i in tl.range(first, seqlen_q, BLOCK_Q):
            row = tl.cast(i, tl.int64)
            count = seqlen_q - i
            q = load_rows(Q + row * stride_qn, count, stride_qn, stride_qd, HEAD_DIM, D, BLOCK_Q)
            o = load_rows(O + row * stride_on, count, stride_on, stride_od, HEAD_DIM, D, BLOCK_Q)
            m = tl.load(M + row + r, mask=r < count, other=-float("inf"))
            l = tl.load(LSE + row + r, mask=r < count, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
            s = apply_mask(
                s, (i + r)[:, None], (j + c)[None, :], (offset, seqlen_k, 0, 0), False, CAUSAL
            )
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(s - shift[:, None])
            kept = l * tl.exp2(m - shift)
            l = kept + tl.sum(p, 1)
            divisor = tl.where(l == 0.0, 1.0, l)
            o = o * (kept / divisor)[:, None]
            o = tl.dot((p / divisor[:, None]).to(v.dtype), v, o, input_precision=PRECISION)
            store_rows(O + row * stride_on, o, count, stride_on, stride_od, HEAD_DIM, D, BLOCK_Q)
            tl.store(M + row + r, m_new, mask=r < count)
            tl.store(LSE + row + r, l, mask=r < count)
            tl.debug_barrier()  # other threads of the program read this in the next round
    for i in tl.range(0, seqlen_q, BLOCK_Q):
        m = tl.load(M + i + r, mask=r < seqlen_q - i, other=0.0)
        l = tl.load(LSE + i + r, mask=r < seqlen_q - i, other=1.0)
        lse = tl.where(l == 0.0, -float("inf"), (m + tl.log2(tl.where(l == 0.0, 1.0, l))) / LOG2_E)
        tl.store(LSE + i + r, lse, mask=r < seqlen_q - i)


def forward_version1(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention's first version, forward only: to be compared with `autograd.forward`.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), as for `forward`.

    Returns:
        out in float32, which version 1 rescales in memory at every step, and lse.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    out = torch.zeros_like(q, dtype=torch.float32)
    lse = q.new_zeros((batch, heads, seqlen_q), dtype=torch.float32)
    config = tiling("forward", head_dim, q.dtype)
    with torch.cuda.device_of(q):
        _attn_fwd_version1[(batch * heads,)](
            Q=q, K=k, V=v, O=out, M=torch.full_like(lse, -torch.inf), LSE=lse,
            scale=1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale,
            **strides(q=q, k=k, v=v, o=out), **row_strides(l=lse), heads=heads,
            group=heads // k.shape[2], seqlen_q=seqlen_q, seqlen_k=k.shape[1], HEAD_DIM=head_dim,
            D=padded(head_dim), BLOCK_Q=min(64, config.block_q), BLOCK_K=min(64, config.block_k),
            CAUSAL=causal, PRECISION="ieee", num_warps=config.warps, num_stages=1,
        )  # fmt: skip
    return out, lse
