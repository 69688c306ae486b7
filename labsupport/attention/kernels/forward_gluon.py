"""FlashAttention's forward pass for Hopper GPUs, in Gluon: groups of warps with different jobs.

A Triton program is one group of warps that do everything in turn: wait for a tile, multiply, take
the softmax, multiply again. The tensor cores idle during the softmax. Gluon, Triton's lower level,
lets us give the warps of a program different jobs (`gl.warp_specialize`):

    producer      one warp: asks the copy engine (TMA) for the tiles of Q, K and V
    consumers     two or three groups of four warps, 64 queries each: products and softmax

There is one program for each multiprocessor. It works through several blocks of queries without a
pause in between: the producer runs ahead, and a consumer starts the scores of the next block
together with the last product of this one. A consumer's step for the tile t of keys and values is

    S = Q K(t)^T,  O = O + P V(t-1)     tensor cores, two products started together
    m, l, P, alpha = softmax of S       exp2 on the special function units
    O = alpha O                         because the running maximum m has changed

With PINGPONG the consumers start their products in turn, so that the tensor cores compute for one
of them while another takes its softmax. Only tiles that cross an edge of the mask are masked.

Barriers in shared memory (`mbarrier`) connect the jobs. A barrier counts arrivals, and each time
that its count is reached its phase flips (0, 1, 0, ...). To wait for phase p is to wait until the
phase p is over; a fresh barrier counts as having finished phase 1, so a first wait for 1 passes.

    barrier     protects                               arrives                 waits
    q_ready     the block of Q has been copied         the copy engine         consumers
    q_empty     its buffer may be overwritten          each consumer           producer
    k_ready     the tile of K has been copied          the copy engine         consumers
    k_empty     its buffer may be overwritten          each consumer           producer
    v_ready, v_empty    the same for V
    order[i]    consumer i may use the tensor cores    the consumer before it  consumer i

K and V have STAGES buffers each, a ring: tile t is in buffer t % STAGES, in its (t // STAGES)-th
round. Q has two, so that the next block is there when this one ends.

Sources: Dao, "FlashAttention-2" (2023), algorithm 1; Shah et al., "FlashAttention-3" (2024), for
producers, consumers and their turns.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * log2(e)), and exp2 is one instruction
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
TRITON_VERSIONS = ("3.6", "3.7")
ROWS = gl.constexpr(64)  # queries of a consumer: what one tensor-core instruction takes


@gluon.jit
def _block(turn, sizes, cu_q, cu_k, mask: gl.constexpr, tile: gl.constexpr):
    """The block of queries that this program attends to in a turn, and its keys.

    A causal mask makes the blocks of a head unequal. Then a program takes them in pairs, the
    longest with the shortest and so on, and all pairs take the same time.
    """
    heads, _, seqlen_q, seqlen_k, left, right, blocks, units = sizes
    LEFT: gl.constexpr = mask[0]
    RIGHT: gl.constexpr = mask[1]
    PACKED: gl.constexpr = mask[2]
    PAIRS: gl.constexpr = mask[3]
    BLOCK_Q: gl.constexpr = tile[0]
    BLOCK_K: gl.constexpr = tile[1]
    # This program's work: one block in each turn, or one pair in each two turns.
    unit = gl.minimum(turn // PAIRS * gl.num_programs(0) + gl.program_id(0), units - 1)
    units_of_head = gl.cdiv(blocks, PAIRS)
    head = unit // units_of_head  # of all sequences
    block = blocks - 1 - unit % units_of_head
    if turn % PAIRS == 1:
        # The middle one of an odd number has no partner. Block `blocks` has no rows: skipped.
        block = gl.where(2 * block == blocks - 1, blocks, blocks - 1 - block)
    batch = head // heads
    head = head % heads
    row = block * BLOCK_Q
    k_row = 0
    rows = seqlen_q - row
    if PACKED:
        row += gl.load(cu_q + batch)
        rows = gl.load(cu_q + batch + 1) - row
        k_row = gl.load(cu_k + batch)
        seqlen_k = gl.load(cu_k + batch + 1) - k_row
        batch = 0
    diagonal = seqlen_k - rows  # the key that the first query of the block ends at
    start = 0
    stop = seqlen_k
    if RIGHT:
        stop = gl.minimum(stop, gl.minimum(diagonal + BLOCK_Q, seqlen_k) + right)
    if LEFT:
        start = gl.maximum(diagonal - left, 0) // BLOCK_K
    tiles = gl.maximum(gl.cdiv(stop, BLOCK_K) - start, 1)
    col = (start + tiles - 1) * BLOCK_K  # from the last tile to the first
    return batch, head, row, rows, k_row, seqlen_k, diagonal, col, tiles


@gluon.jit
def _produce(work, inputs, mask: gl.constexpr, tile: gl.constexpr):
    """Ask for the tiles in the order in which the consumers need them, as soon as there is room."""
    buffers, barriers, sizes, cu_q, cu_k, turns = work
    q_desc, k_desc, v_desc = inputs
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = barriers
    BLOCK_K: gl.constexpr = tile[1]
    STAGES: gl.constexpr = k_buffers.shape[0]
    CONSUMERS: gl.constexpr = tile[0] // ROWS
    n = 0  # blocks so far
    t = 0  # tiles so far
    for turn in range(turns):
        batch, head, row, rows, k_row, _seqlen_k, _diagonal, col, tiles = _block(
            turn, sizes, cu_q, cu_k, mask, tile
        )
        if rows > 0:
            kv_head = head // sizes[1]
            mbarrier.wait(q_empty.index(n % 2), n // 2 & 1 ^ 1)
            mbarrier.expect(q_ready.index(n % 2), CONSUMERS * q_desc.block_type.nbytes)
            for i in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    q_desc, [batch, head, row + i * ROWS, 0],
                    q_ready.index(n % 2), q_buffers.index(n % 2 * CONSUMERS + i),
                )  # fmt: skip
            n += 1
            for _i in range(tiles):
                stage = t % STAGES
                at = [batch, kv_head, k_row + col, 0]
                mbarrier.wait(k_empty.index(stage), t // STAGES & 1 ^ 1)
                mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, at, k_ready.index(stage), k_buffers.index(stage)
                )
                mbarrier.wait(v_empty.index(stage), t // STAGES & 1 ^ 1)
                mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, at, v_ready.index(stage), v_buffers.index(stage)
                )
                t += 1
                col -= BLOCK_K


@gluon.jit
def _apply_mask(s, col, diagonal, seqlen_k, left, right, mask: gl.constexpr):
    """Set scores to -inf where a query may not see a key; leave tiles alone that all may see.

    col is the tile's first key, diagonal the key that its first query ends at.
    """
    LEFT: gl.constexpr = mask[0]
    RIGHT: gl.constexpr = mask[1]
    BLOCK_K: gl.constexpr = s.shape[1]
    crosses = col + BLOCK_K > seqlen_k
    if RIGHT:
        crosses |= col + BLOCK_K - 1 > diagonal + right
    if LEFT:
        crosses |= col < diagonal + ROWS - 1 - left
    if crosses:
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout)) + diagonal - col
        j = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, s.type.layout))
        stop = gl.minimum(i * 0 + BLOCK_K, seqlen_k - col)
        if RIGHT:
            stop = gl.minimum(stop, i + right + 1)
        s = gl.where(j[None, :] < stop[:, None], s, -float("inf"))
        if LEFT:
            s = gl.where(j[None, :] >= (i - left)[:, None], s, -float("inf"))
    return s


@gluon.jit
def _softmax_update(s, m, l, scale):
    """Fold a tile of scores into the running maximum and sum; return P and the factor for O too."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    # A row that has seen no key yet has m = -inf, and -inf - (-inf) is NaN.
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(s * scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    return m_new, l * alpha + gl.sum(p, 1), p, alpha


@gluon.jit
def _two_products(
    q, p, o, use_acc, t, has_k, has_v, buffers, barriers,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """Start S = Q K(t)^T and O = O + P V(t - 1) together; return S, and O, which is not ready."""
    _, k_buffers, v_buffers = buffers
    _, _, k_ready, k_empty, v_ready, _, order = barriers
    STAGES: gl.constexpr = k_buffers.shape[0]
    BLOCK_K: gl.constexpr = k_buffers.shape[3]
    D: gl.constexpr = k_buffers.shape[4]
    k_stage = t % STAGES
    v_stage = (t + STAGES - 1) % STAGES
    k = k_buffers.index(k_stage).reshape([BLOCK_K, D]).permute((1, 0))
    v = v_buffers.index(v_stage).reshape([BLOCK_K, D])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    s = gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout)
    mbarrier.wait(k_ready.index(k_stage), t // STAGES & 1, pred=has_k)
    if PINGPONG:
        mbarrier.wait(order[ME], t & 1 ^ (1 if ME == 0 else 0))
    s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(v_stage), (t - 1) // STAGES & 1, pred=has_v)
    o = warpgroup_mma(p, v, o, use_acc=use_acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(order[(ME + 1) % CONSUMERS], count=1)
    s = warpgroup_mma_wait(1, deps=[s])  # until one product at most is under way: O's
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    return s, o


@gluon.jit
def _consume(
    ME: gl.constexpr, work, outputs, mask: gl.constexpr, tile: gl.constexpr, PINGPONG: gl.constexpr
):
    """Attend with the ME-th 64 queries of each block."""
    buffers, barriers, sizes, cu_q, cu_k, turns = work
    O, L, scale = outputs
    q_buffers, k_buffers, _ = buffers
    q_ready, q_empty, _, _, _, v_empty, _ = barriers
    heads, _, seqlen_q, _, left, right, _, _ = sizes
    BLOCK_K: gl.constexpr = tile[1]
    CONSUMERS: gl.constexpr = tile[0] // ROWS
    STAGES: gl.constexpr = k_buffers.shape[0]
    D: gl.constexpr = k_buffers.shape[4]
    dtype: gl.constexpr = q_buffers.dtype
    # Layouts say which thread holds which elements; these are the tensor cores'.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    # 16 bytes a thread, whole rows a warp: the best for global memory
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])

    nothing = gl.full([ROWS], -float("inf"), gl.float32, s_rows)
    m = nothing
    l = gl.zeros([ROWS], gl.float32, s_rows)
    p = gl.zeros([ROWS, BLOCK_K], dtype, p_layout)
    o = gl.zeros([ROWS, D], gl.float32, o_layout)
    old_batch, old_head, old_row, old_rows, old_tiles = 0, 0, 0, 0, 0
    n = 0  # blocks so far
    t = 0  # tiles so far
    # The first turn has no block before it: it multiplies zeros with whatever V's buffer holds, and
    # stores no rows. The last turn has no block of its own.
    for turn in range(turns + 1):
        batch, head, row, rows, _k_row, seqlen_k, diagonal, col, tiles = _block(
            turn, sizes, cu_q, cu_k, mask, tile
        )
        diagonal += ME * ROWS
        more = turn < turns
        if (rows > 0) | (turn == turns):
            # The first tile of this block, together with the last product of the block before.
            q = q_buffers.index(n % 2 * CONSUMERS + ME).reshape([ROWS, D])
            mbarrier.wait(q_ready.index(n % 2), n // 2 & 1, pred=more)
            s, o = _two_products(
                q, p, o, old_tiles > 1, t, more, t > 0, buffers, barriers, ME, CONSUMERS, PINGPONG
            )
            old_m = m
            old_l = gl.where(l == 0.0, 1.0, l)
            s = _apply_mask(s, col, diagonal, seqlen_k, left, right, mask)
            m, l, p32, alpha = _softmax_update(s, nothing, 0.0, scale)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_empty.index((t + STAGES - 1) % STAGES), count=1, pred=t > 0)
            p = gl.convert_layout(p32.to(dtype), p_layout)
            t += 1

            # Store the block before. A query that has seen no key gets 0 and -inf.
            i = gl.arange(0, ROWS, s_rows) + ME * ROWS
            at = (old_batch * heads + old_head).to(gl.int64) * seqlen_q + old_row
            lse = (old_m + gl.log2(old_l)) * 0.6931471805599453  # ln 2: from log2 to log
            gl.store(L + at + i, lse, mask=i < old_rows)
            out = o * gl.convert_layout(1.0 / old_l, o_rows)[:, None]
            out = gl.convert_layout(out.to(dtype), out_layout)
            i = gl.arange(0, ROWS, gl.SliceLayout(1, out_layout)) + ME * ROWS
            c = gl.arange(0, D, gl.SliceLayout(0, out_layout))
            at = ((old_batch * seqlen_q + old_row).to(gl.int64) * heads + old_head) * D
            to = O + at + (i[:, None] * (heads * D) + c[None, :])
            gl.store(to, out, mask=(i < old_rows)[:, None])
            old_batch, old_head, old_row, old_rows, old_tiles = batch, head, row, rows, tiles

            # The other tiles of this block.
            for step in range(1, gl.where(more, tiles, 1)):
                s, o = _two_products(
                    q, p, o, step > 1, t, True, True, buffers, barriers, ME, CONSUMERS, PINGPONG
                )
                col -= BLOCK_K
                s = _apply_mask(s, col, diagonal, seqlen_k, left, right, mask)
                m, l, p32, alpha = _softmax_update(s, m, l, scale)
                o = warpgroup_mma_wait(0, deps=[o])
                mbarrier.arrive(v_empty.index((t + STAGES - 1) % STAGES), count=1)
                p = gl.convert_layout(p32.to(dtype), p_layout)
                o = o * gl.convert_layout(alpha, o_rows)[:, None]
                t += 1
            mbarrier.arrive(q_empty.index(n % 2), count=1)
            n += 1


@gluon.jit(
    do_not_specialize=("heads", "group", "seqlen_q", "seqlen_k", "left", "right", "blocks", "units")
)
def _attn_fwd(
    q_desc, k_desc, v_desc, O, L, cu_q, cu_k, scale, heads, group, seqlen_q, seqlen_k, left, right,
    blocks, units, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    PAIRS: gl.constexpr, D: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """Q, K, V: descriptors of (batch, heads, seqlen, head_dim). Grid: one per multiprocessor."""
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    mask: gl.constexpr = (LEFT, RIGHT, PACKED, PAIRS)
    tile: gl.constexpr = (BLOCK_Q, BLOCK_K)
    dtype: gl.constexpr = q_desc.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, D], k_desc.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, D], v_desc.layout)
    buffers = (q_buffers, k_buffers, v_buffers)

    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    order0 = gl.allocate_shared_memory(gl.int64, [1], layout)
    order1 = gl.allocate_shared_memory(gl.int64, [1], layout)
    order2 = gl.allocate_shared_memory(gl.int64, [1], layout)
    order = (order0, order1, order2)
    barriers = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, order)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(3):
        mbarrier.init(order[i], count=1)
    fence_async_shared()

    sizes = (heads, group, seqlen_q, seqlen_k, left, right, blocks, units)
    turns = ((units - 1 - gl.program_id(0)) // gl.num_programs(0) + 1) * PAIRS
    work = (buffers, barriers, sizes, cu_q, cu_k, turns)
    inputs = (q_desc, k_desc, v_desc)
    outputs = (O, L, scale)
    # All jobs start with the same registers (maxnreg); then the producer gives up most of its own.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, work, outputs, mask, tile, PINGPONG)),
                (_consume, (1, work, outputs, mask, tile, PINGPONG)),
                (_produce, (work, inputs, mask, tile)),
            ],
            [4, 1],  # warps of all jobs but the first, which has num_warps
            [240, 24],  # their registers a thread
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, work, outputs, mask, tile, PINGPONG)),
                (_consume, (1, work, outputs, mask, tile, PINGPONG)),
                (_consume, (2, work, outputs, mask, tile, PINGPONG)),
                (_produce, (work, inputs, mask, tile)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def why_unsupported(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None
) -> str | None:
    """Return why `flash_gluon_forward` cannot take these inputs, or None if it can."""
    if ".".join(triton.__version__.split(".")[:2]) not in TRITON_VERSIONS:
        tried = " and ".join(TRITON_VERSIONS)
        return f"written for Triton {tried}, this is {triton.__version__}"
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "needs a Hopper GPU (compute capability 9.0)"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"takes bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[-1] not in (64, 128) or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        return "takes head_dim 64 or 128, the same for q, k and v"
    if q.shape[-2] % k.shape[-2]:
        return f"{q.shape[-2]} heads of q are no multiple of the {k.shape[-2]} of k and v"
    if softmax_scale is not None and softmax_scale <= 0:
        return "takes a softmax_scale above 0"
    for name, x in (("q", q), ("k", k), ("v", v)):
        steps = [
            stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1
        ]
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s <= 0 or s % 8 for s in steps):
            return f"{name}: the copy engine needs contiguous rows in 16-byte steps"
    return None


