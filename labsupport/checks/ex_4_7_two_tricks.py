"""Exercise 4-7: FlashAttention-4's two tricks, powers of two by bits and a reference that lags."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.checks.errors import CheckFailed, short
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    explain,
    judge,
    judge_call,
    mistakes,
    number,
    passed,
    results,
    tensor,
    unpack,
    within,
)

NAMES = ("r", "l", "o", "rescaled")


### BEGIN SOLUTION
def exp2_by_bits(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return 2**x by a polynomial and the exponent's bits, without an exponential.

    Args:
        x: float32, any shape, at most 126; -inf gives 0.
        coefficients: of a polynomial near 2**f on [0, 1], highest power first.
    """
    x = x.clamp(min=-127.0)
    n = x.floor()
    f = x - n
    p = torch.zeros_like(f)
    for c in coefficients:
        p = p * f + c
    bits = p.view(torch.int32) + (n.to(torch.int32) << 23)
    return bits.clamp(min=0).view(torch.float32)  # p(0) < 1 and n = -127: below 0


BIT_MISTAKES = mistakes("""
That is exact, so it does not come from the given coefficients: use them.
    bits.clamp(min=0).view(torch.float32) -> torch.exp2(x)
Below -127 the exponent's bits run out, and the sign changes; and -inf is no integer. Clamp x at
-127 first.
    x.clamp(min=-127.0) -> x
-inf must give 0. Where p(0) is below 1, its bits and those of n = -127 add up to less than 0, which
reads as NaN: take at least 0.
    bits.clamp(min=0) -> bits
trunc cuts towards 0, so f is negative for negative x: round down, with floor.
    x.floor() -> x.trunc()
x is rounded to the nearest integer, so f may be negative: round down, with floor.
    x.floor() -> x.round()
The polynomial is evaluated at x: it is near 2^f for 0 <= f < 1 only.
    p * f -> p * x
The coefficients are read from the wrong end: the highest power comes first.
    for c in coefficients -> for c in reversed(coefficients)
The constant term, the last coefficient, is missing.
    in coefficients -> in [*coefficients[:-1], 0.0]
2^n is missing, or not where the exponent is: shift n by 23 bits, and add it.
    (n.to(torch.int32) << 23) -> 0
The exponent begins at bit 23: shift n by 23.
    << 23 -> << 22
n is subtracted: 2^x = 2^n 2^f, so the exponent grows by n.
    + (n -> - (n
The bias of 127 is in the polynomial's exponent already: add n alone.
    (n.to -> ((n + 127).to
.to(torch.int32) converts the number; .view(torch.int32) shows its bits.
    p.view(torch.int32) -> p.to(torch.int32)
.to(torch.float32) converts the integer; .view(torch.float32) reads its bits as a number.
    .view(torch.float32) -> .to(torch.float32)
""")


def smallest_degree(polynomials: Sequence[Sequence[float]], dtype: torch.dtype) -> int:
    """Return the degree of the first polynomial whose error is at most a rounding; 0 for none.

    Args:
        polynomials: coefficients, highest power first; of degrees 1, 2, and so on.
        dtype: what the results are rounded to.
    """
    f = torch.linspace(0, 1, 1001, dtype=torch.float64)
    for coefficients in polynomials:
        p = torch.zeros_like(f)
        for c in coefficients:
            p = p * f + c
        if (p / torch.exp2(f) - 1).abs().max() <= torch.finfo(dtype).eps / 2:
            return len(coefficients) - 1
    return 0


