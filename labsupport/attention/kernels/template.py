"""The forward pass as a template: its caller supplies the update of (m, l, acc).

    for each tile of keys j:
        scores = Q_i K_j^T * scale * log2(e), -inf where a query may not see a key
        m, l, acc = update(m, l, acc, scores, v)        <- a `@triton.jit` function that you write
    O_i = acc / l

The rest is `forward.py` at its smallest: contiguous tensors, no grouped heads, no windows, every
tile masked. Triton compiles your function into the kernel; on a CPU the interpreter calls it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from labsupport.attention.inputs import AttentionInputError, check_math_layout
from labsupport.attention.kernels.common import LOG2_E, apply_mask, load_rows, store_rows
from labsupport.attention.kernels.mode import interpreted


@triton.jit
def with_update_kernel(
    Q, K, V, O, M, L, scale, seqlen_q, seqlen_k,
    update: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of queries, leading dimensions as one. M and L end as maximum (base 2), sum."""
    first = tl.program_id(0) * BLOCK_Q
    lead = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, BLOCK_Q)
    c = tl.arange(0, BLOCK_K)
    rows = lead * seqlen_q + first
    K += lead * seqlen_k * D
    V += lead * seqlen_k * D
    q = load_rows(Q + rows * D, seqlen_q - first, D, 1, D, D, BLOCK_Q)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    for j in tl.range(0, seqlen_k, BLOCK_K):
        k = load_rows(K, seqlen_k - j, D, 1, D, D, BLOCK_K)
        v = load_rows(V, seqlen_k - j, D, 1, D, D, BLOCK_K)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        scores = apply_mask(
            scores, (first + r)[:, None], (j + c)[None, :], (seqlen_k - seqlen_q, seqlen_k, 0, 0),
            False, CAUSAL,
        )  # fmt: skip
        m, l, acc = update(m, l, acc, scores, v)
        K += BLOCK_K * D
        V += BLOCK_K * D
    o = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    store_rows(O + rows * D, o, seqlen_q - first, D, 1, D, D, BLOCK_Q)
    tl.store(M + rows + r, m, mask=first + r < seqlen_q)
    tl.store(L + rows + r, l, mask=first + r < seqlen_q)


@triton.jit
def softmax_update(m, l, acc, scores, v):
    """The update of FlashAttention-2, as in `forward.py`."""
    m_new = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen no key yet has m = -inf, and -inf - (-inf) is NaN.
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(scores - shift[:, None])
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, l, acc


def attention_with_update(
    update: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's forward pass with your update.

    Args:
        update: a `@triton.jit` function `update(m, l, acc, scores, v) -> (m, l, acc)`, called once
            for each tile of keys. m and l (block_q,) and acc (block_q, head_dim) are float32, and
            begin as -inf, 0 and 0. scores (block_q, block_k), float32, carry the factor log2(e):
            exp2 of them is the exp of attention; -inf hides a key. v (block_k, head_dim) has the
            inputs' dtype. A row that has seen no key keeps m = -inf, l = 0 and acc = 0.
        q: (..., seqlen_q, head_dim), float16, bfloat16 or float32; head_dim 16, 32, 64 or 128.
        k, v: (..., seqlen_k, head_dim), same dtype.
        causal: query i sees the keys up to i + seqlen_k - seqlen_q.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        block_q, block_k: rows and columns of a tile, powers of two from 16 on.

    Returns:
        out = acc / l like q (0 where l is 0), and m and l as the last update left them,
        (..., seqlen_q), float32: the log-sum-exp in base 2 is m + log2(l).

    Raises:
        AttentionInputError: tensors that do not fit together, or a head_dim that is not listed.
    """
    check_math_layout(q, k, v)
    head_dim, leading = q.shape[-1], q.shape[:-2]
    if head_dim not in (16, 32, 64, 128):
        raise AttentionInputError(f"head_dim must be 16, 32, 64 or 128, but {head_dim} was given.")
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    m, l = (q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(2))
    if not q.numel():
        return out, m, l
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    with torch.cuda.device_of(q):
        with_update_kernel[(-(-q.shape[-2] // block_q), math.prod(leading))](
            q, k, v, out, m, l, scale, q.shape[-2], k.shape[-2],
            update=update, D=head_dim, BLOCK_Q=block_q, BLOCK_K=block_k, CAUSAL=causal,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return out, m, l


def run_update(update: Any, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Run `attention_with_update` on this machine's device; tensors go in and out on the CPU."""
    device = "cpu" if interpreted() else "cuda"
    tensors = (tensor.to(device) for tensor in inputs)
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of NaN
        results = attention_with_update(update, *tensors, **options)
    return tuple(tensor.cpu() for tensor in results)
