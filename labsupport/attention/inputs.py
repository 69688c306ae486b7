"""Checks of what the attention functions accept; all raise AttentionInputError.

Every message names what was given, what was expected, and how to fix it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.kernels.mode import interpreted

# No published model has more heads, and sequences shorter than that many heads are rare.
MOST_HEADS_OF_A_REAL_MODEL = 128
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
KERNEL_DTYPES, LARGEST_KERNEL_HEAD_DIM = (torch.float16, torch.bfloat16, torch.float32), 256
MODEL_LAYOUT = "(batch, seqlen, heads, head_dim)"


class AttentionInputError(ValueError):
    """The tensors or options given to an attention function do not fit together."""


def first_derivative_only(
    backward: Callable[..., Any],
    instead: str = "for attention, backend='standard' or 'sdpa_math'",
) -> Callable[..., Any]:
    """Let the backward of a `torch.autograd.Function` raise where it is to be differentiated again.

    What it computes depends on saved tensors, and no graph knows how. PyTorch's
    `once_differentiable` misses that where the incoming gradient is a constant, as of `out.sum()`.

    Raises:
        RuntimeError: gradients are on, as `create_graph=True` has them.
    """
    name = backward.__qualname__.partition(".")[0].strip("_")

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} cannot be differentiated twice (create_graph=True): its backward is "
                f"computed by hand. What can: {instead}."
            )
        return backward(ctx, *gradients)

    return once


def check_math_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check tensors in the papers' layout (..., seqlen, head_dim)."""
    layout = "(..., seqlen, head_dim)"
    _check_tensors(q, k, v, layout)
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise AttentionInputError(
            f"q, k and v must have the same leading dimensions, but {_shapes(q, k, v)} were given. "
            "For grouped-query heads use labsupport.attention.attention, which takes "
            f"{MODEL_LAYOUT}, or expand k and v to q's heads."
        )
    _check_lengths(q, k, v, -2, layout)


def check_model_layout(
    q: Tensor, k: Tensor, v: Tensor, *, check_layout: bool = True, one_dtype: bool = True
) -> None:
    """Check tensors in flash-attn's layout (batch, seqlen, heads, head_dim).

    `one_dtype=False` lets floating dtypes be mixed; `check_layout=False` takes heads and seqlen
    that look swapped: more than 128 heads, and more heads than keys.
    """
    _check_tensors(q, k, v, MODEL_LAYOUT, rank=4, one_dtype=one_dtype)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise AttentionInputError(
            f"q, k and v must have the same batch size, but {_shapes(q, k, v)} were given."
        )
    _check_lengths(q, k, v, 1, MODEL_LAYOUT)
    heads, seqlen_k = q.shape[2], k.shape[1]
    if check_layout and heads > MOST_HEADS_OF_A_REAL_MODEL and heads > seqlen_k:
        raise AttentionInputError(
            f"q of shape {tuple(q.shape)} means {heads} heads and keys of length {seqlen_k}: "
            f"heads and seqlen look swapped. This function takes {MODEL_LAYOUT}; from "
            "(batch, heads, seqlen, head_dim) pass q.transpose(1, 2), k.transpose(1, 2), "
            f"v.transpose(1, 2). If you really have {heads} heads, pass check_layout=False."
        )
    _check_heads(q, k, v)


