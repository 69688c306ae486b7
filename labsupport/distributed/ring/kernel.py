"""What a ring asks of a kernel: more than attention does.

The forward must return the log-sum-exp, or partial results cannot be merged. The backward must take
the output and the log-sum-exp from outside: those of the whole row, over the keys of all ranks. A
kernel whose backward is reached through autograd alone uses those of its own block, and gives
gradients of another function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labsupport.attention.implementations import by_name
from labsupport.attention.registry import AttentionCall

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """What a piece is besides its tensors: scale, window (causal is (-1, 0)), ALiBi's slopes."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    slopes: Tensor | None = None


@dataclass(frozen=True)
class BlockKernel:
    """A kernel that can compute a piece of a block. All tensors in flash-attn's layout.

    Attributes:
        name: what users pass as `kernel=`.
        forward: (q, k, v, options) -> out (batch, rows, heads, head_dim), float32 where the kernel
            can, and lse (batch, heads, rows), natural log. Both are the ring's to overwrite.
        backward: (dout, q, k, v, out, lse, options) -> dq, dk, dv, with `out` and `lse` of the
            whole rows. None: it has none that takes them, and is for inference only.
        backend: the entry of `labsupport.attention`'s table whose limits apply.
        further_reasons: (call, deterministic) -> what else it cannot do in a ring.
        in_auto: whether `kernel="auto"` may choose it on this device.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients] | None
    backend: str
    further_reasons: Callable[[AttentionCall, bool], list[str]] = lambda call, deterministic: []
    in_auto: Callable[[torch.device], bool] = lambda device: True

    def reasons(self, call: AttentionCall, deterministic: bool) -> list[str]:
        """Every reason why it cannot compute the pieces of `call`; empty when it can."""
        reasons = by_name(self.backend).reasons(call) + self.further_reasons(call, deterministic)
        if self.backward is None and call.needs_grad:
            reasons.append(NO_BACKWARD)
        return reasons


NO_BACKWARD = (
    "has no backward here that takes the log-sum-exp from outside, which a ring's gradients need: "
    "its forward only, under torch.no_grad()"
)


def is_deterministic(asked: bool) -> bool:
    """Whether the same bits are wanted every time, by the call or by PyTorch's setting."""
    return asked or torch.are_deterministic_algorithms_enabled()


def no_windows(call: AttentionCall) -> list[str]:
    """The reason of kernels that know a causal mask, or none."""
    if not call.windowed:
        return []
    return [
        "cannot do windows in a ring: its kernels take a causal mask or none, not the slanted "
        "edge of a window through a block"
    ]


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
