"""Exercise 3-4: partial results of attention, merged as a ring does it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed, short
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    exactly,
    judge,
    judge_call,
    mistakes,
    passed,
    results,
    unpack,
    within,
)
from labsupport.profiling.memory import measure_peak_memory

NAMES = ("out", "lse")
Result = tuple[Tensor, Tensor]
HALF = (torch.bfloat16, torch.float16)
LN_2 = math.log(2)
HIGH = 1000.0  # beyond what exp can represent, in float64 too
_ONE = "Merge each as it comes, `for part, part_lse in parts`, and keep the running result only."
HELD = 3  # parts that a solution may hold at a time: variables outlive their use


### BEGIN SOLUTION
def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> Result:
    """Return the running result and one more partial result, over the keys of both."""
    both = torch.logaddexp(lse, part_lse)
    safe = both.masked_fill(both == -torch.inf, 0.0)
    weight, part_weight = (lse - safe).exp(), (part_lse - safe).exp()
    return weight[..., None] * out + part_weight[..., None] * part, both


MERGE_MISTAKES = mistakes(r"""
It is the plain average. A part with more keys, or higher scores, must weigh more: exp(its lse),
divided by the sum of both.
    weight[..., None] * out + part_weight[..., None] * part -> (out + part) / 2
The outputs are added up without weights: each one is an average over its own keys.
    weight[..., None] * out + part_weight[..., None] * part -> out + part
A weight belongs to a row: weight[..., None] multiplies all head_dim numbers of its row. Without it,
rows meet columns, or shapes do not fit.
    weight[..., None] * out + part_weight[..., None] * part -> weight * out + part_weight * part
The two values are swapped: return out, lse.
    return weight[..., None] -> return both, weight[..., None]
    part, both -> part
The weights are the log-sum-exps, which are logarithms. Take exp(lse) and exp(part_lse), divided by
their sum.
    (lse - safe).exp() -> lse / (lse + part_lse)
    (part_lse - safe).exp() -> part_lse / (lse + part_lse)
The weights do not add up to 1: divide by their sum, exp(lse) + exp(part_lse).
    (lse - safe).exp(), (part_lse - safe).exp() -> lse.exp(), part_lse.exp()
The weights do not add up to 1: exp(lse - m) and exp(part_lse - m) must be divided by their sum.
    both.masked_fill(both == -torch.inf, 0.0) -> torch.maximum(lse, part_lse).nan_to_num(neginf=0)
The weights are swapped: exp(lse) belongs to out, exp(part_lse) to part.
    weight, part_weight = -> part_weight, weight =
Where nothing was seen, -inf - (-inf) or 0 / 0 is NaN: subtract 0 there, and divide by 1.
    both.masked_fill(both == -torch.inf, 0.0) -> both
exp(1000) overflows and exp(-1000) is 0: subtract the larger log-sum-exp before exp, for the
weights, too.
    (lse - safe).exp(), (part_lse - safe).exp() -> a / w, b / w
    weight, part_weight = -> a, b = lse.exp(), part_lse.exp(); WEIGHTS
    WEIGHTS -> w = a + b + (both == -torch.inf)\n    weight, part_weight =
exp(1000) overflows and exp(-1000) is 0: subtract the larger log-sum-exp first, whichever it is.
    both = torch.logaddexp(lse, part_lse) -> both = (lse.exp() + part_lse.exp()).log()
exp(1000) overflows: subtract the larger of the two log-sum-exps, which is not always the same one.
    both = torch.logaddexp(lse, part_lse) -> both = lse + (1 + (part_lse - lse).exp()).log()
The two log-sum-exps are added. Use torch.logaddexp: log(exp(lse) +
exp(part_lse)).
    both = torch.logaddexp(lse, part_lse) -> both = lse + part_lse
The two log-sum-exps are added. Use torch.logaddexp: log(exp(lse) + exp(part_lse)).
    part, both -> part, lse + part_lse
It is the larger of the two: add log(exp(lse - m) + exp(part_lse - m)) to it.
    part, both -> part, torch.maximum(lse, part_lse)
It is in base 2: use torch.log and torch.exp, the natural ones.
    part, both -> part, both / LN_2
