"""FlashAttention's forward pass for Hopper GPUs, in Gluon: groups of warps with different jobs.

A Triton program is one group of warps that do everything in turn: wait for a tile, multiply, take
the softmax, multiply again. The tensor cores idle during the softmax. Gluon, Triton's lower level,
lets us give the warps of a program different jobs (`gl.warp_specialize`):

    producer      one warp: asks the TMA unit for the tiles of Q, K and V
    consumers     one to three groups of four warps, 64 queries each: products and softmax

There is at most one program for each multiprocessor. It works through several blocks of queries
without a pause in between: the producer runs ahead, and a consumer starts the scores of the next
block together with the last product of this one. A consumer's step for the tile t of keys and
values is

    S = Q K(t)^T,  O = O + P V(t-1)     tensor cores, two products started together
    m, l, P, alpha = softmax of S       exp2 on the special function units
    O = alpha O                         because the running maximum m may have changed

With PINGPONG the consumers start their products in turn, so that the tensor cores compute for one
of them while another takes its softmax. Only tiles that reach beyond the mask or the last key are
masked.
CONSUMERS, TOGETHER and PINGPONG are the steps by which chapter 5 builds this kernel.

Barriers in shared memory (`mbarrier`) connect the jobs. A barrier counts arrivals, and each time
that its count is reached its phase flips (0, 1, 0, ...). To wait for phase p is to wait until the
phase p is over; a fresh barrier counts as having finished phase 1, so a first wait for 1 passes.

    barrier     protects                               arrives                 waits
    q_ready     the block of Q has been copied         the TMA unit            consumers
    q_empty     its buffer may be overwritten          each consumer           producer
    k_ready     the tile of K has been copied          the TMA unit            consumers
    k_empty     its buffer may be overwritten          each consumer           producer
    v_ready, v_empty    the same for V
    order[i]    consumer i may use the tensor cores    the consumer before it  consumer i

Before a copy, `expect` tells a `ready` barrier how many bytes will come; its phase ends when they
have. Without `order` the result would be the same: it is there for speed.

Products are asynchronous: `warpgroup_mma_wait(n)` waits until at most n are still under way, and
`deps` names what is ready then. A call with `pred` false does nothing. `fence_async_shared` lets
the TMA unit see the fresh barriers.

K and V have STAGES buffers each, a ring: tile t is in buffer t % STAGES, in its (t // STAGES)-th
round. Q has two, so that the next block is there when this one ends.

Sources: Dao, "FlashAttention-2" (2023), algorithm 1; Shah et al., "FlashAttention-3" (2024), for
producers, consumers and their turns.
"""

from __future__ import annotations

from functools import cache

import torch
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

from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.common import (
    LOG2_E,
    SIZES,
    Arguments,
    describe,
    numbers,
    run_kernel,
    sizes,
)

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
MARKS = gl.constexpr(4)  # clock reads in a step
ROWS = gl.constexpr(64)  # queries of a consumer: what one tensor-core instruction takes


