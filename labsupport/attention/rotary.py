"""Rotary positions (RoPE): queries and keys are turned by angles that grow with their position.

Take two numbers of a head as a point (x, y), and turn it by an angle t·f: t is the token's position
and f a frequency, another one for each pair of numbers (RoFormer, arXiv 2104.09864, section 3.2.2).
A dot product of two points only knows the angle between them. So the score of query t and key u
depends on t - u only: positions are relative, although each token is turned separately.

    pair i of head_dim / 2:  f = base^(-2i / head_dim)     the first turns by 1 radian a token,
                                                           the last by about 1 / base

Which numbers make a pair? Two conventions are in use, and a file of weights does not say which.
With a head_dim of 8 and pairs a to d:

    interleaved=True    xa ya xb yb xc yc xd yd    neighbours: the RoFormer paper, GPT-J, llama2.c
    interleaved=False   xa xb xc xd ya yb yc yd    half a head apart: GPT-NeoX, Transformers' Llama

The wrong one raises no error. `permute_rotary_rows` rewrites weights from one to the other.

Angles are made in float64, and only their cosines and sines are rounded to float32: at position
1,000,000 float32 has few digits left for the fraction of an angle.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from labsupport.attention.inputs import (
    INTEGERS,
    AttentionInputError,
    check_integers,
    check_max_seqlen,
    check_offsets,
    check_switch,
    overlaps,
)


def rotary_angles(
    positions: Tensor, head_dim: int, *, base: float = 10_000.0, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of each position and each pair.

    Args:
        positions: (seqlen,) or (batch, seqlen) integers. A shard of a sequence gives its own.
        head_dim: how many numbers of a head are turned: even.
        base: the larger, the slower the slow pairs turn (`scaled_base`).
        scaling: positions are divided by it: linear position interpolation (Chen et al., arXiv
            2306.15595).

    Returns:
        cos, sin: (..., seqlen, head_dim / 2) each, float32, on the device of the positions; right
        to float32's rounding up to positions of 10^9.

    Raises:
        AttentionInputError: no integer positions of that shape, an odd head_dim, or a base or
            scaling that is not positive.

    >>> cos, sin = rotary_angles(torch.arange(16), head_dim=8)
    >>> cos.shape
    torch.Size([16, 4])
    """
    dtype, shape = getattr(positions, "dtype", None), tuple(getattr(positions, "shape", ()))
    if dtype not in INTEGERS or len(shape) not in (1, 2):
        raise AttentionInputError(
            f"positions must be an integer tensor (seqlen,) or (batch, seqlen), but a "
            f"{type(positions).__name__} was given, {dtype} of shape {shape}: "
            "torch.arange(seqlen) for a sequence that begins at 0."
        )
    if head_dim < 2 or head_dim % 2 or base <= 0 or scaling <= 0:
        raise AttentionInputError(
            "head_dim must be even, as numbers are turned in pairs, and base and scaling must be "
            f"positive, but head_dim {head_dim}, base {base}, scaling {scaling} was given."
        )
    # Apple's GPUs have no float64.
    device = torch.device("cpu") if positions.device.type == "mps" else positions.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = (positions.to(device, torch.float64) / scaling).unsqueeze(-1) * base**-exponents
    to = positions.device, torch.float32
    return angles.cos().to(*to), angles.sin_().to(*to)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turn queries or keys by their angles; name and arguments are flash-attn's.

    Args:
        x: (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim). If head_dim is
            larger than 2 · cos.shape[-1], the numbers after those stay as they are.
        cos, sin: from `rotary_angles`: (positions, pairs), at least as many as there are tokens in
            a sequence; or the angles of each token, (batch, seqlen, pairs), or (total, pairs) for
            a packed x without `cu_seqlens`.
        interleaved: pairs are neighbours (True) or half a head apart (False).
        inplace: write to x and return it.
        seqlen_offsets: position of the first token, one number or (batch,).
        cu_seqlens: (sequences + 1,) offsets of packed sequences; positions start again in each.
        max_seqlen: at least the longest length; not needed here.

    Returns:
        A tensor of x's shape and dtype, a new one unless `inplace`. Computed in float32 (float64
        for a float64 x).

    A rotation is linear: for its backward, which turns by the opposite angle, autograd keeps cos
    and sin, and not x.

    Raises:
        AttentionInputError: shapes, dtypes or devices do not fit together, positions are not in
            the tables, cosines want gradients (they are constants here), or x cannot be written to.

    >>> x = torch.randn(1, 16, 4, 8)
    >>> turned = apply_rotary_emb(x, *rotary_angles(torch.arange(16), head_dim=8))
    >>> torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    True
    """
    check_switch("interleaved", interleaved)
    check_switch("inplace", inplace)
    _check_rotation(x, cos, sin)
    if inplace and (overlaps(x) or (x.is_leaf and x.requires_grad and is_grad_enabled())):
        raise AttentionInputError(
            "inplace=True writes to x, which is a leaf that requires gradients, or has elements "
            "that share memory (expand): leave inplace out, or pass x.clone()."
        )
    cos, sin = _angles_of_tokens(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return _Rotation.apply(x, cos, sin, interleaved, False, inplace)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, inplace: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = interleaved, back
        if inplace:
            ctx.mark_dirty(x)
        return _rotate(x, cos, sin, interleaved, back, inplace)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        interleaved, back = ctx.options
        dx = _Rotation.apply(dout, *ctx.saved_tensors, interleaved, not back, False)
        return dx, None, None, None, None, None


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, inplace: bool
) -> Tensor:
    # One angle for all heads of a token; 16-bit cosines must not make it 16-bit arithmetic.
    cos, sin = (
        table.to(torch.promote_types(table.dtype, torch.float32)).unsqueeze(-2)
        for table in (cos, sin)
    )
    sign = -1 if back else 1
    turned = 2 * cos.shape[-1]
    out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    if turned < x.shape[-1] and not inplace:
        out[..., turned:] = x[..., turned:]
    xs, ys = _coordinates(x[..., :turned], interleaved)
    new_xs, new_ys = _coordinates(out[..., :turned], interleaved)
    # A half of x in float32 at a time, and never a whole copy: at a million tokens it is gigabytes.
    old_xs = xs.clone() if inplace else xs
    new_xs.copy_((xs * cos).addcmul_(ys, sin, value=-sign))
    new_ys.copy_((ys * cos).addcmul_(old_xs, sin, value=sign))
    return out


def _coordinates(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the x and the y of each pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    pairs = x.shape[-1] // 2
    return x[..., :pairs], x[..., pairs:]


def permute_rotary_rows(weight: Tensor, heads: int, *, to_interleaved: bool) -> Tensor:
    """Permute the rows of a query or key projection from one convention to the other.

    Args:
        weight: (heads · head_dim, width), or a bias (heads · head_dim,).
        heads: of this projection: kv_heads for keys.
        to_interleaved: from halves to neighbours (True), or from neighbours to halves (False).

    Returns:
        A permuted copy. Values are not turned: their projection stays as it is.

    Raises:
        AttentionInputError: the rows do not make `heads` heads of an even head_dim.
    """
    rows = weight.shape[0] if weight.ndim else 0
    if heads < 1 or rows == 0 or rows % (2 * heads):
        raise AttentionInputError(
            f"a weight of shape {tuple(weight.shape)} does not hold {heads} heads of an even "
            "head_dim: it must be (heads * head_dim, width). For a key projection, heads is "
            "kv_heads."
        )
    pairs = rows // heads // 2
    split = (2, pairs) if to_interleaved else (pairs, 2)
    return weight.unflatten(0, (heads, *split)).transpose(1, 2).reshape(weight.shape)


def scaled_base(base: float, head_dim: int, factor: float) -> float:
    """RoPE's base for sequences `factor` times as long as in training: "NTK-aware" scaling.

    The slowest pair turns `factor` times as slowly, as with interpolation, and the fastest, which
    tells neighbours apart, as before. Source: YaRN (Peng et al., arXiv 2309.00071, section 3.1).

    >>> round(scaled_base(10_000, 64, 8))
    85550

    Raises:
        AttentionInputError: head_dim is odd or below 4, or base or factor is not positive.
    """
    if head_dim < 4 or head_dim % 2 or base <= 0 or factor <= 0:
        raise AttentionInputError(
            "head_dim must be even and at least 4, base and factor positive, but head_dim "
            f"{head_dim}, base {base} and factor {factor} were given."
        )
    return base * factor ** (head_dim / (head_dim - 2))


def _check_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, Tensor):
            raise AttentionInputError(
                f"{name} must be a tensor, but a {type(tensor).__name__} was given: "
                "torch.as_tensor(...) converts lists and arrays, rotary_angles makes cos and sin."
            )
    if x.ndim not in (3, 4) or not x.is_floating_point():
        raise AttentionInputError(
            "x must be a floating tensor (batch, seqlen, heads, head_dim), or packed "
            f"(total, heads, head_dim), but {x.dtype} of shape {tuple(x.shape)} was given."
        )
    if cos.shape != sin.shape or cos.dtype != sin.dtype or not cos.is_floating_point():
        raise AttentionInputError(
            "cos and sin must be floating, of one shape and dtype, but cos "
            f"{tuple(cos.shape)} {cos.dtype} and sin {tuple(sin.shape)} {sin.dtype} were given."
        )
    if cos.requires_grad or sin.requires_grad or not x.device == cos.device == sin.device:
        raise AttentionInputError(
            "cos and sin are constants on x's device here, but one of them requires a gradient, or "
            f"x is on {x.device}, cos on {cos.device} and sin on {sin.device}: pass "
            "cos.detach().to(x.device), and sin likewise."
        )
    if not 1 <= cos.shape[-1] <= x.shape[-1] // 2 or cos.ndim not in (2, 3):
        raise AttentionInputError(
            f"x {tuple(x.shape)} needs cos, sin (positions, pairs), 1 to {x.shape[-1] // 2} pairs, "
            f"but {tuple(cos.shape)} was given: make them with rotary_angles(positions, "
            f"{x.shape[-1]}), not doubled as in Transformers."
        )


def _angles_of_tokens(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: Any, cu_seqlens: Any, max_seqlen: Any
) -> tuple[Tensor, Tensor]:
    """Pick each token's row of the tables: (seqlen, pairs), (batch, seqlen, pairs) or packed."""
    tokens, rows, by_one = tuple(x.shape[:-2]), len(cos), type(seqlen_offsets) is int
    if cos.ndim == 3 or (x.ndim == 3 and cu_seqlens is None):
        allowed = [tokens] if x.ndim == 3 else [tokens, (1, tokens[1])]
        shifted = not by_one or seqlen_offsets != 0 or cu_seqlens is not None
        if cos.shape[:-1] not in allowed or shifted:
            raise AttentionInputError(
                f"cos and sin {tuple(cos.shape)} must be the angles of each token of x "
                f"{tuple(x.shape)}: {tokens} and pairs, without seqlen_offsets and cu_seqlens. A "
                "table (positions, pairs) goes with those, or with a batch."
            )
        return cos, sin
    lengths = [tokens[-1]] if by_one else [tokens[-1]] * tokens[0]
    if cu_seqlens is not None:
        if x.ndim != 3:
            raise AttentionInputError(
                f"cu_seqlens describes packed sequences, x (total, heads, head_dim), but x "
                f"{tuple(x.shape)} was given: x.flatten(0, 1) packs a batch."
            )
        lengths = check_offsets("cu_seqlens", cu_seqlens, len(x))
    if max_seqlen is not None:
        check_max_seqlen("max_seqlen", max_seqlen, lengths)
    if by_one:
        offsets = [seqlen_offsets] * len(lengths)
    else:
        seqlen_offsets = check_integers("seqlen_offsets", seqlen_offsets, (len(lengths),))
        offsets = seqlen_offsets.tolist()
    first, needed = min(offsets, default=0), max(map(operator.add, offsets, lengths), default=0)
    if first < 0 or needed > rows:
        raise AttentionInputError(
            f"cos and sin have {rows} positions, but x {tuple(x.shape)} with seqlen_offsets from "
            f"{first} needs {needed}: make longer tables with rotary_angles. Negative offsets do "
            "not count from the end."
        )
    if rows != tokens[-1] and rows == x.shape[2] and x.ndim == 4 and by_one and first == 0:
        raise AttentionInputError(
            f"cos has {rows} positions, as many as x {tuple(x.shape)} has heads: x looks like "
            "(batch, heads, seqlen, head_dim), where x.transpose(1, 2) is needed. If it is not, "
            f"pass cos[:{tokens[-1]}], and sin likewise."
        )
    if cu_seqlens is not None:
        shift = map(operator.sub, offsets, itertools.accumulate(lengths, initial=0))
        shifts = torch.tensor(list(shift)).repeat_interleave(torch.tensor(lengths))
        places = torch.arange(len(x), device=x.device) + shifts.to(x.device)
    elif by_one:
        places = slice(first, needed)
    else:
        places = seqlen_offsets.to(x.device).unsqueeze(1) + torch.arange(
            tokens[-1], device=x.device
        )
    return cos[places], sin[places]
