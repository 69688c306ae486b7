"""Adapters to the implementations: each takes an `AttentionCall` and returns (out, lse or None).

The call is one that the backend's `reasons` do not exclude: out is (batch, seqlen_q, heads,
head_dim), lse (batch, heads, seqlen_q), natural log; lse may also come where it is not asked for.
Where several kernels, or ways to pass a mask, come into question, a function such as
`triton_kernel` decides among them: it returns a `Kernel`, which says its name and runs the call.
An optional package is imported here and nowhere else, when it is first used.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel

from labsupport.attention.call import AttentionCall, BackendUnavailableError
from labsupport.attention.flash_torch import FlashAttentionFunction, flash_attention_forward
from labsupport.attention.inputs import check_kernel_inputs
from labsupport.attention.kernels import autograd, mode
from labsupport.attention.kernels.config import can_be_described
from labsupport.attention.masks import AttentionMask, alibi_bias
from labsupport.attention.reference import masked_attention

Result = tuple[Tensor, Tensor | None]
Run = Callable[[AttentionCall], Result]


@dataclass(frozen=True)
class Kernel:
    """A kernel that was chosen for a call: its name, and the function that runs it."""

    name: str
    run: Run


# --- the lab's own --------------------------------------------------------------------------------


def run_standard(call: AttentionCall) -> Result:
    """Run the textbook attention of `reference`."""
    q, k, v, slopes = call.math_layout()
    out, lse = masked_attention(
        q, k, v, causal=call.causal, softmax_scale=call.softmax_scale,
        window_size=call.window_size, alibi_slopes=slopes, return_lse=call.return_lse,
        softcap=call.softcap,
    )  # fmt: skip
    return _from_math_layout(out, lse)


def run_flash_torch(call: AttentionCall) -> Result:
    """Run the lab's FlashAttention in plain PyTorch."""
    q, k, v, slopes = call.math_layout()
    if call.needs_grad:
        out = FlashAttentionFunction.apply(
            q, k, v, call.causal, call.softmax_scale, call.window_size, slopes
        )
        # Reading what was saved makes a checkpoint recompute its block: only if asked for.
        return _from_math_layout(out, out.grad_fn.saved_tensors[-1] if call.return_lse else None)
    out, lse = flash_attention_forward(
        q, k, v, call.causal, softmax_scale=call.softmax_scale, window_size=call.window_size,
        alibi_slopes=slopes,
    )  # fmt: skip
    return _from_math_layout(out, lse)


def _from_math_layout(out: Tensor, lse: Tensor | None) -> Result:
    return out.flatten(1, 2).transpose(1, 2), None if lse is None else lse.flatten(1, 2)


def triton_kernel(call: AttentionCall) -> Kernel:
    """Choose among the lab's Triton kernels."""
    return _own_kernel(call, autograd.choose(call))


def gluon_kernel(call: AttentionCall) -> Kernel:
    """Return the lab's Gluon kernels."""
    return _own_kernel(call, "gluon")


def _own_kernel(call: AttentionCall, kernels: autograd.Kernels) -> Kernel:
    check_kernel_inputs(call.q, call.k, call.v)  # benchmarks call without a look at the limits
    name = f"labsupport.attention.kernels.{autograd.NAMES[kernels]}"
    interpreted = ", interpreted" if mode.interpreted() else ""
    return Kernel(name + interpreted, partial(autograd.run, kernels=kernels))


TRITON_WITH_GLUON = ("3.6", "3.7")


def missing_gluon() -> str | None:
    """Return why Gluon's kernels cannot run, or None: the language still changes."""
    if reason := mode.missing():
        return reason
    if mode.interpreted():
        return "Triton's interpreter does not run Gluon"
    version = import_module("triton").__version__
    if ".".join(version.split(".")[:2]) not in TRITON_WITH_GLUON:
        return f"written for Triton {' and '.join(TRITON_WITH_GLUON)}, this is {version}"
    return None


def gluon_reasons(call: AttentionCall) -> list[str]:
    """Return why the kernel cannot run a call: it needs a Hopper GPU and one of two head_dims."""
    reasons = []
    if torch.cuda.get_device_capability(call.q.device)[0] != 9:
        reasons.append("is written for Hopper GPUs (compute capability 9.0)")
    if call.head_dim not in (64, 128):
        reasons.append(f"takes head_dim 64 or 128, not {call.head_dim}")
    if not all(map(can_be_described, (call.q, call.k, call.v))):
        reasons.append("the TMA unit needs contiguous rows in 16-byte steps")
    return reasons


def triton_reasons(call: AttentionCall) -> list[str]:
    """A compiled kernel runs on GPUs only."""
    if call.q.device.type == "cpu" and not mode.interpreted():
        return [f"runs on a CPU only in Triton's interpreter: set {mode.VARIABLE}=1 before Python"]
    return []


