"""What the kernels share: which tiles of the score matrix are visible, and which entries of a tile.

Query i and key j meet when  i + offset - left <= j <= i + offset + right,  offset = N_k - N_q, as
in `band.py`. LEFT and RIGHT say at compile time whether there is such a limit; a causal mask is
right = 0. For a block of rows the columns fall into up to three runs of tiles:

    start          full_start         full_stop          stop
      | some rows see |   all rows see    | some rows see  |
      |    (masked)   |    (no mask)      |    (masked)    |
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * log2(e)), and exp2 is one instruction

# Triton compiles anew for sizes that are 1, or a multiple of 16. Of these it would gain nothing.
SIZES = (
    *("heads", "seqlen", "seqlen_q", "seqlen_k", "left", "right", "blocks"),
    *("stride_lb", "stride_lh", "stride_slope"),
)


@triton.jit
def hide(s, i, j, offset, seqlen_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Scores with -inf where query i may not see key j; i and j broadcast to the tile."""
    visible = j < seqlen_k
    if RIGHT:
        visible &= j <= i + offset + right
    if LEFT:
        visible &= j >= i + offset - left
    return tl.where(visible, s, -float("inf"))


@triton.jit
def distance_penalty(slope, i, j, offset):
    """ALiBi: slope * |i + offset - j|, to be subtracted from the scores."""
    return slope * tl.abs(i + offset - j).to(tl.float32)


@triton.jit
def runs(
    first, last, size, below, above,
    BLOCK: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """Columns first-below .. last+above, of `size`, as (start, full_start, full_stop, stop).

    `first` and `last` are the block's rows, moved to the columns' axis. Row r sees the columns
    r - below .. r + above; BELOW and ABOVE say which of the two limits exist. All edges but `stop`
    are multiples of BLOCK.
    """
    start = 0
    full_start = 0
    stop = size
    full_stop = size // BLOCK * BLOCK
    if ABOVE:
        stop = tl.minimum(stop, last + above + 1)
        full_stop = tl.minimum(full_stop, tl.maximum(first + above + 1, 0) // BLOCK * BLOCK)
    if BELOW:
        start = tl.maximum(first - below, 0) // BLOCK * BLOCK
        full_start = tl.cdiv(tl.maximum(last - below, 0), BLOCK) * BLOCK
    stop = tl.maximum(stop, start)
    full_start = tl.minimum(full_start, tl.cdiv(stop, BLOCK) * BLOCK)
    full_stop = tl.maximum(full_stop, full_start)
    return start, full_start, full_stop, stop


@triton.jit
def sequence(cu_seqlens, batch, seqlen, PACKED: tl.constexpr):
    """Where a sequence begins among packed ones (else 0), and its length."""
    start = tl.zeros([], tl.int64)
    if PACKED:
        start = tl.load(cu_seqlens + batch).to(tl.int64)
        seqlen = (tl.load(cu_seqlens + batch + 1) - start).to(tl.int32)
    return start, seqlen


@triton.jit
def load_rows(
    X, count, stride_n, stride_d, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A (BLOCK, D) tile that begins at X; 0 in rows from `count` and columns from HEAD_DIM on."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, D)[None, :]
    return tl.load(X + r * stride_n + d * stride_d, mask=(r < count) & (d < HEAD_DIM), other=0.0)


@triton.jit
def store_rows(
    X, x, count, stride_n, stride_d, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The opposite of `load_rows`, rounding to the tensor's dtype."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, D)[None, :]
    here = (r < count) & (d < HEAD_DIM)
    tl.store(X + r * stride_n + d * stride_d, x.to(X.dtype.element_ty), mask=here)


def describe(x, rows):
    """(batch, seqlen, heads, head_dim) for the copy engine, in tiles of (rows, head_dim)."""
    batch, seqlen, heads, head_dim = x.shape
    stride_b, stride_n, stride_h, stride_d = x.stride()
    shape, strides = [batch, heads, seqlen, head_dim], [stride_b, stride_h, stride_n, stride_d]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, head_dim])


def describe_rows(x, rows):
    """(2, batch, heads, seqlen): two numbers a query, in tiles of (rows,)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, 1, rows])
