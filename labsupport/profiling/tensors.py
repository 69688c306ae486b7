"""Bytes that a tensor program moves, if each operator reads and writes the large memory.

`trace_tensors(fn)` watches every operator. The bytes are those that operators must pass to one
another: a kernel may read an input more than once, and a cache may save some of it. What happens
inside of one operator (a fused attention kernel, say) is not seen: only what it takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labsupport.profiling.memory import LargestTensor

# They write their first argument, whatever it was.
_OVERWRITE = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_"}
# They make room and write nothing.
_RESERVE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class TensorTrace(LargestTensor):
    """Operators of a block of code, its backward included; also says what `LargestTensor` says.

    Attributes:
        operators: by name, for example "mm": [calls, bytes read, bytes written].

    Views cost nothing. An operator that works in place reads and writes.

    Example:
        >>> with TensorTrace() as trace:
        ...     torch.ones(4, 8) @ torch.ones(8, 2)
        >>> trace.operators["mm"]
        [1, 192, 32]
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, list[int]] = {}

    @property
    def read_bytes(self) -> int:
        """Bytes that all operators read."""
        return sum(read for _, read, _ in self.operators.values())

    @property
    def written_bytes(self) -> int:
        """Bytes that all operators wrote."""
        return sum(written for _, _, written in self.operators.values())

    @property
    def total_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # _unsafe_view and its like are views that their schema does not call so.
        shared = _storages(result) & _storages((args, kwargs)) and not func._schema.is_mutable
        moves = isinstance(func, torch._ops.OpOverload) and not func.is_view and not shared
        if moves and func.namespace != "prim":  # prim::device asks, and moves nothing
            name = func._schema.name.split("::")[-1]
            inputs = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            counts = self.operators.setdefault(name, [0, 0, 0])
            counts[0] += 1
            counts[1] += _nbytes((args[1:] if name in _OVERWRITE else args, inputs))
            counts[2] += 0 if name in _RESERVE else _nbytes(result)
        return result


def trace_tensors(fn: Callable[[], Any]) -> TensorTrace:
    """Call `fn()` and return what its operators created, read and wrote.

    >>> trace = trace_tensors(lambda: torch.ones(4, 8) @ torch.ones(8, 2))
    >>> trace.operators["mm"]  # calls, bytes read, bytes written
    [1, 192, 32]
    """
    with TensorTrace() as trace:
        fn()
    return trace


def _nbytes(value: Any) -> int:
    """Bytes of the tensors in a value; one passed twice, and what `expand` repeats, once."""
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return sum(_elements(tensor) * tensor.element_size() for tensor in tensors.values())


def _storages(value: Any) -> set[int]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    dense = (x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided)
    return {x.untyped_storage()._cdata for x in dense}


def _elements(tensor: Tensor) -> int:
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.numel()
    sizes = [n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step != 0]
    return int(torch.Size(sizes).numel())