DEGREE_MISTAKES = mistakes("""
It is the number of coefficients: the degree is one less.
    len(coefficients) - 1 -> len(coefficients)
It is the polynomial's place in the list, from 0: the first one has the degree 1.
    len(coefficients) - 1 -> len(coefficients) - 2
Evaluate polynomial and 2^f in float64: the rounding of float32 hides errors that are smaller.
    dtype=torch.float64 -> dtype=torch.float32
The error is absolute: divide it by 2^f.
    p / torch.exp2(f) - 1 -> p - torch.exp2(f)
eps is the distance of two numbers: rounding moves a number by half of it at most.
    .eps / 2 -> .eps
resolution is a decimal power. Rounding moves a number by half of eps at most.
    .eps / 2 -> .resolution
The largest error lies inside: take many points from 0 to 1.
    linspace(0, 1, 1001 -> linspace(0, 1, 2
The mean error is small enough, the largest is not.
    .max() -> .mean()
An error may have either sign: take its absolute value.
    .abs() ->
By your count hardly a polynomial is good enough. Does the highest power come first, is the true
power 2^f and not e^f, and is all of it computed in float64?
    for c in coefficients -> for c in reversed(coefficients)
f lies between 0 and 1: 2^n takes the rest.
    linspace(0, 1 -> linspace(-1, 1
f lies between 0 and 1: n is x rounded down.
    linspace(0, 1 -> linspace(-0.5, 0.5
The polynomial is rounded to `dtype` before it is judged: judge it in float64.
    (p / torch -> (p.to(dtype).double() / torch
Half of eps is allowed: a rounding moves a number by that much.
    .eps / 2 -> .eps / 4
tiny is the smallest number of a dtype, not the distance of two numbers near 1: that is eps.
    .eps / 2 -> .tiny
The root of the mean square is small enough, the largest error is not.
    .abs().max() -> .pow(2).mean().sqrt()
The least degree is asked for: begin with the first polynomial.
    for coefficients in polynomials -> for coefficients in reversed(polynomials)
None of the polynomials is good enough there: return 0.
    return 0 -> return len(polynomials)
""")


