"""The classifier and its loss, never with all the logits, forward or backward.

For N tokens and a vocabulary of V the logits are the largest tensor of a training step. The loss of
a token needs that token's logits alone, and so does its gradient:

    z = W h + b                           (V,)    logits of one token with hidden state h (width,)
    loss = logsumexp(z) - z[label]
    d = d loss / d z = softmax(z) - onehot(label)

    d loss / d h = Wᵀ d                   (width,)
    d loss / d W = d hᵀ                   (V, width), a sum over the tokens
    d loss / d b = d                      (V,), a sum over the tokens

None of it waits for the rest of the network: what comes back into the loss is one number, by which
everything is multiplied. So the forward pass computes the gradients at once, `chunk` tokens at a
time, and throws each chunk's logits away. What stays is as large as the hidden states and the
weight. Each logit is computed once; `labsupport.precision.losses.compute_loss(head=...,
chunk_size=...)`, which takes any head, computes it twice.

The idea is that of Liger Kernel (Hsu et al., arXiv 2410.10989, section 3.2, "FusedLinear
CrossEntropy"). Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv
2411.09009), go further: a kernel whose logits never leave the chip.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from labsupport.precision.dtypes import short

CHUNK_BYTES = 2**28


def default_chunk(vocabulary: int) -> int:
    """Tokens whose float32 logits take 256 MiB, in multiples of 64: 1,280 for GPT-2's 50,257.

    Each chunk reads the weight and adds to its gradient, (V, width) both, however few its tokens
    are. A chunk as large as the hidden states, 31 tokens of 2,048 at GPT-2's width, would do that
    66 times; 256 MiB do it twice, and are small beside what a training step takes.
    """
    return max(CHUNK_BYTES // (4 * vocabulary) // 64, 1) * 64


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T + bias`, with the logits of one chunk at a time.

    Args:
        hidden: (..., width) floating.
        weight: (V, width) floating; may be tied to an embedding.
        labels: (...) integers in 0 ... V - 1, or `ignore_index`. Not shifted here: labels[i] is
            what hidden[i] predicts.
        bias: (V,) floating.
        chunk: tokens at a time; None means `default_chunk(V)`.
        ignore_index: tokens with this label count neither in the sum nor in the mean.

    Returns:
        A scalar, float32 (float64 for float64 inputs). If every token is ignored it is 0, with
        gradients of 0.

    Matmuls run in autocast's dtype where autocast is on, else in the wider dtype of hidden and
    weight. Softmax and loss are in float32. Gradients come back in their tensor's dtype. The
    weight's is added up over the chunks in float32, and its 16-bit products are not rounded first
    (on a CPU that takes a float32 matmul).

    float16: the gradients kept by the forward pass are those of the *sum* of the losses. The
    division by the number of tokens waits for the backward pass, where it is one float32 number
    together with the loss scale. So nothing underflows before the scale arrives.

    Extra memory: forward, a chunk's logits in float32 (half as much again for 16-bit matmuls), and
    the gradients, which are kept: hidden's in its dtype, the weight's in float32. Backward scales
    them in place. Where the graph is retained it makes new ones, so that it can run again.

    `torch.compile` leaves this function out of its graph (a graph break). On a GPU the check of
    the labels waits for the device, once.

    Raises:
        ValueError: shapes that do not fit, a label out of range, chunk below 1.
        TypeError: labels or chunk that are not integers, tensors that are not floating.
        RuntimeError: differentiated twice.

    >>> chunked_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(10, 4), torch.zeros(2, 3).long())
    tensor(2.3026)
    """
    return _chunked(hidden, weight, labels, bias, chunk, ignore_index)