def flash_gluon_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **config: int,
) -> tuple[Tensor, Tensor]:
    """Compute attention with the kernel of this file.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim); the heads of
            q are a multiple of those of k and v. In packed ones, a NaN or infinity in a sequence
            can make rows of the sequence before NaN, because a tile may reach into its neighbour.
        causal: align the mask to the bottom right.
        softmax_scale: factor on the scores, head_dim ** -0.5 unless given.
        window_size: keys to the left and right of the diagonal; -1 means no limit.
        cu_seqlens_q, cu_seqlens_k: int32 offsets of packed sequences.
        max_seqlen_q: the longest packed sequence, or more; max_seqlen_k is not needed.
        config: constants of the kernel to use instead of the tuned ones.

    Returns:
        out like q, contiguous, and the natural-log lse, float32, (batch, heads, seqlen_q) or
        (heads, total). A query that sees no key gets output 0 and lse -inf.

    Raises:
        ValueError: the kernel does not take the inputs; the message says why.
    """
    reason = why_unsupported(q, k, v, softmax_scale)
    if reason:
        raise ValueError(f"flash_gluon: {reason}")
    packed = q.ndim == 3
    out = q.new_empty(q.shape)
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(shape, dtype=torch.float32)
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if packed:
        q, k, v = q[None], k[None], v[None]
    grid, arguments = launch_arguments(
        q, k, v, out, lse, causal=causal, softmax_scale=softmax_scale, window_size=window_size,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        processors=torch.cuda.get_device_properties(q.device).multi_processor_count, **config,
    )  # fmt: skip
    with torch.cuda.device_of(q):
        _attn_fwd[grid](**arguments)
    return out, lse