They are in base 2, but lse is a natural logarithm: use torch.logaddexp and torch.exp.
    both = torch.logaddexp( -> both = torch.logaddexp2(
    (lse - safe).exp(), (part_lse - safe).exp() -> (lse - safe).exp2(), (part_lse - safe).exp2()
The running lse comes back as it was: it has to grow with every part.
    part, both -> part, lse + 0
The whole part is left out if one query sees none of it. Other queries do: decide row by row.
    both = torch.logaddexp -> if part_lse.isinf().any(): return out, lse\n    both = torch.logaddexp
""")


def merge_all(parts: Iterable[Result]) -> Result:
    """Return all partial results together: one at a time, in float64, rounded once."""
    parts = iter(parts)
    part, lse = next(parts)
    out, dtype = part.double(), part.dtype
    for part, part_lse in parts:
        out, lse = merge(out, lse, part, part_lse)
    return out.to(dtype), lse


ALL_MISTAKES = mistakes(r"""
The first part is lost: the running result starts with it, or with nothing.
    iter(parts) -> list(parts)\n    parts = iter(parts[1:] or parts)
The first part counts twice: begin the loop with the second one.
    for part, -> out, lse = merge(out, lse, part, lse)\n    for part,
The whole part is left out if one query sees none of it. Other queries do: decide row by row.
    out, lse = merge -> if not part_lse.isinf().any(): out, lse = merge
Where nothing was seen so far, `merge` returns NaN: its own check (b) fails. Correct it first.
    part, part_lse)\n -> part, part_lse); out[lse == -torch.inf] = torch.nan\n
exp(1000) overflows and exp(-1000) is 0: subtract the larger log-sum-exp first, as `merge` does.
    out, lse = merge(out, lse, part, part_lse) -> a, b = lse.exp(), part_lse.exp(); lse = REST
    REST -> (a + b).log()\n        out = (a[..., None] * out + b[..., None] * part) / SUM
    SUM -> (a + b + (a + b == 0))[..., None]
The running lse starts at 0, like a key with score 0. Nothing seen is log(0) = -inf.
    for part, -> out, lse = merge(0 * out, 0 * lse, out, lse)\n    for part,
All parts weigh the same. Merge them one by one, each by its log-sum-exp.
    for part, -> n = 1\n    for part,
    out, lse = merge(out, lse, part, part_lse) -> n += 1; out = out + (part - out) / n
The running lse is not carried on: use the one that the last step returned.
    out, lse = merge -> out, _ = merge
Only the first two parts are merged.
    part, part_lse)\n -> part, part_lse); break\n
