"""Exercise 1-7: queries and keys in FP8, scales for blocks, and a turn that spreads outliers."""

from __future__ import annotations

import torch
from torch import Tensor

from labsupport.attention.fp8 import hadamard
from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    judge,
    judge_call,
    mistakes,
    passed,
    results,
    tensor,
)


### BEGIN SOLUTION
def round_to_fp8(x: Tensor, block: int | None = None) -> Tensor:
    """Return x rounded to e4m3 and scaled back.

    Args:
        x: (..., seqlen, head_dim).
        block: number of rows of one head that share a scale; None for one scale in all.
    """
    dims = tuple(range(x.ndim)) if block is None else (-2, -1)
    rounded = []
    for part in x.split(block or x.shape[-2], dim=-2):
        largest = part.abs().amax(dims, keepdim=True)
        scale = torch.where(largest == 0, 1.0, largest / 448)
        rounded.append((part / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)
    return torch.cat(rounded, dim=-2)


FP8_MISTAKES = mistakes("""
`block` is ignored: all numbers share one scale, so blocks of small numbers vanish.
    block is None -> True
    block or x.shape[-2] -> x.shape[-2]
Each row has its own scale: `block` rows share one.
    (-2, -1) -> (-1,)
Each column of a block has its own scale: the block's rows and columns share one.
    (-2, -1) -> (-2,)
The blocks are of columns: split the rows, dim=-2.
    x.split(block or x.shape[-2], dim=-2) -> x.split(block or x.shape[-1], dim=-1)
    torch.cat(rounded, dim=-2) -> torch.cat(rounded, dim=-1)
The last block, which is shorter, is as it was: round it, too.
    return torch.cat -> if part.shape[-2] < (block or 1): rounded[-1] = part\\n    return torch.cat
All heads share the scales: each head's block has its own.
    if block is None else (-2, -1) ->
Without `block` there is one scale for the whole tensor, not one for each head.
    tuple(range(x.ndim)) if block is None else (-2, -1) -> (-2, -1)
The scale comes from the largest number instead of the largest absolute one: negative numbers leave
the range.
    part.abs().amax -> part.amax
The result is not scaled back: multiply by the scale after the rounding.
    to(x.dtype) * scale -> to(x.dtype)
There is no scale: e4m3 ends at 448, and loses digits below 2^-6.
    torch.where(largest == 0, 1.0, largest / 448) -> torch.ones_like(largest)
A block of zeros has the scale 0, and 0 / 0 is NaN: divide by 1 there.
    torch.where(largest == 0, 1.0, largest / 448) -> largest / 448
The largest absolute value must become 448, the end of float8_e4m3fn. (240 ends another format.)
    / 448 -> / 240
The scale is that of int8: the largest absolute value must become 448, the end of e4m3.
    / 448 -> / 127
That is e5m2: its significand has 2 bits, that of e4m3, torch.float8_e4m3fn, has 3.
    float8_e4m3fn -> float8_e5m2
The numbers are rounded to integers, as for int8. e4m3 is a floating-point format: cast to it.
    .to(torch.float8_e4m3fn) -> .round()
""")


HADAMARD_MISTAKES = mistakes("""
The rows have the length sqrt(n): divide by it, so that the matrix is orthogonal.
    h / n**0.5 -> h
The entries are divided by n: by sqrt(n), the rows have the length 1.
    n**0.5 -> n
All entries have the same sign, so that all rows are equal: the lower right block is -H.
    [h, -h] -> [h, h]
The minus sign is in the upper right block: it belongs to the lower right one.
    torch.cat([h, h], 1), torch.cat([h, -h], 1) -> torch.cat([h, -h], 1), torch.cat([h, h], 1)
The minus sign is in the lower left block: it belongs to the lower right one.
    [h, -h] -> [-h, h]
The minus sign is in the upper left block: it belongs to the lower right one.
    torch.cat([h, h], 1), torch.cat([h, -h], 1) -> torch.cat([-h, h], 1), torch.cat([h, h], 1)
It is half as large as it should be: the loop must end with n rows.
    len(h) < n -> 2 * len(h) < n
It is the identity: H starts as the number 1, and grows from four copies of itself.
    h / n**0.5 -> torch.eye(n)
""")


def rotate(q: Tensor, k: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k, (..., seqlen, head_dim), with columns' signs flipped, then turned."""
    h = hadamard(q.shape[-1]).to(q.dtype)
    return q * signs @ h, k * signs @ h


ROTATE_MISTAKES = mistakes("""
Only q is turned, which changes the scores: turn k by the same matrix.
    k * signs @ h -> k
The signs of q's columns were flipped, and not those of k's: both get the same.
    k * signs @ h -> k @ h
The signs are ignored.
    * signs ->
Nothing is turned: signs alone leave an outlier as large as it was.
     @ h ->
The signs were flipped after the turn, where they don't change the rounding: flip first.
    * signs @ h -> @ h * signs
""")
### END SOLUTION


def check_fp8_tensor(student: Student, seed: int = 0) -> None:
    """Exercise 1-7, step 1: one scale for all numbers."""
    _judge_fp8(student, _roundable(2, 24, 8, seed=seed, block=None), None)
    x = _roundable(12, 16, seed=seed + 1, block=None)
    _judge_fp8(student, -1e3 * x, None)
    _judge_fp8(student, torch.zeros(2, 8, 4), None)
    passed("e4m3 with one scale: every number within half a step", seed)


def check_fp8_blocks(student: Student, seed: int = 0) -> None:
    """Exercise 1-7, step 1: a scale for each block of rows of each head; the last is shorter."""
    for rows, block in ((24, 8), (22, 8), (5, 16)):
        _judge_fp8(student, _roundable(2, rows, 8, seed=seed, block=block), block)
    x = _roundable(2, 24, 8, seed=seed + 1, block=8)
    x[1, 8:16] = 0  # padding
    _judge_fp8(student, x, 8)
    _judge_fp8(student, _roundable(2, 2, 24, 8, seed=seed, block=8), 8)
    passed("blocks of rows with a scale of their own, zeros included", seed)


def check_hadamard(student: Student, seed: int = 0) -> None:
    """Exercise 1-7, step 2: the orthogonal Hadamard matrix of 1, 2, 4, ... rows."""
    for n in (2, 16, 64, 1):
        judge_call(student, hadamard, HADAMARD_MISTAKES, (n,), ("H",), where=f"(n = {n}) ")
    if (dtype := tensor(call(student, 4)).dtype) != torch.float32:
        raise CheckFailed(f"H must be float32; it is {dtype}.")
    passed("Hadamard's matrix: entries of one size, rows of length 1", seed)


def check_rotation(student: Student, seed: int = 0) -> None:
    """Exercise 1-7, step 2: the same turn for q and k, which leaves their products."""
    q, k = (draw(2, n, 16, seed=seed + n) for n in (6, 9))
    signs = draw(16, seed=seed).sign()
    judge_call(student, rotate, ROTATE_MISTAKES, (q, k, signs), ("q", "k"))
    passed("q and k are turned alike: the scores stay, the outliers spread", seed)


def _judge_fp8(student: Student, x: Tensor, block: int | None) -> None:
    given = tensor(call(student, x, block))
    where = f"(block {block}, x of shape {tuple(x.shape)}) "
    if given.dtype != x.dtype:
        raise CheckFailed(f"{where}cast the result back to {x.dtype}; it is {given.dtype}.")
    right = round_to_fp8(x, block)
    known = results(round_to_fp8, FP8_MISTAKES, lambda f: f(x, block))
    # Heads and blocks differ in size by powers of ten: compare them one by one.
    size = right.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    known = ((say, wrong / size) for say, wrong in known if wrong.shape == x.shape)
    name = f"{where}the result, relative to the largest of its row,"
    if given.shape != x.shape:
        raise CheckFailed(f"{where}the result has shape {tuple(given.shape)}, not that of x.")
    judge(name, given / size, right / size, allowed=1e-3, mistakes=known)


def _roundable(*shape: int, seed: int, block: int | None) -> Tensor:
    """Return numbers that e4m3 rounds in one way only, in blocks of different size."""
    x = draw(*shape, seed=seed)
    if block is not None:
        heads = 10.0 ** torch.arange(shape[0]).mul(-1.5)[:, None, None]
        x = x * heads * 10.0 ** (1.0 - torch.arange(shape[-2]) // block)[:, None]
    x[..., 0, 1] = -3 * x[..., 0, :].abs().amax(-1)  # the largest is negative
    # 1% away from a number that e4m3 has, except for the largest: far from where rounding turns.
    near = round_to_fp8(x, block)
    return torch.where((near - x).abs() < 1e-6 * x.abs(), near, 0.99 * near)