def launch_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    processors: int,
    **config: int,
) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid and the kernel's arguments, for 4-dimensional q, k and v."""
    _, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    left, right = (min(side, seqlen_q + seqlen_k) for side in window_size)
    if causal:
        right = 0
    sequences, longest = len(q), seqlen_q
    packed = cu_seqlens_q is not None
    if packed:
        sequences, longest = len(cu_seqlens_q) - 1, max_seqlen_q or seqlen_q
    config = tuned(head_dim, seqlen_k, limited=left >= 0 or right >= 0) | config
    blocks = triton.cdiv(longest, 64 * config["CONSUMERS"])
    pairs = 2 if right >= 0 and blocks * heads * sequences > processors else 1
    units = triton.cdiv(blocks, pairs) * heads * sequences
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    arguments = dict(
        q_desc=_describe(q, 64), k_desc=_describe(k, config["BLOCK_K"]),
        v_desc=_describe(v, config["BLOCK_K"]), O=out, L=lse, cu_q=cu_seqlens_q if packed else lse,
        cu_k=cu_seqlens_k if packed else lse, scale=scale * LOG2_E, heads=heads,
        group=heads // kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, left=left, right=right,
        blocks=blocks, units=units, LEFT=left >= 0, RIGHT=right >= 0, PACKED=packed, PAIRS=pairs,
        D=head_dim, num_warps=4, maxnreg=168 if config["CONSUMERS"] == 2 else 128, **config,
    )  # fmt: skip
    return (min(units, processors),), arguments


def tuned(head_dim: int, seqlen_k: int, *, limited: bool) -> dict[str, int]:
    """Return the kernel's constants; `limited`: a causal mask or a window."""
    three = head_dim == 64 and seqlen_k >= (16384 if limited else 2048)
    return {
        "BLOCK_K": 128,
        "STAGES": 2 if head_dim == 128 else 3,
        "CONSUMERS": 3 if three else 2,
        "PINGPONG": not three,
    }


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Describe (batch, seqlen, heads, head_dim) to the copy engine, in tiles of rows."""
    batch, seqlen, heads, head_dim = x.shape
    # The stride of a dimension of size 1 is arbitrary, but the engine wants a multiple of 16 bytes.
    strides = [s if n > 1 else head_dim for n, s in zip(x.shape, x.stride(), strict=True)]
    tile = [1, 1, rows, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(tile, DTYPES[x.dtype])
    order = [strides[0], strides[2], strides[1], 1]
    return TensorDescriptor(x, [batch, heads, seqlen, head_dim], order, tile, layout)
