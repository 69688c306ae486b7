"""Exercise 1-6: a dtype for kernels that take half precision only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from labsupport.attention import oracle_attention, standard_attention
from labsupport.attention.accuracy import compare_with_oracle
from labsupport.attention.registry import short
from labsupport.checks.verdict import CheckFailed, Mistake, a_few_steps, call, explain, passed

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIMIT = 65_520.0  # float16 rounds this, and all above it, to infinity


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention in the layout of the exercise, (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return oracle_attention(q, k, v)[0].transpose(1, 2)


MISTAKES = (
    Mistake(
        (".transpose(1, 2)", ""),
        "each token attends across heads: attention() takes (batch, seqlen, heads, head_dim), no "
        "transpose is needed",
    ),
    Mistake(("(q, k, v)[0]", "(q, v, k)[0]"), "k and v are swapped"),
    Mistake(
        ("(q, k, v)[0]", "(q, k, v, causal=True)[0]"), "it is causal, and no mask was asked for"
    ),
)


def check_half_dtype_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-6: bfloat16 where an input is bfloat16 or too large for float16, else float16."""
    for dtypes in itertools.product((F32, F16, BF16), repeat=3):
        _expect(student, _tensors(dtypes, seed), BF16 if BF16 in dtypes else F16, _of_dtypes)
    for name in "qkv":
        for outlier in (1e5, -1e5, 3e38):
            tensors = dict(zip("qkv", _tensors((F32, F32, F32), seed), strict=True))
            tensors[name].view(-1)[7] = outlier
            _expect(student, list(tensors.values()), BF16, _of_outlier(name, outlier))
    tensors = [torch.full((1, 8, 2, 64), 40.0) for _ in range(3)]
    _expect(student, tensors, F16, _of_scores)
    passed("bfloat16 where it is needed, float16 with its finer steps elsewhere", seed)