def lazy_update(
    r: Tensor, l: Tensor, o: Tensor, s: Tensor, v: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the running state after one more tile, and which rows were rescaled.

    Args:
        r, l: reference and sum, (rows,); -inf and 0 where no key was seen.
        o: sum of weighted values, (rows, head_dim).
        s: scores in powers of two, (rows, keys); -inf hides a key.
        v: values, (keys, head_dim).
        threshold: how far a score may exceed r before r follows.
    """
    top = s.amax(dim=-1)
    rises = top - r > threshold  # False for NaN: no key so far, none in this tile
    new = torch.where(rises, top, r)
    safe = new.masked_fill(new == -torch.inf, 0.0)
    alpha = torch.exp2(r - safe)
    p = torch.exp2(s - safe[:, None])
    l = l * alpha + p.sum(dim=-1)
    o = o * alpha[:, None] + p @ v
    return new, l, o, rises & (r > -torch.inf)


UPDATE_MISTAKES = mistakes("""
The weights are right, the returned r is not the reference that they were computed with: where
nothing is rescaled, the old r must come back.
    return new, -> return torch.maximum(r, top),
The threshold is ignored: r follows every new maximum.
    top - r > threshold -> top > r
The maximum is that of all rows: take the row's own, with dim=-1.
    s.amax(dim=-1) -> s.amax()
A score far below 0 is not a high one: take the maximum without abs.
    s.amax(dim=-1) -> s.abs().amax(dim=-1)
The threshold is a power of two already, as the scores are: take no logarithm of it.
    > threshold -> > math.log2(threshold + 1e-30)
The threshold is a difference of scores, which are powers of two: compare with it, not with 2^it.
    > threshold -> > 2**threshold
Where a row has seen no key, its first ones set the reference, too: any score is above -inf.
    torch.where(rises, -> torch.where(rises & (r > -torch.inf),
The first two values are swapped: return r, l, o, rescaled.
    return new, l, -> return l, new,
Exactly `threshold` above r is not more: keep r there.
    top - r > threshold -> top - r >= threshold
The threshold counts powers of two, as the scores do: compare without a factor.
    > threshold -> > threshold * math.log(2)
A tile far *below* r moves it too: r only follows scores above it.
    top - r > threshold -> (top - r).abs() > threshold
One row's rise moves all rows: each row decides for itself.
    torch.where(rises -> torch.where(rises.any()
r falls where a tile's maximum is lower: keep it there.
    torch.where(rises, top, r) -> top
The new reference is the tile's maximum, not r + threshold.
    torch.where(rises, top, r) -> torch.where(rises, r + threshold, r)
The weights are relative to the tile's maximum: use the reference that l and o have.
    s - safe[:, None] -> s - top[:, None]
Scores are in powers of two: exp2, not exp.
    exp2 -> exp
The factor is upside down: old terms shrink, by 2^(old reference - new one).
    r - safe -> safe - r
l is not rescaled where r moved.
    l * alpha -> l
o is not rescaled where r moved.
    o * alpha[:, None] -> o
The division by l comes after the last tile.
    return new, l, o, -> return new, l, o / l[:, None],
Where no key was seen, -inf - (-inf) is NaN: subtract 0 there.
    new.masked_fill(new == -torch.inf, 0.0) -> new
A row's first keys count as a rescaling: there was nothing to rescale.
    rises & (r > -torch.inf) -> rises
Rows that have seen no key yet count as rescaled: they have nothing to rescale.
    rises & (r > -torch.inf) -> alpha != 1
`rescaled` marks the rows that were not rescaled.
    rises & (r > -torch.inf) -> ~rises
""")
### END SOLUTION


def check_exp2_bits(student: Student, seed: int = 0) -> None:
    """Exercise 4-7, step 1: the given polynomial, times a power of two."""
    for degree, at in ((1, 0.5), (3, 0.5), (5, 0.1 * (1 + seed % 8))):
        x = 6 * draw(3, 40, seed=seed + degree)
        x[0, :8] = torch.tensor([0.0, -1.0, -0.5, 7.75, -40.25, -125.5, -3.0, 2.0])
        x[2, :4] = torch.tensor([-torch.inf, -130.0, -300.5, -1e6])
        coefficients = _series(degree, at)
        given = tensor(call(student, x, coefficients))
        right = exp2_by_bits(x, coefficients)
        known = results(
            exp2_by_bits, BIT_MISTAKES, lambda f, a=(x, coefficients): f(*a), pairs=False
        )
        if given.shape != x.shape or given.dtype != x.dtype:
            raise CheckFailed(f"the result is {short(given.dtype)} {tuple(given.shape)}: like x.")
        # Relative to the right number; below the smallest normal one nothing counts.
        size = right.clamp(min=1e-30)
        judge(
            f"({len(coefficients)} coefficients) the result, relative to the right one,",
            given / size,
            right / size,
            allowed=1e-5,
            mistakes=((say, wrong / size) for say, wrong in known),
        )
        if bool(call(within(calls_power, student), x, coefficients)[0]):
            raise CheckFailed("an exponential or a power is called: make 2^n by the bits alone.")
    passed("2^x from a polynomial and the exponent's bits, hidden keys included", seed)


class _Powers(TorchDispatchMode):
    """A watch that notes exponentials and powers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        self.seen |= name in ("exp", "exp2", "expm1", "pow", "float_power", "ldexp")
        return func(*args, **(kwargs or {}))


def calls_power(function: Any, x: Tensor, coefficients: Sequence[float]) -> tuple[Tensor]:
    """Run a function, and return if it called an exponential or a power, as a bool of torch's."""
    with _Powers() as watch:
        function(x, coefficients)
    return (torch.tensor(watch.seen),)


def check_smallest_degree(student: Student, seed: int = 0) -> None:
    """Exercise 4-7, step 1: the least degree whose error is below a rounding."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    places = (0.0, 0.5, 0.62, 0.1 + 0.01 * (seed % 80))
    cases = [([_series(n, at) for n in range(1, 10)], dtype) for at in places for dtype in dtypes]
    cases.append((cases[0][0][:3], torch.float32))  # none is good enough
    cases.append(([[1.0, 1.0], *cases[0][0][1:]], torch.bfloat16))  # the first is exact at 0 and 1
    given = [number(call(student, *case), "the degree") for case in cases]
    right = [smallest_degree(*case) for case in cases]
    known = results(
        smallest_degree, DEGREE_MISTAKES, lambda f: [f(*case) for case in cases], pairs=False
    )
    if given != right:
        say = explain(given, known, operator.eq)
        off = next(i for i, (a, b) in enumerate(zip(given, right, strict=True)) if a != b)
        raise CheckFailed(
            f"for {len(cases[off][0])} polynomials and {short(cases[off][1])} you return "
            f"{given[off]:g}; right is {right[off]}. {say}"
        )
    passed("the degree whose error is below the rounding of a dtype", seed)


def check_lazy_update(student: Student, seed: int = 0) -> None:
    """Exercise 4-7, step 2: one tile, with a reference that follows late."""
    _, l, o, s, v = _state(seed)
    near = s.amax(dim=-1) + torch.tensor([1.0, -1.0]).repeat(6) * l.clamp(max=5.0)
    _judge(student, (near, l, o, s, v, 8.0), "(no row rises far) ")
    for threshold in (8.0, 0.0, 1.0 + seed % 6):
        r, l, o, s, v = _state(seed)
        # How far the tile's maximum is above r: in the first row exactly by the threshold.
        rise = torch.tensor([threshold, 0.8 * threshold + 0.1, threshold + 0.5, 30.0, -20.0])
        s[:5] += (r[:5] + rise - s[:5].amax(dim=-1)).round()[:, None]
        r[0] = s[0].amax() - threshold
        _judge(student, (r, l, o, s, v, threshold), f"(threshold {threshold:g}) ")
    passed("one tile more, rescaled where the maximum rose by more than the threshold", seed)


def check_lazy_edges(student: Student, seed: int = 0) -> None:
    """Exercise 4-7, step 2: rows that have seen no key, hidden keys, and scores of any size."""
    r, l, o, s, v = _state(seed + 1)
    r[:6], l[:6], o[:6] = -torch.inf, 0.0, 0.0
    s[3:9] = -torch.inf
    _judge(student, (r, l, o, s, v, 8.0), "(rows without a key, and hidden tiles) ")
    s[9:] += 1000.0
    _judge(student, (r, l, o, s, v, 8.0), "(scores about 1,000) ")
    passed("rows without a key, and scores of any size", seed)


def _judge(student: Student, arguments: tuple, where: str) -> None:
    judged = ("l", "o", "r", "rescaled")
    marks = unpack(call(student, *arguments), NAMES)[-1]
    if marks.dtype != torch.bool:
        raise CheckFailed(f"rescaled is {short(marks.dtype)}: return one bool for each row.")
    judge_call(student, lazy_update, UPDATE_MISTAKES, arguments, NAMES, judged=judged, where=where)


def _state(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return r, l, o after some tiles, and another tile's scores and values: 12 rows, 16 keys."""
    r, l = 4 * draw(12, seed=seed), 1 + draw(12, seed=seed + 1).abs()
    o, v = draw(12, 8, seed=seed + 2), draw(16, 8, seed=seed + 3)
    return r, l, o, 4 * draw(12, 16, seed=seed + 4), v


def _series(degree: int, at: float) -> list[float]:
    """Return Taylor's polynomial of 2**f at f = `at`, in powers of f, the highest first."""
    terms = [2**at * math.log(2) ** k / math.factorial(k) for k in range(degree + 1)]
    return [
        sum(terms[k] * math.comb(k, j) * (-at) ** (k - j) for k in range(j, degree + 1))
        for j in range(degree, -1, -1)
    ]