def check_packed_layout(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> None:
    """Check flash-attn's packed layout: (total, heads, head_dim) and offsets 0 .. total."""
    layout = "(total_tokens, heads, head_dim)"
    _check_tensors(q, k, v, layout, rank=3)
    _check_lengths(q, k, v, 0, layout)
    _check_heads(q, k, v)
    check_offsets("cu_seqlens_q", cu_seqlens_q, len(q))
    check_offsets("cu_seqlens_k", cu_seqlens_k, len(k))
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise AttentionInputError(
            f"cu_seqlens_q describes {len(cu_seqlens_q) - 1} sequences, cu_seqlens_k "
            f"{len(cu_seqlens_k) - 1}: they must describe the same ones."
        )


def check_offsets(name: str, offsets: object, total: int | None = None) -> list[int]:
    """Check offsets of packed sequences, and return the lengths; a `total` of None takes any."""
    whole = isinstance(offsets, Tensor) and offsets.dtype in (torch.int32, torch.int64)
    steps = offsets.tolist() if isinstance(offsets, Tensor) and whole and offsets.ndim == 1 else []
    ends = total is None or steps[-1:] == [total]
    if len(steps) < 2 or steps[0] != 0 or not ends or steps != sorted(steps):
        end = "" if total is None else f" and ends at {total}, the number of packed tokens"
        raise AttentionInputError(
            f"{name} must be a 1-D integer tensor that starts at 0, never falls{end}; {offsets} "
            "was given. For lengths [3, 5] it is [0, 3, 8]: torch.tensor([0, 3, 5]).cumsum(0)."
        )
    return list(map(operator.sub, steps[1:], steps))


def described(x: object) -> str:
    """Return a tensor's shape, dtype and device for a message, or another object's type."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def check_max_seqlen(name: str, longest: object, lengths: list[int]) -> None:
    """Check that a longest length is a number, and none of the `lengths` is larger."""
    number = longest.item() if isinstance(longest, Tensor) and longest.ndim == 0 else longest
    least = max(lengths)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise AttentionInputError(
            f"{name} must be the longest length, here {least}, or more, but {longest!r} was given."
        )


def check_switch(name: str, switch: object) -> None:
    """Check that an option is True or False, and not another argument that slipped into place."""
    if not isinstance(switch, bool):
        raise AttentionInputError(f"{name} is True or False, but {switch!r} was given.")


def check_integers(name: str, x: object, shape: tuple[int, ...]) -> Tensor:
    """Check an integer tensor of one shape, and return it as int64."""
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS or tuple(x.shape) != shape:
        kind = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise AttentionInputError(
            f"{name} must be an integer tensor of shape {shape}, but {kind} was given: "
            "torch.tensor(...) converts a list."
        )
    return x.long()


def check_range(name: str, numbers: list[int], most: list[int], limit: str) -> list[int]:
    """Check that numbers are 0 to those of `most`, which `limit` describes, and return them."""
    if min(numbers) < 0 or any(map(operator.gt, numbers, most)):
        wrong = next((n, top) for n, top in zip(numbers, most, strict=True) if not 0 <= n <= top)
        raise AttentionInputError(
            f"{name} must be 0 to {wrong[1]}, {limit}, but {wrong[0]} was given; negative numbers "
            "do not count from the end."
        )
    return numbers


def overlaps(x: Tensor, other: Tensor | None = None) -> bool:
    """Return whether elements of x, or of x and another one of its shape, share memory.

    May say so of rare interleaved views, as PyTorch's own check does.
    """
    apart = 0 if other is None else other.data_ptr() - x.data_ptr()
    if x.is_contiguous() and (other is None or other.is_contiguous()):
        return other is not None and abs(apart) < x.nbytes
    steps = [(stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if other is not None:
        if x.stride() != other.stride():
            reach_x, reach_other = (
                sum((n - 1) * stride for n, stride in zip(y.shape, y.stride(), strict=True))
                for y in (x, other)
            )
            return -reach_other * x.itemsize <= apart <= reach_x * x.itemsize
        steps.append((abs(apart) // x.itemsize, 2))
    reach = 0
    for stride, size in sorted(steps):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def check_kernel_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check what the lab's Triton kernels take beyond the layouts: dtypes, devices, head_dim."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in KERNEL_DTYPES:
        raise AttentionInputError(
            "for Triton's kernels q, k and v must have one dtype, float16, bfloat16 or float32, "
            f"but {q.dtype}, {k.dtype}, {v.dtype} were given."
        )
    if q.dtype == torch.bfloat16 and interpreted():
        raise AttentionInputError(
            "Triton's interpreter computes bfloat16 wrongly: use float16 or float32 where there is "
            "no GPU."
        )
    if not 0 < q.shape[-1] <= LARGEST_KERNEL_HEAD_DIM:
        raise AttentionInputError(
            f"for Triton's kernels head_dim must be 1 to {LARGEST_KERNEL_HEAD_DIM}, but "
            f"{q.shape[-1]} was given; labsupport.attention.attention has backends for more."
        )
    _check_devices(q, k, v)


def check_mask(mask: Tensor | None, scores: tuple[int, ...]) -> None:
    """Check that a mask broadcasts to the shape of the scores, and is not one of 0 and 1.

    A tokenizer's attention_mask is, integer or floating.
    """
    dtype = getattr(mask, "dtype", type(mask).__name__)
    if mask is not None and dtype != torch.bool and not getattr(dtype, "is_floating_point", False):
        raise AttentionInputError(
            "mask must be boolean (True where a query may look) or floating (added to the scores), "
            f"but {dtype} was given: a mask of 0 and 1 becomes boolean with mask.bool()."
        )
    if mask is None:
        return
    shape = tuple(mask.shape)
    sizes = zip(reversed(shape), reversed(scores), strict=False)
    if len(shape) > len(scores) or not all(size in (1, whole) for size, whole in sizes):
        raise AttentionInputError(
            f"mask must broadcast to the scores (..., seqlen_q, seqlen_k), here {scores}, but "
            f"shape {shape} was given. A mask of keys (batch, seqlen_k) becomes "
            "mask[:, None, None, :] for inputs (batch, heads, seqlen, head_dim)."
        )
    if dtype == torch.bool or torch.compiler.is_compiling():
        return
    if bool(((mask == 0) | (mask == 1)).all() & (mask == 1).any()):
        raise AttentionInputError(
            "a floating mask is added to the scores, so one of 0 and 1 hides nothing: it makes the "
            "weights of its ones e times as large. Pass mask.bool(), True where a query may look."
        )


def check_scale(softmax_scale: object) -> None:
    """Check that the factor on the scores is a finite number: no tensor, which might be trained."""
    if softmax_scale is None:
        return
    number = isinstance(softmax_scale, Real) and not isinstance(softmax_scale, bool)
    if not number or not math.isfinite(softmax_scale):
        raise AttentionInputError(
            f"softmax_scale is a finite number, a constant here, but {softmax_scale!r} was given. "
            "Take the number of a tensor with .item(); to train a scale, multiply q by it, and "
            "pass softmax_scale=1.0."
        )


_ELSEWHERE = {
    "mask": "masks: standard_attention(..., mask)",
    "attn_mask": "masks: standard_attention(..., mask), or PyTorch's scaled_dot_product_attention",
    "score_mod": "score_mod: torch.nn.attention.flex_attention.flex_attention",
    "block_mask": "block_mask: torch.nn.attention.flex_attention.flex_attention",
    "dropout_p": "dropout: torch.nn.functional.scaled_dot_product_attention, on a GPU",
    "is_causal": "it is called causal=, and aligned bottom-right",
    "scale": "it is called softmax_scale=",
    "enable_gqa": "leave it out: fewer key heads are shared without it",
    "cu_seqlens_q": "packed sequences: attention_varlen",
    "cu_seqlens_k": "packed sequences: attention_varlen",
}


def refuse_options(function: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for options that a function does not have; says which function has them."""
    for name in options:
        if name not in known:
            place = _ELSEWHERE.get(name, f"there are {', '.join(known)}")
            raise TypeError(f"{function} has no option {name!r}: {place}.")


def check_window(window_size: object) -> None:
    """Check that a window is (left, right), two integers of at least -1."""
    pair = window_size if isinstance(window_size, tuple | list) else ()
    whole = [isinstance(side, int) and not isinstance(side, bool) and side >= -1 for side in pair]
    if len(whole) != 2 or not all(whole):
        raise AttentionInputError(
            "window_size is (left, right), two integers with -1 for 'no limit', but "
            f"{window_size!r} was given."
        )


def check_softcap(softcap: object) -> None:
    """Check that a cap on the scores is a finite number, not below 0."""
    number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
    if not number or not 0 <= softcap < math.inf:
        raise AttentionInputError(
            f"softcap is a finite number, 0 for none, but {softcap!r} was given."
        )


def check_alibi_slopes(alibi_slopes: Tensor | None, batch: int, heads: int) -> None:
    """Check that slopes are a tensor of (heads,) or (batch, heads) without a gradient."""
    if alibi_slopes is None:
        return
    shape = tuple(alibi_slopes.shape) if isinstance(alibi_slopes, Tensor) else None
    if shape not in {(heads,), (batch, heads)}:
        raise AttentionInputError(
            f"alibi_slopes must be a tensor of shape ({heads},) or ({batch}, {heads}) for {heads} "
            f"heads and batch size {batch}, but {shape or type(alibi_slopes).__name__} was given: "
            "torch.tensor(...) converts a list."
        )
    check_constant_slopes(alibi_slopes)


def check_constant_slopes(alibi_slopes: Tensor | None) -> None:
    """Check that no gradient of the slopes is wanted, since none is computed."""
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise AttentionInputError(
            "alibi_slopes.requires_grad is True, but slopes are constants here: pass "
            "alibi_slopes.detach()."
        )


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, layout: str, *, rank: int = 0, one_dtype: bool = True
) -> None:
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise AttentionInputError(
                f"{name} must be a torch.Tensor of shape {layout}, but a {type(x).__name__} "
                "was given: torch.as_tensor(...) converts lists and NumPy arrays."
            )
        if x.ndim != rank if rank else x.ndim < 2:
            raise AttentionInputError(
                f"{name} must have {rank or 'at least 2'} dimensions {layout}, but shape "
                f"{tuple(x.shape)} was given. Add a missing dimension with unsqueeze, e.g. "
                "x.unsqueeze(0) for a batch of one."
            )
        if not x.is_floating_point():
            raise AttentionInputError(
                f"{name} has dtype {x.dtype}, but attention needs a floating dtype: find out why, "
                f"or convert it with {name}.float() ({name}.real if it is complex)."
            )
        if x.dtype.itemsize < 2:
            raise AttentionInputError(
                f"{name} has dtype {x.dtype}, whose numbers mean nothing without the scales "
                f"they were quantised with: multiply {name}.to(torch.bfloat16) by its scales first."
            )
    if one_dtype and not q.dtype == k.dtype == v.dtype:
        raise AttentionInputError(
            f"q, k and v must have one dtype, but {q.dtype}, {k.dtype}, {v.dtype} were given. "
            "Cast them to the one you mean, e.g. k.to(q.dtype)."
        )
    _check_devices(q, k, v)
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] or q.shape[-1] == 0:
        raise AttentionInputError(
            "q, k and v must have the same head_dim (the last dimension), at least 1, but "
            f"{_shapes(q, k, v)} were given."
        )


def _check_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.device == k.device == v.device:
        raise AttentionInputError(
            f"q, k and v must be on one device, but {q.device}, {k.device}, {v.device} were given. "
            "Move them, e.g. k.to(q.device)."
        )


def _check_lengths(q: Tensor, k: Tensor, v: Tensor, dim: int, layout: str) -> None:
    if k.shape[dim] != v.shape[dim]:
        raise AttentionInputError(
            f"k has length {k.shape[dim]} and v {v.shape[dim]}: every key needs its value. "
            f"{_shapes(q, k, v)} were given for layout {layout}."
        )
    if q.shape[dim] == 0 or k.shape[dim] == 0:
        raise AttentionInputError(
            f"empty sequence: attention needs at least one query and one key, but "
            f"{_shapes(q, k, v)} were given for layout {layout}."
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads != v.shape[-2] or kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise AttentionInputError(
            f"{heads} query heads cannot share {kv_heads} key heads and {v.shape[-2]} value heads: "
            "heads must be a multiple of kv_heads, the same for k and v. "
            f"{_shapes(q, k, v)} were given; if the layout is (batch, heads, seqlen, head_dim), "
            "transpose(1, 2) each of them."
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
