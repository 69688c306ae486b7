"""Cross-entropy in float32, from logits or, chunk by chunk, from hidden states.

For a sequence of N tokens and a vocabulary of V, the logits are the largest tensor of a small
language model: N = 16,384 and V = 128,256 make 7.8 GiB in float32, and the loss and its gradient
make it three times that. No token's loss needs another token's logits. So they can be computed for
`chunk_size` tokens at a time, thrown away, and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from labsupport.precision.dtypes import short


def compute_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    head: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Return the mean cross-entropy over the tokens that are not ignored, computed in float32.

    Args:
        logits: (..., V) floating; with `head`, hidden states (..., width) instead.
        labels: (...) integers in 0 ... V - 1, or `ignore_index`. They are not shifted: to predict
            the next token, pass logits[:, :-1] and labels[:, 1:].
        head: module (`model.lm_head`) or function that makes logits (tokens, V) from hidden states
            (tokens, width).
        dtype: dtype of log-softmax and of the loss.
        ignore_index: tokens with this label count neither in the sum nor in the mean.
        chunk_size: number of tokens to process at a time; None means all of them. With `head`,
            logits of only `chunk_size` tokens exist at a time, also in the backward pass, at the
            cost of one more pass through the head. Without, only their copies in `dtype` are saved.
        loss_scale: factor on the loss, so that gradients in float16 do not vanish; divide them by
            it. (`MixedPrecisionOptimizer.backward` scales the loss that it is given.)

    Returns:
        A scalar in `dtype`, summed in float32 or wider. If every token is ignored it is 0, with
        gradients of 0, so that a batch of padding does not end a training run (`F.cross_entropy`
        gives NaN).

    Chunks change no token's logits, loss or gradient beyond the rounding of another matmul shape.
    The gradient of the head's weight is a sum over the chunks in the weight's dtype: for a bfloat16
    weight one more rounding per chunk. On a GPU the check of the labels waits for the device, once.

    Raises:
        ValueError: shapes that do not fit, a label out of range, chunk_size below 1.
        TypeError: labels that are not integers; logits or a dtype that are not floating.

    >>> compute_loss(torch.zeros(2, 3, 10), torch.zeros(2, 3, dtype=torch.long))
    tensor(2.3026)
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers (the right token), not {short(labels.dtype)}.")
    for wanted in (logits.dtype, dtype):
        if not wanted.is_floating_point:
            raise TypeError(f"logits and dtype must be floating, not {short(wanted)}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: at least 1 token, or None for all of them.")
    if not logits.ndim or logits.shape[:-1] != labels.shape or not logits.shape[-1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be (..., V), or hidden states (..., width) with a "
            f"head; labels {tuple(labels.shape)} the same without the last dimension: one label "
            "for each token."
        )
    # Any integers may be labels here; cross_entropy takes int64 only, like its ignore_index.
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    counted = targets != ignore_index
    known = targets.masked_fill(~counted, 0)
    smallest, largest = torch.stack(torch.aminmax(known)).tolist() if known.numel() else (0, 0)
    if smallest < 0:
        raise ValueError(
            f"label {smallest} is negative, and not the ignore_index {ignore_index}: ignored "
            "tokens must carry that number."
        )

    def token_losses(rows: Tensor, targets: Tensor) -> Tensor:
        scores = rows if head is None else head(rows)
        if largest >= scores.shape[-1]:
            raise ValueError(
                f"label {largest} is out of range: the vocabulary has {scores.shape[-1]} tokens."
            )
        return F.cross_entropy(
            scores.to(dtype), targets, reduction="none", ignore_index=ignore_index
        )

    if chunk_size is None or len(targets) <= chunk_size:
        losses = token_losses(rows, targets)
    else:
        # split instead of slices: the backward of each slice would fill a tensor of the full size.
        pairs = zip(rows.split(chunk_size), targets.split(chunk_size), strict=True)
        losses = torch.cat([checkpoint(token_losses, *pair, use_reentrant=False) for pair in pairs])
    # One sum over all tokens, chunked or not: the same rounding. In float16 it would overflow.
    total = losses.sum(dtype=torch.promote_types(dtype, torch.float32))
    return (loss_scale * total / counted.sum().clamp(min=1)).to(dtype)
