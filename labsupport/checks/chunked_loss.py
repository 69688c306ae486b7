"""Exercise 3-2: classifier and loss, some tokens at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention import compare_with_oracle
from labsupport.checks.verdict import CheckFailed, Mistake, call, judge, passed, results
from labsupport.profiling.memory import LargestTensor, measure_peak_memory
from labsupport.profiling.units import format_bytes
from labsupport.training.data import IGNORED

NAMES = ("hidden", "weight")


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden @ weight.T, with one chunk's logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        """Compute the loss, and the gradients that belong to it."""
        counted = labels != IGNORED
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
            d *= kept[:, None] / count
            grad_hidden[part] = d @ weight
            grad_weight += d.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients by the incoming one."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None


_ALL_CHUNKS, _D = "range(0, len(labels), chunk)", "d *= kept[:, None] / count"
_WHOLE_CHUNKS = "range(0, len(labels) // chunk * chunk, chunk)"
LOSS_MISTAKES = (
    Mistake(
        (
            *("* kept).sum()", "* kept).sum() / kept.sum()"),
            *("return total / count", "return total / -(-len(labels) // chunk)"),
        ),
        "It is the mean of the chunks' means. Chunks do not hold equally many tokens that count: "
        "add up the losses, and divide once, at the end.",
    ),
    Mistake(
        ("return total / count", "return total / len(labels)"),
        "It is divided by all tokens. Divide by those whose label is not -100.",
    ),
    Mistake(
        ("return total / count", "return total"),
        "It is the sum; divide by the number of tokens that count.",
    ),
    Mistake(
        (_ALL_CHUNKS, _WHOLE_CHUNKS), "The last, shorter chunk is left out: loop to len(labels)."
    ),
    Mistake(("total -=", "total = -"), "It is the loss of the last chunk alone: add up (+=)."),
    Mistake(
        ("        ctx.save", "            break\n        ctx.save"),
        "It is the loss of the first chunk alone.",
    ),
    Mistake(
        ("[:, 0] * kept", "[:, 0]"),
        "Ignored tokens count in the sum, as if their label were 0. Their loss must be 0.",
    ),
    Mistake(
        (
            *("[:, 0] * kept", "[:, 0]"),
            *("labels.masked_fill(~counted, 0)", "labels.where(counted, len(weight) + IGNORED)"),
        ),
        "A label of -100 was used as an index, which counts from the end of the vocabulary. Hide "
        "these tokens first.",
    ),
    Mistake(
        ("total -=", "total +="), "The sign is wrong: the loss is minus the log of a probability."
    ),
    Mistake(
        ("torch.log_softmax(hidden[part] @ weight.T, dim=-1)", "hidden[part] @ weight.T"),
        "It is minus the label's logit; the logsumexp over the vocabulary is missing.",
    ),
    Mistake(
        ("log_p.gather", "log_p.exp().gather"),
        "It is minus the label's probability; take its logarithm first.",
    ),
)
GRADIENT_MISTAKES = (
    Mistake(
        (" * grad_loss", ""),
        "The incoming gradient is ignored: the loss was multiplied by 3 afterwards, so backward "
        "gets 3, and everything must be multiplied by it.",
    ),
    Mistake(("* grad_loss", "* grad_loss**2"), "The incoming gradient is multiplied in twice."),
    Mistake(
        ("-torch.ones_like", "0 * torch.ones_like"),
        "The minus one at the label is missing: d = softmax - onehot(label).",
    ),
    Mistake(
        ("d *= kept", "d *= -1 * kept"),
        "The sign is wrong: d = softmax - onehot(label), not the other way round.",
    ),
    Mistake(("log_p.exp()", "0 * log_p"), "The softmax is missing: d = softmax - onehot(label)."),
    Mistake(
        (_D, "d /= count"),
        "Ignored tokens get a gradient, as if their label were 0. Their d must be 0 throughout.",
    ),
    Mistake(
        ("d[:, :1])", "d[:, :1]) * kept[:, None]", _D, "d /= count"),
        "Ignored tokens get a gradient: their softmax, without a label. Their d must be 0 "
        "throughout, not at the label only.",
    ),
    Mistake(
        (_D, "d *= kept[:, None]"),
        "It is not divided by the number of tokens that count; the loss is.",
    ),
    Mistake(
        (_D, "d *= kept[:, None] / len(labels)"),
        "It is divided by all tokens. Divide by those whose label is not -100.",
    ),
    Mistake(
        (_D, "d *= kept[:, None] / (kept.sum().clamp(min=1) * -(-len(labels) // chunk))"),
        "Each chunk was divided by its own number of tokens; divide by that of all that count.",
    ),
    Mistake((_ALL_CHUNKS, _WHOLE_CHUNKS), "The last, shorter chunk is left out."),
    Mistake(
        ("grad_weight +=", "grad_weight ="),
        "Each chunk overwrites the one before. Every token adds to the weight's gradient: +=.",
    ),
    Mistake(
        ("log_p.exp()", "0 * log_p", "-torch.ones_like", "0 * torch.ones_like"),
        "It is all zeros: is it ever written?",
    ),
)


def check_loss_values(student: Any, seed: int = 0) -> None:
    """Exercise 3-2: the mean loss of the tokens that count, for chunks of any size."""
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
    """Exercise 3-2: gradients of hidden and weight, scaled by what comes in, in two dtypes."""
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
    given = _loss(student, *inputs, chunk)
    textbook, exact = (
        _with_gradients(_cross_entropy, inputs, dtype=dtype)[0]
        for dtype in (inputs[0].dtype, torch.float64)
    )
    # One number may be exact by luck; a right sum in another order need not be.
    rounding = 4 * torch.finfo(inputs[0].dtype).eps * exact.abs().item()
    judge(
        where,
        given,
        exact,
        allowed=compare_with_oracle(textbook, textbook, exact).allowed + rounding,
        mistakes=results(
            ChunkedLoss, LOSS_MISTAKES, lambda f: _with_gradients(f.apply, inputs, chunk)[0]
        ),
    )


def _judge_gradients(
    given: tuple[Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    chunk: int,
    factor: float,
    where: str,
) -> None:
    textbook, exact = (
        _with_gradients(_cross_entropy, inputs, factor=factor, dtype=dtype)
        for dtype in (inputs[0].dtype, torch.float64)
    )
    for index, name in enumerate(NAMES, start=1):
        report = compare_with_oracle(textbook[index], textbook[index], exact[index], gradient=True)
        judge(
            f"{where}the gradient of {name}",
            given[index - 1],
            exact[index],
            allowed=report.allowed,
            dtype=inputs[0].dtype,
            mistakes=results(
                ChunkedLoss,
                GRADIENT_MISTAKES,
                lambda f, i=index: _with_gradients(f.apply, inputs, chunk, factor=factor)[i],
            ),
        )


def _with_gradients(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    *chunk: int,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """Return the loss, and the gradients of factor * loss for hidden and weight."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs[:2]]
    loss = function(*leaves, inputs[2], *chunk)
    return loss, *torch.autograd.grad(factor * loss, leaves)


def _cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED)


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
