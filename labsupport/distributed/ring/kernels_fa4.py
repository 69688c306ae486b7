"""flash-attn-4 in a ring: its public forward, and the private backward behind it where it exists.

`flash_attn_func` returns the log-sum-exp. Its backward, reached by autograd, uses the log-sum-exp
of its own block. The function behind takes another one, but is not public: it is looked for when
it is wanted, and a release without it is refused with that reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from labsupport.attention.adapters import run_fa4
from labsupport.attention.registry import AttentionCall
from labsupport.distributed.ring.kernel import (
    NO_BACKWARD,
    BlockKernel,
    Gradients,
    Options,
    is_deterministic,
)


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    left, right = options.window
    causal = right == 0
    window = (left, -1 if causal else right)
    call = AttentionCall(
        q.contiguous(), k.contiguous(), v.contiguous(), causal, options.scale, window, None, True
    )
    out, lse = run_fa4(call)
    assert lse is not None
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> Gradients:
    backward = _private_backward()
    assert backward is not None  # its absence is a reason to refuse
    left, right = (None if side < 0 else side for side in options.window)
    tensors = (x.contiguous() for x in (q, k, v, out, dout, lse))
    dq, dk, dv = backward(
        *tensors,
        softmax_scale=options.scale,
        causal=right == 0 and left is None,
        window_size_left=left,
        window_size_right=None if left is None and right == 0 else right,
    )[:3]
    return dq, dk, dv


def _private_backward() -> Callable[..., Any] | None:
    """The function behind autograd's, in the package that `labsupport.attention` has imported."""
    module = sys.modules.get("flash_attn.cute.interface")
    return getattr(module, "_flash_attn_bwd", None)


def _reasons(call: AttentionCall, deterministic: bool) -> list[str]:
    reasons = []
    if call.needs_grad and _private_backward() is None:
        reasons.append(NO_BACKWARD)
    if is_deterministic(deterministic):
        reasons.append("adds dQ up in any order unless told otherwise, which a ring does not do")
    return reasons


FA4 = BlockKernel(
    name="fa4",
    forward=_forward,
    backward=_backward,
    backend="fa4",
    further_reasons=_reasons,
    in_auto=lambda device: False,  # its backward is private
)
