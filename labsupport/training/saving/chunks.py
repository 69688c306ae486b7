"""A function of single tokens, applied to some tokens at a time.

The MLP of a decoder widens each token to four times its size or more, and keeps that for the
backward pass. No token's result needs another token's. So a part of the sequence can go through at
a time: its wide tensors are thrown away when it is done, and computed again, part by part, in the
backward pass. Liu and Abbeel, "Blockwise Parallel Transformer for Large Context Models" (arXiv
2305.19370), train long sequences in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_chunks(
    fn: Callable[[Tensor], Tensor], x: Tensor, size: int | None, *, dim: int = -2
) -> Tensor:
    """`fn(x)`, computed for `size` tokens at a time, forward and backward.

    Args:
        fn: makes y (..., tokens, any) from x (..., tokens, width), each token by itself: an MLP, a
            norm, a projection; not attention. A module, or a function.
        x: (..., tokens, width), any dtype.
        size: tokens at a time. None, or as many as there are: `fn(x)`, nothing else.
        dim: the dimension of x, and of the result, that counts tokens.

    Returns:
        What `fn(x)` returns, up to the rounding of another matmul shape.

    With gradients on, each chunk is checkpointed: x and the result are kept, and between the two
    only one chunk's tensors exist at a time, for one more forward pass of `fn`. Gradients of
    weights are added up over the chunks, in the weights' dtype.

    Raises:
        ValueError: size below 1; `fn` changed the number of tokens.
        TypeError: size is not an integer.
        IndexError: x has no such dimension.

    >>> in_chunks(torch.nn.Linear(8, 2), torch.zeros(1, 100, 8), 32).shape
    torch.Size([1, 100, 2])
    """
    if size is None:
        return fn(x)
    if not isinstance(size, Integral) or isinstance(size, bool):
        raise TypeError(f"size counts tokens: an integer or None, not {size!r}.")
    if size < 1:
        raise ValueError(f"size must be at least 1 token, not {size}.")
    if x.shape[dim] <= size:
        return fn(x)
    # split, and not slices: the backward of each slice would fill a tensor of the full size.
    parts = x.split(int(size), dim)
    # Without gradients nothing would be kept, and nothing has to be computed again.
    if torch.is_grad_enabled():
        results = [checkpoint(fn, part, use_reentrant=False) for part in parts]
    else:
        results = [fn(part) for part in parts]
    for part, result in zip(parts, results, strict=True):
        if result.ndim < x.ndim - dim % x.ndim or result.shape[dim] != part.shape[dim]:
            raise ValueError(
                f"fn made {tuple(result.shape)} of {tuple(part.shape)}: dimension {dim} must keep "
                "its length. in_chunks is for functions of single tokens."
            )
    return torch.cat(results, dim)