def check_half_dtype_edges(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-6: the limit itself, and entries that are infinite or NaN already."""
    for value, expected in ((65_504.0, F16), (65_519.0, F16), (LIMIT, BF16), (-LIMIT, BF16)):
        tensors = _tensors((F32, F32, F32), seed)
        tensors[1].view(-1)[3] = value
        becomes = torch.tensor(value).to(F16).item()
        _expect(
            student,
            tensors,
            expected,
            lambda _, value=value, becomes=becomes: (
                f"k holds {value:,.0f}, which float16 rounds to {becomes:,.0f}: the limit is "
                "65,520, half a step above float16's largest number."
            ),
        )
    for value in (torch.inf, -torch.inf, torch.nan):
        tensors = _tensors((F32, F32, F32), seed)
        tensors[0].view(-1)[5] = value
        _expect(
            student,
            tensors,
            F16,
            lambda _, value=value: (
                f"q holds {value}, which no dtype repairs, and all finite magnitudes fit into "
                "float16: look at finite entries only (torch.isfinite)."
            ),
        )
        tensors[0].view(-1)[6] = 1e5
        _expect(
            student,
            tensors,
            BF16,
            lambda _, value=value: (
                f"q holds {value}, and beside it a finite 1e5 that float16 cannot hold: an entry "
                "that is not finite must not hide the others. (max() of a tensor with NaN is "
                "NaN, and no comparison with NaN is true.)"
            ),
        )
    passed("the limit is exact, and entries that are not finite do not count", seed)


def check_half_attention(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-6: half precision inside, the result in q's dtype, gradients in their own."""
    cases = [(F32,) * 3, (F32, F32, F32), (F32, BF16, F16), (F16, F32, F32), (BF16, F32, F16)]
    for number, dtypes in enumerate(cases):
        q, k, v = _tensors(dtypes, seed, seqlen=32)
        names = ", ".join(map(short, dtypes))
        half = BF16 if BF16 in dtypes else F16
        if number == 0:
            v.view(-1)[9] = 1e5
            names, half = f"{names} with a value of 1e5", BF16
        for x in (q, k, v):
            x.requires_grad_()
        out = call(student, q, k, v)
        if not isinstance(out, Tensor):
            raise CheckFailed(f"return one tensor, not {type(out).__name__}.")
        if out.dtype != q.dtype:
            said = " It came back as the kernel made it: cast it." if out.dtype == half else ""
            raise CheckFailed(
                f"q, k, v are {names}: the result must be {short(q.dtype)}, like q, but it is "
                f"{short(out.dtype)}.{said}"
            )
        if not out.isfinite().all():
            raise CheckFailed(
                f"q, k, v are {names}, all finite, and the result is not: cast to what your "
                "half_dtype chooses, not always to float16."
            )
        if not torch.equal(out, out.to(half).to(out.dtype)):
            raise CheckFailed(
                f"q, k, v are {names}: the result holds numbers that {short(half)} does not have, "
                "so it was not computed in it. Cast q, k and v before you call attention."
            )
        if half == F16 and torch.equal(out, out.to(BF16).to(out.dtype)):
            raise CheckFailed(
                f"q, k, v are {names}: the result was computed in bfloat16, but float16 holds all "
                "of it, and has three more bits. Cast to what your half_dtype chooses."
            )
        if out.grad_fn is None:
            raise CheckFailed(
                "the result is cut off from q, k and v: .detach(), .data and torch.tensor(...) "
                "lose the gradient, .to(dtype) keeps it."
            )
        out.backward(torch.ones_like(out))
        for name, x in zip("qkv", (q, k, v), strict=True):
            if x.grad is None:
                raise CheckFailed(
                    f"no gradient reaches {name}: cast with .to(dtype), not through .detach() or "
                    ".data."
                )
        _judge_in_half(out, (q, k, v), half, names)
    _check_that_the_kernel_gets_half(student)
    passed("half precision inside, the caller's dtypes outside, gradients included", seed)


def _check_that_the_kernel_gets_half(student: Callable[..., Any]) -> None:
    """Two keys of nearly the same score: rounding k to float16 moves the weight by 0.06."""
    q, k, v = (torch.zeros(1, 2, 1, 16) for _ in range(3))
    q[..., :2] = 128.0  # times the scale of 1/4: 32
    k[0, 0, 0, :2] = 10.02
    k[0, 1, 0, :2] = torch.tensor([10.04, 9.985])
    v[0, 1] = 1.0
    out = call(student, q, k, v)
    given = oracle_attention(*(x.double().transpose(1, 2) for x in (q, k, v)))[0].mean()
    # Whatever rounds k, or the scores, is off by 0.004 at least.
    if abs(out.double().mean() - given) < 0.002:
        raise CheckFailed(
            "the inputs reach the kernel in float32, and only the result is rounded: a kernel for "
            "half precision takes q, k and v in half precision. Cast them before the call."
        )


def _judge_in_half(
    out: Tensor, inputs: tuple[Tensor, Tensor, Tensor], half: torch.dtype, names: str
) -> None:
    """Output and gradients by the error rule, with the textbook in `half` as the yardstick."""
    exact = _with_gradients(inputs, torch.float64)
    textbook = _with_gradients(inputs, half)

    def run(attention: Callable[..., Tensor]) -> Tensor:
        return attention(*(x.detach().double() for x in inputs))

    results = [out, *(x.grad for x in inputs)]
    for name, result, yard, oracle in zip(
        ("the output", "q's gradient", "k's gradient", "v's gradient"),
        results,
        textbook,
        exact,
        strict=True,
    ):
        assert result is not None
        report = compare_with_oracle(
            result.double(), yard.double(), oracle, gradient=name != "the output"
        )
        # The last rounding, to the caller's own dtype, is not the textbook's.
        if report.max_error <= report.allowed + a_few_steps(oracle, half, result.dtype):
            continue
        said = str(report)
        if name == "the output":
            given = [x.detach().double() for x in inputs]
            said = (
                explain(result, full_attention, MISTAKES, lambda f, g=given: f(*g), _near) or said
            )
        raise CheckFailed(f"q, k, v are {names}: {name} is wrong. {said}.")


def _near(result: Tensor, wrong: Tensor) -> bool:
    limit = 0.02 * wrong.abs().max().item()
    return torch.allclose(result.detach().double(), wrong, rtol=0.0, atol=limit)


def _with_gradients(
    inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Output and gradients of the textbook in `dtype`, in flash-attn's layout."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    function = oracle_attention if dtype == torch.float64 else standard_attention
    out = function(*(x.transpose(1, 2) for x in leaves))[0].transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return (out.detach(), *gradients)


Diagnose = Callable[[torch.dtype], str]


def _expect(
    student: Callable[..., Any], tensors: list[Tensor], expected: torch.dtype, why: Diagnose
) -> None:
    given = call(student, *tensors)
    if isinstance(given, str):
        raise CheckFailed(f"return a dtype such as torch.float16, not the text {given!r}.")
    if not isinstance(given, torch.dtype):
        raise CheckFailed(f"return a dtype such as torch.float16, not {type(given).__name__}.")
    if given == expected:
        return
    names = ", ".join(short(x.dtype) for x in tensors)
    if given not in (F16, BF16):
        raise CheckFailed(
            f"for q, k, v in {names} you return {short(given)}: these kernels take float16 and "
            "bfloat16 only."
        )
    raise CheckFailed(
        f"for q, k, v in {names} you return {short(given)}, but {short(expected)} is right. "
        f"{why(given)}"
    )


def _of_dtypes(given: torch.dtype) -> str:
    if given == F16:
        return (
            "Somebody chose bfloat16 for one of the three, for its range: casting to float16 gives "
            "it up. Look at all three inputs, not at the first only."
        )
    return (
        "All magnitudes fit into float16, which has 11 significant bits to bfloat16's 8: do not "
        "give three bits away."
    )


def _of_outlier(name: str, outlier: float) -> Diagnose:
    def say(given: torch.dtype) -> str:
        sign = " Its sign does not matter: look at abs()." if outlier < 0 else ""
        return f"{name} holds {outlier:.0e}, which float16 turns into infinity.{sign}"

    return say


def _of_scores(given: torch.dtype) -> str:
    return (
        "All entries are 40. The scores are 102,400 before scaling, but the kernel keeps them in "
        "float32: only the inputs themselves have to fit."
    )


def _tensors(dtypes: Any, seed: int, seqlen: int = 8) -> list[Tensor]:
    def draw() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for dtype in dtypes:
            yield torch.randn(1, seqlen, 2, 16, generator=generator).to(dtype)

    return list(draw())
