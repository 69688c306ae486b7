"""Exercise 3-1: queries and keys turned by their positions (RoPE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    equal,
    explain,
    judge_call,
    mistakes,
    passed,
    results,
    tensor,
    unpack,
)

ANGLE_NAMES = ("cos", "sin")
FAR = 100_000


### BEGIN SOLUTION
def rotary_angles(
    positions: Tensor, head_dim: int, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (seqlen, head_dim // 2) each, of each position and pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = base ** (-exponents / head_dim)
    angles = positions[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


ANGLE_MISTAKES = mistakes("""
The exponent is -i / head_dim; it is -2i / head_dim, so that it runs from 0 to almost -1.
    -exponents / -> -exponents / 2 /
The exponent is -2i / (head_dim / 2); it is -2i / head_dim. Divide by the whole head_dim.
    / head_dim) -> / (head_dim // 2))
The exponent lacks its minus sign: frequencies fall, base ** (-2i / head_dim).
    (-exponents -> (exponents
`base` is ignored: you always take 10,000.
    base ** -> 10_000 **
The values in `positions` are ignored: you count 0, 1, 2, ... instead. A shard of a sequence starts
somewhere else.
    positions[:, None] -> torch.arange(len(positions))[:, None]
Both tables are cosines: return cos, then sin.
    angles.sin() -> angles.cos()
cos is a table of sines: return cos first, then sin.
    angles.cos().float(), angles.sin() -> angles.sin().float(), angles.cos()
The pairs are counted from 1: the first pair is i = 0, with frequency 1.
    arange(0, head_dim, 2 -> arange(2, head_dim + 2, 2
The frequencies were rounded to bfloat16. Use float32 or float64.
    base ** (-exponents / head_dim) -> (base ** (-exponents / head_dim)).bfloat16().double()
The angles are in degrees. cos and sin take radians: the product of position and frequency.
    positions[:, None] * -> torch.pi / 180 * positions[:, None] *
Positions are counted from 1: the first token's is the first value in `positions`.
    positions[:, None] -> (positions + 1)[:, None]
The exponent was rounded down to a whole number (by //, or an integer dtype): divide by /.
    (-exponents / head_dim) -> -(exponents // head_dim)
The angles were computed in bfloat16, which cannot count beyond 256. Use float32 or float64.
    positions[: -> positions.bfloat16().double()[:
""")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (batch, seqlen, heads, head_dim) by its angles; pairs are half a head apart."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


TURN_MISTAKES = mistakes(r"""
Your pairs are neighbours, (2i, 2i + 1), the other convention. Here dimension i is paired with
i + head_dim // 2.
    .chunk(2, dim=-1) -> .unflatten(-1, (-1, 2)).unbind(-1)
    torch.cat(turned, dim=-1) -> torch.stack(turned, dim=-1).flatten(-2)
You read neighbours, (2i, 2i + 1), but write halves: here dimension i is paired with
i + head_dim // 2, for reading too.
    .chunk(2, dim=-1) -> .unflatten(-1, (-1, 2)).unbind(-1)
The pairs are right, but the result interleaves them: join the halves with torch.cat.
    torch.cat(turned, dim=-1) -> torch.stack(turned, dim=-1).flatten(-2)
It turns the other way round, by -angle: x' = x cos - y sin and y' = y cos + x sin.
    cos - second -> cos + second
    cos + first -> cos - first
There is a minus too many: x' = x cos - y sin, but y' = y cos + x sin.
    cos + first -> cos - first
A minus is missing: x' = x cos - y sin. With two plus signs it is no rotation.
    cos - second -> cos + second
Only the cosines are used: each number of a pair also needs the other's sine.
    - second * sin ->
    + first * sin ->
The cosine stands where the sine belongs: x' = x cos - y sin and y' = y cos + x sin.
    second * sin -> second * cos
    first * sin -> first * cos
cos and sin have swapped places: x' = x cos - y sin.
    cos[:, None, :], sin[:, None, :] -> sin[:, None, :], cos[:, None, :]
y' was computed from the new x': the first half was overwritten too early.
    turned = ( -> first = first * cos - second * sin\n    turned = (
    (first * cos - second * sin -> (first
The angles run along the heads. cos[:, None, :], of shape (seqlen, 1, head_dim // 2), puts them
along seqlen.
    cos[:, None, :], sin[:, None, :] -> cos, sin
""")


def pairs_to_halves(weight: Tensor, heads: int) -> Tensor:
    """Move the rows of a query or key projection from neighbours to halves."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


ROW_MISTAKES = mistakes("""
This is the way back: it makes neighbours of halves. Rows 0, 2, 4, ... of a head come first.
    (heads, -1, 2) -> (heads, 2, -1)
The even rows of ALL heads come first, so the heads are mixed up: permute within each head.
    (heads, -1, 2) -> (1, -1, 2)
Nothing has moved.
    pairs.transpose(1, 2).reshape(weight.shape) -> weight
The columns were permuted. The rows make the numbers of a head; columns read x.
    weight.unflatten -> weight.T.unflatten
    (weight.shape) -> (weight.T.shape).T
""")
### END SOLUTION


def check_rope_angles(student: Student, seed: int = 0) -> None:
    """Exercise 3-1 (a): cosines and sines of each position and pair."""
    for positions, *arguments in (
        (torch.arange(40), 16, 10_000.0),
        (torch.arange(5, 30 + seed % 7), 8, 500_000.0),
        (torch.tensor([7, 3, 3, 200 + seed]), 64, 10_000.0),
        (torch.arange(12), 8),
    ):
        _judge_angles(student, positions, *arguments)
    passed("cosines and sines of each position and pair are right", seed)


def check_rope_values(student: Student, seed: int = 0) -> None:
    """Exercise 3-1 (b): each pair (i, i + head_dim // 2) turned by its angle, in float32."""
    # Where batch, seqlen and heads are the same number, angles along the wrong one raise no error.
    for shape in ((4, 4, 4, 8), (2, 9, 3, 16), (1, 6, 1, 2)):
        x = draw(*shape, seed=seed)
        tables = _tables(torch.arange(3, 3 + shape[1]), shape[-1])
        where, arguments = f"(x of shape {shape}) the ", (x, *tables)
        judge_call(student, apply_rope, TURN_MISTAKES, arguments, ("result",), where=where)
    _judge_half(student, torch.arange(3, 19), seed)
    passed("each pair is turned by its angle, and the dtype stays", seed)


def check_rope_positions(
    angles: Callable[..., Any], apply: Callable[..., Any], seed: int = 0
) -> None:
    """Exercise 3-1 (a, b): scores know distances only; shards; positions far from the beginning."""
    q, k = (draw(1, 12, 2, 16, seed=seed + i) for i in (1, 2))

    def turn(x: Tensor, first: int, end: int) -> Tensor:
        cos, sin = unpack(call(angles, torch.arange(first, end), 16), ANGLE_NAMES)
        return tensor(call(apply, x, cos, sin)).double()

    def scores(first: int) -> Tensor:
        return _scores(turn(q, first, first + 12), turn(k, first, first + 12))

    near = scores(0)
    if torch.allclose(near, _scores(q.double(), k.double()), atol=1e-4):
        raise CheckFailed("the scores do not depend on positions at all: nothing is turned.")
    # What the other checks name: the same mistake then has the same name here.
    far = torch.arange(FAR, FAR + 16)
    _judge_angles(angles, far, 16)
    _judge_half(apply, far, seed)
    # Below 256 even bfloat16 counts right: rounded positions are another mistake, named below.
    moved = scores(200)
    if (gap := (near - moved).abs().max().item()) > 1e-3:
        raise CheckFailed(
            f"all tokens moved on by 200 positions, and scores changed by up to {gap:.2g}. With "
            "rotations, the score of query t and key u depends on t - u alone: is each pair "
            "really turned, x' = x cos - y sin and y' = y cos + x sin?"
        )
    shard = turn(q[:, 6:], 6, 12)
    if equal(near, moved) or not torch.allclose(turn(q, 0, 12)[:, 6:], shard, rtol=0.0, atol=1e-5):
        raise CheckFailed(
            "the second half of a sequence, with positions 6 ... 11, is not turned as it is within "
            "the whole sequence. Angles must come from the values in `positions` alone."
        )
    passed("scores depend on distances only, in shards and at position 100,000 too", seed)


def check_rope_conventions(student: Student, seed: int = 0) -> None:
    """Exercise 3-1 (c): the scores of the permuted weights, in halves, are the old ones."""
    for heads, head_dim, width in ((1, 8, 12), (3, 8, 24), (2, 16, 20)):
        where = f"(heads {heads}, head_dim {head_dim}, width {width}) "
        weights = [draw(heads * head_dim, width, seed=seed + i) for i in (0, 1)]
        new = [tensor(call(student, weight, heads)) for weight in weights]
        if new[0].shape != weights[0].shape:
            raise CheckFailed(
                f"{where}the result has shape {tuple(new[0].shape)}, but the weight's, "
                f"{tuple(weights[0].shape)}, was expected."
            )
        right = [pairs_to_halves(one, heads) for one in weights]
        known = results(pairs_to_halves, ROW_MISTAKES, lambda f, a=(weights[0], heads): f(*a))
        if all(map(equal, new, right)):
            continue
        say = explain(new[0], known)
        say = say or "Row 2i of a head must become row i, and row 2i + 1 row i + head_dim // 2."
        raise CheckFailed(f"{where}the scores are not those of the old weights. {say}")
    passed("the permuted weights give the same scores under the other convention", seed)


def _judge_angles(student: Student, positions: Tensor, *arguments: Any) -> None:
    # An angle of t radians is rounded by about t * 2**-23 when it is made in float32.
    allowed = 1e-6 + 2e-7 * float(positions.max())
    base = f"{arguments[1]:,.0f}" if len(arguments) > 1 else "not given: 10,000"
    where = f"(positions from {positions[0]:,}, head_dim {arguments[0]}, base {base}) "
    judge_call(
        student,
        rotary_angles,
        ANGLE_MISTAKES,
        (positions, *arguments),
        ANGLE_NAMES,
        where=where,
        allowed=allowed,
        dtype=torch.float32,
    )


def _judge_half(student: Student, positions: Tensor, seed: int) -> None:
    """Judge a bfloat16 input: computed in float32, and rounded once."""
    x = draw(2, len(positions), 2, 16, seed=seed + 3).bfloat16()
    cos, sin = _tables(positions, 16)
    arguments, where = (x.float(), cos, sin), "(x in float32) the "
    judge_call(student, apply_rope, TURN_MISTAKES, arguments, ("result",), where=where)
    result = tensor(call(student, x, cos, sin))
    if result.dtype != x.dtype:
        raise CheckFailed(f"x is bfloat16, the result {result.dtype}: cast it back, .to(x.dtype).")
    exact = apply_rope(x.double(), cos.double(), sin.double())
    # bfloat16 has 8 significant bits: one rounding moves a number by 2**-8 of itself at most.
    if ((result.double() - exact).abs() > exact.abs() * 2**-8 + 1e-5).any():
        raise CheckFailed(
            "with a bfloat16 x the result is further off than one rounding: something was computed "
            "in bfloat16. Cast x to float32 first (not cos and sin down), and the result back last."
        )


def _tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    return rotary_angles(positions, head_dim)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihd,bjhd->bhij", q, k)
