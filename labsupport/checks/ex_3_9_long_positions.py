"""Exercise 3-9: rotary frequencies for texts longer than those of the training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.verdict import (
    Mistake,
    Student,
    call,
    explain,
    judge,
    mistakes,
    number,
    passed,
    results,
    tensor,
    values,
)


### BEGIN SOLUTION
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
`low`, an end of the ramp, is not rounded: down, to a whole pair.
    math.floor(head_dim / 2 * ends[0]) -> head_dim / 2 * ends[0]
`high`, an end of the ramp, is not rounded: up, to a whole pair.
    math.ceil(head_dim / 2 * ends[1]) -> head_dim / 2 * ends[1]
Both ends of the ramp are rounded up: `low` is rounded down.
    math.floor -> math.ceil
The ends of the ramp are rounded the other way round: `low` down, `high` up.
    math.floor(head_dim / 2 * ends[0]) -> math.ceil(head_dim / 2 * ends[0])
    high = math.ceil -> high = math.floor
The ends of the ramp are exchanged: 32 turns give `low`, 1 turn gives `high`.
    (32, 1) -> (1, 32)
Both logarithms must have one base: that of the turns is decimal.
    math.log(trained -> math.log10(trained
Both logarithms must have one base: that of the turns is binary.
    math.log(trained -> math.log2(trained
Both logarithms must have one base: that of `base` is decimal.
    math.log(base) -> math.log10(base)
Both logarithms must have one base: that of `base` is binary.
    math.log(base) -> math.log2(base)
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
All frequencies stay as they are: pairs without a full turn are divided by `factor`. If there is a
ramp: does it run over i, and not over f? Are its ends divided by the logarithm of `base`?
    (1 - ramp) * plain + ramp * plain / factor -> plain
The periods are mixed: mix the frequencies.
    (1 - ramp) * plain + ramp * plain / factor -> 1 / ((1 - ramp) / plain + ramp * factor / plain)
The base is that of NTK-aware scaling: YaRN starts from the plain frequencies.
    plain = base ** -> plain = (base * factor ** (head_dim / (head_dim - 2))) **
""")
FACTOR_MISTAKES = mistakes("""
The attention factor lacks the 1: at factor = 1 it must change nothing.
    math.log(factor) + 1 -> math.log(factor)
The 1 stands outside of the logarithm: 0.1 ln(factor) + 1.
    math.log(factor) + 1 -> math.log(factor + 1)
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
### END SOLUTION


def check_interpolated(student: Student, seed: int = 0) -> None:
    """Exercise 3-9: all pairs slowed alike."""
    cases = (16, 10_000.0, 4.0), (64, 500_000.0, 1.5 + seed), (8, 100.0 + seed, 1.0)
    given = [call(student, *case) for case in cases]
    _judge(given, interpolated, INTERPOLATED_MISTAKES, cases)
    passed("position interpolation: every pair is slowed alike", seed)


def check_ntk_aware(student: Student, seed: int = 0) -> None:
    """Exercise 3-9: the first pair as before, the last slowed by the factor."""
    cases = (16, 10_000.0, 4.0), (64, 500_000.0, 1.5 + seed), (8, 100.0 + seed, 1.0)
    given = [call(student, *case) for case in cases]
    _judge(given, ntk_aware, NTK_MISTAKES, cases)
    passed("NTK-aware: the first pair stays, the last is slowed by the factor", seed)


def check_yarn(student: Student, seed: int = 0) -> None:
    """Exercise 3-9: fast pairs stay, slow pairs are slowed, scores sharpened."""
    cases = (
        (16, 100_000.0, 2.0, 2048),
        (64, 100_000.0, 3.0 + seed, 8192),
        (128, 500_000.0 + 1000 * seed, 8.0, 4000 + 100 * seed),
        (32, 10_000.0, 4.0, 128),
    )
    found = [values(call(student, *case), ("frequencies", "attention_factor")) for case in cases]
    _judge([frequencies for frequencies, _ in found], yarn, RAMP_MISTAKES, cases)

    def factors(function: Any) -> Tensor:
        return torch.tensor([function(*case)[1] for case in cases])

    given = [number(factor, "the attention factor") for _, factor in found]
    right, known = factors(yarn), results(yarn, FACTOR_MISTAKES, factors)
    of = ", ".join(f"{case[2]:g}" for case in cases)
    judge(
        f"the attention factor, for factors of {of},",
        torch.tensor(given), right, allowed=1e-5, mistakes=known,
    )  # fmt: skip
    passed("YaRN: fast pairs stay, slow ones are interpolated, scores are sharpened", seed)


def _judge(
    given: Sequence[Any],
    solution: Any,
    table: Iterable[Mistake],
    cases: Sequence[tuple[Any, ...]],
) -> None:
    """Judge frequencies by their ratio to the right ones: they differ by powers of ten.

    A mistake that explains all cases is named; else one that explains the first wrong case.
    """

    def run(function: Any) -> list[Tensor]:
        found = [function(*case) for case in cases]
        return [one[0] if isinstance(one, tuple) else one for one in found]

    right, known = run(solution), list(results(solution, table, run))
    mine = [tensor(one, "the frequencies") for one in given]
    say = explain(mine, known, _same)
    for i, case in enumerate(cases):
        alone = [(s, wrong[i] / right[i]) for s, wrong in known if wrong[i].shape == right[i].shape]
        fits = mine[i].shape == right[i].shape
        judge(
            f"{_named(case)}your frequencies divided by the right ones (all should be 1): "
            "the result",
            mine[i] / right[i] if fits else mine[i],
            torch.ones_like(right[i]),
            allowed=1e-5,
            mistakes=[(say, mine[i] / right[i])] if say and fits else alone,
        )


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(x.shape == y.shape and torch.allclose(x.double(), y, rtol=1e-5) for x, y in pairs)


def _named(case: tuple[Any, ...]) -> str:
    names = ("head_dim", "base", "factor", "trained")
    return f"({', '.join(f'{n} {x:,g}' for n, x in zip(names, case, strict=False))}) "
