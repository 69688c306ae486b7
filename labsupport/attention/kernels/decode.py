"""Decoding: few queries against a long cache of keys, with the keys split among programs.

Generation has one query at a time: too few blocks of queries to occupy a GPU. But the keys can be
split, too, because partial results merge exactly (`online_softmax.py`):

    keys       |  split 0  |  split 1  |  split 2  |      _decode_split: one program each,
                 O_0, L_0    O_1, L_1    O_2, L_2         the forward's loop over its own keys
                        \\       |       /
                            O,  L                         _decode_merge: the same running softmax,
                                                          with L_s for the scores, O_s for V

Decoding waits for memory, so the cache should be read once: query heads that share a key/value head
share a tile, whose rows are (query, head of the group).

Source: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference" (2023),
https://pytorch.org/blog/flash-decoding/.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from labsupport.attention.call import AttentionCall, BackendUnavailableError
from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_kernel_inputs,
    check_model_layout,
    check_window,
)
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.common import (
    LOG2_E,
    Arguments,
    constants,
    row_strides,
    run_kernel,
    starts_early,
    strides,
    tile_ranges,
    wait_for_inputs,
)
from labsupport.attention.kernels.config import choose_splits, decode_tiling, padded
from labsupport.attention.kernels.forward import _attn_fwd_inner, epilogue

MERGED_AT_ONCE = 16


@triton.jit
def _decode_split(
    Q, K, V, O, LSE, slopes, cache_seqlens, scale,
    stride_qb, stride_qn, stride_qh, stride_qd, stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd,
    stride_os, stride_ob, stride_on, stride_oh, stride_od,
    stride_ls, stride_lb, stride_lh, stride_slope,
    kv_heads, group, seqlen_q, seqlen_k, left, right, blocks, num_splits,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of rows x splits x kv_heads x batch, on one axis."""
    program = tl.program_id(0)
    first = program % blocks * BLOCK_Q
    split = program // blocks % num_splits
    kv_head = (program // blocks // num_splits % kv_heads).to(tl.int64)
    batch = (program // blocks // num_splits // kv_heads).to(tl.int64)
    wait_for_inputs(EARLY)
    if cache_seqlens is not None:  # a wrong length must not lead out of the cache
        seqlen_k = tl.minimum(tl.maximum(tl.load(cache_seqlens + batch), 0), seqlen_k)
    offset = seqlen_k - seqlen_q

    rows = seqlen_q * group
    r = first + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    i = r // group
    head = kv_head * group + r % group
    here = r < rows
    here_d = here[:, None] & (d < HEAD_DIM)[None, :]
    q_at = batch * stride_qb + i.to(tl.int64) * stride_qn + head * stride_qh
    q = tl.load(Q + q_at[:, None] + d[None, :] * stride_qd, mask=here_d, other=0.0)
    slope = tl.zeros([BLOCK_Q, 1], tl.float32)
    if ALIBI:
        slope = (
            tl.load(slopes + batch * stride_slope + head, mask=here, other=0.0)[:, None] * LOG2_E
        )

    # Of the keys that these rows see (a window leaves few), each split takes as many whole tiles.
    last = tl.minimum(first + BLOCK_Q, rows) - 1
    starts, stops = tile_ranges(
        first // group + offset, last // group + offset, seqlen_k, left, right, BLOCK_K, LEFT, RIGHT
    )
    share = tl.cdiv(tl.cdiv(stops[2] - starts[0], BLOCK_K), num_splits) * BLOCK_K
    start = starts[0] + split * share
    stop = tl.minimum(stops[2], start + share)  # not above `start` where no tile is left

    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    # All tiles are masked: a few operations for each score, where the memory sets the pace anyway.
    m, l, o = _attn_fwd_inner(
        m, l, o, q, K + batch * stride_kb + kv_head * stride_kh,
        V + batch * stride_vb + kv_head * stride_vh, i, start, stop, scale * LOG2_E, slope,
        (offset, seqlen_k, left, right), stride_kn, stride_kd, stride_vn, stride_vd,
        HEAD_DIM, D, BLOCK_K, True, LEFT, RIGHT, ALIBI, PRECISION,
    )  # fmt: skip

    o, lse = epilogue(m, l, o)
    split = split.to(tl.int64)
    o_at = split * stride_os + batch * stride_ob + i.to(tl.int64) * stride_on + head * stride_oh
    o_at = O + o_at[:, None] + d[None, :] * stride_od
    tl.store(o_at, o.to(O.dtype.element_ty), mask=here_d)
    tl.store(LSE + split * stride_ls + batch * stride_lb + head * stride_lh + i, lse, mask=here)


@triton.jit
def _decode_merge(
    O_s, LSE_s, O, LSE,
    stride_ps, stride_pb, stride_pn, stride_ph, stride_pd,
    stride_ob, stride_on, stride_oh, stride_od,
    stride_ls, stride_lb, stride_lh, heads, seqlen_q, num_splits,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK_SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: queries x heads x batch, on one axis. LSE has the strides of one split of LSE_s."""
    program = tl.program_id(0)
    i = (program % seqlen_q).to(tl.int64)
    head = (program // seqlen_q % heads).to(tl.int64)
    batch = (program // seqlen_q // heads).to(tl.int64)
    O_s += batch * stride_pb + i * stride_pn + head * stride_ph
    O += batch * stride_ob + i * stride_on + head * stride_oh
    LSE_s += batch * stride_lb + head * stride_lh + i
    LSE += batch * stride_lb + head * stride_lh + i

    wait_for_inputs(EARLY)
    d = tl.arange(0, D)
    m = -float("inf")
    l = 0.0
    o = tl.zeros([D], tl.float32)
    for first in tl.range(0, num_splits, BLOCK_SPLITS):
        s = first + tl.arange(0, BLOCK_SPLITS).to(tl.int64)
        lse = tl.load(LSE_s + s * stride_ls, mask=s < num_splits, other=-float("inf")) * LOG2_E
        part = tl.load(
            O_s + s[:, None] * stride_ps + d[None, :] * stride_pd,
            mask=(s < num_splits)[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(lse, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight = tl.exp2(lse - shift)  # 0 for a split without a visible key
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(weight, 0)
        o = o * alpha + tl.sum(weight[:, None] * part, 0)
        m = m_new
    l = tl.where(l == 0.0, 1.0, l)
    tl.store(O + d * stride_od, (o / l).to(O.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(LSE, (m + tl.log2(l)) / LOG2_E)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few queries to a long cache, whose keys are split among many programs.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float32, any strides; the newest
            tokens, whose keys are in the cache already. head_dim is 256 at most.
        k_cache, v_cache: (batch, seqlen_k, kv_heads, head_dim), same dtype, any strides.
        cache_seqlens: (batch,) int32 or int64, the keys of each sequence that count: seqlen_k
            unless given. Lengths outside 0 .. seqlen_k are an error on a CPU, and clamped on a GPU.
        causal: query i of seqlen_q sees the keys up to length - seqlen_q + i, bottom-right, by each
            sequence's own length.
        softmax_scale, window_size, alibi_slopes: as in `labsupport.attention.attention`.
        num_splits: into how many parts the keys are cut; chosen by `choose_splits` unless given.

    Returns:
        out like q, or (out, lse) with the natural-log lse (batch, heads, seqlen_q) in float32. A
        query that sees no key gets output 0 and lse -inf. There is no backward.

    Raises:
        AttentionInputError: tensors or options do not fit together, or ask for a gradient.
        BackendUnavailableError: Triton's kernels cannot run here.
    """
    check_model_layout(q, k_cache, v_cache)
    check_window(window_size)
    check_alibi_slopes(alibi_slopes, q.shape[0], q.shape[2])
    _check(q, k_cache, v_cache, cache_seqlens, alibi_slopes, num_splits)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    left, right = (min(side, seqlen_q + seqlen_k) for side in window_size)
    right = 0 if causal else right

    config = decode_tiling(seqlen_q * group, head_dim, q.dtype)
    blocks = -(-seqlen_q * group // config.block_q)
    if num_splits is None:
        seen = seqlen_k if left < 0 or right < 0 else min(seqlen_k, left + right + seqlen_q)
        tiles = -(-seen // config.block_k)
        on_gpu = q.device.type == "cuda"
        processors = (
            torch.cuda.get_device_properties(q.device).multi_processor_count if on_gpu else 1
        )
        num_splits = choose_splits(tiles, blocks * kv_heads * batch, processors)

    out = torch.empty_like(q)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if q.numel():
        # One split has nothing to be merged with: it writes the result itself.
        parts, part_lses = out[None], lse[None]
        if num_splits > 1:
            parts = q.new_empty((num_splits, *q.shape), dtype=torch.float32)
            part_lses = lse.new_empty((num_splits, *lse.shape))
        lengths = None if cache_seqlens is None else cache_seqlens.to(torch.int32).contiguous()
        call = AttentionCall(q, k_cache, v_cache, softmax_scale=softmax_scale).with_positive_scale()
        q, scale = call.q, float(call.scale)
        slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
        shared = {
            "stride_ls": part_lses.stride(0), **row_strides(l=part_lses[0]), "seqlen_q": seqlen_q,
            "num_splits": num_splits, "HEAD_DIM": head_dim, "D": padded(head_dim),
            **starts_early(q.device),
        }  # fmt: skip

        def split() -> tuple[int, Arguments]:
            return blocks * num_splits * kv_heads * batch, {
                **strides(q=q, k=k_cache, v=v_cache, o=parts[0]), "stride_os": parts.stride(0),
                "stride_slope": slopes.stride(0) if slopes is not None and slopes.ndim == 2 else 0,
                "scale": scale, "kv_heads": kv_heads, "group": group, "seqlen_k": seqlen_k,
                "left": left, "right": right, "blocks": blocks, "LEFT": left >= 0,
                "RIGHT": right >= 0, "ALIBI": slopes is not None, "PRECISION": "ieee",
                **shared, **constants(config),
            }  # fmt: skip

        def merge() -> tuple[int, Arguments]:
            return seqlen_q * heads * batch, {
                **strides(p=parts[0], o=out), "stride_ps": parts.stride(0), "heads": heads,
                "BLOCK_SPLITS": MERGED_AT_ONCE, "num_warps": 4, **shared,
            }  # fmt: skip

        tensors = {"Q": q, "K": k_cache, "V": v_cache, "O": parts, "LSE": part_lses}
        with autocast_off(q), torch.cuda.device_of(q):
            run_kernel(
                _decode_split, {**tensors, "slopes": slopes, "cache_seqlens": lengths},
                (config, scale, left, right), split,
            )  # fmt: skip
            if num_splits > 1:
                run_kernel(
                    _decode_merge, {"O_s": parts, "LSE_s": part_lses, "O": out, "LSE": lse}, (),
                    merge,
                )  # fmt: skip
    return (out, lse) if return_lse else out


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None,
    alibi_slopes: Tensor | None, num_splits: int | None,
) -> None:  # fmt: skip
    reason = mode.missing()
    if reason is None and not mode.interpreted() and q.device.type == "cpu":
        reason = f"compiled kernels take tensors on a GPU, but q is on {q.device}: move them"
    if reason is not None:
        raise BackendUnavailableError(f"decode cannot run: {reason}.", {"decode": (reason,)})
    check_kernel_inputs(q, k_cache, v_cache)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k_cache, v_cache)):
        raise AttentionInputError(
            "decode has no backward, but q, k_cache or v_cache requires a gradient: call it under "
            "torch.inference_mode(), or use labsupport.attention.attention for training."
        )
    if num_splits is not None and (not isinstance(num_splits, int) or num_splits < 1):
        raise AttentionInputError(
            f"num_splits must be a positive integer, but {num_splits!r} was given."
        )
    for name, tensor in (("cache_seqlens", cache_seqlens), ("alibi_slopes", alibi_slopes)):
        if isinstance(tensor, Tensor) and tensor.device != q.device:
            raise AttentionInputError(
                f"{name} must be on q's device, {q.device}, but is on {tensor.device}: move it."
            )
    if cache_seqlens is None:
        return
    whole = isinstance(cache_seqlens, Tensor) and cache_seqlens.dtype in (torch.int32, torch.int64)
    if not whole or tuple(cache_seqlens.shape) != (q.shape[0],):
        raise AttentionInputError(
            f"cache_seqlens must be an int32 or int64 tensor of shape ({q.shape[0]},), one length "
            f"for each sequence, but {cache_seqlens!r} was given."
        )
    longest = k_cache.shape[1]
    if (
        cache_seqlens.device.type == "cpu"
        and not 0 <= min(l := cache_seqlens.tolist()) <= max(l) <= longest
    ):
        raise AttentionInputError(
            f"cache_seqlens must lie in 0 .. {longest}, the keys of the cache, but {l} was given."
        )
