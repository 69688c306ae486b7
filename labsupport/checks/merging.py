"""Exercise 3-4: partial results of attention, merged as a ring does it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.verdict import CheckFailed, Mistake, call, judge, passed, results, unpack

NAMES = ("out", "lse")
Result = tuple[Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]  # out, lse, part, part_lse
LN_2 = math.log(2)
HIGH = 1000.0  # beyond what exp can represent, in float64 too
HELD = 3  # parts that a solution may hold at a time: variables outlive their use


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> Result:
    """Return the running result and one more partial result, over the keys of both."""
    both = torch.logaddexp(lse, part_lse)
    safe = both.masked_fill(both == -torch.inf, 0.0)
    weight, part_weight = (lse - safe).exp(), (part_lse - safe).exp()
    return weight[..., None] * out + part_weight[..., None] * part, both


def merge_all(parts: Iterable[Result]) -> Result:
    """Return all partial results together: one at a time, in float64, rounded once."""
    parts = iter(parts)
    part, lse = next(parts)
    out, dtype = part.double(), part.dtype
    for part, part_lse in parts:
        out, lse = merge(out, lse, part, part_lse)
    return out.to(dtype), lse


_OUT = "weight[..., None] * out + part_weight[..., None] * part"
_WEIGHTS = "(lse - safe).exp(), (part_lse - safe).exp()"
_LESS_M = (
    *("- safe).exp()", "- m).exp()"),
    *("    weight,", "    m = torch.maximum(lse, part_lse).nan_to_num(neginf=0)\n    weight,"),
)
OUT_MISTAKES = (
    Mistake(
        (_OUT, "(out + part) / 2"),
        "It is the plain average. A part with more keys, or higher scores, must weigh more: "
        "exp(its lse), divided by the sum of both.",
    ),
    Mistake(
        (_OUT, "out + part"),
        "The outputs are added up without weights: each one is an average over its own keys.",
    ),
    Mistake(
        (_WEIGHTS, "lse / (lse + part_lse), part_lse / (lse + part_lse)"),
        "The weights are the log-sum-exps themselves. They are logarithms: the weights are "
        "exp(lse) and exp(part_lse), divided by their sum.",
    ),
    Mistake(
        (_WEIGHTS, "lse.exp(), part_lse.exp()"),
        "The weights do not add up to 1: divide by their sum, exp(lse) + exp(part_lse).",
    ),
    Mistake(
        _LESS_M,
        "The weights do not add up to 1: exp(lse - m) and exp(part_lse - m) still have to be "
        "divided by their sum.",
    ),
    Mistake(
        (*_LESS_M, _OUT, f"({_OUT}) / (weight + part_weight)[..., None] ** 2"),
        "It is divided by the sum of the weights twice.",
    ),
    Mistake(
        ("weight, part_weight =", "part_weight, weight ="),
        "The weights are swapped: exp(lse) belongs to out, exp(part_lse) to part.",
    ),
    Mistake(
        (_WEIGHTS, "(lse >= part_lse).to(lse), (lse < part_lse).to(lse)"),
        "Only the part with the larger log-sum-exp is kept. Both count.",
    ),
    Mistake(
        (*_LESS_M, "part_weight[..., None] * part", "part"),
        "out is scaled by exp(lse - m), but part by nothing: it needs exp(part_lse - m).",
    ),
    Mistake((_OUT, "out + 0"), "out comes back as it was: part is not in it."),
    Mistake((_OUT, "part.to(out)"), "part comes back as it was: out is lost."),
    Mistake(
        (_WEIGHTS, "(torch.stack((lse, part_lse)) * LN_2).softmax(0)"),
        "The weights are powers of 2. The log-sum-exp is a natural logarithm: use exp.",
    ),
)
_LSE = "part, both"
LSE_MISTAKES = (
    Mistake(
        (_LSE, "part, lse + part_lse"),
        "The two log-sum-exps are added. Use torch.logaddexp: log(exp(lse) + exp(part_lse)).",
    ),
    Mistake(
        (_LSE, "part, torch.maximum(lse, part_lse)"),
        "It is the larger of the two: add log(exp(lse - m) + exp(part_lse - m)) to it.",
    ),
    Mistake(
        (_LSE, "part, (lse + part_lse) / 2"),
        "It is the mean of the two. It is log(exp(lse) + exp(part_lse)).",
    ),
    Mistake(
        (_LSE, "part, both - torch.maximum(lse, part_lse)"),
        "The maximum is missing: m + log(exp(lse - m) + exp(part_lse - m)).",
    ),
    Mistake(
        (_LSE, "part, both.exp()"), "The logarithm is missing: it is log(exp(lse) + exp(part_lse))."
    ),
    Mistake(
        (*_LESS_M, "- m).exp()", "- safe).exp()", _LSE, "part, m + (both - m).exp()"),
        "A logarithm is missing: m + log(sum of the weights), not m + their sum.",
    ),
    Mistake(
        (_LSE, "part, both / LN_2"),
        "It is in base 2: use torch.log and torch.exp, the natural ones.",
    ),
    Mistake(
        (_LSE, "part, lse + 0"),
        "The running lse comes back as it was: it has to grow with every part.",
    ),
    Mistake((_LSE, "part, part_lse + 0"), "The part's lse comes back: the running one is lost."),
    Mistake(
        (_LSE, "part, weight * lse + part_weight * part_lse"),
        "The log-sum-exps are averaged. It is log(exp(lse) + exp(part_lse)).",
    ),
)
_STEP = "out, lse = merge(out, lse, part, part_lse)"
ALL_MISTAKES = (
    Mistake(
        ("iter(parts)", "list(parts)\n    parts = iter(parts[1:] or parts)"),
        "The first part is lost: the running result starts with it, or with nothing.",
    ),
    Mistake(
        ("iter(parts)", "list(parts)\n    parts = iter(parts[:-1] or parts)"),
        "The last part is lost.",
    ),
    Mistake(
        ("    for", "    out, lse = merge(0 * out, 0 * lse, out, lse)\n    for"),
        "The running lse starts at 0, like a key with score 0. Nothing seen is log(0) = -inf.",
    ),
    Mistake(
        ("    for", "    n = 1\n    for", _STEP, "n += 1; out = out + (part - out) / n"),
        "All parts weigh the same. Merge them one by one, each by its log-sum-exp: "
        "out, lse = merge(out, lse, part, part_lse).",
    ),
    Mistake(
        ("out, lse = merge", "out, _ = merge"),
        "The running lse is not carried on: use the one that the last step returned.",
    ),
    Mistake((_STEP, _STEP + "; break"), "Only the first two parts are merged."),
)


class Named(list):
    """A list of tensors that an error message can name without showing all of its numbers."""

    def __repr__(self) -> str:
        return f"a list of {len(self)}"


def check_merge_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-4 (a): two partial results are attention over the keys of both."""
    for leading, rows, head_dim, keys in (((), 7, 8, (5, 12)), ((2, 3), 6, 4, (1, 9))):
        whole, parts = _attention(leading, rows, head_dim, keys, seed)
        where = f"({rows} queries, {keys[0]} keys and {keys[1]}) "
        given = (*parts[0], *parts[1])
        result = _judge(call(student, *given), given, where, allowed=1e-5)
        if not torch.allclose(result[0].double(), whole[0], atol=1e-5):
            raise CheckFailed(f"{where}out is not attention over all the keys.")
    out, lse, part, part_lse = *parts[0], *parts[1]
    for dtype in (torch.bfloat16, torch.float16):
        given = (out, lse, part.to(dtype), part_lse)
        _judge(call(student, *given), given, f"(a part in {_short(dtype)}) ", allowed=1e-5)
    passed("two parts are attention over the keys of both", seed)


