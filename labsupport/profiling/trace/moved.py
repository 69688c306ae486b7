"""How many bytes do the operators of a call read and write, if each reads its inputs once?

A program of many small operators writes each intermediate result and reads it again; a fused
kernel keeps it on the chip. Both show here: every operator that PyTorch runs is charged the bytes
of the tensors that it is given, once each, and of the tensors that it makes. Views move nothing.

It counts what crosses the border of an operator, not what a memory chip saw: caches save some of
it, and a kernel that reads an input several times adds to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MAKES_ONLY = ("empty", "new_empty")  # memory is taken; nothing is read or written
# Operators whose work the profiler shows under the name of another, which they call.
_DONE_BY = {"aten::clone": "aten::copy_", "aten::_to_copy": "aten::copy_"}


class _Moved(TorchDispatchMode):
    """Adds up bytes by operator, a backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        given = _by_storage((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.partition("::")[2].startswith(_MAKES_ONLY):
            return result
        out = _by_storage(result)
        changes = func._schema.is_mutable
        made = {key: size for key, size in out.items() if changes or key not in given}
        if made or not out:  # otherwise its results are views of what it was given
            self.by_operator[_DONE_BY.get(name, name)] += sum(given.values()) + sum(made.values())
        return result


def moved_bytes(fn: Callable[[], Any]) -> dict[str, int]:
    """Call `fn()`, and return the bytes that its operators read and wrote, by operator.

    Keys are the names that torch.profiler uses, for example 'aten::bmm'. What does not go through
    PyTorch's dispatcher (a Triton kernel that is launched directly) is not seen.

    Example:
        >>> x = torch.ones(1000)
        >>> moved_bytes(lambda: x + x)  # x once, and the result
        {'aten::add': 8000}
    """
    with _Moved() as moved:
        fn()
    return dict(moved.by_operator)


def _by_storage(values: Any) -> dict[int, int]:
    """Bytes of the tensors, each storage once, and never more than the storage holds."""
    leaves, _ = torch.utils._pytree.tree_flatten(values)
    found: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or leaf.is_meta:
            continue
        storage = leaf.untyped_storage()
        size = min(leaf.numel() * leaf.element_size(), storage.nbytes())
        found[storage._cdata] = max(size, found.get(storage._cdata, 0))
    return found