# --- SDPA -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sdpa:
    """`F.scaled_dot_product_attention`, pinned to one of its backends."""

    backend: SDPBackend
    operator: str  # as PyTorch's profiler shows it
    can_use: Callable[[SDPAParams, bool], bool] | None = None  # on a GPU; None: always
    with_lse: dict[str, Callable[..., Result]] = field(default_factory=dict)  # by device

    def kernel(self, call: AttentionCall) -> Kernel:
        """Return the operator's name for this call, and the way to pass its mask."""
        flash_on_cpu = self.backend == SDPBackend.FLASH_ATTENTION and call.q.device.type == "cpu"
        note = " (with a stored seqlen_q x seqlen_k mask)" if self.stores_mask(call) else ""
        name = self.operator + ("_for_cpu" if flash_on_cpu else "") + note
        masked = call.alibi_slopes is not None or _needs_mask_tensor(call)
        is_causal = not masked and not call.band.unlimited
        return Kernel(name, partial(self.run, masked=masked, is_causal=is_causal))

    def run(self, call: AttentionCall, *, masked: bool, is_causal: bool) -> Result:
        """Run the call, with a mask tensor or PyTorch's `is_causal`, which is aligned top-left."""
        q, k, v = call.q.transpose(1, 2), call.k.transpose(1, 2), call.v.transpose(1, 2)
        if call.return_lse:
            out, lse = self.with_lse[q.device.type](call, q, k, v, masked, is_causal)
            return out.transpose(1, 2), lse
        mask = _sdpa_mask(call) if masked else None
        with sdpa_kernel(self.backend) if is_compiling() else _pinned(self.backend):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=call.softmax_scale,
                enable_gqa=call.heads != call.kv_heads,
            )  # fmt: skip
        return out.transpose(1, 2), None

    def stores_mask(self, call: AttentionCall) -> bool:
        """Return whether a fused kernel needs a mask of seqlen_q x seqlen_k for this call."""
        if self.backend == SDPBackend.FLASH_ATTENTION:  # on a GPU it takes no mask at all
            return call.q.device.type == "cpu" and _needs_mask_tensor(call)
        if self.backend == SDPBackend.EFFICIENT_ATTENTION:  # bottom-right masks are built in
            built_in = call.band.plain_causal and not call.return_lse
            return call.alibi_slopes is not None or (_needs_mask_tensor(call) and not built_in)
        return False

    def reasons(self, call: AttentionCall) -> list[str]:
        """PyTorch's own reasons against this backend on a GPU, for these very tensors."""
        # Dynamo traces no SDPAParams: in torch.compile the pinned kernel itself refuses.
        if self.can_use is None or torch.compiler.is_compiling():
            return []
        if call.q.device.type == "cpu":
            unit = call.q.stride(-1) == call.k.stride(-1) == call.v.stride(-1) == 1
            return [] if unit else ["needs the last dimension to be contiguous (stride 1)"]
        if call.windowed and self.backend == SDPBackend.FLASH_ATTENTION:
            return ["cannot do sliding windows on a GPU: its kernel takes no mask there"]
        q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
        is_causal = call.band.plain_causal and call.band.offset == 0
        params = SDPAParams(q, k, v, None, 0.0, is_causal, call.heads != call.kv_heads)
        if self.can_use(params, False):
            return []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.can_use(params, True)
        texts = [str(w.message).split(" (Triggered internally")[0].strip() for w in caught]
        return texts or ["PyTorch refuses these inputs without a reason"]


@contextmanager
def _pinned(backend: SDPBackend) -> Iterator[None]:
    """`sdpa_kernel` in a third of its time; torch.compile only knows the original."""
    before = [enabled() for _, enabled, _ in _SWITCHES]
    try:
        for switch, _, enable in _SWITCHES:
            enable(switch == backend)
        yield
    finally:
        for flag, (_, _, enable) in zip(before, _SWITCHES, strict=True):
            enable(flag)


def _needs_mask_tensor(call: AttentionCall) -> bool:
    band = call.band
    return not band.unlimited and not (band.plain_causal and band.offset == 0)


def _sdpa_mask(call: AttentionCall) -> Tensor | None:
    band = call.band
    if call.alibi_slopes is not None:
        return _float_mask(call)
    if band.plain_causal:
        # Imported here: it brings torch._dynamo, which doubles the time to import this package.
        from torch.nn.attention.bias import causal_lower_right

        # Keeps CUDA's flash kernel (bottom-right inside); elsewhere it becomes a stored mask.
        return causal_lower_right(band.seqlen_q, band.seqlen_k)
    return band.full_mask(call.q.device)