# The loop's length, the check of the labels and the choice to work in place are Python's business.
@torch.compiler.disable
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunk: int | None,
    ignore_index: int,
) -> Tensor:
    _check(hidden, weight, labels, bias, chunk)
    targets = labels.reshape(-1).long()
    _check_range(targets, len(weight), ignore_index)
    size = default_chunk(len(weight)) if chunk is None else int(chunk)
    rows = hidden.reshape(-1, hidden.shape[-1])
    # In Function.forward gradients are off: whether anyone wants them is known here only.
    return _ChunkedCrossEntropy.apply(
        rows, weight, bias, targets, size, ignore_index, torch.is_grad_enabled()
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        size: int,
        ignore_index: int,
        training: bool,
    ) -> Tensor:
        device = hidden.device.type
        compute = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(device) and compute != torch.float64:
            compute = torch.get_autocast_dtype(device)
        exact = torch.promote_types(compute, torch.float32)

        wanted = [training and needed for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if wanted[2] and bias is not None else None

        counted = targets != ignore_index
        count = counted.sum().clamp(min=1)
        losses = torch.zeros(len(targets), dtype=exact, device=hidden.device)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            for start in range(0, len(targets), size):
                part = slice(start, start + size)
                x, kept = hidden[part].to(compute), counted[part]
                labels = targets[part].masked_fill(~kept, 0).unsqueeze(1)

                logits = x @ matrix.T
                if bias is not None:
                    logits += bias.to(compute)
                # From here on one tensor of a chunk's logits, changed in place.
                scores = logits.to(exact)
                del logits
                largest = scores.amax(1, keepdim=True)
                right = scores.gather(1, labels)
                total = scores.sub_(largest).exp_().sum(1, keepdim=True)
                loss = total.log() + largest - right
                losses[part] = loss.squeeze(1).masked_fill_(~kept, 0)
                if not any(wanted):
                    continue

                # softmax - onehot; 0 for what is ignored.
                kept = kept.unsqueeze(1).to(exact)
                d = scores.mul_(kept / total).scatter_add_(1, labels, -kept)
                del scores
                if grad_bias is not None:
                    grad_bias += d.sum(0)
                rounded = d.to(compute)
                del d
                if grad_hidden is not None:
                    grad_hidden[part] = rounded @ matrix
                if grad_weight is not None:
                    _add_product(grad_weight, rounded.T, x)
                del rounded
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, count)
        ctx.size = size
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients are on only where they are to be differentiated again (create_graph=True). What
        # we return depends on hidden and weight, and no graph knows how: to go on would be wrong.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy cannot be differentiated twice (create_graph=True): its "
                "gradients are computed in the forward pass. compute_loss can."
            )
        *gradients, count = ctx.saved_tensors
        factor = grad_loss / count
        owned = not _graph_is_kept()
        grads = (
            None if gradient is None else _scaled(gradient, factor, dtype, ctx.size, owned)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *grads, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, for a and b of total's dtype or of 16 bits, without rounding to these."""
    if a.dtype != total.dtype and a.is_cuda and torch.version.hip is None:
        # Tensor cores multiply 16-bit numbers and add in float32; the sum can be had as it is.
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, size: int, owned: bool) -> Tensor:
    """`gradient * factor` in `dtype`; in place where the gradient is ours to change."""
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


def _graph_is_kept() -> bool:
    """Whether the running backward pass was told to keep its graph (retain_graph=True)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int | None
) -> None:
    named = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating, not {short(tensor.dtype)}.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers (the index of the right token), not {short(labels.dtype)}."
        )
    if chunk is not None and (not isinstance(chunk, Integral) or isinstance(chunk, bool)):
        raise TypeError(f"chunk counts tokens: an integer or None, not {chunk!r}.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, not {chunk}.")
    if weight.ndim != 2 or len(weight) == 0:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be (V, width), with V of at least 1: "
            "the weight of a linear classifier."
        )
    if hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be (..., width) with the width of the weight, "
            f"{weight.shape[1]}. Logits go to compute_loss."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias {tuple(bias.shape)} must be ({len(weight)},): one for each token of the "
            "vocabulary."
        )
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} "
            "without the last dimension: one label for each token."
        )


def _check_range(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse labels that no logit belongs to. Waits for the device once."""
    counted = targets.masked_fill(targets == ignore_index, 0)
    if counted.numel() == 0:
        return
    for label in torch.stack(torch.aminmax(counted)).tolist():
        if not 0 <= label < vocabulary:
            raise ValueError(
                f"label {label} is out of range: there are {vocabulary} tokens, "
                f"0 ... {vocabulary - 1}, and what is ignored carries {ignore_index}."
            )
