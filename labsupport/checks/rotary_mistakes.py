"""What typical wrong solutions of exercise 3-1 compute, and what to say of each."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from labsupport.attention.rotary import permute_rotary_rows

ANGLE_MISTAKES = {
    "exponent i/d": (
        "The exponent is -i / head_dim; it is -2i / head_dim, so that it runs from 0 to almost -1."
    ),
    "exponent 4i/d": (
        "The exponent is -2i / (head_dim / 2); it is -2i / head_dim. Divide by the whole head_dim."
    ),
    "to the last": "The exponent ends at -1 exactly: it is -2i / head_dim, from 0 to almost -1.",
    "exponent positive": (
        "The exponent lacks its minus sign: frequencies fall, base ** (-2i / head_dim)."
    ),
    "frequencies reversed": "The order is reversed: pair 0 turns fastest, by 1 radian a token.",
    "base ignored": "`base` is ignored: you always take 10,000.",
    "from 1": "Positions start at 1; use them as they are given, and they start at 0.",
    "counted": (
        "The values in `positions` are ignored: you count 0, 1, 2, ... instead. A shard of a "
        "sequence starts somewhere else."
    ),
    "2 pi": "There is a factor of 2 pi too much: angles are position * frequency, in radians.",
    "degrees": "The angles were converted from degrees; they are radians already.",
    "swapped": "cos and sin are swapped: return cos first.",
    "negative": "The sign of the angle is wrong: it is + position * frequency.",
    "positions in bfloat16": (
        "Positions were rounded to bfloat16, which counts to 256 only. Use float32 or float64."
    ),
    "positions in float16": (
        "Positions were rounded to float16, which counts to 2,048 and ends at 65,504. Use float32 "
        "or float64."
    ),
    "16 bits": (
        "The angles were computed in bfloat16, which cannot count beyond 256. Compute them in "
        "float32 or float64."
    ),
}

TURN_MISTAKES = {
    "neighbours": (
        "Your pairs are neighbours, (2i, 2i + 1), the other convention. Here dimension i is paired "
        "with i + head_dim // 2."
    ),
    "halves in, neighbours out": (
        "The pairs are right, but the result interleaves them: join the halves with torch.cat, not "
        "with stack and flatten."
    ),
    "other way": (
        "It turns the other way round, by -angle: the minus belongs to the first number of a pair, "
        "x' = x cos - y sin and y' = y cos + x sin."
    ),
    "both plus": "A minus is missing: x' = x cos - y sin. With two plus signs it is no rotation.",
    "both minus": "There is a minus too many: y' = y cos + x sin.",
    "cos only": "Only the cosines are used: each number of a pair also needs the other's sine.",
    "cos and sin swapped": "cos and sin have swapped places: x' = x cos - y sin.",
    "overwritten": (
        "y' was computed from the new x', not from x: the first half was overwritten before the "
        "second one was made."
    ),
    "second half left": "The second half is left as it was; it is turned too: y' = y cos + x sin.",
    "halves swapped": "The two halves of the result are swapped: x' comes first.",
    "over heads": (
        "The angles run along the heads, so each head is turned by another one. Give cos and sin a "
        "dimension for the heads: cos[:, None, :], of shape (seqlen, 1, head_dim // 2)."
    ),
    "over batch": (
        "The angles run along the batch. cos[:, None, :], of shape (seqlen, 1, head_dim // 2), "
        "puts them along seqlen."
    ),
    "scaled": "It is divided by sqrt(head_dim). A rotation keeps lengths; attention scales later.",
}

ROW_MISTAKES = {
    "inverse": (
        "This is the way back: it makes neighbours of halves. Rows 0, 2, 4, ... of a head come "
        "first, then rows 1, 3, 5, ..."
    ),
    "heads ignored": (
        "The even rows of ALL heads come first, so the heads are mixed up. Permute within each "
        "head: unflatten the rows into (heads, head_dim // 2, 2)."
    ),
    "unchanged": "Nothing has moved.",
    "columns": "The columns were permuted. The rows make the numbers of a head; columns read x.",
    "y first": "The second numbers of the pairs come first. They belong into the second half.",
    "heads inside": "The heads are not the outermost: rows are head after head.",
}


def turned(x: Tensor, cos: Tensor, sin: Tensor, mistake: str | None = None) -> Tensor:
    """x (batch, seqlen, heads, head_dim) turned by the angles, with one mistake."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    if mistake == "neighbours":
        a, b = x[..., 0::2], x[..., 1::2]
    # Along the heads or the batch the tables fit only if those are as many as tokens.
    axis = {"over heads": 0, "over batch": 2}.get(mistake or "", 1)
    if axis != 1 and x.shape[{0: 2, 2: 0}[axis]] != len(cos):
        return x.new_empty(0)
    cos, sin = (t[(slice(None), *[None] * axis)] for t in (cos, sin))
    if mistake == "cos and sin swapped":
        cos, sin = sin, cos
    if mistake == "other way":
        sin = -sin
    first = a * cos + b * sin if mistake == "both plus" else a * cos - b * sin
    source = first if mistake == "overwritten" else a
    second = b * cos - source * sin if mistake == "both minus" else b * cos + source * sin
    if mistake == "cos only":
        first, second = a * cos, b * cos
    if mistake == "second half left":
        second = b
    if mistake == "halves swapped":
        first, second = second, first
    if mistake == "scaled":
        first, second = (t / math.sqrt(x.shape[-1]) for t in (first, second))
    if mistake in ("neighbours", "halves in, neighbours out"):
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def angles_with_mistake(
    positions: Tensor, head_dim: int, base: float, mistake: str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin (seqlen, head_dim // 2) in float64, with one mistake."""
    pairs = head_dim // 2
    i = torch.arange(pairs, dtype=torch.float64)
    exponents: Mapping[str, Tensor] = {
        "exponent i/d": -i / head_dim,
        "exponent 4i/d": -4 * i / head_dim,
        "to the last": -i / max(pairs - 1, 1),
        "exponent positive": 2 * i / head_dim,
        "frequencies reversed": -2 * i.flip(0) / head_dim,
    }
    name = mistake or ""
    frequencies = (10_000.0 if name == "base ignored" else base) ** exponents.get(
        name, -2 * i / head_dim
    )
    t = torch.arange(len(positions)) if name == "counted" else positions
    if name.startswith("positions in"):
        t = t.to(torch.bfloat16 if name.endswith("bfloat16") else torch.float16)
    t = t.double() + (1 if name == "from 1" else 0)
    if name == "16 bits":
        return _angles_in_16_bits(positions, head_dim, base)
    factor = {"2 pi": 2 * math.pi, "degrees": math.pi / 180, "negative": -1.0}.get(name, 1.0)
    angles = factor * t[:, None] * frequencies
    return (angles.sin(), angles.cos()) if name == "swapped" else (angles.cos(), angles.sin())


def rows_with_mistake(weight: Tensor, heads: int, mistake: str) -> Tensor:
    """The rows of a projection, permuted with one mistake."""
    if mistake == "inverse":
        return permute_rotary_rows(weight, heads, to_interleaved=True)
    if mistake == "unchanged":
        return weight
    if mistake == "heads ignored":
        return permute_rotary_rows(weight, 1, to_interleaved=False)
    if mistake == "columns":
        if weight.shape[1] % (2 * heads):
            return weight.new_empty(0)
        return permute_rotary_rows(weight.T.contiguous(), heads, to_interleaved=False).T
    pairs = weight.unflatten(0, (heads, -1, 2))  # (heads, head_dim // 2, 2, width)
    if mistake == "y first":
        return pairs.flip(2).transpose(1, 2).reshape(weight.shape)
    return pairs.permute(2, 1, 0, 3).reshape(weight.shape)  # "heads inside"


def _angles_in_16_bits(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    i = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = (base ** (-i / head_dim)).bfloat16()
    angles = positions.bfloat16()[:, None] * frequencies
    return angles.float().cos(), angles.float().sin()