def _float_mask(call: AttentionCall) -> Tensor | None:
    """The band and ALiBi as one additive mask in q's dtype, for operators that take only that."""
    band, mask = call.band, None
    visible = band.full_mask(call.q.device)
    if call.alibi_slopes is not None:
        rows, cols = slice(0, band.seqlen_q), slice(0, band.seqlen_k)
        mask = alibi_bias(call.alibi_slopes, rows, cols, band.offset).to(call.q.dtype)
        mask = mask[None] if call.alibi_slopes.ndim == 1 else mask
    elif visible is not None:
        mask = torch.zeros(visible.shape, dtype=call.q.dtype, device=call.q.device)
    return mask if mask is None or visible is None else mask.masked_fill(~visible, -torch.inf)


def _flash_cpu_with_lse(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, masked: bool, is_causal: bool
) -> Result:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=_float_mask(call) if masked else None, scale=call.scale
    )
    return out, lse


def _flash_cuda_with_lse(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, masked: bool, is_causal: bool
) -> Result:
    # SDPA's operator wants head_dim in multiples of 8; SDPA itself pads and cuts as here.
    q, k, v = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v))
    # Its only mask is a causal one, which it aligns bottom-right.
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, masked or is_causal, False, scale=call.scale
    )
    return out[..., : call.head_dim], lse


def _efficient_with_lse(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, masked: bool, is_causal: bool
) -> Result:
    bias = _float_mask(call) if masked else None
    if bias is not None:
        # The kernel reads aligned rows: pad each to a multiple of 16, then cut it to length.
        bias = F.pad(bias, (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]]
        bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, is_causal, scale=call.scale
    )
    return out, lse[..., : q.shape[-2]]


def _cudnn_with_lse(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, masked: bool, is_causal: bool
) -> Result:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=call.scale
    )
    return out, lse.reshape(q.shape[:-1])


_cuda = torch.backends.cuda
_SWITCHES = (
    (SDPBackend.FLASH_ATTENTION, _cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (
        SDPBackend.EFFICIENT_ATTENTION,
        _cuda.mem_efficient_sdp_enabled,
        _cuda.enable_mem_efficient_sdp,
    ),
    (SDPBackend.CUDNN_ATTENTION, _cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (SDPBackend.MATH, _cuda.math_sdp_enabled, _cuda.enable_math_sdp),
)
SDPA_FLASH = Sdpa(
    SDPBackend.FLASH_ATTENTION,
    "aten::_scaled_dot_product_flash_attention",
    _cuda.can_use_flash_attention,
    {"cpu": _flash_cpu_with_lse, "cuda": _flash_cuda_with_lse},
)
SDPA_EFFICIENT = Sdpa(
    SDPBackend.EFFICIENT_ATTENTION,
    "aten::_scaled_dot_product_efficient_attention",
    _cuda.can_use_efficient_attention,
    {"cuda": _efficient_with_lse},
)
SDPA_CUDNN = Sdpa(
    SDPBackend.CUDNN_ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention",
    _cuda.can_use_cudnn_attention,
    {"cuda": _cudnn_with_lse},
)
SDPA_MATH = Sdpa(SDPBackend.MATH, "aten::_scaled_dot_product_attention_math")

# --- FlexAttention, compiled ----------------------------------------------------------------------


def flex_reasons(call: AttentionCall) -> list[str]:
    """FlexAttention is compiled: on a CPU by a C++ compiler, on a GPU for products of 16."""
    if call.q.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return ["needs a C++ compiler on a CPU: install g++ (Linux) or Xcode's tools (macOS)"]
    if call.q.device.type == "cuda" and call.head_dim < 16:
        return [f"needs head_dim to be at least 16 on a GPU, not {call.head_dim}"]
    return []


def run_flex(call: AttentionCall) -> Result:
    """Run compiled FlexAttention: the band as a block mask, ALiBi and softcap as a score_mod."""
    from torch._inductor.exc import InductorError
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
    band = call.band
    # Each shape compiles its own kernel. Past a limit PyTorch would run uncompiled, which
    # stores the scores: raise the limit, and fail rather than do that silently.
    with torch._dynamo.config.patch(recompile_limit=512, fail_on_recompile_limit_hit=True):
        # Without a block mask the CPU's kernel keeps scratch of seqlen_q x seqlen_k.
        masked = not band.unlimited or q.device.type == "cpu"
        try:
            result = _compiled_flex()(
                q, k, v, scale=call.scale, enable_gqa=call.heads != call.kv_heads,
                score_mod=_score_mod(call),
                block_mask=_block_mask(band, q.device) if masked else None,
                return_aux=AuxRequest(lse=True) if call.return_lse else None,
            )  # fmt: skip
        except InductorError as error:
            # PyTorch 2.11 on a GPU: few float32 queries of grouped heads with ALiBi, for one.
            why = f"PyTorch {torch.__version__} cannot compile this call"
            message = f"backend 'flex' cannot run this call:\n  flex: {why}: {error}"
            raise BackendUnavailableError(message, {"flex": (why,)}) from error
    out, lse = (result[0], result[1].lse) if call.return_lse else (result, None)
    return out.transpose(1, 2), lse


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def _block_mask(band: AttentionMask, device: torch.device) -> Any:
    """FlexAttention's list of visible tiles; cached: a new one compiles the kernel again."""
    from torch.nn.attention.flex_attention import create_block_mask

    everything, offset = band.seqlen_q + band.seqlen_k, band.offset
    left = everything if band.left is None else band.left
    right = everything if band.right is None else band.right

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= i + offset - left) & (j <= i + offset + right)

    return create_block_mask(visible, None, None, band.seqlen_q, band.seqlen_k, device=str(device))


def _score_mod(call: AttentionCall) -> Callable[..., Tensor] | None:
    """The change of each score that FlexAttention compiles in: capped, then biased."""
    softcap, offset = call.softcap, call.band.offset
    if call.alibi_slopes is None:
        return _capped(softcap) if softcap else None
    slopes = call.alibi_slopes.float().expand(call.q.shape[0], -1)

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = softcap * torch.tanh(score / softcap) if softcap else score
        return score - slopes[b, h] * (i + offset - j).abs()

    return biased


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)


