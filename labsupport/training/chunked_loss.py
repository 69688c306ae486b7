"""A loss that never has all the logits: theory/07-long-context.md derives it.

With z = W h and d = softmax(z) - onehot(label), the gradients Wᵀ d and d hᵀ wait for nothing but
one factor. So the forward pass computes them, and throws each chunk's logits away (as Liger Kernel:
Hsu et al., arXiv 2410.10989, section 3.2).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.inputs import first_derivative_only
from labsupport.precision.dtypes import short
from labsupport.training.config import IGNORED


def default_chunk(vocabulary: int) -> int:
    """Return the tokens whose float32 logits take 256 MiB, in multiples of 64: 1,280 for GPT-2.

    Each chunk reads the weight and adds to its gradient, (V, width) both, however few its tokens
    are: so it should not be much smaller.
    """
    return max(2**28 // (4 * vocabulary) // 64, 1) * 64


# The loop's length, the check of the labels and the choice to work in place are Python's business.
# (torch.compiler.disable does the same, and imports torch._dynamo immediately: a second a process.)
@torch._disable_dynamo
def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Return the mean cross-entropy of `hidden @ weight.T`, with one chunk of logits at a time.

    Args:
        hidden: (..., width) floating.
        weight: (V, width) floating; may be tied to an embedding.
        labels: (...) integers in 0 ... V - 1, or -100: such tokens count neither in the sum nor in
            the mean. Not shifted here: labels[i] is what hidden[i] predicts.
        chunk: tokens at a time; None means `default_chunk(V)`.

    Returns:
        A scalar, float32 (float64 for float64 inputs); 0 if every token is ignored.

    Matmuls run in autocast's dtype where autocast is on, else in the wider dtype of hidden and
    weight; softmax, loss, and the sum of the weight's gradient over the chunks are in float32.
    Gradients come back in their tensor's dtype. Those kept by the forward pass are of the *sum* of
    the losses: the division by their number waits for the loss scale, so that float16 does not
    underflow. Memory: one chunk's logits, hidden's gradient in its dtype, the weight's in float32.

    Raises:
        ValueError: shapes that do not fit, a label out of range, chunk below 1.
        TypeError: labels that are not integers; hidden or weight that are not floating.
        RuntimeError: differentiated twice.

    >>> chunked_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(10, 4), torch.zeros(2, 3).long())
    tensor(2.3026)
    """
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if not (integers and hidden.is_floating_point() and weight.is_floating_point()):
        raise TypeError(
            f"labels must be integers, hidden and weight floating, but {short(labels.dtype)}, "
            f"{short(hidden.dtype)} and {short(weight.dtype)} were given."
        )
    vocabulary, width = weight.shape if weight.ndim == 2 else (1, -1)
    size = default_chunk(vocabulary) if chunk is None else chunk
    if hidden.shape != (*labels.shape, width) or size < 1:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, labels {tuple(labels.shape)}, weight "
            f"{tuple(weight.shape)}, chunk {size}: they must be (..., width), (...), (V, width) "
            "and 1 or more tokens."
        )
    targets = labels.reshape(-1).long()
    counted = targets.masked_fill(targets == IGNORED, 0)
    for label in torch.stack(torch.aminmax(counted)).tolist() if counted.numel() else ():
        if not 0 <= label < vocabulary:  # a GPU would only say "device-side assert"
            raise ValueError(
                f"label {label} is out of range: there are {vocabulary} tokens, "
                f"0 ... {vocabulary - 1}, and what is ignored carries {IGNORED}."
            )
    # In Function.forward gradients are off, so their state is passed on from here.
    return _ChunkedCrossEntropy.apply(
        hidden.reshape(-1, width), weight, targets, size, torch.is_grad_enabled()
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, size: int, training: bool
    ) -> Tensor:
        device = hidden.device.type
        compute = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(device) and compute != torch.float64:
            compute = torch.get_autocast_dtype(device)
        exact = torch.promote_types(compute, torch.float32)

        wanted = [training and needed for needed in ctx.needs_input_grad[:2]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None

        counted = targets != IGNORED
        count = counted.sum().clamp(min=1)
        losses = torch.zeros(len(targets), dtype=exact, device=hidden.device)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            for start in range(0, len(targets), size):
                part = slice(start, start + size)
                x, kept = hidden[part].to(compute), counted[part]
                labels = targets[part].masked_fill(~kept, 0).unsqueeze(1)

                # From here on one tensor of a chunk's logits, changed in place.
                scores = (x @ matrix.T).to(exact)
                largest = scores.amax(1, keepdim=True)
                right = scores.gather(1, labels)
                total = scores.sub_(largest).exp_().sum(1, keepdim=True)
                loss = total.log() + largest - right
                losses[part] = loss.squeeze(1).masked_fill_(~kept, 0)
                if not any(wanted):
                    continue

                # softmax - onehot; 0 for what is ignored.
                kept = kept.unsqueeze(1).to(exact)
                d = scores.mul_(kept / total).scatter_add_(1, labels, -kept).to(compute)
                del scores
                if grad_hidden is not None:
                    grad_hidden[part] = d @ matrix
                if grad_weight is not None:
                    _add_product(grad_weight, d.T, x)
                del d
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        ctx.size, ctx.dtypes = size, (hidden.dtype, weight.dtype)
        return losses.sum() / count

    @staticmethod
    @partial(first_derivative_only, instead="compute_loss")
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, count = ctx.saved_tensors
        factor = grad_loss / count
        # With retain_graph=True the stored gradients are needed again, and copies are scaled.
        owned = not torch._C._autograd._get_current_graph_task_keep_graph()
        grads = (
            None if gradient is None else _scaled(gradient, factor, dtype, ctx.size, owned)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *grads, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `total += a @ b`, for 16-bit a and b too, without rounding the product to 16 bits."""
    if a.dtype != total.dtype and a.is_cuda and torch.version.hip is None:
        # Tensor cores multiply 16-bit numbers and add in float32; the sum can be had as it is.
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, size: int, owned: bool) -> Tensor:
    """Return `gradient * factor` in `dtype`; in place where the gradient is ours to change."""
    if not owned:
        gradient = gradient.clone()
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor).to(dtype)
    # One dimension, so that 16-bit gradients are multiplied in float32: as a scalar the factor
    # would be rounded to their dtype first, and a loss scale of 65,536 is inf in float16. In
    # parts, because a CPU makes float32 copies for that.
    for part in gradient.split(size):
        part.mul_(factor.reshape(1))
    return gradient.to(dtype)
