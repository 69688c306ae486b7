"""FlashAttention's backward pass for Hopper GPUs, in Gluon: five products in one kernel.

`backward.py` and `hopper.py` take two kernels, one that walks along the queries for dK and dV, and
one that walks along the keys for dQ. Both recompute S and dO V^T: seven products. Here one program
has a block of 128 keys and walks along the queries. dQ = sum of dS K over all blocks of keys then
belongs to no program; each adds its share to a float32 tensor in memory:

    S^T  = K Q^T,    P^T = exp2(S^T - shift)              shift: lse * log2(e)
    dP^T = V dO^T,   dS^T = P^T * (dP^T - delta)          delta: rowsum(dO * O) - dlse
    dV  += P^T dO,   dK += dS^T Q                         in registers, until the end
    dQ  += dS K                                           in memory

S and dP are computed transposed, so that P^T and dS^T are already where the tensor cores want the
left factor of the next product: in the registers of the same warps. The sums of dQ come in any
order, and float32 addition is not associative: **the last bits of dQ differ from run to run**. For
the same bits every time (`torch.use_deterministic_algorithms`), take the two Triton kernels.

The warps of a program have different jobs:

    producer      one warp: asks the TMA unit for K and V, then for the tiles of Q, dO,
                  shift and delta
    consumers     two groups of four warps, 64 keys each: products and elementwise arithmetic

A product with dS sums over all 128 keys, so the consumers exchange their halves of dS in shared
memory, and each computes one half of the tile of dQ: with head_dim 128 half of the columns of 64
queries, with head_dim 64 half of 128 queries. The TMA unit adds it to dQ while the consumers go
on (`cp.reduce.async.bulk.tensor`). In memory a half lies in the order in which threads have its
numbers in registers: four at a time, without bank conflicts. `_round` restores the order of rows.

    barrier     protects                                     arrives            waits
    k_ready     K and V have been copied                     the TMA unit       consumers
    ready       a tile of Q, dO, shift and delta, too        the TMA unit       consumers
    empty       its buffers may be overwritten               each consumer      producer
    ds_ready    both halves of dS are in shared memory       each consumer      consumers

The tiles have STAGES buffers, a ring as in `forward_gluon.py`, which explains phases. dS has two:
a consumer that has passed `ds_ready` for tile t has finished its dQ of tile t - 1, so that the
other one may overwrite the dS of t - 1 with that of t + 1.

Products are asynchronous, and `warpgroup_mma_wait(n)` waits until n of them at most are under way.
A consumer's step, with what its tensor cores and its other units do at the same time:

    products    S, dP        dP     |               dV            dQ      dK
    others              exp2 of S   | dS, store it     exchange        |  store dQ

The waits are at the bars: for dP, and for dQ.

Sources: Dao, "FlashAttention-2" (2023), algorithm 2; Shah et al., "FlashAttention-3" (2024),
section B.1, for the jobs of the warps and dQ by the TMA unit; FlashAttention-4's kernel for Hopper
(`flash_attn/cute/flash_bwd_sm90.py`), for the order of the products and of dQ in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.backward import launch_preprocess
from labsupport.attention.kernels.common import (
    LOG2_E,
    SIZES,
    Arguments,
    blocks_of,
    describe,
    numbers,
    run_kernel,
    sizes,
)
from labsupport.attention.kernels.config import can_be_described
from labsupport.attention.kernels.forward_gluon import descriptor

ROWS = gl.constexpr(64)  # keys of a consumer: what one tensor-core instruction takes
KEYS = gl.constexpr(128)  # keys of a program: of two consumers


@builtin
def _reduce_add(desc, at, tile, _semantic: Any = None):
    """Ask the TMA unit to add a tile in shared memory to the tensor; Gluon lacks the name."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, desc.handle, at, tile.handle)


@triton.jit
def first_tile(q_row, batch, BLOCK_Q: tl.constexpr):
    """The tile of dQ where a packed sequence begins: one may reach into two tiles more than fit."""
    return q_row // BLOCK_Q + 2 * batch


