"""What a tensor program creates and moves, if each operator reads and writes the large memory.

`trace_tensors(fn)` listens to every operator. The bytes are those that operators must pass to one
another: a kernel may read an input more than once, and a cache may save some of it. What happens
inside of one operator (a fused attention kernel, say) is not seen: only what it takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.profiling.memory import LargestTensor

if TYPE_CHECKING:
    import pandas as pd

# They write their first argument, and do not look at what it held.
_OVERWRITE = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_"}
# They make room and write nothing.
_RESERVE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Operator:
    """All calls of one operator: bytes of its tensors in and out."""

    calls: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class TensorTrace(LargestTensor):
    """Listens to a block of code, its backward included; also says what `LargestTensor` says.

    Attributes:
        operators: by name, for example "mm", what was read and written.

    Views cost nothing. An operator that works in place reads and writes.

    Example:
        >>> with TensorTrace() as trace:
        ...     torch.ones(4, 8) @ torch.ones(8, 2)
        >>> trace.operators["mm"].read_bytes
        192
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, Operator] = {}

    @property
    def read_bytes(self) -> int:
        """Of all operators."""
        return sum(op.read_bytes for op in self.operators.values())

    @property
    def written_bytes(self) -> int:
        """Of all operators."""
        return sum(op.written_bytes for op in self.operators.values())

    @property
    def total_bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes

    def table(self) -> pd.DataFrame:
        """A row an operator: calls, read_bytes, written_bytes, total_bytes; the largest first."""
        import pandas as pd

        rows = [
            {
                "operator": name, "calls": op.calls, "read_bytes": op.read_bytes,
                "written_bytes": op.written_bytes, "total_bytes": op.read_bytes + op.written_bytes,
            }
            for name, op in self.operators.items()
        ]  # fmt: skip
        table = pd.DataFrame(
            rows, columns=["operator", "calls", "read_bytes", "written_bytes", "total_bytes"]
        )
        return table.sort_values("total_bytes", ascending=False, ignore_index=True, kind="stable")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        result = super().__torch_dispatch__(func, types, args, kwargs)
        moves = isinstance(func, torch._ops.OpOverload) and not func.is_view
        if moves and func.namespace != "prim":  # prim::device asks, and moves nothing
            name = func._schema.name.split("::")[-1]
            self._count(name, args, kwargs or {}, result)
        return result

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        taken = args[1:] if name in _OVERWRITE else args
        given = {key: value for key, value in kwargs.items() if key != "out"}
        before = self.operators.get(name, Operator())
        self.operators[name] = Operator(
            before.calls + 1,
            before.read_bytes + _nbytes((taken, given)),
            before.written_bytes + (0 if name in _RESERVE else _nbytes(result)),
        )


def trace_tensors(fn: Callable[[], Any]) -> TensorTrace:
    """Call `fn()` and return what its operators created, read and wrote.

    Example:
        >>> trace = trace_tensors(lambda: standard_attention(q, k, v))
        >>> trace.shape, trace.total_bytes
    """
    with TensorTrace() as trace:
        fn()
    return trace


def _nbytes(value: Any) -> int:
    """Bytes of the tensors in a value; one that is passed twice counts once."""
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    # What `expand` repeats exists once.
    return sum(_elements(tensor) * tensor.element_size() for tensor in tensors.values())


def _elements(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return tensor.numel()
    sizes = [n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step != 0]
    return int(torch.Size(sizes).numel()) if tensor.numel() else 0