""")
### END SOLUTION


def check_merge_values(student: Student, seed: int = 0) -> None:
    """Exercise 3-4 (a): two partial results are attention over the keys of both."""
    # With as many queries as head_dim, a missing dimension of the weights raises no error.
    for leading, rows, head_dim, keys in (((), 8, 8, (5, 12)), ((2, 3), 6, 4, (1, 9))):
        ours, theirs = _parts(leading, rows, head_dim, keys, seed)
        _judge(student, (*ours, *theirs), f"({rows} queries, {keys[0]} keys and {keys[1]}) ")
    for dtype in HALF:
        part, part_lse = theirs
        _judge(student, (*ours, part.to(dtype), part_lse), f"(a part in {short(dtype)}) ")
    passed("two parts are attention over the keys of both", seed)


def check_merge_edges(student: Student, seed: int = 0) -> None:
    """Exercise 3-4 (b): rows that see nothing, and scores of any size."""
    parts = _parts((2,), 8, 4, (6, 6), seed)
    for what, *empty in (
        ("the part holds no key for some queries", slice(0), slice(0, 5)),
        ("no key was seen before, for some queries", slice(0, 5), slice(0)),
        ("neither holds a key for some queries", slice(2, 6), slice(0, 4)),
    ):
        cut = [t.clone() for pair in parts for t in pair]
        for i, rows in enumerate(empty):
            cut[2 * i][:, rows], cut[2 * i + 1][:, rows] = 0.0, -torch.inf
        _judge(student, cut, f"({what}) ")
    (out, lse), (part, part_lse) = parts
    for ours, theirs in ((HIGH, HIGH), (-HIGH, -HIGH), (HIGH, -HIGH), (-HIGH, HIGH)):
        # An lse near 1,000 is rounded to 2**-14 in float32, and so are differences of two.
        shifted = (out, lse + ours, part, part_lse + theirs)
        _judge(student, shifted, f"(lse about {ours:,.0f} and {theirs:,.0f}) ", 5e-4)
    passed("queries without a key, and scores of any size", seed)


def check_merge_all(student: Student, seed: int = 0) -> None:
    """Exercise 3-4 (c): any number of parts, in any order, one at a time, rounded once."""
    parts = _parts((2,), 6, 8, (3, 7, 1, 9, 4), seed)
    # The last rank of a ring works the other way round: here a query sees nothing for a while.
    late = [(o.clone(), l.clone()) for o, l in parts]
    for part, part_lse in late[:3]:
        part[:, :2], part_lse[:, :2] = 0.0, -torch.inf
    for what, some in {
        "5 parts": parts,  # several mistakes look alike in two parts: five come first
        "1 part": parts[:1],
        "2 parts": parts[:2],
        "the same parts, the last one first": parts[::-1],
        "two queries see no key in the first three parts": late,
        "lse about 1,000": [(o, l + HIGH) for o, l in parts],
        "lse about -1,000": [(o, l - HIGH) for o, l in parts],
    }.items():
        allowed = 5e-4 if "1,000" in what else 2e-5  # see check_merge_edges
        where, options = f"({what}) ", {"allowed": allowed, "dtype": torch.float32}
        judge_call(student, merge_all, ALL_MISTAKES, (some,), NAMES, where=where, **options)
    for dtype in HALF:
        many = _parts((), 16, 32, tuple(range(1, 13)), seed + 1)
        some = [(part.to(dtype), part_lse) for part, part_lse in many]
        _judge_half(call(student, some), some)
    _judge_one_at_a_time(student, seed)
    passed("any number of parts, one at a time, rounded once", seed)


def _judge(student: Student, inputs: Sequence[Tensor], where: str, allowed: float = 1e-5) -> None:
    out, _ = unpack(result := call(student, *inputs), NAMES)
    if out.dtype in HALF:
        raise CheckFailed(
            f"{where}out is {out.dtype}: the running result stays in float32, or every merge "
            "rounds it again."
        )
    judge_call(
        lambda *_: result,
        merge,
        MERGE_MISTAKES,
        inputs,
        NAMES,
        where=where,
        allowed=allowed,
        dtype=torch.float32,
    )


def _judge_half(result: Any, parts: Sequence[Result], how: str = "") -> None:
    """Judge the result of parts in half precision."""
    dtype = parts[0][0].dtype
    where = f"({len(parts)} parts in {short(dtype)}{how}) "
    out, lse = unpack(result, NAMES)
    if out.dtype != dtype:
        raise CheckFailed(f"{where}out is {out.dtype}: cast the result to {dtype} at the end.")
    if lse.dtype != torch.float32:
        raise CheckFailed(f"{where}lse is {lse.dtype}, but it must stay float32.")
    doubled = exactly(parts)
    exact, exact_lse = merge_all(doubled)
    known = results(merge_all, ALL_MISTAKES, lambda f: f(doubled)[1])
    judge(where + "lse", lse, exact_lse, allowed=2e-5, mistakes=known)
    # One rounding moves a number by half a unit in its last place at most.
    unit = torch.finfo(dtype).eps / 2
    if ((out.double() - exact).abs() > exact.abs() * unit * 1.01 + 2e-6).any():
        raise CheckFailed(
            f"{where}out is further off than one rounding: it was rounded on the way. Keep the "
            "running result in float32 (the first part, too: .float()), and cast at the end."
        )


def fed(student: Student, parts: Sequence[Result]) -> tuple[Any, int]:
    """Hand over copies of parts one at a time; return the result, and how many lived at a time."""
    made: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = []
    most = 0

    def coming() -> Iterator[Result]:
        nonlocal most
        for part, part_lse in parts:
            held = [sum(ref() is not None for ref in refs) for refs in zip(*made, strict=True)]
            most = max(most, *held, 0)
            fresh = part.clone(), part_lse.clone()
            made.append((weakref.ref(fresh[0]), weakref.ref(fresh[1])))
            yield fresh
            del fresh

    result = student(coming())
    return result, most


def peak_fed(student: Student, part: Tensor, part_lse: Tensor, number: int) -> int:
    """Hand over one part several times, and return the memory that was in use, in bytes."""
    coming = ((part.clone(), part_lse.clone()) for _ in range(number))
    return measure_peak_memory(lambda: student(coming), device="cpu").peak_bytes


def _judge_one_at_a_time(student: Student, seed: int) -> None:
    """Judge parts that come one at a time: a ring has room for one."""
    wide = _parts((), 6, 8, tuple(range(2, 12)), seed + 2)
    parts = [(part.bfloat16(), part_lse) for part, part_lse in wide]
    result, most = call(within(fed, student), parts)
    _judge_half(result, parts, ", from a generator")
    if most > HELD:
        raise CheckFailed(
            f"while {len(parts)} parts came, up to {most} of them were still in memory. {_ONE}"
        )
    # Nor may the memory grow with the number of parts, although none of them is held.
    ((part, part_lse),) = _parts((), 64, 64, (8,), seed)
    number, most = 48, 24  # a merge in float64 takes 12 times the memory of a part
    peak = call(within(peak_fed, student), part, part_lse, number)
    if peak > most * part.nbytes:
        raise CheckFailed(
            f"while {number} parts came, {peak / part.nbytes:.0f} times the memory of a part was "
            f"in use: copies of all parts are stored. {_ONE}"
        )


def _parts(
    leading: tuple[int, ...], rows: int, head_dim: int, keys: Sequence[int], seed: int
) -> list[Result]:
    """Return attention over each group of keys, in float32."""
    q = 2 * draw(*leading, rows, head_dim, seed=seed, dtype=torch.float64)
    k, v = draw(2, *leading, sum(keys), head_dim, seed=seed + 1, dtype=torch.float64)
    parts = []
    for some_k, some_v in zip(k.split(list(keys), -2), v.split(list(keys), -2), strict=True):
        scores = q @ some_k.mT / head_dim**0.5
        parts.append(((scores.softmax(-1) @ some_v).float(), scores.logsumexp(-1).float()))
    return parts
