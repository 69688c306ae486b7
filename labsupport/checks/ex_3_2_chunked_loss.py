"""Exercise 3-2: classifier and loss, some tokens at a time, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed, not_written
from labsupport.checks.verdict import (
    call,
    draw,
    exactly,
    judge_call,
    mistakes,
    own_line,
    passed,
    tensor,
    within,
)
from labsupport.profiling.memory import LargestTensor, measure_peak_memory
from labsupport.profiling.units import format_bytes

IGNORED = -100  # the label of a token that does not count
EXACT = 1e-11  # in float64; a sum in float32 is off by more
NAMES = ("hidden", "weight")
GRADIENTS = ("the gradient of hidden", "the gradient of weight")
Inputs = tuple[Tensor, Tensor, Tensor]  # hidden (tokens, width), weight (vocab, width), labels


### BEGIN SOLUTION
class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden @ weight.T, with one chunk's logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        """Compute the loss, and the gradients that belong to it."""
        counted = labels != -100
        count = counted.sum().clamp(min=1)
        targets = labels.masked_fill(~counted, 0)
        total = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            kept, target = counted[part], targets[part, None]
            log_p = torch.log_softmax(hidden[part] @ weight.T, dim=-1)
            total -= (log_p.gather(1, target)[:, 0] * kept).sum()
            d = log_p.exp()
            d.scatter_add_(1, target, -torch.ones_like(d[:, :1]))
            d *= kept[:, None]
            d /= count
            grad_hidden[part] = d @ weight
            grad_weight += d.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients by the incoming one."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None


LOSS_MISTAKES = mistakes(r"""
Something was computed in float32, although the inputs are float64: begin the sum with
hidden.new_zeros(()).
    hidden.new_zeros(()) -> torch.zeros(())
If every token is ignored, divide by 1: max(count, 1), or
count.clamp(min=1) of a tensor. The loss and its gradients are 0 then.
    .clamp(min=1) ->
exp(200) overflows float32: subtract each row's maximum first, or use torch.log_softmax.
    torch.log_softmax( -> (lambda s: ((e := s.float().exp()) / e.sum(-1, True)).log().to(s))(
    weight.T, dim=-1) -> weight.T)
It is the mean of the chunks' means. Chunks do not hold equally many tokens that count: add up the
losses, and divide once, at the end.
    * kept).sum() -> * kept).sum() / kept.sum()
    return total / count -> return total / -(-len(labels) // chunk)
Label 0 counts, too: only -100 marks a token that does not.
    labels != -100 -> labels > 0
Label 0 counts, too: its loss is missing.
    [:, 0] * kept -> [:, 0] * kept * (target[:, 0] > 0)
It is divided by all tokens. Divide by those whose label is not -100.
    return total / count -> return total / len(labels)
It is the sum; divide by the number of tokens that count.
    return total / count -> return total
The last, shorter chunk is left out: loop to len(labels).
    range(0, len(labels), -> range(0, len(labels) // chunk * chunk,
It is the loss of the last chunk alone: add up (+=).
    total -= -> total = -
Ignored tokens count in the sum, as if their label were 0. Their loss must be 0.
    [:, 0] * kept -> [:, 0]
A label of -100 was used as an index, which counts from the end. Hide these tokens first.
    [:, 0] * kept -> [:, 0]
    labels.masked_fill(~counted, 0) -> labels.where(counted, len(weight) + IGNORED)
The sign is wrong: the loss of a token is logsumexp(z) - z_label, which is never negative.
    total -= -> total +=
The softmax runs over the tokens: it belongs over the vocabulary, dim=-1.
    dim=-1) -> dim=0)
It is minus the label's logit; the logsumexp over the vocabulary is missing.
    torch.log_softmax(hidden[part] @ weight.T, dim=-1) -> hidden[part] @ weight.T
""")
GRADIENT_MISTAKES = mistakes(r"""
Something was computed in float32, although the inputs are float64: begin the sums with
torch.zeros_like(weight), and don't divide a bool by a count before it meets d.
    torch.zeros_like(hidden), torch.zeros_like(weight) -> ZEROS
    ZEROS -> torch.zeros(hidden.shape), torch.zeros(weight.shape)
The incoming gradient is ignored: multiply by it. It is 3 where the loss is multiplied by 3.
    * grad_loss ->
It is multiplied by the incoming gradient twice.
    * grad_loss -> * grad_loss * grad_loss
Label 0 counts, too: only -100 marks a token that does not.
    labels != -100 -> labels > 0
Tokens with label 0 get no gradient: only -100 marks a token that does not count.
    d *= kept[:, None] -> d *= (kept & (labels[part] > 0))[:, None]
The softmax runs over the tokens: it belongs over the vocabulary, dim=-1.
    dim=-1) -> dim=0)
