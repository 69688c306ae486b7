"""What the attention functions accept, and what they say to the rest.

Every message names what was given, what was expected, and the shortest way out.
"""

from __future__ import annotations

import torch
from torch import Tensor

# No published model has more heads, and sequences shorter than so many heads are rare.
MOST_HEADS_OF_A_REAL_MODEL = 128


class AttentionInputError(ValueError):
    """The tensors or options given to an attention function do not fit together."""


def check_math_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check tensors in the papers' layout (..., seqlen, head_dim).

    Raises:
        AttentionInputError: ranks, dtypes, devices, lengths or leading dimensions do not fit.
    """
    _check_common(q, k, v, least_rank=2, layout="(..., seqlen, head_dim)")
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise AttentionInputError(
            f"q, k and v must have the same leading dimensions, but {_shapes(q, k, v)} were given. "
            "For grouped-query heads use labsupport.attention.attention, which takes "
            "(batch, seqlen, heads, head_dim), or expand k and v to q's heads."
        )
    _check_lengths(q.shape[-2], k.shape[-2], v.shape[-2], "(..., seqlen, head_dim)", q, k, v)


def check_model_layout(
    q: Tensor, k: Tensor, v: Tensor, *, check_layout: bool = True, one_dtype: bool = True
) -> None:
    """Check tensors in flash-attn's layout (batch, seqlen, heads, head_dim).

    `one_dtype=False` lets floating dtypes be mixed.

    Raises:
        AttentionInputError: ranks, dtypes, devices, lengths, batch or heads do not fit, or heads
            and seqlen look swapped (more than 128 heads, and more heads than keys);
            `check_layout=False` skips only that last check.
    """
    layout = "(batch, seqlen, heads, head_dim)"
    _check_common(q, k, v, least_rank=4, layout=layout, exact=True, one_dtype=one_dtype)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise AttentionInputError(
            f"q, k and v must have the same batch size, but {_shapes(q, k, v)} were given."
        )
    _check_lengths(q.shape[1], k.shape[1], v.shape[1], layout, q, k, v)
    heads, seqlen_k = q.shape[2], k.shape[1]
    if check_layout and heads > MOST_HEADS_OF_A_REAL_MODEL and heads > seqlen_k:
        raise AttentionInputError(
            f"q of shape {tuple(q.shape)} means {heads} heads and keys of length {seqlen_k}: "
            f"heads and seqlen look swapped. This function takes {layout}; from "
            "(batch, heads, seqlen, head_dim) pass q.transpose(1, 2), k.transpose(1, 2), "
            f"v.transpose(1, 2). If you really have {heads} heads, pass check_layout=False."
        )
    _check_heads(heads, k.shape[2], v.shape[2], q, k, v)


def check_packed_layout(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> None:
    """Check tensors in flash-attn's packed layout (total tokens, heads, head_dim).

    Raises:
        AttentionInputError: shapes do not fit, or `cu_seqlens_*` are not rising offsets 0 .. total
            of equally many sequences.
    """
    _check_common(q, k, v, least_rank=3, layout="(total_tokens, heads, head_dim)", exact=True)
    _check_lengths(q.shape[0], k.shape[0], v.shape[0], "(total_tokens, heads, head_dim)", q, k, v)
    _check_heads(q.shape[1], k.shape[1], v.shape[1], q, k, v)
    for name, offsets, total in (
        ("cu_seqlens_q", cu_seqlens_q, q.shape[0]),
        ("cu_seqlens_k", cu_seqlens_k, k.shape[0]),
    ):
        if not isinstance(offsets, Tensor):
            raise AttentionInputError(
                f"{name} must be a 1-D integer tensor, but a {type(offsets).__name__} was given: "
                "torch.tensor(...) converts it."
            )
        whole = not (offsets.is_floating_point() or offsets.is_complex())
        steps = offsets.tolist() if offsets.ndim == 1 and whole else []
        if len(steps) < 2 or steps[0] != 0 or steps[-1] != total or steps != sorted(steps):
            raise AttentionInputError(
                f"{name} must be a 1-D integer tensor that starts at 0, never falls and ends at "
                f"{total}, the number of packed tokens; {offsets} was given. For lengths "
                "[3, 5] it is [0, 3, 8]: torch.tensor([0, 3, 5]).cumsum(0)."
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise AttentionInputError(
            f"cu_seqlens_q describes {len(cu_seqlens_q) - 1} sequences, cu_seqlens_k "
            f"{len(cu_seqlens_k) - 1}: they must describe the same ones."
        )


def check_mask(mask: Tensor | None) -> None:
    """Check that a mask says clearly what it means: True and False, or numbers to be added.

    Raises:
        AttentionInputError: an integer mask, such as a tokenizer's attention_mask of 0 and 1.
    """
    if mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        return
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise AttentionInputError(
            "mask must be boolean (True where a query may look) or floating (added to the scores), "
            f"but {given} was given: a mask of 0 and 1 becomes boolean with mask.bool()."
        )


def check_window(window_size: object) -> None:
    """Check that a window is (left, right), two integers of at least -1.

    Raises:
        AttentionInputError: anything else.
    """
    pair = window_size if isinstance(window_size, tuple | list) else ()
    sides = [side for side in pair if isinstance(side, int) and side >= -1]
    if len(pair) != 2 or len(sides) != 2:
        raise AttentionInputError(
            f"window_size is (left, right), two integers with -1 for 'no limit', but "
            f"{window_size!r} was given."
        )


def check_alibi_slopes(alibi_slopes: Tensor | None, batch: int, heads: int) -> None:
    """Check that slopes are a tensor of (heads,) or (batch, heads) that wants no gradient.

    Raises:
        AttentionInputError: anything else. (Not every kernel differentiates them; none silently.)
    """
    if alibi_slopes is None:
        return
    if not isinstance(alibi_slopes, Tensor):
        raise AttentionInputError(
            f"alibi_slopes must be a tensor, but a {type(alibi_slopes).__name__} was given: "
            "torch.tensor(...) converts it."
        )
    if tuple(alibi_slopes.shape) not in {(heads,), (batch, heads)}:
        raise AttentionInputError(
            f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}) for {heads} heads and "
            f"batch size {batch}, but {tuple(alibi_slopes.shape)} was given."
        )
    if alibi_slopes.requires_grad:
        raise AttentionInputError(
            "alibi_slopes.requires_grad is True, but slopes are constants here: pass "
            "alibi_slopes.detach()."
        )


def _check_common(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    least_rank: int,
    layout: str,
    exact: bool = False,
    one_dtype: bool = True,
) -> None:
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, Tensor):
            raise AttentionInputError(
                f"{name} must be a torch.Tensor of shape {layout}, but a {type(tensor).__name__} "
                "was given: torch.as_tensor(...) converts lists and NumPy arrays."
            )
        wrong_rank = tensor.ndim != least_rank if exact else tensor.ndim < least_rank
        if wrong_rank:
            wanted = f"{least_rank}" if exact else f"at least {least_rank}"
            raise AttentionInputError(
                f"{name} must have {wanted} dimensions {layout}, but shape {tuple(tensor.shape)} "
                "was given. Add a missing dimension with unsqueeze, e.g. x.unsqueeze(0) for a "
                "batch of one."
            )
        if not tensor.is_floating_point():
            remedy = (
                f"attention of complex numbers is not defined here; take {name}.real if that is "
                "what you mean."
                if tensor.is_complex()
                else f"{name}.float(), or better: look why it is not one already."
            )
            raise AttentionInputError(
                f"{name} has dtype {tensor.dtype}, but attention needs a floating dtype: {remedy}"
            )
        if tensor.dtype.itemsize < 2:
            raise AttentionInputError(
                f"{name} has dtype {tensor.dtype}, whose numbers mean nothing without the scales "
                f"they were quantised with: multiply {name}.to(torch.bfloat16) by its scales first."
            )
    if one_dtype and not q.dtype == k.dtype == v.dtype:
        raise AttentionInputError(
            f"q, k and v must have one dtype, but {q.dtype}, {k.dtype}, {v.dtype} were given. "
            "Cast them to the one you mean, e.g. k.to(q.dtype)."
        )
    if not q.device == k.device == v.device:
        raise AttentionInputError(
            f"q, k and v must be on one device, but {q.device}, {k.device}, {v.device} were given. "
            "Move them, e.g. k.to(q.device)."
        )
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise AttentionInputError(
            f"q, k and v must have the same head_dim (the last dimension), but {_shapes(q, k, v)} "
            "were given."
        )
    if q.shape[-1] == 0:
        raise AttentionInputError(f"head_dim is 0: {_shapes(q, k, v)} were given.")


def _check_lengths(
    seqlen_q: int, seqlen_k: int, seqlen_v: int, layout: str, q: Tensor, k: Tensor, v: Tensor
) -> None:
    if seqlen_k != seqlen_v:
        raise AttentionInputError(
            f"k has length {seqlen_k} and v {seqlen_v}: every key needs its value. "
            f"{_shapes(q, k, v)} were given for layout {layout}."
        )
    if seqlen_q == 0 or seqlen_k == 0:
        raise AttentionInputError(
            f"empty sequence: q has length {seqlen_q}, k and v {seqlen_k}, in layout {layout}. "
            "Attention needs at least one query and one key."
        )


def _check_heads(heads: int, kv_heads: int, v_heads: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    if kv_heads != v_heads:
        raise AttentionInputError(
            f"k has {kv_heads} heads and v {v_heads}: they must match. "
            f"{_shapes(q, k, v)} were given."
        )
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise AttentionInputError(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly: heads must be a "
            f"multiple of kv_heads. {_shapes(q, k, v)} were given; if the layout is "
            "(batch, heads, seqlen, head_dim), transpose(1, 2) each of them."
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
