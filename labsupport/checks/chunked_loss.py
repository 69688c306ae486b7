"""Checks of exercise 3-2: classifier and loss, some tokens at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention import compare_with_oracle
from labsupport.checks.loss_mistakes import (
    GRADIENT_MISTAKES,
    IGNORED,
    LOSS_MISTAKES,
    gradients_with_mistake,
    loss_with_mistake,
)
from labsupport.checks.verdict import CheckFailed, Mistake, call, judge, passed
from labsupport.profiling.memory import LargestTensor, measure_peak_memory
from labsupport.profiling.units import format_bytes

NAMES = ("hidden", "weight")


def check_loss_values(student: Any, seed: int = 0) -> None:
    """Exercise 3-2: the mean loss of the tokens that count, for chunks of any size.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    for tokens, chunk, ignored in ((24, 8, 0), (29, 8, 0), (29, 8, 9), (7, 100, 2), (5, 1, 1)):
        inputs = _inputs(tokens, ignored, seed)
        where = f"({tokens} tokens, chunk {chunk}, {ignored} ignored) the loss"
        _judge_loss(student, inputs, chunk, where)
    hidden, weight, labels = _inputs(12, 3, seed)
    nothing = _loss(student, hidden, weight, torch.full_like(labels, IGNORED), 5)
    if nothing.item() != 0:
        raise CheckFailed(
            f"if every token is ignored, the loss is {nothing.item()}; it must be 0. Divide by 1 "
            "when no token counts: count.clamp(min=1)."
        )
    large = hidden / hidden.norm(dim=-1, keepdim=True) * 200
    weight = weight / weight.norm(dim=-1, keepdim=True)
    if not _loss(student, large, weight, labels, 5).isfinite():
        raise CheckFailed(
            "with logits up to 200 the loss is not finite: exp(200) overflows float32. Subtract "
            "each row's maximum before exp, or use torch.log_softmax or torch.logsumexp."
        )
    _judge_loss(student, (large, weight, labels), 5, "(logits up to 200) the loss")
    passed("the mean loss over the tokens that count, whatever the chunk", seed)


def check_loss_gradients(student: Any, seed: int = 0) -> None:
    """Exercise 3-2: gradients of hidden and weight, scaled by what comes in, in two dtypes.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    for tokens, chunk, ignored, factor, dtype in (
        (24, 8, 0, 1.0, torch.float64),
        (29, 8, 0, 3.0, torch.float32),
        (29, 8, 9, 3.0, torch.float64),
        (29, 8, 9, 0.5, torch.float32),
        (7, 100, 2, 3.0, torch.float32),
    ):
        inputs = _inputs(tokens, ignored, seed, dtype)
        given = _gradients(student, *inputs, chunk, factor)
        where = f"({tokens} tokens, chunk {chunk}, {ignored} ignored, {dtype}, loss * {factor:g}) "
        _judge_gradients(given, inputs, chunk, factor, where)
    hidden, weight, labels = _inputs(12, 0, seed)
    given = _gradients(student, hidden, weight, torch.full_like(labels, IGNORED), 5, 1.0)
    for name, gradient in zip(NAMES, given, strict=True):
        if not torch.equal(gradient, torch.zeros_like(gradient)):
            raise CheckFailed(
                f"if every token is ignored, the gradient of {name} must be 0, and it is not. (0 / "
                "0 is NaN: divide by count.clamp(min=1).)"
            )
    passed("gradients of hidden and weight agree with autograd's, scaled by what comes in", seed)


def check_loss_memory(student: Any) -> None:
    """Exercise 3-2: the logits of one chunk at a time, forward and backward.

    Raises:
        CheckFailed: naming the largest tensor and its operator, or what was held altogether; or
            the loss does not reach hidden or weight: who computes nothing needs no memory.
    """
    tokens, vocab, width, chunk = 1024, 512, 16, 32
    hidden, weight, labels = _inputs(tokens, 100, 0, vocab=vocab, width=width)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = tokens * vocab
    with LargestTensor() as largest:
        loss = _loss(student, hidden, weight, labels, chunk)
    _refuse_large(largest, "forward", tokens, vocab, chunk)
    with LargestTensor() as largest:
        gradients = _backward(loss, leaves)
    _refuse_large(largest, "backward", tokens, vocab, chunk)

    def step() -> None:
        _backward(_loss(student, hidden, weight, labels, chunk), leaves)

    peak = measure_peak_memory(step, device="cpu").peak_bytes
    if peak > logits * 4 / 2:
        raise CheckFailed(
            f"no tensor holds all the logits, but together {format_bytes(peak)} are in use at the "
            f"peak, and all the logits take {format_bytes(4 * logits)}. Are the logits of each "
            "chunk kept for the backward pass? Keep gradients, or compute the logits again."
        )
    require_gradients(gradients)
    passed(
        f"{format_bytes(peak)} at the peak, forward and backward; all the logits would take "
        f"{format_bytes(4 * logits)}"
    )


def require_gradients(gradients: Sequence[Tensor | None]) -> None:
    """Refuse a backward pass that gave `hidden` or `weight` nothing.

    Raises:
        CheckFailed: a gradient is missing, or zero throughout.
    """
    for name, gradient in zip(NAMES, gradients, strict=True):
        if gradient is None or not gradient.any():
            raise CheckFailed(
                f"the gradient of {name} is zero: memory counts where gradients come back."
            )


def _judge_loss(
    student: Any, inputs: tuple[Tensor, Tensor, Tensor], chunk: int, where: str
) -> None:
    hidden, weight, labels = inputs
    given = _loss(student, *inputs, chunk)
    exact = loss_with_mistake(*inputs, chunk)
    textbook = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED)
    # One number may be exact by luck; a right sum in another order need not be.
    rounding = 4 * torch.finfo(hidden.dtype).eps * exact.abs().item()
    judge(
        where,
        given,
        exact,
        allowed=compare_with_oracle(textbook, textbook, exact).allowed + rounding,
        mistakes=[
            Mistake(said, lambda m=m: loss_with_mistake(*inputs, chunk, m))
            for m, said in LOSS_MISTAKES.items()
        ],
    )


def _judge_gradients(
    given: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    chunk: int,
    factor: float,
    where: str,
) -> None:
    exact = gradients_with_mistake(*inputs, chunk, factor)
    leaves = [t.detach().requires_grad_() for t in inputs[:2]]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, inputs[2], ignore_index=IGNORED)
    textbook = torch.autograd.grad(factor * loss, leaves)
    for index, name in enumerate(NAMES):
        report = compare_with_oracle(textbook[index], textbook[index], exact[index], gradient=True)
        judge(
            f"{where}the gradient of {name}",
            given[index],
            exact[index],
            allowed=report.allowed,
            dtype=inputs[index].dtype,
            mistakes=[
                Mistake(
                    said,
                    lambda m=m, index=index: gradients_with_mistake(*inputs, chunk, factor, m)[
                        index
                    ],
                )
                for m, said in GRADIENT_MISTAKES.items()
            ],
        )


def _loss(student: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    given = call(_function(student), hidden, weight, labels, chunk)
    if not isinstance(given, Tensor):
        raise CheckFailed(f"forward must return the loss as a tensor, not {type(given).__name__}.")
    if given.ndim:
        raise CheckFailed(
            f"forward returns shape {tuple(given.shape)}; the mean loss is one number, of shape ()."
        )
    return given


def _function(student: Any) -> Callable[..., Any]:
    """`student.apply` under the class's name, for the messages."""
    if not (isinstance(student, type) and issubclass(student, torch.autograd.Function)):
        raise CheckFailed(
            "pass the class itself, a subclass of torch.autograd.Function with static methods "
            "forward and backward."
        )

    def apply(*args: Any) -> Any:
        return student.apply(*args)

    apply.__name__ = student.__name__
    return apply