The minus one at the label is missing: d = softmax - onehot(label).
    -torch.ones_like -> 0 * torch.ones_like
The sign is wrong: d = softmax - onehot(label), not the other way round.
    d *= kept -> d *= -1 * kept
Ignored tokens get a gradient, as if their label were 0. Their d must be 0 throughout.
    d *= kept[:, None] -> pass
It is not divided by the number of tokens that count; the loss is.
    d /= count -> pass
It is divided by all tokens. Divide by those whose label is not -100.
    d /= count -> d /= len(labels)
Each chunk was divided by its own number of tokens; divide by that of all that count.
    d /= count -> d /= kept.sum().clamp(min=1) * -(-len(labels) // chunk)
Each chunk was divided by its own number of tokens that count; divide by that of the whole
sequence.
    d /= count -> d /= kept.sum().clamp(min=1)
The last, shorter chunk is left out.
    range(0, len(labels), -> range(0, len(labels) // chunk * chunk,
Each chunk overwrites the one before. Every token adds to the weight's gradient: +=.
    grad_weight += -> grad_weight =
If every token is ignored, divide by 1: max(count, 1), or
count.clamp(min=1) of a tensor. The gradients are 0 then.
    .clamp(min=1) ->
""")
### END SOLUTION


def check_loss_values(student: Any, seed: int = 0) -> None:
    """Exercise 3-2: the mean loss of the tokens that count, for chunks of any size."""
    for tokens, chunk, ignored in ((24, 8, 0), (29, 8, 0), (29, 8, 9), (7, 100, 2), (5, 1, 1)):
        where = f"({tokens} tokens, chunk {chunk}, {ignored} ignored) "
        _judge_loss(student, _inputs(tokens, ignored, seed), chunk, where)
    hidden, weight, labels = _inputs(12, 3, seed)
    _judge_loss(student, (hidden, weight, labels * 0 + IGNORED), 5, "(all ignored) ")
    large = hidden / hidden.norm(dim=-1, keepdim=True) * 200
    weight = weight / weight.norm(dim=-1, keepdim=True)
    _judge_loss(student, (large, weight, labels), 5, "(logits up to 200) ")
    _judge_loss(student, exactly(_inputs(29, 9, seed)), 8, "(float64) ", EXACT)
    passed("the mean loss over the tokens that count, whatever the chunk", seed)


def check_loss_gradients(student: Any, seed: int = 0) -> None:
    """Exercise 3-2: gradients of hidden and weight, scaled by the incoming one, in two dtypes."""
    for tokens, chunk, ignored, factor, dtype in (
        (24, 8, 0, 1.0, torch.float64),
        (29, 8, 0, 3.0, torch.float32),
        (29, 8, 9, 3.0, torch.float64),
        (29, 8, 9, 0.5, torch.float32),
        (7, 100, 2, 3.0, torch.float32),
        (12, 5, 12, 1.0, torch.float32),
    ):
        hidden, weight, labels = _inputs(tokens, ignored, seed)
        arguments = (hidden.to(dtype), weight.to(dtype), labels, chunk, factor)
        where = f"({tokens} tokens, chunk {chunk}, {ignored} ignored, {dtype}, loss * {factor:g}) "
        judge_call(
            student,
            ChunkedLoss,
            GRADIENT_MISTAKES,
            arguments,
            GRADIENTS,
            where=where,
            allowed=EXACT if dtype == torch.float64 else None,
            factor=3,
            dtype=dtype,
            adapt=_gradients,
        )
    passed("gradients of hidden and weight agree with autograd's, scaled by what comes in", seed)


def check_loss_memory(student: Any) -> None:
    """Exercise 3-2: the logits of one chunk at a time, forward and backward.

    Raises:
        CheckFailed: names the largest tensor and its operator, or the peak altogether; or the loss
            does not reach hidden or weight, so that a stub that computes nothing cannot pass.
    """
    tokens, vocab, chunk = 1024, 512, 32
    hidden, weight, labels = _inputs(tokens, 100, 0, vocab=vocab)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    apply = _applied(student)
    with LargestTensor() as largest:
        loss = apply(*leaves, labels, chunk)
    _refuse_large(largest, "forward", tokens, vocab, chunk)
    with LargestTensor() as largest:
        gradients = _backward(loss, leaves)
    _refuse_large(largest, "backward", tokens, vocab, chunk)
    peak = call(within(peak_of_step, student), hidden.detach(), weight.detach(), labels, chunk)
    logits = 4 * tokens * vocab
    used = f"{format_bytes(peak)} at the peak; all the logits would take {format_bytes(logits)}"
    if peak > logits / 2:
        raise CheckFailed(
            f"no tensor holds all the logits, but together there are {used}. Are the logits of "
            "each chunk kept for the backward pass? Keep gradients, or compute the logits again."
        )
    require_gradients(gradients)
    passed(f"forward and backward: {used}")


def peak_of_step(student: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> int:
    """Run forward and backward, and return the memory that was in use, in bytes."""
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    step = lambda: _backward(student.apply(*leaves, labels, chunk), leaves)  # noqa: E731
    return measure_peak_memory(step, device="cpu").peak_bytes


def require_gradients(gradients: Sequence[Tensor | None]) -> None:
    """Refuse a backward pass that gave `hidden` or `weight` nothing.

    Raises:
        CheckFailed: a gradient is missing, or zero throughout.
    """
    for name, gradient in zip(NAMES, gradients, strict=True):
        if gradient is None or not gradient.any():
            raise CheckFailed(
                f"the gradient of {name} is zero: memory is judged only where there are gradients."
            )


def _judge_loss(
    student: Any, inputs: Inputs, chunk: int, where: str, allowed: float | None = None
) -> None:
    arguments, names = (*inputs, chunk), ("the loss",)
    options: dict[str, Any] = {"where": where, "allowed": allowed, "adapt": _applied}
    judge_call(student, ChunkedLoss, LOSS_MISTAKES, arguments, names, **options)


def _applied(student: Any) -> Callable[..., Tensor]:
    """Return `student.apply` under the class's name, for the messages."""
    if not (isinstance(student, type) and issubclass(student, torch.autograd.Function)):
        raise CheckFailed(
            "pass the class itself, a subclass of torch.autograd.Function with static methods "
            "forward and backward."
        )

    def applied(*args: Any) -> Any:
        return student.apply(*args)

    apply: Any = applied
    apply.__name__, apply.__wrapped__ = student.__name__, student.forward
    apply.__signature__ = inspect.signature(partial(student.forward, None))
    return lambda *args: tensor(call(apply, *args), "the loss")


def _gradients(student: Any) -> Callable[..., Sequence[Tensor]]:
    """Return a function to the gradients of factor * loss for hidden and weight."""

    def gradients(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, factor: float) -> Any:
        leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
        return _backward(_applied(student)(*leaves, labels, chunk) * factor, leaves)

    return gradients


def _backward(loss: Tensor, leaves: list[Tensor]) -> Sequence[Tensor]:
    if loss.grad_fn is None:
        raise CheckFailed(
            "the loss does not know that it depends on hidden and weight: is forward a static "
            "method of a torch.autograd.Function?"
        )
    try:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    except NotImplementedError:
        raise CheckFailed(not_written("backward")) from None
    except Exception as error:
        raise CheckFailed(
            f"backward raised {type(error).__name__}{own_line(error) or ': '}{error}\n"
            "It returns four values, as forward takes four arguments after ctx: gradients of "
            "hidden (tokens, width) and weight (vocab, width), in this order, and None for labels "
            "and chunk. A token that does not count keeps its row in the gradient of hidden: zeros."
        ) from error
    for name, gradient in zip(NAMES, gradients, strict=True):
        if gradient is None:
            raise CheckFailed(f"backward returns None for {name}: its gradient is missing.")
    return gradients


def _refuse_large(largest: LargestTensor, when: str, tokens: int, vocab: int, chunk: int) -> None:
    if largest.numel > chunk * vocab:
        raise CheckFailed(
            f"{when} created a tensor of shape {largest.shape} (by {largest.op}) for {tokens} "
            f"tokens, a vocabulary of {vocab} and chunk {chunk}: no tensor may be larger than one "
            f"chunk's logits, {chunk} x {vocab}."
        )


def _inputs(tokens: int, ignored: int, seed: int, vocab: int = 150) -> Inputs:
    """Return inputs in float32; some labels are 0, and some tokens ignored (the last ones, too)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, vocab, (tokens,), generator=generator)
    labels[::4] = 0
    places = torch.randperm(tokens - 1, generator=generator)[: max(ignored - 1, 0)]
    labels[places] = IGNORED
    if ignored:
        labels[-1] = IGNORED
    return draw(tokens, 16, seed=seed + 1), draw(vocab, 16, seed=seed + 2) / 2, labels
