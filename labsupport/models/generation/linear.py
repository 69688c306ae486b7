"""A decode step around its attention: matrices times one vector for each row of the batch.

Such a step waits for memory, and for the launches of its kernels: so there are few, and on Hopper
each fetches its weights while the one before ends.

    embed     the token's row of the table
    qkv       norm, Q K V, rotary positions: q, and k, v into the cache
    linear    a matrix alone; after a norm; added to the residual; gate and up with SwiGLU

What is needed together lies in neighbouring rows of a matrix: (i, i + head_dim / 2) of a head,
which the rotary positions turn, and (gate, up).
"""

import triton
import triton.language as tl
from torch import Tensor

from labsupport.attention.kernels import mode
from labsupport.attention.kernels.common import Arguments, starts_early, wait_for_inputs


@triton.jit
def _embed(Token, Table, X, Seqlens, Prompts, Output, length, width, BLOCK: tl.constexpr):
    """Grid: rows. X becomes the token's row of the table; Output gets the token."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(Token + row)
    seqlen = tl.load(Seqlens + row)
    d = tl.arange(0, BLOCK)
    tl.store(X + row * width + d, tl.load(Table + token * width + d, d < width), d < width)
    tl.store(Output + row * length + seqlen - tl.load(Prompts + row), token)
    tl.store(Seqlens + row, seqlen + 1)


@triton.jit
def _products(
    X, W, Gain, m, n, rows, eps, N, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """X[m] W[n]^T (BLOCK_M, BLOCK_N) in float32; with a Gain, of normalised rows of X."""
    k = tl.arange(0, BLOCK_K)[None, :]
    x_at = X + m[:, None].to(tl.int64) * K + k
    w_at = W + n[:, None].to(tl.int64) * K + k
    here_m, here_n = m[:, None] < rows, n[:, None] < N
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    if BLOCK_M == 1:
        # Weights do not depend on the kernel before: their first tile is fetched while it ends.
        w = tl.load(w_at, mask=here_n & (k < K), other=0.0)
        wait_for_inputs(EARLY)
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for j in tl.static_range(0, K, BLOCK_K):
            x = tl.load(x_at + j, mask=k < K - j, other=0.0).to(tl.float32)
            if Gain is not None:
                squares += x * x
                x *= tl.load(Gain + j + k, mask=k < K - j, other=0.0)
            sums += w.to(tl.float32) * x
            if j + BLOCK_K < K:
                w = tl.load(w_at + j + BLOCK_K, mask=here_n & (k < K - j - BLOCK_K), other=0.0)
        products = tl.sum(sums, 1)[None, :]
    else:
        wait_for_inputs(EARLY)
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for j in tl.range(0, K, BLOCK_K):
            w = tl.load(w_at + j, mask=here_n & (k < K - j), other=0.0)
            x = tl.load(x_at + j, mask=here_m & (k < K - j), other=0.0)
            if Gain is not None:
                wide = x.to(tl.float32)
                squares += wide * wide
                x = (wide * tl.load(Gain + j + k, mask=k < K - j, other=0.0)).to(w.dtype)
            products = tl.dot(x, tl.trans(w), products, input_precision="ieee")
    if Gain is not None:
        products *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    return products


@triton.jit
def _qkv(
    X, W, Gain, Cos, Sin, Q, K_cache, V_cache, Seqlens, rows, eps, heads, kv_heads, length,
    K: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BLOCK_N rows of W within a head x blocks of the batch."""
    first = tl.program_id(0) * BLOCK_N
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    N = (heads + 2 * kv_heads) * D
    products = _products(X, W, Gain, m, n, rows, eps, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EARLY)
    a, b = tl.split(tl.reshape(products, [BLOCK_M, BLOCK_N // 2, 2]))
    head = first // D
    i = first % D // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
    here = m[:, None] < rows
    slot = tl.load(Seqlens + m, mask=m < rows, other=1)[:, None].to(tl.int64) - 1
    m = m[:, None].to(tl.int64)
    if head < heads + kv_heads:
        cos = tl.load(Cos + slot * (D // 2) + i, mask=here)
        sin = tl.load(Sin + slot * (D // 2) + i, mask=here)
        a, b = a * cos - b * sin, b * cos + a * sin
    if head < heads:
        at = Q + (m * heads + head) * D + i
    elif head < heads + kv_heads:
        at = K_cache + ((m * length + slot) * kv_heads + head - heads) * D + i
    else:
        at = V_cache + ((m * length + slot) * kv_heads + head - heads - kv_heads) * D + i
    tl.store(at, a.to(Q.dtype.element_ty), mask=here)
    tl.store(at + D // 2, b.to(Q.dtype.element_ty), mask=here)


@triton.jit
def _linear(
    X, W, Gain, Y, rows, eps, N,
    K: tl.constexpr, ADD: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Y = X W^T, added to Y, or with pairs (gate, up) of columns as silu(gate) * up.

    Grid: blocks of rows of W x blocks of the batch.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = _products(X, W, Gain, m, n, rows, eps, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EARLY)
    if SWIGLU:
        gate, up = tl.split(tl.reshape(y, [BLOCK_M, BLOCK_N // 2, 2]))
        y = gate * tl.sigmoid(gate) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        N = N // 2
    here = (m[:, None] < rows) & (n[None, :] < N)
    at = Y + m[:, None].to(tl.int64) * N + n[None, :]
    if ADD:
        y += tl.load(at, mask=here, other=0.0)
    tl.store(at, y.to(Y.dtype.element_ty), mask=here)


def embed(
    token: Tensor, table: Tensor, x: Tensor, seqlens: Tensor, prompts: Tensor, output: Tensor
) -> None:
    """Fill x (batch, width), write token (batch,) to output, and add 1 to seqlens.

    output (batch, length) has the row's token number n at n - prompts.
    """
    batch, width = x.shape
    _embed[(batch,)](
        token, table, x, seqlens, prompts, output, output.shape[1], width,
        BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip


def qkv(
    x: Tensor, weight: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k_cache: Tensor,
    v_cache: Tensor, seqlens: Tensor, eps: float,
) -> None:  # fmt: skip
    """Fill q (batch, 1, heads, head_dim), and slot seqlens - 1 of each row of the caches.

    Args:
        x: (batch, width), normalised here with `gain` (width,) and `eps`.
        weight: ((heads + 2 kv_heads) * head_dim, width), pairs of each head next to each other.
        cos, sin: (length, head_dim / 2) float32.
        k_cache, v_cache: (batch, length, kv_heads, head_dim), contiguous.
    """
    heads, head_dim = q.shape[2:]
    length, kv_heads = k_cache.shape[1:3]
    grid, constants = block_sizes(len(x), weight, head_dim)
    _qkv[grid](
        x, weight, gain, cos, sin, q, k_cache, v_cache, seqlens, len(x), eps, heads, kv_heads,
        length, K=x.shape[1], D=head_dim, **constants, **starts_early(x.device),
    )  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, y: Tensor, gain: Tensor | None = None, eps: float = 0.0,
    *, add: bool = False, swiglu: bool = False,
) -> None:  # fmt: skip
    """Fill y (batch, n) with x weight^T, or add it; after RMSNorm where there is a gain.

    Args:
        x: (batch, k), contiguous, like all others.
        weight: (n, k); with `swiglu` (2 n, k), rows gate, up, gate, up ...
    """
    x = x.reshape(len(x), -1)
    grid, constants = block_sizes(len(x), weight)
    _linear[grid](
        x, weight, gain, y, len(x), eps, len(weight), K=x.shape[1], ADD=add, SWIGLU=swiglu,
        **constants, **starts_early(x.device),
    )  # fmt: skip


def block_sizes(rows: int, weight: Tensor, head_dim: int = 0) -> tuple[tuple[int, int], Arguments]:
    """Return the grid and the constants for (rows, k) times weight (n, k).

    A block lies within a head, where there is a head_dim.
    """
    n, k = weight.shape
    block_m = 1 if rows == 1 else min(64, max(16, triton.next_power_of_2(rows)))
    if mode.interpreted():
        block_n, block_k = 256, 256
    elif block_m == 1:
        block_n = (32 if n >= 2048 else 8) // weight.itemsize
        block_k = min(1024, triton.next_power_of_2(k))
    else:
        block_n, block_k = 32 if n >= 2048 else min(16, block_m // 2), 256 // weight.itemsize
    if head_dim:  # the largest power of two that divides it, at most
        block_n = min(block_n, head_dim & -head_dim)
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return (triton.cdiv(n, block_n), triton.cdiv(rows, block_m)), sizes | {"num_warps": 4}
