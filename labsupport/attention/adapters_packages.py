"""Adapters to optional packages: flash-attn (2), flash-attn-4 and xFormers.

Each package is imported here and nowhere else, when it is first used. Options are passed by
keyword: their order differs from version to version.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.call import AttentionCall

Result = tuple[Tensor, Tensor | None]


# --- flash-attn 2 ---------------------------------------------------------------------------------


@cache
def missing_fa2() -> str | None:
    """Why flash-attn 2 cannot be used, or None if it can."""
    # flash-attn-4 installs into the same top-level folder, `flash_attn`, without this module.
    return _missing(
        "flash_attn.flash_attn_interface",
        "flash-attn is not installed: pip install --no-build-isolation 'flash-attn>=2.8' (CUDA; "
        "it compiles: theory/10-field-guide.md)",
    )


def run_fa2(call: AttentionCall) -> Result:
    """Run flash-attn 2's `flash_attn_func`."""
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(
        call.q, call.k, call.v, **_fa2_options(call), return_attn_probs=True
    )
    return out, lse


def run_fa2_packed(call: AttentionCall) -> Result:
    """Run flash-attn 2's `flash_attn_varlen_func` on all sequences of a packed call at once."""
    from flash_attn import flash_attn_varlen_func

    out, lse, _ = flash_attn_varlen_func(
        call.q, call.k, call.v, **_packed(call), **_fa2_options(call), return_attn_probs=True
    )
    return out, lse


def _fa2_options(call: AttentionCall) -> dict[str, Any]:
    slopes = call.alibi_slopes
    return {
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        "window_size": tuple(call.window_size),
        "alibi_slopes": None if slopes is None else slopes.float(),
    }


# --- flash-attn-4 (CuTe DSL) ----------------------------------------------------------------------


@cache
def missing_fa4() -> str | None:
    """Why flash-attn-4 cannot be used, or None if it can."""
    return _missing(
        "flash_attn.cute",
        "flash-attn-4 is not installed: pip install -e '.[hopper]' (Hopper and newer)",
    )


def fa4_reasons(call: AttentionCall) -> list[str]:
    """What its release 4.0.0b36 computes wrongly, found by this lab's own tests on an H200."""
    if call.needs_grad and call.head_dim % 32:
        return [
            f"returns wrong gradients for head_dim {call.head_dim} (found with 4.0.0b36): "
            "right ones for multiples of 32"
        ]
    return []


def run_fa4(call: AttentionCall) -> Result:
    """Run flash-attn-4's `flash_attn_func`."""
    from flash_attn.cute import flash_attn_func

    return flash_attn_func(call.q, call.k, call.v, **_fa4_options(call))


def run_fa4_packed(call: AttentionCall) -> Result:
    """Run flash-attn-4's `flash_attn_varlen_func` on all sequences of a packed call at once."""
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func(call.q, call.k, call.v, **_packed(call), **_fa4_options(call))


def _fa4_options(call: AttentionCall) -> dict[str, Any]:
    left, right = (None if side < 0 else side for side in call.window_size)
    return {
        "softmax_scale": call.softmax_scale,
        "causal": call.causal and left is None,
        # With a left limit, causality has to be said as a right limit of 0.
        "window_size": (left, 0 if call.causal else right) if left is not None else (None, right),
        "return_lse": call.return_lse,
    }


# --- xFormers -------------------------------------------------------------------------------------


@cache
def missing_xformers() -> str | None:
    """Say why xFormers cannot be used, or None: its CUDA extensions may fail to load silently."""
    # What it logs at import is said again below, where it is asked for.
    logging.getLogger("xformers").setLevel(logging.ERROR)
    missing = _missing(
        "xformers.ops", "xFormers is not installed: pip install xformers (CUDA only)"
    )
    if missing is None and torch.cuda.is_available():
        error = import_module("xformers._cpp_lib")._cpp_library_load_exception
        if error is not None:
            said = " ".join(str(error).split())
            return f"xFormers is installed, but its CUDA extensions do not load: {said[:160]}"
    return missing


def run_xformers(call: AttentionCall) -> Result:
    """Run xFormers; a call that wants the log-sum-exp goes to another of its functions."""
    from xformers import ops
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    bias = LowerTriangularFromBottomRightMask() if call.causal else None
    if call.return_lse:
        return ops.memory_efficient_attention_forward_requires_grad(
            call.q, call.k, call.v, attn_bias=bias, scale=call.scale
        )
    out = ops.memory_efficient_attention(call.q, call.k, call.v, attn_bias=bias, scale=call.scale)
    return out, None


# --- shared ---------------------------------------------------------------------------------------


def _missing(module: str, how_to_install: str) -> str | None:
    """Why `module` cannot be used, or None. Without a GPU it is only looked for, not imported."""
    if find_spec(module.partition(".")[0]) is None:
        return how_to_install
    if not torch.cuda.is_available():
        return None
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return how_to_install
        return f"{module} is installed, but does not import: {error}"
    except Exception as error:  # a build for another PyTorch fails in many ways; each is a reason
        return f"{module} is installed, but does not import: {type(error).__name__}: {error}"
    return None


def _packed(call: AttentionCall) -> dict[str, Any]:
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    return {
        "cu_seqlens_q": call.cu_seqlens_q.to(call.q.device, torch.int32),
        "cu_seqlens_k": call.cu_seqlens_k.to(call.q.device, torch.int32),
        "max_seqlen_q": int(call.cu_seqlens_q.diff().max()),
        "max_seqlen_k": int(call.cu_seqlens_k.diff().max()),
    }