def check_merge_edges(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-4 (b): rows that see nothing, and scores of any size."""
    _, parts = _attention((2,), 8, 4, (6, 6), seed)
    for what, empty in (
        ("the part holds no key for some queries", (slice(0), slice(0, 5))),
        ("no key was seen before, for some queries", (slice(0, 5), slice(0))),
        ("neither holds a key for some queries", (slice(2, 6), slice(0, 4))),
    ):
        given = _emptied(parts, empty)
        nothing = (given[1] == -torch.inf) & (given[3] == -torch.inf)
        out, lse = unpack(call(student, *given), NAMES)
        if out.isnan().any() or lse.isnan().any():
            raise CheckFailed(
                f"({what}) the result holds NaN: -inf - (-inf), or 0 / 0. Where nothing was seen, "
                "subtract 0 instead of -inf."
            )
        if lse.shape == nothing.shape and nothing.any() and (lse[nothing] != -torch.inf).any():
            raise CheckFailed(
                f"({what}) the lse of a query that has seen no key is -inf, not "
                f"{lse[nothing].max().item():.3g}: a key in the next part must outweigh nothing."
            )
        if out.shape[:-1] == nothing.shape and (out[nothing] != 0).any():
            raise CheckFailed(f"({what}) the output of a query that has seen no key is 0.")
        _judge((out, lse), given, f"({what}) ", allowed=1e-5)
    for high in ((HIGH, HIGH), (-HIGH, -HIGH), (HIGH, -HIGH), (-HIGH, HIGH)):
        (out, lse), (part, part_lse) = parts
        given = (out, lse + high[0], part, part_lse + high[1])
        where = f"(lse about {high[0]:,.0f} and {high[1]:,.0f}) "
        result = unpack(call(student, *given), NAMES)
        expected = merge(*(t.double() for t in given))
        lost = [not r.isfinite().all() for r in result]
        gone = result[0].shape == out.shape and (result[0] == 0).all()
        if any(lost) or gone:
            raise CheckFailed(
                f"{where}{NAMES[lost.index(True)] if any(lost) else 'out'} is "
                f"{'0' if gone and not any(lost) else 'not finite'}: exp(1000) overflows and "
                "exp(-1000) is 0. Subtract the larger of the two log-sum-exps first, whichever it "
                "is."
            )
        for name, ours, theirs in zip(NAMES, expected, result, strict=True):
            # An lse near 1,000 is rounded to 2**-14 in float32, and so are differences of two.
            judge(where + name, theirs, ours, allowed=5e-4)
    passed("queries without a key, and scores of any size", seed)


def check_merge_all(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 3-4 (c): any number of parts, in any order, one at a time, rounded once."""
    _, parts = _attention((2,), 6, 8, (3, 7, 1, 9, 4), seed)
    # Several mistakes look alike in two parts: five come first.
    for count in (1, 5, 2):
        _judge_all(student, parts[:count], f"({count} part{'s' * (count > 1)}) ")
    _judge_all(student, parts[::-1], "(the same parts, the last one first) ")
    # The last rank of a ring works the other way round: here a query sees nothing for a while.
    late = [(o.clone(), l.clone()) for o, l in parts]
    for part, part_lse in late[:3]:
        part[:, :2], part_lse[:, :2] = 0.0, -torch.inf
    _judge_all(student, late, "(two queries see no key in the first three parts) ")
    for dtype in (torch.bfloat16, torch.float16):
        _, many = _attention((), 16, 32, tuple(range(1, 13)), seed + 1)
        _judge_half(student, [(part.to(dtype), part_lse) for part, part_lse in many], dtype)
    _judge_one_at_a_time(student, seed)
    passed("any number of parts, one at a time, rounded once", seed)


def _judge(given: Any, inputs: Four, where: str, allowed: float) -> Result:
    out, lse = unpack(given, NAMES)
    exact = [t.double() for t in inputs]
    expected = merge(*exact)
    if out.dtype in (torch.bfloat16, torch.float16):
        raise CheckFailed(
            f"{where}out is {out.dtype}: the running result stays in float32, or every merge "
            "rounds it again."
        )
    for index, result, known in ((0, out, OUT_MISTAKES), (1, lse, LSE_MISTAKES)):
        judge(
            where + NAMES[index],
            result,
            expected[index],
            allowed=allowed,
            dtype=torch.float32,
            mistakes=results(merge, known, lambda f, i=index: f(*exact)[i]),
        )
    return out, lse


def _judge_all(student: Callable[..., Any], parts: Sequence[Result], where: str) -> None:
    # The student gets copies: what is done to them in place must not become the expectation.
    copies = Named((part.clone(), part_lse.clone()) for part, part_lse in parts)
    result = unpack(call(student, copies), NAMES)
    exact = [(part.double(), part_lse.double()) for part, part_lse in parts]
    expected = merge_all(exact)
    for index, name in enumerate(NAMES):
        if result[index].isnan().any():
            raise CheckFailed(f"{where}{name} holds NaN: the running result starts with -inf.")
        judge(
            where + name,
            result[index],
            expected[index],
            allowed=2e-5,
            dtype=torch.float32,
            mistakes=results(merge_all, ALL_MISTAKES, lambda f, i=index: f(exact)[i]),
        )


def _judge_half(
    student: Callable[..., Any], parts: Sequence[Result], dtype: torch.dtype, given: Any = None
) -> None:
    """`given` is what the student gets for the parts: a list of them, unless it is something."""
    where = f"({len(parts)} parts in {_short(dtype)}{', from a generator' if given else ''}) "
    copies = Named((part.clone(), part_lse.clone()) for part, part_lse in parts)
    out, lse = unpack(call(student, given or copies), NAMES)
    if out.dtype != dtype:
        raise CheckFailed(
            f"{where}out is {out.dtype}, the parts are {dtype}: cast the result back, once, at the "
            "end."
        )
    if lse.dtype != torch.float32:
        raise CheckFailed(f"{where}lse is {lse.dtype}, and stays float32 throughout.")
    doubled = [(part.double(), part_lse.double()) for part, part_lse in parts]
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


def _judge_one_at_a_time(student: Callable[..., Any], seed: int) -> None:
    """A ring has room for the part that it works on: parts come one at a time, and go."""
    _, wide = _attention((), 6, 8, tuple(range(2, 12)), seed + 2)
    parts = [(part.bfloat16(), part_lse) for part, part_lse in wide]
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def coming() -> Iterator[Result]:
        nonlocal most
        for part, part_lse in parts:
            most = max(most, sum(ref() is not None for ref in made))
            fresh = part.clone()
            made.append(weakref.ref(fresh))
            yield fresh, part_lse.clone()
            del fresh

    _judge_half(student, parts, torch.bfloat16, coming())
    if most > HELD:
        raise CheckFailed(
            f"while {len(parts)} parts came, up to {most} of them were still in memory. Merge each "
            "as it comes, `for part, part_lse in parts`, and keep the running result only."
        )


def _attention(
    leading: tuple[int, ...], rows: int, head_dim: int, keys: Sequence[int], seed: int
) -> tuple[Result, list[Result]]:
    """Attention over all keys in float64, and over each group of keys in float32."""
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(*leading, rows, head_dim, generator=generator, dtype=torch.float64)
    k, v = (
        torch.randn(*leading, sum(keys), head_dim, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    groups = zip(k.split(list(keys), -2), v.split(list(keys), -2), strict=True)
    parts = [_one(q, *group) for group in groups]
    return _one(q, k, v), [(out.float(), lse.float()) for out, lse in parts]


def _one(q: Tensor, k: Tensor, v: Tensor) -> Result:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _emptied(parts: Sequence[Result], empty: Sequence[slice]) -> Four:
    given: list[Tensor] = []
    for (out, lse), rows in zip(parts, empty, strict=True):
        out, lse = out.clone(), lse.clone()
        out[..., rows, :], lse[..., rows] = 0.0, -torch.inf
        given += [out, lse]
    return given[0], given[1], given[2], given[3]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
