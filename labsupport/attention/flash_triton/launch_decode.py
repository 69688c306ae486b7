"""Decoding with a key/value cache: checks, the number of splits, and the launch of two kernels.

How many splits? Enough programs to occupy every multiprocessor, and not one more than fit at once:
a second round would take as long as the first, however few programs are left for it. Each split
takes at least MIN_TILES tiles, because its partial result is written and read again.

    batch x kv_heads        splits for 132 multiprocessors (Hopper) and 128 tiles of keys
          8                 264 // 8   = 33, evened out to 32 of 4 tiles
         64                 264 // 64  = 4
        256                 1: the heads alone fill the GPU
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from labsupport.attention.flash_torch import autocast_off
from labsupport.attention.flash_triton import mode
from labsupport.attention.flash_triton.geometry import positive
from labsupport.attention.flash_triton.tuning import Tiling, overridden, padded
from labsupport.attention.inputs import (
    AttentionInputError,
    check_alibi_slopes,
    check_model_layout,
    check_window,
)
from labsupport.attention.reports import BackendUnavailableError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256

# Programs that fit on one multiprocessor at once, for `tiling` below: two on Hopper. On A100, whose
# shared memory is smaller, only one of those with the most rows.
RESIDENT = 2
MIN_TILES = 2
MERGED_AT_ONCE = 16


@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    alibi_slopes: Tensor | None = ...,
    splits: int | None = ...,
    return_lse: Literal[False] = ...,
    float32_out: bool = ...,
) -> Tensor: ...
@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = ...,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    alibi_slopes: Tensor | None = ...,
    splits: int | None = ...,
    return_lse: Literal[True],
    float32_out: bool = ...,
) -> tuple[Tensor, Tensor]: ...
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
    splits: int | None = None,
    return_lse: bool = False,
    float32_out: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few queries to a long cache, its keys shared out among many programs.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16 or float32, any strides; the newest
            tokens, whose keys are in the cache already. head_dim is 256 at most.
        k_cache, v_cache: (batch, seqlen_k, kv_heads, head_dim), same dtype, any strides; heads is a
            multiple of kv_heads, and nothing is copied for it.
        cache_seqlens: (batch,) int32 or int64: how many keys of each sequence count; the others are
            not read. Lengths outside 0 .. seqlen_k are an error on a CPU; on a GPU, where looking
            at them would wait for the device, they are clamped. Without it: seqlen_k for all.
        causal: query i of seqlen_q sees the keys up to length - seqlen_q + i, bottom-right, by each
            sequence's own length.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        window_size: (left, right) keys around a query's position that it sees; -1 for no limit.
        alibi_slopes: (heads,) or (batch, heads), slopes of ALiBi's penalty for distance.
        splits: into how many parts the keys are cut; chosen by `choose_splits` unless given.
        return_lse: return the log-sum-exp too.
        float32_out: return the output as it was accumulated, to be merged with others.

    Returns:
        out like q, or (out, lse) with the natural-log lse (batch, heads, seqlen_q) in float32. A
        query that sees no key gets output 0 and lse -inf. There is no backward.

    Raises:
        AttentionInputError: tensors or options do not fit together, or ask for a gradient.
        BackendUnavailableError: Triton's kernels cannot run here.

    Source: Dao et al., "Flash-Decoding for long-context inference" (2023); see `decode.py`.
    """
    _check(q, k_cache, v_cache, cache_seqlens, window_size, alibi_slopes, splits)
    _check_available(q)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    left, right = (min(side, seqlen_q + seqlen_k) for side in window_size)
    right = 0 if causal else right

    plan = tiling(seqlen_q * group, head_dim, q.dtype)
    blocks = -(-seqlen_q * group // plan.block_q)
    if splits is None:
        seen = seqlen_k if left < 0 or right < 0 else min(seqlen_k, left + right + seqlen_q)
        tiles = -(-seen // plan.block_k)
        splits = choose_splits(tiles, blocks * kv_heads * batch, _multiprocessors(q))

    out = torch.empty_like(q, dtype=torch.float32 if float32_out else q.dtype)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if q.numel():
        # One split has nothing to be merged with: it writes the result itself.
        parts = out[None] if splits == 1 else q.new_empty((splits, *q.shape), dtype=torch.float32)
        part_lses = lse[None] if splits == 1 else lse.new_empty((splits, *lse.shape))
        lengths = None if cache_seqlens is None else cache_seqlens.to(torch.int32).contiguous()
        slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
        stride_slope = slopes.stride(0) if slopes is not None and slopes.ndim == 2 else 0
        scale = 1 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)
        q, scale = positive(q, scale)
        with autocast_off(q), torch.cuda.device_of(q):
            from labsupport.attention.flash_triton.decode import merge_kernel, splits_kernel

            splits_kernel[(blocks * splits * kv_heads * batch,)](
                q, k_cache, v_cache, parts, part_lses, slopes, lengths, scale,
                *q.stride(), *k_cache.stride(), *v_cache.stride(), *parts.stride(),
                *part_lses.stride()[:3], stride_slope,
                kv_heads, group, seqlen_q, seqlen_k, left, right, blocks, splits,
                HEAD_DIM=head_dim, D=padded(head_dim),
                BLOCK_ROWS=plan.block_q, BLOCK_K=plan.block_k,
                LEFT=left >= 0, RIGHT=right >= 0, ALIBI=slopes is not None, PRECISION="ieee",
                num_warps=plan.warps, num_stages=plan.stages,
            )  # fmt: skip
            if splits > 1:
                merge_kernel[(seqlen_q * heads * batch,)](
                    parts, part_lses, out, lse, *parts.stride(), *out.stride(),
                    *part_lses.stride()[:3], heads, seqlen_q, splits,
                    HEAD_DIM=head_dim, D=padded(head_dim), BLOCK_SPLITS=MERGED_AT_ONCE, num_warps=4,
                )  # fmt: skip
    return (out, lse) if return_lse else out


def choose_splits(tiles: int, programs: int, multiprocessors: int) -> int:
    """Into how many parts the keys are cut, so that all programs run at once and few of them wait.

    Args:
        tiles: tiles of keys that a program would walk through alone.
        programs: programs without splits: blocks of rows x kv_heads x batch.
        multiprocessors: of the GPU.

    Returns:
        at least 1; no split stays empty, and none but the last is shorter than the others.

    >>> choose_splits(tiles=128, programs=8, multiprocessors=132)
    32
    """
    splits = min(RESIDENT * multiprocessors // max(1, programs), tiles // MIN_TILES)
    return -(-tiles // -(-tiles // splits)) if splits > 1 else 1


def tiling(rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Rows and keys of a tile, for `rows` = seqlen_q x group.

    Keys: as many as make K and V 32 KiB; with one tile in use and the next on its way, 64 KiB.
    Rows: 16 at least, for the tensor cores; at most as many as the registers can hold beside it.
    More rows than that are cut into several tiles, which each read the keys.
    """
    if (chosen := overridden("decode")) is not None:
        return chosen
    width = max(64, padded(head_dim))
    block_k = 2**14 // dtype.itemsize // width
    if dtype == torch.float32:
        return Tiling(16, block_k, warps=8, stages=3)
    most = min(64, 2**13 // width)
    return Tiling(min(most, max(16, 1 << (rows - 1).bit_length())), block_k, warps=4, stages=3)


def _multiprocessors(q: Tensor) -> int:
    """Of q's GPU; interpreted, programs run one after the other."""
    if q.device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(q.device).multi_processor_count


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    splits: int | None,
) -> None:
    check_model_layout(q, k_cache, v_cache)
    check_window(window_size)
    check_alibi_slopes(alibi_slopes, q.shape[0], q.shape[2])
    if q.dtype not in DTYPES:
        raise AttentionInputError(
            f"decode computes in float16, bfloat16 or float32, but {q.dtype} was given."
        )
    if q.shape[-1] > MAX_HEAD_DIM:
        raise AttentionInputError(
            f"decode takes head_dim up to {MAX_HEAD_DIM}, but {q.shape[-1]} was given; "
            "labsupport.attention.attention has backends for more."
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k_cache, v_cache)):
        raise AttentionInputError(
            "decode has no backward, but q, k_cache or v_cache requires a gradient: call it under "
            "torch.inference_mode(), or use labsupport.attention.attention for training."
        )
    if splits is not None and (not isinstance(splits, int) or splits < 1):
        raise AttentionInputError(f"splits must be a positive integer, but {splits!r} was given.")
    if cache_seqlens is not None:
        _check_lengths(cache_seqlens, q, k_cache)
    for name, tensor in (("cache_seqlens", cache_seqlens), ("alibi_slopes", alibi_slopes)):
        if tensor is not None and tensor.device != q.device:
            raise AttentionInputError(
                f"{name} must be on q's device, {q.device}, but is on {tensor.device}: move it."
            )


def _check_lengths(cache_seqlens: Tensor, q: Tensor, k_cache: Tensor) -> None:
    if not isinstance(cache_seqlens, Tensor):
        raise AttentionInputError(
            "cache_seqlens must be an integer tensor (batch,), but a "
            f"{type(cache_seqlens).__name__} was given: torch.tensor(...) converts it."
        )
    whole = cache_seqlens.dtype in (torch.int32, torch.int64)
    if not whole or tuple(cache_seqlens.shape) != (q.shape[0],):
        raise AttentionInputError(
            f"cache_seqlens must be int32 or int64 of shape ({q.shape[0]},), a length a sequence, "
            f"but {cache_seqlens.dtype} of shape {tuple(cache_seqlens.shape)} was given."
        )
    longest = k_cache.shape[1]
    if (
        cache_seqlens.device.type == "cpu"
        and ((cache_seqlens < 0) | (cache_seqlens > longest)).any()
    ):
        raise AttentionInputError(
            f"cache_seqlens must lie in 0 .. {longest}, the keys of the cache, but "
            f"{cache_seqlens.tolist()} was given."
        )


def _check_available(q: Tensor) -> None:
    reason = mode.missing()
    if reason is None and mode.interpreted() and q.dtype == torch.bfloat16:
        reason = "Triton's interpreter computes bfloat16 wrongly: use float16 or float32"
    if reason is None and not mode.interpreted() and q.device.type == "cpu":
        reason = f"compiled kernels take tensors on a GPU, but q is on {q.device}: move them"
    if reason is not None:
        raise BackendUnavailableError(
            f"decode cannot run: {reason}.", {"flash_triton.decode": (reason,)}
        )
