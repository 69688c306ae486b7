"""Exercise 1-6: a dtype for kernels that take half precision only."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labsupport.attention import compare_with_oracle, oracle_attention, standard_attention
from labsupport.checks.errors import CheckFailed, short
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    explain,
    mistakes,
    passed,
    results,
    tensor,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = torch.inf, torch.nan
WHY = {
    F16: "All finite magnitudes fit into float16, which has three bits more than bfloat16.",
    BF16: "An input is bfloat16, or holds a number that float16 turns into infinity.",
}
Inputs = tuple[Tensor, ...]  # q, k, v: (batch, seqlen, heads, head_dim)


### BEGIN SOLUTION
def half_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Return bfloat16 where an input is bfloat16 or too large for float16, otherwise float16."""
    for x in (q, k, v):
        finite = x[x.isfinite()]
        if x.dtype == torch.bfloat16 or (finite.abs() >= 65_520).any():
            return torch.bfloat16
    return torch.float16


DTYPE_MISTAKES = mistakes("""
float16 rounds 65,519 down to 65,504, but 65,520 to infinity: the limit is half a step above 65,504.
    >= 65_520 -> > 65_504
float16 rounds 65,520 to infinity, so the limit itself is too large: >=, not >.
    >= 65_520 -> > 65_520
No dtype repairs infinite entries: look at finite ones only (torch.isfinite).
    x[x.isfinite()] -> x
No dtype repairs infinite entries, and max() of a tensor with NaN is NaN: look at finite ones only
(torch.isfinite).
    x[x.isfinite()] -> x
    (finite.abs() >= 65_520).any() -> finite.abs().max() >= 65_520
A NaN must not hide a large entry: max() of a tensor with NaN is NaN, and compares as False.
    x[x.isfinite()] -> x.masked_fill(x.isinf(), 0)
    (finite.abs() >= 65_520).any() -> finite.abs().max() >= 65_520
Only the first input is looked at: all three of q, k and v count.
    for x in (q, k, v): -> for x in (q,):
The range is ignored: float16 turns magnitudes from 65,520 on into infinity.
    (finite.abs() >= 65_520).any() -> False
An input in bfloat16 was chosen for its range: casting to float16 gives it up.
    x.dtype == torch.bfloat16 or ->
The sign does not matter: look at abs().
    finite.abs() -> finite
That is always bfloat16: where all magnitudes fit, float16 has three more bits.
    return torch.float16 -> return torch.bfloat16
The scores need not fit, since the kernel keeps them in float32: only the inputs themselves count.
    for x in (q, k, v): -> for x in (q, k, v, q.float().flatten(2) @ k.float().flatten(2).mT):
""")


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in the layout of the exercise, (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return oracle_attention(q, k, v)[0].transpose(1, 2)


ATTENTION_MISTAKES = mistakes("""
Each token attends across heads: attention() takes (batch, seqlen, heads, head_dim), untransposed.
    .transpose(1, 2) ->
k and v are swapped.
    (q, k, v)[0] -> (q, v, k)[0]
It is causal, and no mask was asked for.
    (q, k, v)[0] -> (q, k, v, causal=True)[0]
""")
### END SOLUTION


def check_half_dtype_values(student: Student, seed: int = 0) -> None:
    """Exercise 1-6: bfloat16 where an input is bfloat16 or too large for float16, else float16."""
    cases = [_inputs(dtypes, seed) for dtypes in itertools.product((F32, F16, BF16), repeat=3)]
    for i, outlier in itertools.product(range(3), (1e5, -1e5, 3e38)):
        cases.append(_with(seed, i, outlier))
    cases.append((torch.full((1, 8, 2, 64), 40.0),) * 3)  # scores of 102,400 before scaling
    _judge_dtypes(student, cases)
    passed("bfloat16 where it is needed, float16 with its finer steps elsewhere", seed)


def check_half_dtype_edges(student: Student, seed: int = 0) -> None:
    """Exercise 1-6: the limit itself, and entries that are infinite or NaN already."""
    limits = 65_504.0, 65_519.0, 65_520.0, -65_520.0
    cases = [_with(seed, i, value) for value in limits for i in range(2)]
    for value in (INF, -INF, NAN):
        cases += [_with(seed, 0, value), _with(seed, 0, value, 1e5)]
    q, k, v = _with(seed, 2, 1e5)
    cases += [(q[:, :3], k, v), (q, torch.full_like(k, NAN), v)]
    cases.append((torch.full((1, 8, 2, 64), 40.0),) * 3)  # large scores, once more
    _judge_dtypes(student, cases)
    passed("the limit is exact, and entries that are not finite do not count", seed)


def _judge_dtypes(student: Student, cases: list[Inputs]) -> None:
    given = [call(student, *case) for case in cases]
    best = [half_dtype(*case) for case in cases]
    known = results(half_dtype, DTYPE_MISTAKES, lambda f: [f(*case) for case in cases])
    for case, dtype, right in zip(cases, given, best, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise CheckFailed(f"return a dtype such as torch.float16, not {dtype!r}.")
        if dtype == right:
            continue
        say = explain(given, known, operator.eq)
        if not say and dtype not in (F16, BF16):
            say = "These kernels take float16 and bfloat16 only."
        shown = [f"{short(x.dtype)} up to {x.abs().max().item():,.6g}" for x in case]
        raise CheckFailed(
            f"for q, k, v of {', '.join(shown)} you return {short(dtype)}, but {short(right)} is "
            f"right. {say or WHY[right]}"
        )


def check_half_attention(student: Student, seed: int = 0) -> None:
    """Exercise 1-6: half precision inside, the result in q's dtype, gradients in their own."""
    cases = [_inputs(one, seed, 32) for one in ((F32,) * 3, (F32, BF16, F16), (F16, F32, F32))]
    cases += [_inputs((BF16, F32, F16), seed, 32), _inputs((F32,) * 3, seed, 32)]
    cases[-1][2].view(-1)[9] = 1e5
    for inputs in cases:
        half = half_dtype(*inputs)
        where = f"q, k, v are {', '.join(short(x.dtype) for x in inputs)}: "
        if inputs is cases[-1]:
            where = where.replace(":", " with a value of 1e5:")
        leaves = [x.requires_grad_() for x in inputs]
        out = tensor(call(student, *leaves))
        if say := _of_output(out, inputs[0].dtype, half):
            raise CheckFailed(where + say)
        gradients = torch.autograd.grad(
            out, leaves, torch.ones_like(out), allow_unused=True, retain_graph=True
        )
        for name, gradient in zip("qkv", gradients, strict=True):
            if gradient is None:
                raise CheckFailed(
                    f"no gradient reaches {name}: cast with .to(dtype), not .detach() or .data."
                )
        _judge_errors([out, *gradients], inputs, half, where)
    _check_that_the_kernel_gets_half(student)
    passed("half precision inside, the caller's dtypes outside, gradients included", seed)


def _of_output(out: Tensor, dtype: torch.dtype, half: torch.dtype) -> str:
    """Return the first problem of an output's dtype and numbers, otherwise ""."""
    if out.dtype != dtype:
        return (
            f"the result must be {short(dtype)}, like q, but it is {short(out.dtype)}, as the "
            "kernel made it: cast it. (Is `q` already the cast one there? Save its dtype first.)"
        )
    if not out.isfinite().all():
        return "all inputs are finite, but the result is not: cast to the dtype of your half_dtype."
    if not torch.equal(out, out.to(half).to(dtype)):
        return f"the result was not computed in {short(half)}: cast q, k and v before the call."
    if half == F16 and torch.equal(out, out.to(BF16).to(dtype)):
        return "the result was computed in bfloat16, but float16 holds all of it with more bits."
    if out.grad_fn is None:
        return "the result is cut off from q, k and v: .detach() and .data lose the gradient."
    return ""


def _judge_errors(tensors: list[Tensor], inputs: Inputs, half: torch.dtype, where: str) -> None:
    """Judge output and gradients by flash-attn's rule, with the textbook in `half`."""

    def by(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*(x.transpose(1, 2) for x in leaves))[0].transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    exact = by(oracle_attention, torch.float64)
    textbook = by(standard_attention, half)
    doubled = [x.detach().double() for x in inputs]
    known = results(full_attention, ATTENTION_MISTAKES, lambda f: f(*doubled))
    names = ("the output", "q's gradient", "k's gradient", "v's gradient")
    for name, *three in zip(names, tensors, textbook, exact, strict=True):
        result, yardstick, right = (x.detach().double() for x in three)
        report = compare_with_oracle(result, yardstick, right, gradient=name != "the output")
        # The last rounding, to the caller's own dtype, is not the textbook's.
        steps = 3 * max(torch.finfo(dtype).eps for dtype in (half, three[0].dtype))
        if report.max_error <= report.allowed + steps * float(right.abs().max()):
            continue
        say = explain(result, known, _near)
        raise CheckFailed(f"{where}{name} is wrong. {say or report}")


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.02 * b.abs().max().item())


def _check_that_the_kernel_gets_half(student: Student) -> None:
    """Judge two keys of nearly the same score: rounding k to float16 moves the weight by 0.06."""
    q, k, v = (torch.zeros(1, 2, 1, 16) for _ in range(3))
    q[..., :2] = 128.0  # times the scale of 1/4: 32
    k[0, :, 0, :2] = torch.tensor([[10.02, 10.02], [10.04, 9.985]])
    v[0, 1] = 1.0
    out = call(student, q, k, v)
    exact = full_attention(*(x.double() for x in (q, k, v))).mean()
    if abs(out.double().mean() - exact) < 0.002:  # with k, or the scores, rounded: at least 0.004
        raise CheckFailed(
            "the inputs reach the kernel in float32, and only the result is rounded: cast q, k and "
            "v before the call."
        )


def _inputs(dtypes: tuple[torch.dtype, ...], seed: int, seqlen: int = 8) -> Inputs:
    q, k, v = draw(3, 1, seqlen, 2, 16, seed=seed)
    return tuple(x.to(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True))


def _with(seed: int, i: int, *entries: float) -> Inputs:
    """Return inputs in float32; the i-th holds these entries, too."""
    inputs = tuple(x.clone() for x in _inputs((F32,) * 3, seed))
    inputs[i].view(-1)[: len(entries)] = torch.tensor(entries)
    return inputs
