"""Adapter to PyTorch's FlexAttention, compiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.band import Band
from labsupport.attention.call import AttentionCall

Result = tuple[Tensor, Tensor | None]


def flex_reasons(call: AttentionCall) -> list[str]:
    """FlexAttention is compiled: on a CPU by a C++ compiler."""
    if call.q.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return ["needs a C++ compiler on a CPU: install g++ (Linux) or Xcode's tools (macOS)"]
    return []


def run_flex(call: AttentionCall) -> Result:
    """Run compiled FlexAttention: the band as a block mask, ALiBi as a change of each score."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
    band = call.band
    hides, on_cpu = not band.unlimited, q.device.type == "cpu"
    # Each shape compiles a kernel of its own. Past a limit PyTorch would run uncompiled, which
    # stores the scores: raise the limit, and fail rather than do that silently.
    with torch._dynamo.config.patch(recompile_limit=512, fail_on_recompile_limit_hit=True):
        result = _compiled_flex()(
            q,
            k,
            v,
            score_mod=_alibi_score_mod(call) if call.alibi_slopes is not None else None,
            # Without a block mask the CPU's kernel keeps scratch of seqlen_q x seqlen_k.
            block_mask=_block_mask(band, q.device) if hides or on_cpu else None,
            scale=call.scale,
            enable_gqa=call.heads != call.kv_heads,
            return_aux=AuxRequest(lse=True) if call.return_lse else None,
        )
    out, lse = (result[0], result[1].lse) if call.return_lse else (result, None)
    return out.transpose(1, 2), lse


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def _block_mask(band: Band, device: torch.device) -> Any:
    """FlexAttention's list of visible tiles; kept, because a new one compiles the kernel anew."""
    from torch.nn.attention.flex_attention import create_block_mask

    left = band.seqlen_q + band.seqlen_k if band.left is None else band.left
    right = band.seqlen_q + band.seqlen_k if band.right is None else band.right
    offset = band.offset

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= i + offset - left) & (j <= i + offset + right)

    return create_block_mask(visible, None, None, band.seqlen_q, band.seqlen_k, device=str(device))


def _alibi_score_mod(call: AttentionCall) -> Callable[..., Tensor]:
    slopes, offset = call.alibi_slopes, call.band.offset
    assert slopes is not None
    slopes = slopes.expand(call.q.shape[0], -1)

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[b, h] * (i + offset - j).abs()

    return biased