# --- optional packages: their options' order differs from version to version, so by keyword -------


@cache
def missing(module: str, how_to_install: str) -> str | None:
    """Return why a module cannot be used, or None. Without a GPU it is only looked for."""
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


def run_fa2(call: AttentionCall) -> Result:
    """Run flash-attn 2, on all sequences of a packed call together."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    function = flash_attn_varlen_func if call.packed else flash_attn_func
    slopes = call.alibi_slopes
    return function(
        call.q, call.k, call.v, **_packed(call), softmax_scale=call.softmax_scale,
        causal=call.causal, window_size=tuple(call.window_size),
        alibi_slopes=None if slopes is None else slopes.float(), softcap=call.softcap,
        return_attn_probs=True,
    )[:2]  # fmt: skip


def fa4_reasons(call: AttentionCall) -> list[str]:
    """Return what its release 4.0.0b36 computes wrongly, as this lab's tests found on an H200."""
    reasons = []
    if call.needs_grad and call.softcap:
        reasons.append("its gradients with softcap were not compared with the oracle")
    if call.needs_grad and call.head_dim % 32:
        reasons.append(
            f"returns wrong gradients for head_dim {call.head_dim} (found with 4.0.0b36): "
            "right ones for multiples of 32"
        )
    return reasons


def run_fa4(call: AttentionCall) -> Result:
    """Run flash-attn-4 (CuTe DSL), on all sequences of a packed call together."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    function = flash_attn_varlen_func if call.packed else flash_attn_func
    left, right = (None if side < 0 else side for side in call.window_size)
    # With a left limit, causality has to be said as a right limit of 0.
    limited = call.causal and left is not None
    return function(
        call.q, call.k, call.v, **_packed(call), softmax_scale=call.softmax_scale,
        causal=call.causal and left is None, window_size=(left, 0 if limited else right),
        softcap=call.softcap, return_lse=call.return_lse,
    )  # fmt: skip


def _packed(call: AttentionCall) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {name: getattr(call, name) for name in names} if call.packed else {}


@cache
def missing_xformers() -> str | None:
    """Return why xFormers cannot be used, or None: its extensions may fail to load silently."""
    logging.getLogger("xformers").setLevel(logging.ERROR)  # the reason is given below instead
    reason = missing("xformers.ops", "xFormers is not installed: pip install xformers (CUDA only)")
    if reason is None and torch.cuda.is_available():
        error = import_module("xformers._cpp_lib")._cpp_library_load_exception
        if error is not None:
            text = " ".join(str(error).split())
            return f"xFormers is installed, but its CUDA extensions do not load: {text[:160]}"
    return reason


def run_xformers(call: AttentionCall) -> Result:
    """Run xFormers; a call that wants the log-sum-exp goes to another of its functions."""
    from xformers import ops
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    bias = LowerTriangularFromBottomRightMask() if call.causal else None
    inputs, options = (call.q, call.k, call.v), {"attn_bias": bias, "scale": call.scale}
    if call.return_lse:
        return ops.memory_efficient_attention_forward_requires_grad(*inputs, **options)
    return ops.memory_efficient_attention(*inputs, **options), None
