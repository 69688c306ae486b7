"""The sums of a ring's steps: in place, in float32.

The first result that covers all rows is taken as it is. What follows is added (gradients) or merged
(outputs, by their log-sum-exps; on a GPU by one Triton kernel). The sum is in float32 once a third
part will follow: two parts that a kernel returned in 16 bits are rounded once, in the end, anyway.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from labsupport.attention.kernels import mode
from labsupport.attention.online_softmax import merge_attention
from labsupport.distributed.ring.kernels import widened

_triton_is_missing = cache(mode.missing)


class Total:
    """An output with its log-sum-exp, or a gradient, of several parts.

    Attributes:
        value: (batch, seqlen, heads, head_dim); None before the first part.
        lse: (batch, heads, seqlen) float32 or wider; None for a gradient.
    """

    def __init__(self, like: Tensor, parts: int) -> None:
        """Begin a sum with this number of parts, of a tensor's shape and dtype."""
        self.like, self.missing = like, parts
        self.value: Tensor | None = None
        self.lse: Tensor | None = None

    def merge(self, rows: slice, part: Tensor, lse: Tensor) -> None:
        """Merge a block pair's output, with its log-sum-exp, for some rows."""
        value = self._begun(part)
        if value is part:
            self.lse = lse.to(torch.promote_types(self.like.dtype, torch.float32))
            return
        if self.lse is None:
            self.lse = value.new_full(value.shape[:1] + value.shape[2:0:-1], -torch.inf)
        merge_into(value[:, rows], self.lse[:, :, rows], part, lse)

    def add(self, rows: slice, part: Tensor) -> None:
        """Add a block pair's gradient of some rows."""
        value = self._begun(part)
        if value is not part:
            value[:, rows] += part

    def _begun(self, part: Tensor) -> Tensor:
        """The sum to change; the part itself if it is the whole sum so far."""
        self.missing -= 1
        if self.value is None:
            like, wide = self.like, torch.promote_types(self.like.dtype, torch.float32)
            whole = part.shape == like.shape
            self.value = part if whole else torch.zeros(like.shape, dtype=wide, device=like.device)
        elif self.missing:
            self.value = widened(self.value)
        return self.value

    def result(self) -> Tensor:
        """Return the sum in the dtype of `like`."""
        assert self.value is not None  # a rank sees its own keys
        return self.value.to(self.like.dtype)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into (out, lse), in place; shapes as in `Total`."""
    if _kernels_take(out, part) and _kernels_take(lse, part_lse):
        from labsupport.distributed.ring.merge_kernel import launch_merge

        launch_merge(out, lse, part, part_lse)
        return
    new_out, new_lse = merge_attention(out.transpose(1, 2), lse, part.transpose(1, 2), part_lse)
    out.copy_(new_out.transpose(1, 2))
    lse.copy_(new_lse)


def _kernels_take(total: Tensor, part: Tensor) -> bool:
    return (
        total.device.type == "cuda"
        and {total.dtype, part.dtype} <= {torch.float32, torch.bfloat16, torch.float16}
        and total.stride(-1) == part.stride(-1) == 1
        and total.numel() > 0
        and _triton_is_missing() is None
    )