def _gradients(
    student: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, factor: float
) -> tuple[Tensor, Tensor]:
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    return _backward(_loss(student, hidden, weight, labels, chunk) * factor, [hidden, weight])


def _backward(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    if loss.grad_fn is None:
        raise CheckFailed(
            "the loss does not know that it depends on hidden and weight: is forward a static "
            "method of a torch.autograd.Function?"
        )
    try:
        hidden, weight = torch.autograd.grad(loss, leaves, allow_unused=True)
    except NotImplementedError:
        raise CheckFailed(
            "backward is not written yet: replace `raise NotImplementedError`."
        ) from None
    except Exception as error:
        raise CheckFailed(_of_backward(error)) from error
    for name, gradient in zip(NAMES, (hidden, weight), strict=True):
        if gradient is None:
            raise CheckFailed(f"backward returns None for {name}: its gradient is missing.")
    return hidden, weight


def _of_backward(error: Exception) -> str:
    said = f"backward raised {type(error).__name__}: {error}"
    if "incorrect number of gradients" in str(error):
        return (
            f"{said}\nforward takes four arguments behind ctx, so backward returns four values: "
            "gradients of hidden and weight, and None for labels and chunk."
        )
    if "invalid gradient" in str(error):
        return (
            f"{said}\nA gradient has the shape of its tensor, and they come in the order of "
            "forward's arguments: hidden (tokens, width), then weight (vocab, width)."
        )
    return said


def _refuse_large(largest: LargestTensor, when: str, tokens: int, vocab: int, chunk: int) -> None:
    if largest.numel > chunk * vocab:
        whole = "all the logits" if largest.numel >= tokens * vocab else "more than one chunk"
        raise CheckFailed(
            f"{when} created a tensor of shape {largest.shape} (by {largest.op}) for {tokens} "
            f"tokens, a vocabulary of {vocab} and chunk {chunk}: that is {whole}. No tensor may be "
            f"larger than one chunk's logits, {chunk} x {vocab}."
        )


def _inputs(
    tokens: int,
    ignored: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    vocab: int = 150,
    width: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, labels; the ignored tokens stand at random places, and at the end."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype) / 2
    labels = torch.randint(1, vocab, (tokens,), generator=generator)
    where = torch.randperm(tokens - 1, generator=generator)[: max(ignored - 1, 0)]
    labels[where] = IGNORED
    if ignored:
        labels[-1] = IGNORED
    return hidden, weight, labels
