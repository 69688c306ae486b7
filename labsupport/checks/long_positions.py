"""Exercise 3-9: rotary frequencies for texts longer than those of the training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.cases import reference
from labsupport.checks.verdict import (
    Mistake,
    Student,
    call,
    judge,
    mistakes,
    number,
    passed,
    results,
    tensor,
    values,
)


def interpolated(head_dim: int, base: float, factor: float) -> Tensor:
    """Return the frequencies, (head_dim // 2,), of positions divided by `factor`."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return base**-exponents / factor


INTERPOLATED_MISTAKES = mistakes("""
`factor` is ignored: divide each frequency by it.
    / factor ->
The pairs turn faster, not slower: divide by `factor`.
    / factor -> * factor
The base is multiplied by `factor`, which leaves the first pair as it was: slow all pairs alike.
    base**-exponents / factor -> (base * factor)**-exponents
The exponent lacks its minus sign: f_i is base^(-2i / head_dim).
    base**-exponents -> base**exponents
The exponent is -i / head_dim; it is -2i / head_dim.
    (0, head_dim, 2, -> (head_dim // 2,
`base` is ignored: you always take 10,000.
    base** -> 10_000**
""")


def ntk_aware(head_dim: int, base: float, factor: float) -> Tensor:
    """Return the frequencies, (head_dim // 2,), of a base that slows the last pair by `factor`."""
    larger = base * factor ** (head_dim / (head_dim - 2))
    return larger ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


NTK_MISTAKES = mistakes("""
The base is multiplied by `factor` itself, so the last pair is slowed by too little: the factor
needs an exponent.
    ** (head_dim / (head_dim - 2)) ->
The exponent of `factor` is upside down: at the last pair the base stands to the power
-(head_dim - 2) / head_dim, and its reciprocal undoes that.
    head_dim / (head_dim - 2) -> (head_dim - 2) / head_dim
The last pair's exponent is -(head_dim - 2) / head_dim: subtract 2, not 1.
    (head_dim - 2) -> (head_dim - 1)
The base became smaller, so the pairs turn faster: multiply it.
    base * factor -> base / factor
The frequencies are divided by `factor` as well: a larger base alone is enough.
    larger ** (-torch -> 1 / factor * larger ** (-torch
`factor` is ignored: the base must grow.
    larger ** -> base **
`base` is ignored: you always take 10,000.
    base * -> 10_000 *
""")


def yarn(head_dim: int, base: float, factor: float, trained: int) -> tuple[Tensor, float]:
    """Return YaRN's frequencies, (head_dim // 2,), and its attention factor."""
    plain = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    ends = [math.log(trained / (2 * math.pi * n)) / math.log(base) for n in (32, 1)]
    low = max(math.floor(head_dim / 2 * ends[0]), 0)
    high = math.ceil(head_dim / 2 * ends[1])
    ramp = ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * plain + ramp * plain / factor, 0.1 * math.log(factor) + 1


RAMP_MISTAKES = mistakes("""
The ramp is the wrong way round: where it is 0, among the fast pairs, frequencies stay; where it is
1, they are divided by `factor`.
    (1 - ramp) * plain + ramp * plain / factor -> ramp * plain + (1 - ramp) * plain / factor
The ramp goes on below 0 and above 1: clamp it.
    .clamp(0, 1) ->
The 2 pi is missing: a pair makes trained * f / (2 pi) turns in training.
    2 * math.pi * n -> n
The ramp uses the new length: turns are counted in the training's, `trained`.
    math.log(trained -> math.log(factor * trained
The ends of the ramp are not rounded: `low` down, `high` up, to whole pairs.
    math.floor(head_dim / 2 * ends[0]) -> head_dim / 2 * ends[0]
    math.ceil(head_dim / 2 * ends[1]) -> head_dim / 2 * ends[1]
Both ends of the ramp are rounded down: `high` is rounded up.
    math.ceil -> math.floor
Both ends of the ramp are rounded to the nearest pair: `low` down, `high` up.
    math.ceil -> round
    math.floor -> round
`low` is negative here, and no pair has that number: take 0.
    max(math.floor(head_dim / 2 * ends[0]), 0) -> math.floor(head_dim / 2 * ends[0])
The ramp is linear in the number of turns. That is the paper's formula; its program, and
Transformers, make it linear in the pair's number, and so do we.
    (torch.arange(head_dim // 2) - low) -> (32 - trained / 2 / math.pi * plain)
    (high - low) -> 31
The pairs are counted from `low` to the last one: the ramp ends at `high`.
    (high - low) -> (head_dim // 2 - low)
You count numbers of a head, not pairs: there are head_dim / 2 of them.
    head_dim / 2 * ends -> head_dim * ends
All pairs are interpolated: those with many turns must stay.
    (1 - ramp) * plain + ramp * plain / factor -> plain / factor
All frequencies stay as they are: pairs without a full turn are divided by `factor`.
    (1 - ramp) * plain + ramp * plain / factor -> plain
The periods are mixed: mix the frequencies.
    (1 - ramp) * plain + ramp * plain / factor -> 1 / ((1 - ramp) / plain + ramp * factor / plain)
The base is that of NTK-aware scaling: YaRN starts from the plain frequencies.
    plain = base ** -> plain = (base * factor ** (head_dim / (head_dim - 2))) **
""")
FACTOR_MISTAKES = mistakes("""
The attention factor lacks the 1: at factor = 1 it must change nothing.
    math.log(factor) + 1 -> math.log(factor)
The attention factor lacks its 0.1.
    0.1 * math.log(factor) -> math.log(factor)
The attention factor takes the natural logarithm, math.log.
    math.log(factor) + 1 -> math.log10(factor) + 1
The attention factor takes the natural logarithm, math.log.
    math.log(factor) + 1 -> math.log2(factor) + 1
That is its square, which the scores get: queries and keys are each multiplied by
0.1 ln(factor) + 1.
    0.1 * math.log(factor) + 1 -> (0.1 * math.log(factor) + 1) ** 2
That is the temperature t, which divides the scores; return sqrt(1 / t), which multiplies queries
and keys.
    0.1 * math.log(factor) + 1 -> (0.1 * math.log(factor) + 1) ** -2
The attention factor is upside down: it makes queries and keys larger.
    0.1 * math.log(factor) + 1 -> 1 / (0.1 * math.log(factor) + 1)
The attention factor is always 1: scores are to be sharpened, too.
    0.1 * math.log(factor) + 1 -> 1.0
""")


def check_interpolated(student: Student, seed: int = 0) -> None:
    """Exercise 3-9: all pairs slowed alike."""
    for case in ((16, 10_000.0, 4.0), (64, 500_000.0, 1.5 + seed), (8, 100.0 + seed, 1.0)):
        _judge(student, interpolated, INTERPOLATED_MISTAKES, case)
    passed("position interpolation: every pair is slowed alike", seed)


def check_ntk_aware(student: Student, seed: int = 0) -> None:
    """Exercise 3-9: the first pair as before, the last slowed by the factor."""
    for case in ((16, 10_000.0, 4.0), (64, 500_000.0, 1.5 + seed), (8, 100.0 + seed, 1.0)):
        _judge(student, ntk_aware, NTK_MISTAKES, case)
    passed("NTK-aware: the first pair stays, the last is slowed by the factor", seed)


def check_yarn(student: Student, seed: int = 0) -> None:
    """Exercise 3-9: fast pairs stay, slow pairs are slowed, scores sharpened."""
    for case in (
        (16, 100_000.0, 2.0, 2048),
        (64, 100_000.0, 3.0 + seed, 8192),
        (128, 500_000.0 + 1000 * seed, 8.0, 4000 + 100 * seed),
        (32, 10_000.0, 4.0, 128),
    ):
        found = values(call(student, *case), ("frequencies", "attention_factor"))
        _judge(lambda *_, f=found: f[0], yarn, RAMP_MISTAKES, case)
        right = reference(lambda c=case: yarn(*c)[1])
        known = results(yarn, FACTOR_MISTAKES, lambda f, c=case: f(*c)[1])
        judge(
            f"{_named(case)}the attention factor",
            torch.tensor(number(found[1], "the attention factor")),
            torch.tensor(right),
            allowed=1e-5,
            mistakes=((say, torch.tensor(wrong)) for say, wrong in known),
        )
    passed("YaRN: fast pairs stay, slow ones are interpolated, scores are sharpened", seed)


def _judge(
    student: Student, solution: Any, table: Iterable[Mistake], case: tuple[Any, ...]
) -> None:
    """Judge frequencies by their ratio to the right ones: they differ by powers of ten."""

    def run(function: Any) -> Tensor:
        found = function(*case)
        return found[0] if isinstance(found, tuple) else found

    right, known = reference(lambda: run(solution)), results(solution, table, run)
    given = tensor(call(student, *case), "the frequencies")
    ratios = ((say, wrong / right) for say, wrong in known if wrong.shape == right.shape)
    fits = given.shape == right.shape
    judge(
        f"{_named(case)}your frequencies divided by the right ones (all should be 1): the result",
        given / right if fits else given, torch.ones_like(right), allowed=1e-5, mistakes=ratios,
    )  # fmt: skip


def _named(case: tuple[Any, ...]) -> str:
    names = ("head_dim", "base", "factor", "trained")
    return f"({', '.join(f'{n} {x:,g}' for n, x in zip(names, case, strict=False))}) "
