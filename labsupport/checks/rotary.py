"""Exercise 3-1: queries and keys turned by their positions (RoPE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.rotary import apply_rotary_emb
from labsupport.checks.verdict import (
    CheckFailed,
    Mistake,
    call,
    explain,
    judge,
    passed,
    results,
    unpack,
)

ANGLE_NAMES = ("cos", "sin")
FAR = 100_000


def rotary_angles(
    positions: Tensor, head_dim: int, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (seqlen, head_dim // 2) each, of each position and pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64)
    frequencies = base ** (-exponents / head_dim)
    angles = positions[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (batch, seqlen, heads, head_dim) by its angles; pairs are half a head apart."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def pairs_to_halves(weight: Tensor, heads: int) -> Tensor:
    """Move the rows of a query or key projection from neighbours to halves."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


ANGLE_MISTAKES = (
    Mistake(
        ("-exponents /", "-exponents / 2 /"),
        "The exponent is -i / head_dim; it is -2i / head_dim, so that it runs from 0 to almost -1.",
    ),
    Mistake(
        ("/ head_dim)", "/ (head_dim // 2))"),
        "The exponent is -2i / (head_dim / 2); it is -2i / head_dim. Divide by the whole head_dim.",
    ),
    Mistake(
        ("-exponents / head_dim", "-torch.linspace(0, 1, head_dim // 2, dtype=torch.float64)"),
        "The exponent ends at -1 exactly: it is -2i / head_dim, from 0 to almost -1.",
    ),
    Mistake(
        ("(-exponents", "(exponents"),
        "The exponent lacks its minus sign: frequencies fall, base ** (-2i / head_dim).",
    ),
    Mistake(
        ("/ head_dim)", "/ head_dim).flip(0)"),
        "The order is reversed: pair 0 turns fastest, by 1 radian a token.",
    ),
    Mistake(("base **", "10_000 **"), "`base` is ignored: you always take 10,000."),
    Mistake(
        ("positions[:, None]", "(positions[:, None] + 1)"),
        "Positions start at 1; use them as they are given, and they start at 0.",
    ),
    Mistake(
        ("positions[:, None]", "torch.arange(len(positions))[:, None]"),
        "The values in `positions` are ignored: you count 0, 1, 2, ... instead. A shard of a "
        "sequence starts somewhere else.",
    ),
    Mistake(
        ("* frequencies", "* frequencies * 2 * torch.pi"),
        "There is a factor of 2 pi too much: angles are position * frequency, in radians.",
    ),
    Mistake(
        ("* frequencies", "* frequencies * torch.pi / 180"),
        "The angles were converted from degrees; they are radians already.",
    ),
    Mistake(
        ("angles.cos().float(), angles.sin()", "angles.sin().float(), angles.cos()"),
        "cos and sin are swapped: return cos first.",
    ),
    Mistake(
        ("* frequencies", "* -frequencies"),
        "The sign of the angle is wrong: it is + position * frequency.",
    ),
    Mistake(
        ("positions[:", "positions.bfloat16().double()[:"),
        "Positions were rounded to bfloat16, which counts to 256 only. Use float32 or float64.",
    ),
    Mistake(
        ("positions[:", "positions.half().double()[:"),
        "Positions were rounded to float16, which counts to 2,048. Use float32 or float64.",
    ),
    Mistake(
        (
            "positions[:, None] * frequencies",
            "(positions.bfloat16()[:, None] * frequencies.bfloat16()).double()",
        ),
        "The angles were computed in bfloat16, which cannot count beyond 256. Use float32.",
    ),
)
_TABLES, _JOINED = "cos[:, None, :], sin[:, None, :]", "torch.cat(turned, dim=-1)"
_INTERLEAVED = "torch.stack(turned, dim=-1).flatten(-2)"
TURN_MISTAKES = (
    Mistake(
        (".chunk(2, dim=-1)", ".unflatten(-1, (-1, 2)).unbind(-1)", _JOINED, _INTERLEAVED),
        "Your pairs are neighbours, (2i, 2i + 1), the other convention. Here dimension i is paired "
        "with i + head_dim // 2.",
    ),
    Mistake(
        (_JOINED, _INTERLEAVED),
        "The pairs are right, but the result interleaves them: join the halves with torch.cat.",
    ),
    Mistake(
        ("cos - second", "cos + second", "cos + first", "cos - first"),
        "It turns the other way round, by -angle: the minus belongs to the first number of a pair, "
        "x' = x cos - y sin and y' = y cos + x sin.",
    ),
    Mistake(
        ("cos - second", "cos + second"),
        "A minus is missing: x' = x cos - y sin. With two plus signs it is no rotation.",
    ),
    Mistake(("cos + first", "cos - first"), "There is a minus too many: y' = y cos + x sin."),
    Mistake(
        (" - second * sin", "", " + first * sin", ""),
        "Only the cosines are used: each number of a pair also needs the other's sine.",
    ),
    Mistake(
        (_TABLES, "sin[:, None, :], cos[:, None, :]"),
        "cos and sin have swapped places: x' = x cos - y sin.",
    ),
    Mistake(
        (
            *("    turned =", "    first = first * cos - second * sin\n    turned ="),
            *("(first * cos - second * sin", "(first"),
        ),
        "y' was computed from the new x': the first half was overwritten too early.",
    ),
    Mistake(
        ("second * cos + first * sin", "second"),
        "The second half is left as it was; it is turned too: y' = y cos + x sin.",
    ),
    Mistake(
        ("(turned,", "(turned[::-1],"), "The two halves of the result are swapped: x' comes first."
    ),
    Mistake(
        (_TABLES, "cos, sin"),
        "The angles run along the heads, so each head is turned by another one. Give cos and sin a "
        "dimension for the heads: cos[:, None, :], of shape (seqlen, 1, head_dim // 2).",
    ),
    Mistake(
        (_TABLES, "cos[:, None, None], sin[:, None, None]"),
        "The angles run along the batch. cos[:, None, :], of shape (seqlen, 1, head_dim // 2), "
        "puts them along seqlen.",
    ),
    Mistake(
        ("    return", "    return x.shape[-1] ** -0.5 *"),
        "It is divided by sqrt(head_dim). A rotation keeps lengths; attention scales later.",
    ),
)
ROW_MISTAKES = (
    Mistake(
        ("(heads, -1, 2)", "(heads, 2, -1)"),
        "This is the way back: it makes neighbours of halves. Rows 0, 2, 4, ... of a head come "
        "first, then rows 1, 3, 5, ...",
    ),
    Mistake(
        ("(heads, -1, 2)", "(1, -1, 2)"),
        "The even rows of ALL heads come first, so the heads are mixed up. Permute within each "
        "head: unflatten the rows into (heads, head_dim // 2, 2).",
    ),
    Mistake(("pairs.transpose(1, 2).reshape(weight.shape)", "weight"), "Nothing has moved."),
    Mistake(
        ("weight.unflatten", "weight.T.unflatten", "(weight.shape)", "(weight.T.shape).T"),
        "The columns were permuted. The rows make the numbers of a head; columns read x.",
    ),
    Mistake(
        ("transpose(1, 2)", "transpose(1, 2).flip(1)"),
        "The second numbers of the pairs come first. They belong into the second half.",
    ),
    Mistake(
        ("transpose(1, 2)", "permute(2, 1, 0, 3)"),
        "The heads are not the outermost: rows are head after head.",
    ),
)