@gluon.jit
def _work(sizes, cu_q, cu_k, mask: gl.constexpr, BLOCK_Q: gl.constexpr):
    """The block of keys of this program, and the queries that see any of it."""
    heads, group, seqlen_q, seqlen_k, left, right, blocks = sizes
    LEFT: gl.constexpr = mask[0]
    RIGHT: gl.constexpr = mask[1]
    PACKED: gl.constexpr = mask[2]
    ROTATE: gl.constexpr = mask[3]
    kv_heads = heads // group
    program = gl.program_id(0)
    col = program % blocks * KEYS  # causal: the block that most queries see is the first
    head = program // blocks % kv_heads
    batch = program // blocks // kv_heads
    q_row = 0
    k_row = 0
    tile = 0
    if PACKED:
        q_row = gl.load(cu_q + batch)
        tile = first_tile(q_row, batch, BLOCK_Q)
        k_row = gl.load(cu_k + batch)
        seqlen_q = gl.load(cu_q + batch + 1) - q_row
        seqlen_k = gl.load(cu_k + batch + 1) - k_row
        batch = 0
    offset = seqlen_k - seqlen_q
    start = 0
    stop = seqlen_q
    if RIGHT:
        start = gl.maximum(col - offset - right, 0) // BLOCK_Q * BLOCK_Q
    if LEFT:
        stop = gl.minimum(stop, gl.minimum(col + KEYS, seqlen_k) - offset + left)
    if PACKED:
        # The engine copies rows of numbers from multiples of 16 bytes only.
        start -= q_row % 4
        stop = gl.where(col < seqlen_k, stop, start)
    tiles = gl.maximum(gl.cdiv(stop - start, BLOCK_Q), 0)
    last = start + (tiles - 1) * BLOCK_Q
    first = start
    if ROTATE:
        # Otherwise all programs of a head would add to the same tile of dQ at the same time.
        first += program % blocks * tiles // blocks * BLOCK_Q
    rows = (start, first, last)
    return batch, head, q_row, k_row, tile, seqlen_q, seqlen_k, col, rows, tiles


@gluon.jit
def _next(head, row, rows, BLOCK_Q: gl.constexpr):
    """The next tile of queries: from first to last, from start to first; then the next head."""
    start, first, last = rows
    row = gl.where(row == last, start, row + BLOCK_Q)
    return gl.where(row == first, head + 1, head), row


@gluon.jit
def _produce(work, inputs, mask: gl.constexpr):
    """Ask for K and V, then for the tiles of queries as soon as there is room."""
    buffers, barriers, sizes, cu_q, cu_k = work
    Q, dO, K, V, Rows = inputs
    k_buffers, v_buffers, q_buffers, do_buffers, row_buffers, _, _ = buffers
    k_ready, ready, empty, _ = barriers
    BLOCK_Q: gl.constexpr = q_buffers.shape[3]
    STAGES: gl.constexpr = q_buffers.shape[0]
    bytes: gl.constexpr = 2 * (Q.block_type.nbytes + Rows.block_type.nbytes)
    batch, kv_head, q_row, k_row, _tile, _seqlen_q, _seqlen_k, col, rows, tiles = _work(
        sizes, cu_q, cu_k, mask, BLOCK_Q
    )
    group = sizes[1]
    mbarrier.expect(k_ready, 4 * K.block_type.nbytes)
    for i in gl.static_range(2):
        at = [batch, kv_head, k_row + col + i * ROWS, 0]
        tma.async_copy_global_to_shared(K, at, k_ready, k_buffers.index(i))
        tma.async_copy_global_to_shared(V, at, k_ready, v_buffers.index(i))
    head = kv_head * group
    row = rows[1]
    for t in range(tiles * group):
        stage = t % STAGES
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), t // STAGES & 1 ^ 1)
        mbarrier.expect(bar, bytes)
        at = [batch, head, q_row + row, 0]
        tma.async_copy_global_to_shared(Q, at, bar, q_buffers.index(stage))
        tma.async_copy_global_to_shared(dO, at, bar, do_buffers.index(stage))
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(
                Rows, [i, batch, head, q_row + row], bar, row_buffers.index(2 * stage + i)
            )
        head, row = _next(head, row, rows, BLOCK_Q)


@gluon.jit
def _apply_mask(s, row, col, seqlen_q, seqlen_k, left, right, mask: gl.constexpr):
    """Set scores to -inf where a query may not see a key; s is S^T, (keys, queries)."""
    LEFT: gl.constexpr = mask[0]
    RIGHT: gl.constexpr = mask[1]
    PACKED: gl.constexpr = mask[2]
    BLOCK_Q: gl.constexpr = s.shape[1]
    diagonal = row + seqlen_k - seqlen_q - col  # of the block, the key that the first query ends at
    crosses = col + ROWS > seqlen_k
    if PACKED:
        crosses |= (row < 0) | (row + BLOCK_Q > seqlen_q)
    if RIGHT:
        crosses |= diagonal + right < ROWS - 1
    if LEFT:
        crosses |= diagonal + BLOCK_Q - 1 - left > 0
    if crosses:
        # Key j is seen by the queries from .. to - 1.
        j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))
        i = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, s.type.layout))
        to = gl.where(j < seqlen_k - col, gl.minimum(seqlen_q - row, BLOCK_Q), 0)
        if LEFT:
            to = gl.minimum(to, j - diagonal + left + 1)
        s = gl.where(i[None, :] < to[:, None], s, -float("inf"))
        if RIGHT:
            s = gl.where(i[None, :] >= (j - diagonal - right)[:, None], s, -float("inf"))
        if PACKED:
            s = gl.where((i >= -row)[None, :], s, -float("inf"))
    return s


