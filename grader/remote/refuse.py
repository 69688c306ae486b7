"""Fused attention refused at PyTorch's dispatcher, however it is spelt.

The student's cells may call it: a comparison with PyTorch's own does no harm. When they have run,
and before the grader calls a function, operators that compute attention begin to raise an error.
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_OPERATORS = re.compile(
    r"aten::(_?scaled_dot_product|_(native|triton)_multi_head_attention|linear_cross_entropy"
    r"|_transformer_encoder_layer_fwd|_(flash|efficient|cudnn)_attention_)"
    r"|onnx::(Attention|RotaryEmbedding)"
)
# Nested tensors and vmap have kernels of their own, and a composite kernel can be called by name.
_KEYS = (
    *("CPU", "AutogradCPU", "NestedTensorCPU", "AutogradNestedTensor"),
    *("FuncTorchVmapMode", "CompositeImplicitAutograd"),
)
_LATE = "torch.onnx.ops"  # registers its operators when it is imported


class FusedAttentionRefused(RuntimeError):
    """A solution called an operator that does the exercise."""


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise FusedAttentionRefused(
        f"this exercise asks to write what {name} does: it cannot be called here"
    )


def hide_kernels() -> None:
    """Disable calls of an operator's kernel that bypass PyTorch's dispatcher."""
    torch._C._dispatch_get_computed_kernel_for_dispatch_key = functools.partial(
        _refuse, "get_kernel"
    )


def refuse() -> Callable[[], None]:
    """Refuse fused attention from now on; return what allows it again."""
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "onnx")}
    for name in torch._C._dispatch_get_all_op_names():
        if _OPERATORS.match(name):
            space, _, operator = name.partition("::")
            answer = functools.partial(_refuse, operator.lstrip("_"))
            for key in _KEYS:
                libraries[space].impl(operator, answer, key, allow_override=True)
    hidden = _LATE not in sys.modules
    if hidden:
        sys.modules[_LATE] = None  # type: ignore[assignment]
    higher = torch._ops.HigherOrderOperator
    call: Any = higher.__call__

    def call_others(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._name.startswith("flex_attention"):
            _refuse("FlexAttention")
        return call(self, *args, **kwargs)

    higher.__call__ = call_others  # type: ignore[method-assign]

    def allow() -> None:
        for library in libraries.values():
            library._destroy()
        higher.__call__ = call  # type: ignore[method-assign]
        if hidden:
            sys.modules.pop(_LATE, None)

    return allow