def check_rope_angles(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-1 (a): cosines and sines of each position and pair."""
    for positions, head_dim, base in (
        (torch.arange(40), 16, 10_000.0),
        (torch.arange(5, 30 + seed % 7), 8, 500_000.0),
        (torch.tensor([7, 3, 3, 200 + seed]), 64, 10_000.0),
    ):
        where = f"(head_dim {head_dim}, base {base:,.0f}) "
        _judge_angles(call(student, positions, head_dim, base), positions, head_dim, base, where)
    positions = torch.arange(12)
    _judge_angles(call(student, positions, 8), positions, 8, 10_000.0, "(base not given: 10,000) ")
    passed("cosines and sines of each position and pair are right", seed)


def check_rope_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-1 (b): each pair (i, i + head_dim // 2) turned by its angle, in float32."""
    # Where batch, seqlen and heads are the same number, angles along the wrong one raise no error.
    for batch, seqlen, heads, head_dim in ((4, 4, 4, 8), (2, 9, 3, 16), (1, 6, 1, 2)):
        x = _draw(batch, seqlen, heads, head_dim, seed=seed)
        cos, sin = rotary_angles(torch.arange(3, 3 + seqlen), head_dim)
        result = _tensor(call(student, x, cos, sin))
        exact = (x.double(), cos.double(), sin.double())
        judge(
            f"(batch {batch}, seqlen {seqlen}, heads {heads}, head_dim {head_dim}) the result",
            result,
            apply_rope(*exact),
            allowed=1e-5,
            dtype=x.dtype,
            mistakes=results(apply_rope, TURN_MISTAKES, lambda f, exact=exact: f(*exact)),
        )
    _judge_half(student, torch.arange(3, 19), seed)
    passed("each pair is turned by its angle, and the dtype stays", seed)


def check_rope_positions(
    angles: Callable[..., Any], apply: Callable[..., Any], seed: int = 0
) -> None:
    """Exercise 3-1 (a, b): scores know distances only; shards; positions far from the beginning."""
    q, k = (_draw(1, 12, 2, 16, seed=seed + i) for i in (1, 2))

    def scores(first: int) -> Tensor:
        cos, sin = unpack(call(angles, torch.arange(first, first + 12), 16), ANGLE_NAMES)
        a, b = (_tensor(call(apply, x, cos, sin)).double() for x in (q, k))
        return torch.einsum("bihd,bjhd->bhij", a, b)

    near = scores(0)
    if torch.allclose(near, torch.einsum("bihd,bjhd->bhij", q.double(), k.double()), atol=1e-4):
        raise CheckFailed("the scores do not depend on positions at all: nothing is turned.")
    # Below 256 even bfloat16 counts right: rounded positions are another mistake, named below.
    moved = scores(200)
    if (gap := (near - moved).abs().max().item()) > 1e-3:
        raise CheckFailed(
            f"all tokens moved on by 200 positions, and scores changed by up to {gap:.2g}. With "
            "rotations, the score of query t and key u depends on t - u alone: is each pair "
            "really turned, x' = x cos - y sin and y' = y cos + x sin?"
        )
    if torch.allclose(near, moved, rtol=0.0, atol=1e-12):
        raise CheckFailed(
            "angles for positions 200 ... 211 equal those of 0 ... 11: the values in "
            "`positions` are ignored. A shard of a sequence starts somewhere else."
        )
    cos, sin = unpack(call(angles, torch.arange(12), 16), ANGLE_NAMES)
    whole = _tensor(call(apply, q, cos, sin))
    cos, sin = unpack(call(angles, torch.arange(6, 12), 16), ANGLE_NAMES)
    shard = _tensor(call(apply, q[:, 6:], cos, sin))
    if not torch.allclose(whole[:, 6:], shard, rtol=0.0, atol=1e-5):
        raise CheckFailed(
            "the second half of a sequence, with positions 6 ... 11, is not turned as it is within "
            "the whole sequence. Angles must come from `positions` alone."
        )
    far = torch.arange(FAR, FAR + 16)
    _judge_angles(call(angles, far, 16), far, 16, 10_000.0, f"(positions from {FAR:,}) ")
    _judge_half(apply, far, seed)
    passed("scores depend on distances only, in shards and at position 100,000 too", seed)


def check_rope_conventions(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-1 (c): the scores of the permuted weights, in halves, are the old ones."""
    for heads, head_dim, width in ((1, 8, 12), (3, 8, 24), (2, 16, 20)):
        where = f"(heads {heads}, head_dim {head_dim}, width {width}) "
        w_q, w_k = (_draw(heads * head_dim, width, seed=seed + i) for i in (0, 1))
        new_q, new_k = (_tensor(call(student, w, heads)) for w in (w_q, w_k))
        if new_q.shape != w_q.shape:
            raise CheckFailed(
                f"{where}the result has shape {tuple(new_q.shape)}, but the weight's, "
                f"{tuple(w_q.shape)}, was expected."
            )
        x = _draw(1, 10, width, seed=seed + 2)
        cos, sin = rotary_angles(torch.arange(10), head_dim)
        old = _scores(x, w_q, w_k, heads, cos, sin, interleaved=True)
        new = _scores(x, new_q, new_k, heads, cos, sin, interleaved=False)
        if torch.allclose(old, new, rtol=1e-4, atol=1e-3):
            continue
        said = (
            explain(new_q, pairs_to_halves, ROW_MISTAKES, lambda f, w=w_q, h=heads: f(w, h))
            or "Row 2i of a head must become its row i, and row 2i + 1 its row i + head_dim // 2."
        )
        raise CheckFailed(
            f"{where}the scores are not those of the old weights under the old convention. {said}"
        )
    passed("the permuted weights give the same scores under the other convention", seed)


def _judge_angles(given: Any, positions: Tensor, head_dim: int, base: float, where: str) -> None:
    values = unpack(given, ANGLE_NAMES)
    expected = rotary_angles(positions, head_dim, base)
    # An angle of t radians is rounded by about t * 2**-23 when it is made in float32.
    allowed = 1e-6 + 2e-7 * float(positions.max())
    for index, name in enumerate(ANGLE_NAMES):
        if values[index].shape == (len(positions), head_dim):
            raise CheckFailed(
                f"{where}{name} has head_dim columns; there are head_dim // 2 pairs, and each has "
                "one angle: (seqlen, head_dim // 2)."
            )
        if values[index].dtype in (torch.bfloat16, torch.float16):
            raise CheckFailed(f"{where}{name} is {values[index].dtype}. {ANGLE_MISTAKES[-1].say}")
        judge(
            where + name,
            values[index],
            expected[index],
            allowed=allowed,
            dtype=torch.float32,
            mistakes=results(
                rotary_angles, ANGLE_MISTAKES, lambda f, i=index: f(positions, head_dim, base)[i]
            ),
        )


def _judge_half(student: Callable[..., Any], positions: Tensor, seed: int) -> None:
    """A bfloat16 input: computed in float32, and rounded once."""
    x = _draw(2, len(positions), 2, 16, seed=seed + 3).bfloat16()
    cos, sin = rotary_angles(positions, 16)
    result = _tensor(call(student, x, cos, sin))
    if result.dtype != x.dtype:
        raise CheckFailed(
            f"x is bfloat16, but the result is {result.dtype}: cast it back, .to(x.dtype). "
            "(float32 cosines turn the product into float32.)"
        )
    exact = apply_rope(x.double(), cos.double(), sin.double())
    # bfloat16 has 8 significant bits: one rounding moves a number by 2**-8 of itself at most.
    if ((result.double() - exact).abs() > exact.abs() * 2**-8 + 1e-5).any():
        raise CheckFailed(
            "with a bfloat16 x the result is further off than one rounding: something was computed "
            "in bfloat16. Cast x to float32 first (not cos and sin down), and the result back last."
        )


def _scores(
    x: Tensor, w_q: Tensor, w_k: Tensor, heads: int, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> Tensor:
    q, k = (
        apply_rotary_emb((x @ w.T).unflatten(-1, (heads, -1)), cos, sin, interleaved=interleaved)
        for w in (w_q, w_k)
    )
    return torch.einsum("bihd,bjhd->bhij", q, k)


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckFailed(f"return one tensor, not {type(value).__name__}.")
    return value


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