@gluon.jit
def _store(X, x, tile, batch, head, row, count, heads, seqlen):
    """Store a block of dK or dV, by way of a tile in shared memory that is no longer needed."""
    D: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tile.store(x.to(tile.dtype))
    x = tile.load(layout)
    j = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = ((batch * seqlen + row).to(gl.int64) * heads + head) * D
    gl.store(X + at + (j[:, None] * (heads * D) + c[None, :]), x, mask=(j < count)[:, None])


@gluon.jit
def _consume(ME: gl.constexpr, work, outputs, mask: gl.constexpr, FROM_DELTA: gl.constexpr):
    """The products of the ME-th 64 keys of the block, and the ME-th half of dQ."""
    buffers, barriers, sizes, cu_q, cu_k = work
    dQ, dK, dV, scale = outputs
    k_buffers, v_buffers, q_buffers, do_buffers, row_buffers, ds_buffers, dq_buffers = buffers
    k_ready, ready, empty, ds_ready = barriers
    heads, group, _, total_k, left, right, _ = sizes
    BLOCK_Q: gl.constexpr = q_buffers.shape[3]
    STAGES: gl.constexpr = q_buffers.shape[0]
    D: gl.constexpr = q_buffers.shape[4]
    dtype: gl.constexpr = q_buffers.dtype
    # Layouts say which thread holds which elements; these are the tensor cores'.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    # Half of dQ: with head_dim 128 half of the columns of 64 queries, with 64 half of 128 queries.
    DQ_ROW: gl.constexpr = ME * (BLOCK_Q - 64)
    DQ_COL: gl.constexpr = ME * (D - 64)

    batch, kv_head, q_row, k_row, tile, seqlen_q, seqlen_k, col, rows, tiles = _work(
        sizes, cu_q, cu_k, mask, BLOCK_Q
    )
    col += ME * ROWS
    k = k_buffers.index(ME).reshape([ROWS, D])
    v = v_buffers.index(ME).reshape([ROWS, D])
    k_mine = k.slice(DQ_COL, 64, dim=1)
    k_other = k_buffers.index(1 - ME).reshape([ROWS, D]).slice(DQ_COL, 64, dim=1)
    zero = gl.zeros([ROWS, BLOCK_Q], gl.float32, s_layout)
    no_dq = gl.zeros([64, 64], gl.float32, dq_layout)
    dk = gl.zeros([ROWS, D], gl.float32, dk_layout)
    dv = gl.zeros([ROWS, D], gl.float32, dk_layout)
    head = kv_head * group
    row = rows[1]
    mbarrier.wait(k_ready, 0)
    for t in range(tiles * group):
        stage = t % STAGES
        q = q_buffers.index(stage).reshape([BLOCK_Q, D])
        do = do_buffers.index(stage).reshape([BLOCK_Q, D])
        shift_row = row_buffers.index(2 * stage).reshape([BLOCK_Q])
        delta_row = row_buffers.index(2 * stage + 1).reshape([BLOCK_Q])
        mbarrier.wait(ready.index(stage), t // STAGES & 1)
        dp = zero
        if FROM_DELTA:  # the product then starts from -delta
            dp = zero - delta_row.load(row_layout)[None, :]
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=FROM_DELTA, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        s = _apply_mask(s, row, col, seqlen_q, seqlen_k, left, right, mask)
        p32 = gl.exp2(s * scale - shift_row.load(row_layout)[None, :])
        p = gl.convert_layout(p32.to(dtype), p_layout)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if not FROM_DELTA:
            dp -= delta_row.load(row_layout)[None, :]
        ds = (p32 * dp).to(dtype)
        ds_mine = ds_buffers.index(t % 2 * 2 + ME)
        ds_other = ds_buffers.index(t % 2 * 2 + 1 - ME)
        tma.store_wait(0)  # until the TMA unit has read the last tile of dQ
        ds_mine.store(ds)
        dv = warpgroup_mma(p, do, dv, is_async=True)
        fence_async_shared()
        mbarrier.arrive(ds_ready, count=1)
        mbarrier.wait(ds_ready, t & 1)
        ds_mine = ds_mine.permute((1, 0)).slice(DQ_ROW, 64, dim=0)
        ds_other = ds_other.permute((1, 0)).slice(DQ_ROW, 64, dim=0)
        dq = warpgroup_mma(ds_mine, k_mine, no_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds_other, k_other, dq, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
        # Row 16 w + 8 h + r, column 8 g + 2 c + e is in lane 4 r + c of warp w: (w, h, r, g, c, e).
        dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([16, 256])
        dq_buffers.index(ME).reshape([16, 256]).store(dq)
        fence_async_shared()
        at = tile + (row + q_row % 4) // BLOCK_Q
        _reduce_add(dQ, [batch, head, 32 * at + 16 * ME, 0], dq_buffers.index(ME))
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(empty.index(stage), count=1)
        head, row = _next(head, row, rows, BLOCK_Q)
    count = seqlen_k - col
    k_row += col
    kv_heads = heads // group
    _store(dV, dv, v, batch, kv_head, k_row, count, kv_heads, total_k)
    dk *= scale * 0.6931471805599453  # ln 2: from log2 to log
    _store(dK, dk, v, batch, kv_head, k_row, count, kv_heads, total_k)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=(*SIZES, "group"))
def _gluon_bwd(
    Q, dO, K, V, Rows, dQ, dK, dV, cu_q, cu_k, scale,
    heads, group, seqlen_q, seqlen_k, left, right, blocks,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, ROTATE: gl.constexpr, FROM_DELTA: gl.constexpr,
):  # fmt: skip
    """dK and dV, and dQ added to dQ. Grid: blocks of keys x key/value heads x batch."""
    mask: gl.constexpr = (LEFT, RIGHT, PACKED, ROTATE)
    dtype: gl.constexpr = Q.dtype
    BLOCK_Q: gl.constexpr = Q.block_shape[2]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_Q], dtype)
    k_buffers = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], K.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], V.layout)
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, D], Q.layout)
    do_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, D], dO.layout)
    row_buffers = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, 1, 1, BLOCK_Q], Rows.layout)
    ds_buffers = gl.allocate_shared_memory(dtype, [4, ROWS, BLOCK_Q], ds_layout)
    dq_buffers = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 16, 256], dQ.layout)
    buffers = (k_buffers, v_buffers, q_buffers, do_buffers, row_buffers, ds_buffers, dq_buffers)

    layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [1], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    ds_ready = gl.allocate_shared_memory(gl.int64, [1], layout)
    barriers = (k_ready, ready, empty, ds_ready)
    mbarrier.init(k_ready, count=1)
    mbarrier.init(ds_ready, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()

    sizes = (heads, group, seqlen_q, seqlen_k, left, right, blocks)
    work = (buffers, barriers, sizes, cu_q, cu_k)
    inputs = (Q, dO, K, V, Rows)
    outputs = (dQ, dK, dV, scale)
    # All jobs start with the same registers (maxnreg); then the producer gives up most of them.
    gl.warp_specialize(
        [
            (_consume, (0, work, outputs, mask, FROM_DELTA)),
            (_consume, (1, work, outputs, mask, FROM_DELTA)),
            (_produce, (work, inputs, mask)),
        ],
        [4, 1],  # warps of all jobs but the first, which has num_warps
        [240, 24],  # their registers a thread
    )


@triton.jit(do_not_specialize=("heads", "seqlen", "blocks"))
def _round(
    X, Y, cu_q, scale, heads, seqlen, blocks, PACKED: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Y = X * scale in the dtype of Y, and in rows. Grid: tiles of queries x heads x batch."""
    program = tl.program_id(0)
    block = program % blocks
    head = program // blocks % heads
    batch = program // blocks // heads
    first = block * BLOCK_Q
    tile = program
    start = batch.to(tl.int64) * seqlen
    if PACKED:
        start = tl.load(cu_q + batch)
        tiles = seqlen // BLOCK_Q + 2 * (tl.num_programs(0) // blocks // heads)
        tile = head * tiles + first_tile(start, batch, BLOCK_Q) + block
        first -= start % 4
        seqlen = tl.load(cu_q + batch + 1) - start
    x = tl.load(X + tile.to(tl.int64) * BLOCK_Q * D + tl.arange(0, BLOCK_Q * D), first < seqlen)
    # (half, g, w, r, c, h, e), see `_consume`; halves are of columns or of rows
    x = x.reshape(2, 8, 4, 8, 4, 2, 2)
    if D == 128:
        x = x.permute(2, 5, 3, 0, 1, 4, 6).reshape(BLOCK_Q, D)
    else:
        x = x.permute(0, 2, 5, 3, 1, 4, 6).reshape(BLOCK_Q, D)
    i = first + tl.arange(0, BLOCK_Q)
    at = ((start + i).to(tl.int64) * heads + head) * D
    here = (i >= 0) & (i < seqlen)
    x = (x * scale).to(Y.dtype.element_ty)
    tl.store(Y + at[:, None] + tl.arange(0, D)[None, :], x, mask=here[:, None])


def _flat_descriptor(x: Tensor, shape: list[int], steps: list[int], tile: list[int]) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(tile))
    return TensorDescriptor(x, shape, steps, tile, layout)


def launch(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, **config: int,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, as `backward.launch` does; all three are contiguous.

    The last bits of dq differ from call to call. In packed sequences a NaN or infinity can make
    gradients of neighbouring sequences NaN, too, because a tile may reach into them.

    Args:
        call: within the limits of the backend `flash_gluon`.
        dout: with any strides.
        config: constants of the kernel to use instead of the tuned ones.
    """
    of_dq = call.scale  # the scores' scale may change its sign with q
    call = call.with_positive_scale()
    q, k, v, packed = call.q, call.k, call.v, call.packed
    if not can_be_described(dout):
        dout = dout.contiguous()
    # 16-byte steps from one row of numbers to the next.
    rows = lse.new_empty((2, *lse.shape[:-1], -(-lse.shape[-1] // 4) * 4))[..., : lse.shape[-1]]
    launch_preprocess(dout, out, lse, dlse, shift=rows[0], delta=rows[1])
    full = call.left < 0 and call.right < 0
    config = {
        "STAGES": 2, "ROTATE": full,
        "FROM_DELTA": full or call.head_dim == 64,
    } | config  # fmt: skip
    block_q = 8192 // call.head_dim
    q4, k4, v4, dout4 = (x[None] if packed else x for x in (q, k, v, dout))
    tiles = -(-q.shape[-3] // block_q)
    if call.cu_seqlens_q is not None:
        tiles = len(q) // block_q + 2 * (len(call.cu_seqlens_q) - 1)
    shape = len(q4), call.heads, tiles * 32, 256  # a tile is 32 rows of 256 numbers
    dq32 = torch.zeros(shape, dtype=torch.float32, device=q.device)
    rows4 = rows[:, None] if packed else rows
    tensors = {
        "Q": describe(q4, block_q, make=descriptor),
        "dO": describe(dout4, block_q, make=descriptor),
        "K": describe(k4, 64, make=descriptor), "V": describe(v4, 64, make=descriptor),
        "Rows": describe(rows4, 1, block_q, make=descriptor, plain=True),
        "dQ": describe(dq32, 16, 256, make=_flat_descriptor, plain=True), "dK": dk, "dV": dv,
        "cu_q": call.cu_seqlens_q if packed else lse,
        "cu_k": call.cu_seqlens_k if packed else lse,
    }  # fmt: skip

    def rest() -> tuple[int, Arguments]:
        blocks, programs = blocks_of(k, call.max_seqlen_k, KEYS.value, call)
        return programs, {
            "scale": call.scale * LOG2_E.value, **sizes(call), "blocks": blocks,
            "LEFT": call.left >= 0, "RIGHT": call.right >= 0, "PACKED": packed,
            "D": call.head_dim, "num_warps": 4, "maxnreg": 168, **config,
        }  # fmt: skip

    run_kernel(_gluon_bwd, tensors, (numbers(call), packed, *config.values()), rest)

    def rest_of_round() -> tuple[int, Arguments]:
        # Tiles of a packed sequence may begin three rows before it.
        blocks, programs = blocks_of(q, call.max_seqlen_q + 3, block_q, call)
        return programs, {
            "scale": of_dq, "heads": call.heads, "seqlen": q.shape[-3], "blocks": blocks,
            "PACKED": packed, "D": call.head_dim, "BLOCK_Q": block_q,
        }  # fmt: skip

    of_round = {"X": dq32, "Y": dq, "cu_q": tensors["cu_q"]}
    run_kernel(_round, of_round, (of_dq, numbers(call)), rest_of_round)
