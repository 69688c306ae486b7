"""Both passes for Hopper GPUs: the TMA unit fetches the tiles, and the threads do not.

A multiprocessor of compute capability 9.0 has an engine that copies whole tiles between memory and
shared memory: the Tensor Memory Accelerator. One thread names a tile by its coordinates in a
*descriptor* of the tensor (base, shape, strides, tile); the engine computes addresses, and fills
what lies beyond the tensor with zeros. The descriptors cover (batch, heads, seqlen, head_dim);
`autograd.choose` says what is left to the plain kernels.

In the backward, zeros beyond the end add nothing: dO = 0, and dS = P * (0 - 0). So only limits of
the mask need masked tiles, and for dQ the end of the keys. Rows holds Shift and Delta.

Source: NVIDIA, CUDA C++ Programming Guide, "Tensor Memory Access".
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.backward import add_to_dkdv, add_to_dq, launch_preprocess
from labsupport.attention.kernels.common import (
    LOG2_E,
    SIZES,
    Arguments,
    apply_mask,
    blocks_of,
    constants,
    describe,
    numbers,
    row_strides,
    run_kernel,
    sizes,
    tile_ranges,
)
from labsupport.attention.kernels.config import KernelConfig, tiling
from labsupport.attention.kernels.forward import epilogue, softmax_update


@triton.jit
def _hopper_fwd_inner(
    m, l, o, q, K, V, batch, kv_head, i, start, stop, scale, band,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):  # fmt: skip
    """Take the keys start..stop into the running maximum m, sum l and output o of a block."""
    c = tl.arange(0, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        k = K.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            s = apply_mask(s, i[:, None], (j + c)[None, :], band, LEFT, RIGHT)
        v = V.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        m, l, o = softmax_update(m, l, o, s, v, scale, MASKED, "ieee")
    return m, l, o


@triton.jit(do_not_specialize=SIZES)
def _hopper_fwd(
    Q, O, K, V, LSE, scale, stride_lb, stride_lh, heads, group, seqlen_q, seqlen_k, left, right,
    blocks, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
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
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    last = tl.minimum(first + BLOCK_Q, seqlen_q) - 1
    starts, stops = tile_ranges(
        first + offset, last + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
    )
    for part in tl.static_range(0 if LEFT else 1, 3):
        m, l, o = _hopper_fwd_inner(
            m, l, o, q, K, V, batch, kv_head, i, starts[part], stops[part],
            scale * LOG2_E, (offset, seqlen_k, left, right), D, BLOCK_K, part != 1, LEFT, RIGHT,
        )  # fmt: skip
    o, lse = epilogue(m, l, o)
    O.store([batch, head, first, 0], o.to(O.dtype).reshape(1, 1, BLOCK_Q, D))
    at = batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
    tl.store(LSE + at + i, lse, mask=i < seqlen_q)


@triton.jit
def _hopper_dkdv_inner(
    dk, dv, k, v, Q, dO, Rows, batch, head, j, start, stop, scale, band,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Add the share of the queries start..stop to dk and dv of a block of keys, transposed."""
    r = tl.arange(0, BLOCK_Q)
    for i in tl.range(start, stop, BLOCK_Q):
        q = Q.load([batch, head, i, 0]).reshape(BLOCK_Q, D)
        do = dO.load([batch, head, i, 0]).reshape(BLOCK_Q, D)
        shift = Rows.load([0, batch, head, i]).reshape(BLOCK_Q)
        delta = Rows.load([1, batch, head, i]).reshape(BLOCK_Q)
        s = tl.dot(k, tl.trans(q)) * scale
        if MASKED:
            s = apply_mask(s, (i + r)[None, :], j[:, None], band, LEFT, RIGHT)
        dk, dv = add_to_dkdv(dk, dv, s, v, q, do, shift, delta, False, "ieee")
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _hopper_dkdv(
    Q, dO, K, V, dK, dV, Rows, scale, heads, group, seqlen_q, seqlen_k, left, right,
    blocks, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """dK and dV; all tensors are descriptors. Grid: blocks of keys x key/value heads x batch."""
    program = tl.program_id(0)
    kv_heads = heads // group
    first = program % blocks * BLOCK_K
    kv_head = program // blocks % kv_heads
    batch = program // blocks // kv_heads
    offset = seqlen_k - seqlen_q
    j = first + tl.arange(0, BLOCK_K)
    k = K.load([batch, kv_head, first, 0]).reshape(BLOCK_K, D)
    v = V.load([batch, kv_head, first, 0]).reshape(BLOCK_K, D)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    # Key j is seen by the queries j - offset - right .. j - offset + left: the band, turned.
    last = tl.minimum(first + BLOCK_K, seqlen_k) - 1
    starts, stops = tile_ranges(
        first - offset, last - offset, seqlen_q, right, left, BLOCK_Q, RIGHT, LEFT
    )
    for g in range(group):
        head = kv_head * group + g
        for part in tl.static_range(0 if RIGHT else 1, 3 if LEFT else 2):
            # Without a limit on that side, the last tile needs no mask either.
            stop = stops[part] if LEFT or part == 0 else stops[2]
            dk, dv = _hopper_dkdv_inner(
                dk, dv, k, v, Q, dO, Rows, batch, head, j, starts[part], stop,
                scale * LOG2_E, (offset, seqlen_k, left, right), D, BLOCK_Q, part != 1, LEFT, RIGHT,
            )  # fmt: skip
    dK.store([batch, kv_head, first, 0], (dk * scale).to(dK.dtype).reshape(1, 1, BLOCK_K, D))
    dV.store([batch, kv_head, first, 0], dv.to(dV.dtype).reshape(1, 1, BLOCK_K, D))


@triton.jit
def _hopper_dq_inner(
    dq, q, do, shift, delta, K, V, batch, kv_head, i, start, stop, scale, band,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Add the share of the keys start..stop to dq of a block of queries."""
    c = tl.arange(0, BLOCK_K)
    for j in tl.range(start, stop, BLOCK_K):
        k = K.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        v = V.load([batch, kv_head, j, 0]).reshape(BLOCK_K, D)
        s = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            s = apply_mask(s, i[:, None], (j + c)[None, :], band, LEFT, RIGHT)
        dq = add_to_dq(dq, s, do, k, v, shift, delta, False, "ieee")
    return dq


@triton.jit(do_not_specialize=SIZES)
def _hopper_dq(
    Q, dO, dQ, K, V, Rows, scale, heads, group, seqlen_q, seqlen_k, left, right,
    blocks, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """dQ; all tensors are descriptors. Grid: blocks of queries x heads x batch."""
    program = tl.program_id(0)
    first = (blocks - 1 - program % blocks) * BLOCK_Q
    head = program // blocks % heads
    batch = program // blocks // heads
    kv_head = head // group
    offset = seqlen_k - seqlen_q
    i = first + tl.arange(0, BLOCK_Q)
    q = Q.load([batch, head, first, 0]).reshape(BLOCK_Q, D)
    do = dO.load([batch, head, first, 0]).reshape(BLOCK_Q, D)
    shift = Rows.load([0, batch, head, first]).reshape(BLOCK_Q)
    delta = Rows.load([1, batch, head, first]).reshape(BLOCK_Q)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    last = tl.minimum(first + BLOCK_Q, seqlen_q) - 1
    starts, stops = tile_ranges(
        first + offset, last + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
    )
    for part in tl.static_range(0 if LEFT else 1, 3):
        dq = _hopper_dq_inner(
            dq, q, do, shift, delta, K, V, batch, kv_head, i, starts[part], stops[part],
            scale * LOG2_E, (offset, seqlen_k, left, right), D, BLOCK_K, part != 1, LEFT, RIGHT,
        )  # fmt: skip
    dQ.store([batch, head, first, 0], (dq * scale).to(dQ.dtype).reshape(1, 1, BLOCK_Q, D))


def launch_forward(call: AttentionCall, out: Tensor, lse: Tensor) -> None:
    """Fill out and lse, as `forward.launch` does."""
    q, k, v = call.q, call.k, call.v
    config = tiling("forward", call.head_dim, q.dtype, hopper=True, keys=k.shape[1])
    tensors = {**_describe(config, {"Q": q, "O": out}, {"K": k, "V": v}), "LSE": lse}
    _run(_hopper_fwd, tensors, call, config, (q, config.block_q), lse)


def launch_backward(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, as `backward.launch` does."""
    q, k, v = call.q, call.k, call.v
    batch, seqlen, heads, head_dim = q.shape
    # 16-byte steps from one row of numbers to the next.
    rows = lse.new_empty((2, batch, heads, -(-seqlen // 4) * 4))[..., :seqlen]
    launch_preprocess(dout, out, lse, dlse, shift=rows[0], delta=rows[1])

    def run(
        kernel: Any, config: KernelConfig, cut: tuple[Tensor, int], *outputs: dict[str, Tensor]
    ) -> None:
        of_queries, of_keys = outputs
        tensors = _describe(config, {"Q": q, "dO": dout, **of_queries}, {"K": k, "V": v, **of_keys})
        tensors["Rows"] = describe(rows, 1, config.block_q, plain=True)
        _run(kernel, tensors, call, config, cut)

    keys = tiling("keys", head_dim, q.dtype, hopper=True)
    run(_hopper_dkdv, keys, (k, keys.block_k), {}, {"dK": dk, "dV": dv})
    queries = tiling("queries", head_dim, q.dtype, hopper=True)
    run(_hopper_dq, queries, (q, queries.block_q), {"dQ": dq}, {})


def _run(
    kernel: Any, tensors: dict[str, Any], call: AttentionCall, config: KernelConfig,
    cut: tuple[Tensor, int], lse: Tensor | None = None,
) -> None:  # fmt: skip
    def rest() -> tuple[int, Arguments]:
        blocks, programs = blocks_of(cut[0], 0, cut[1], call)
        more = {} if lse is None else row_strides(l=lse)
        return programs, {
            "scale": call.scale, "blocks": blocks, "D": call.head_dim, "LEFT": call.left >= 0,
            "RIGHT": call.right >= 0, **more, **sizes(call), **constants(config),
        }  # fmt: skip

    run_kernel(kernel, tensors, (config, numbers(call)), rest)


def _describe(
    config: KernelConfig, of_queries: dict[str, Tensor], of_keys: dict[str, Tensor]
) -> dict[str, Any]:
    """Return descriptors in tiles of queries, then of keys."""
    return {
        **{name: describe(x, config.block_q) for name, x in of_queries.items()},
        **{name: describe(x, config.block_k) for name, x in of_keys.items()},
    }