@gluon.jit
def _block(slot, sizes, cu_q, cu_k, mask: gl.constexpr, tile: gl.constexpr):
    """The block of queries that this program attends to in a slot, and its keys.

    A causal mask makes the blocks of a head unequal. Where there are more of them than programs, a
    program takes them in pairs, the longest with the shortest and so on: then all pairs take about
    the same time.
    """
    heads, _, seqlen_q, seqlen_k, left, right, blocks, units = sizes
    LEFT: gl.constexpr = mask[0]
    RIGHT: gl.constexpr = mask[1]
    PACKED: gl.constexpr = mask[2]
    PAIRS: gl.constexpr = mask[3]
    BLOCK_Q: gl.constexpr = tile[0]
    BLOCK_K: gl.constexpr = tile[1]
    # This program's work: a block in each slot, or a pair in two slots.
    unit = gl.minimum(slot // PAIRS * gl.num_programs(0) + gl.program_id(0), units - 1)
    units_of_head = gl.cdiv(blocks, PAIRS)
    head = unit // units_of_head  # of all sequences
    block = blocks - 1 - unit % units_of_head
    if slot % PAIRS == 1:
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
    diagonal = seqlen_k - rows  # the last key that a causal mask leaves to the first query
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
    """Ask for Q, then for K and V tile by tile, each as soon as its buffer is free."""
    buffers, barriers, sizes, cu_q, cu_k, slots = work
    Q, K, V = inputs
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = barriers
    BLOCK_K: gl.constexpr = tile[1]
    STAGES: gl.constexpr = k_buffers.shape[0]
    CONSUMERS: gl.constexpr = tile[0] // ROWS
    n = 0  # blocks so far
    t = 0  # tiles so far
    for slot in range(slots):
        batch, head, row, rows, k_row, _seqlen_k, _diagonal, col, tiles = _block(
            slot, sizes, cu_q, cu_k, mask, tile
        )
        if rows > 0:
            kv_head = head // sizes[1]
            mbarrier.wait(q_empty.index(n % 2), (n // 2 & 1) ^ 1)
            mbarrier.expect(q_ready.index(n % 2), CONSUMERS * Q.block_type.nbytes)
            for i in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    Q, [batch, head, row + i * ROWS, 0],
                    q_ready.index(n % 2), q_buffers.index(n % 2 * CONSUMERS + i),
                )  # fmt: skip
            n += 1
            for _i in range(tiles):
                stage = t % STAGES
                at = [batch, kv_head, k_row + col, 0]
                mbarrier.wait(k_empty.index(stage), (t // STAGES & 1) ^ 1)
                mbarrier.expect(k_ready.index(stage), K.block_type.nbytes)
                tma.async_copy_global_to_shared(K, at, k_ready.index(stage), k_buffers.index(stage))
                mbarrier.wait(v_empty.index(stage), (t // STAGES & 1) ^ 1)
                mbarrier.expect(v_ready.index(stage), V.block_type.nbytes)
                tma.async_copy_global_to_shared(V, at, v_ready.index(stage), v_buffers.index(stage))
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
def _mark(EVENT: gl.constexpr, ME: gl.constexpr, t, clock, style: gl.constexpr):
    """With TRACE, write when the first program's consumer ME came here with tile t.

    Events: 0 ready for the products, 1 its turn to start them, 2 scores done, 3 softmax done.
    """
    TRACE: gl.constexpr = style[2]
    if TRACE:
        Clock, marks = clock
        now = gl.inline_asm_elementwise(
            "mov.u64 $0, %clock64;", "=l,r", [t], dtype=gl.int64, is_pure=False, pack=1
        )
        gl.store(
            Clock + (ME * marks + t) * MARKS + EVENT, now, (gl.program_id(0) == 0) & (t < marks)
        )


@gluon.jit
def _two_products(
    q, p, o, use_acc, t, has_k, has_v, buffers, barriers, clock,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, style: gl.constexpr,
):  # fmt: skip
    """Return S = Q K(t)^T, and O = O + P V(t - 1), which is still being computed if TOGETHER."""
    TOGETHER: gl.constexpr = style[0]
    PINGPONG: gl.constexpr = style[1]
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
    _mark(0, ME, t, clock, style)
    mbarrier.wait(k_ready.index(k_stage), t // STAGES & 1, pred=has_k)
    if PINGPONG:
        mbarrier.wait(order[ME], (t & 1) ^ (1 if ME == 0 else 0))
    _mark(1, ME, t, clock, style)
    s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
    if not TOGETHER:
        s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.wait(v_ready.index(v_stage), (t - 1) // STAGES & 1, pred=has_v)
    o = warpgroup_mma(p, v, o, use_acc=use_acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(order[(ME + 1) % CONSUMERS], count=1)
    if TOGETHER:
        s = warpgroup_mma_wait(1, deps=[s])  # until one product at most is under way: O's
    else:
        o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(k_empty.index(k_stage), count=1, pred=has_k)
    _mark(2, ME, t, clock, style)
    return s, o


@gluon.jit
def _consume(
    ME: gl.constexpr, work, outputs, mask: gl.constexpr, tile: gl.constexpr, style: gl.constexpr
):
    """Attend with the ME-th 64 queries of each block."""
    buffers, barriers, sizes, cu_q, cu_k, slots = work
    O, L, clock, scale = outputs
    q_buffers, k_buffers, _ = buffers
    q_ready, q_empty, _, _, _, v_empty, _ = barriers
    heads, _, seqlen_q, _, left, right, _, _ = sizes
    BLOCK_K: gl.constexpr = tile[1]
    CONSUMERS: gl.constexpr = tile[0] // ROWS
    STAGES: gl.constexpr = k_buffers.shape[0]
    D: gl.constexpr = k_buffers.shape[4]
    dtype: gl.constexpr = q_buffers.dtype
    # Layouts say which thread holds which elements. These are the tensor cores': [3, 0] is Hopper's
    # instruction, [4, 1] the four warps, one below the other, [16, N, 16] what a warp multiplies. A
    # SliceLayout is what is left of one when a dimension is summed up.
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
    # The first block has none before it: it multiplies zeros with anything in V's buffer, and
    # stores no rows. The last slot has no block: it stores the block before.
    for slot in range(slots + 1):
        batch, head, row, rows, _k_row, seqlen_k, diagonal, col, tiles = _block(
            slot, sizes, cu_q, cu_k, mask, tile
        )
        diagonal += ME * ROWS
        more = slot < slots
        if (rows > 0) | (slot == slots):
            # The first tile of this block, together with the last product of the block before.
            q = q_buffers.index(n % 2 * CONSUMERS + ME).reshape([ROWS, D])
            mbarrier.wait(q_ready.index(n % 2), n // 2 & 1, pred=more)
            s, o = _two_products(
                q, p, o, old_tiles > 1, t, more, t > 0, buffers, barriers, clock, ME, CONSUMERS,
                style,
            )  # fmt: skip
            old_m = m
            old_l = gl.where(l == 0.0, 1.0, l)
            s = _apply_mask(s, col, diagonal, seqlen_k, left, right, mask)
            m, l, p32, alpha = _softmax_update(s, nothing, 0.0, scale)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_empty.index((t + STAGES - 1) % STAGES), count=1, pred=t > 0)
            p = gl.convert_layout(p32.to(dtype), p_layout)
            _mark(3, ME, t, clock, style)
            t += 1

            # Store the block before. A query that has seen no key gets 0 and -inf.
            i = gl.arange(0, ROWS, s_rows) + ME * ROWS
            at = (old_batch * heads + old_head).to(gl.int64) * seqlen_q + old_row
            lse = (old_m + gl.log2(old_l)) * 0.6931471805599453  # ln 2: from log2 to log
            gl.store(L + at + i, lse, mask=i < old_rows)
            out = o * gl.convert_layout(1.0 / old_l, o_rows)[:, None]
            out = gl.convert_layout(out.to(O.dtype.element_ty), out_layout)
            i = gl.arange(0, ROWS, gl.SliceLayout(1, out_layout)) + ME * ROWS
            c = gl.arange(0, D, gl.SliceLayout(0, out_layout))
            at = ((old_batch * seqlen_q + old_row).to(gl.int64) * heads + old_head) * D
            to = O + at + (i[:, None] * (heads * D) + c[None, :])
            gl.store(to, out, mask=(i < old_rows)[:, None])
            old_batch, old_head, old_row, old_rows, old_tiles = batch, head, row, rows, tiles

            # The other tiles of this block.
            for step in range(1, gl.where(more, tiles, 1)):
                s, o = _two_products(
                    q, p, o, step > 1, t, True, True, buffers, barriers, clock, ME, CONSUMERS, style
                )
                col -= BLOCK_K
                s = _apply_mask(s, col, diagonal, seqlen_k, left, right, mask)
                m, l, p32, alpha = _softmax_update(s, m, l, scale)
                o = warpgroup_mma_wait(0, deps=[o])
                mbarrier.arrive(v_empty.index((t + STAGES - 1) % STAGES), count=1)
                p = gl.convert_layout(p32.to(dtype), p_layout)
                o = o * gl.convert_layout(alpha, o_rows)[:, None]
                _mark(3, ME, t, clock, style)
                t += 1
            mbarrier.arrive(q_empty.index(n % 2), count=1, pred=more)
            n += 1


@gluon.jit(do_not_specialize=(*SIZES, "units", "marks"))
def _gluon_fwd(
    Q, K, V, O, L, cu_q, cu_k, Clock, scale, heads, group, seqlen_q, seqlen_k, left, right, blocks,
    units, marks, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    PAIRS: gl.constexpr, D: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, TOGETHER: gl.constexpr, PINGPONG: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Q, K, V: descriptors of (batch, heads, seqlen, head_dim). Grid: one per multiprocessor."""
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    mask: gl.constexpr = (LEFT, RIGHT, PACKED, PAIRS)
    tile: gl.constexpr = (BLOCK_Q, BLOCK_K)
    style: gl.constexpr = (TOGETHER, PINGPONG, TRACE)
    dtype: gl.constexpr = Q.dtype
    q_buffers = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, 1, ROWS, D], Q.layout)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, D], K.layout)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, D], V.layout)
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
    slots = ((units - 1 - gl.program_id(0)) // gl.num_programs(0) + 1) * PAIRS
    work = (buffers, barriers, sizes, cu_q, cu_k, slots)
    inputs = (Q, K, V)
    outputs = (O, L, (Clock, marks), scale)
    # All jobs start with the same registers (maxnreg). Then the producer gives up most of them,
    # and the consumers take them.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, work, outputs, mask, tile, style)),
                (_produce, (work, inputs, mask, tile)),
            ],
            [1],  # warps of all jobs but the first, which has num_warps
            [24],  # their registers a thread
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, work, outputs, mask, tile, style)),
                (_consume, (1, work, outputs, mask, tile, style)),
                (_produce, (work, inputs, mask, tile)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, work, outputs, mask, tile, style)),
                (_consume, (1, work, outputs, mask, tile, style)),
                (_consume, (2, work, outputs, mask, tile, style)),
                (_produce, (work, inputs, mask, tile)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def launch(
    call: AttentionCall, out: Tensor, lse: Tensor, *, clock: Tensor | None = None, **config: int
) -> None:
    """Fill out and lse, as `forward.launch` does.

    In packed sequences a NaN or infinity can also make rows of the preceding sequence NaN, because
    a tile may reach into its neighbour.

    Args:
        call: within the limits of the backend `flash_gluon`.
        clock: int64 (CONSUMERS, tiles, MARKS), filled with the clock of the first program's
            multiprocessor: see `_mark`.
        config: constants of the kernel to use instead of the tuned ones.
    """
    q, k, v = call.q, call.k, call.v
    limited = call.left >= 0 or call.right >= 0
    config = tuned(call.head_dim, k.shape[-3], limited=limited) | config
    if k.numel() == 0:
        out.zero_(), lse.fill_(-torch.inf)
        return
    q4, k4, v4 = (x[None] if call.packed else x for x in (q, k, v))
    tensors = {
        "Q": describe(q4, ROWS.value, make=descriptor),
        "K": describe(k4, config["BLOCK_K"], make=descriptor),
        "V": describe(v4, config["BLOCK_K"], make=descriptor), "O": out, "L": lse,
        "cu_q": call.cu_seqlens_q if call.packed else lse,
        "cu_k": call.cu_seqlens_k if call.packed else lse, "Clock": lse if clock is None else clock,
    }  # fmt: skip

    def rest() -> tuple[int, Arguments]:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        marks = 0 if clock is None else clock.shape[1]
        return programs_and_arguments(call, config, processors, marks)

    key = numbers(call), call.packed, clock is not None, *config.values()
    run_kernel(_gluon_fwd, tensors, key, rest)


def programs_and_arguments(
    call: AttentionCall, config: dict[str, int], processors: int, marks: int = 0
) -> tuple[int, Arguments]:
    """Return the number of programs and the kernel's arguments after the tensors."""
    sequences, longest = len(call.q), call.q.shape[1]
    if call.cu_seqlens_q is not None:
        sequences, longest = len(call.cu_seqlens_q) - 1, call.max_seqlen_q or len(call.q)
    blocks = -(-longest // (ROWS.value * config["CONSUMERS"]))
    of_all = blocks * call.heads * sequences
    pairs = 2 if call.right >= 0 and of_all > processors else 1
    units = -(-blocks // pairs) * call.heads * sequences
    # Two, three or four groups of four warps, the producer's included, share 65,536 registers.
    registers = {1: 240, 2: 168, 3: 128}[config["CONSUMERS"]]
    return min(units, processors), {
        "scale": call.scale * LOG2_E.value, **sizes(call), "blocks": blocks, "units": units,
        "marks": marks, "LEFT": call.left >= 0, "RIGHT": call.right >= 0, "PACKED": call.packed,
        "PAIRS": pairs, "D": call.head_dim, "num_warps": 4, "TRACE": marks > 0,
        "maxnreg": registers, **config,
    }  # fmt: skip


def tuned(head_dim: int, seqlen_k: int, *, limited: bool) -> dict[str, int]:
    """Return the kernel's constants; `limited`: a causal mask or a window."""
    three = head_dim == 64 and seqlen_k >= (16384 if limited else 2048)
    return {
        "BLOCK_K": 128,
        "STAGES": 2 if head_dim == 128 else 3,
        "CONSUMERS": 3 if three else 2,
        "TOGETHER": True,
        "PINGPONG": not three,
    }


def descriptor(x: Tensor, shape: list[int], steps: list[int], tile: list[int]) -> TensorDescriptor:
    """Return Gluon's descriptor of a tensor, for `common.describe`."""
    layout = tile_layout(tuple(tile), DTYPES.get(x.dtype, gl.float32))
    return TensorDescriptor(x, shape, steps, tile, layout)


@cache
def tile_layout(tile: tuple[int, ...], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(tile), dtype)
