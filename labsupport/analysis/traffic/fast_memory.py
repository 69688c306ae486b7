"""A fast memory of M elements and a slow one: refuses what does not fit, counts what moves.

    slow memory                fast memory: at most M elements at any time
      Slow Q, K, V, O  -load-> tensors that operators may compute with, and what they make
                       <-store-

`FastMemory` watches every operator while it is active. A tensor takes room from the moment when an
operator creates it until its storage is released: intermediate results count, and working in place
saves room. Computing with a tensor that was not loaded is an error. So a block size that runs here
fits.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.profiling.memory import stored_tensors


class OutOfFastMemoryError(MemoryError):
    """More elements at a time than the fast memory holds."""


class Slow:
    """A tensor in slow memory, of any size, or a part of one. Only `FastMemory` accesses it.

    `slow[rows]` and `slow[rows, cols]` name a part, and move nothing.
    """

    def __init__(self, name: str, values: Tensor, index: Any = ...) -> None:
        self.name, self.values, self.index = name, values, index

    def __getitem__(self, index: Any) -> Slow:
        return Slow(self.name, self.values, index)


class FastMemory(TorchDispatchMode):
    """At most `capacity` elements at a time; counts what is loaded and stored.

    Attributes:
        capacity: M, in elements; None for any number.
        read, written: elements, by the name of the tensor in slow memory.
        used, peak: elements in fast memory, now and at most.

    Raises:
        OutOfFastMemoryError: a load or a result does not fit beside what is there.
        RuntimeError: an operator takes a tensor that was never loaded.

    >>> from labsupport.analysis.traffic import Slow
    >>> q = Slow("Q", torch.ones(8, 4))
    >>> with FastMemory(40) as chip:
    ...     block = chip.load(q[:4])
    >>> chip.read["Q"], chip.peak
    (16, 16)
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.used = self.peak = 0
        self._aside = False
        self._references: Counter[int] = Counter()  # tensors that refer to a storage

    def room(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> Slow:
        """Make room for a matrix in slow memory, of zeros that cost nothing."""
        with self.aside():
            return Slow(name, torch.zeros(rows, cols, dtype=dtype))

    def load(self, part: Slow) -> Tensor:
        """Copy a part of a slow tensor into fast memory."""
        with self.aside():
            source = part.values[part.index]
        self.read[part.name] += source.numel()
        loaded = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        with self.aside():
            return loaded.copy_(source)

    def store(self, part: Slow, values: Tensor | float, *, add: bool = False) -> None:
        """Write values to slow memory.

        Args:
            add: let the slow memory add them to its own: an atomic addition, nothing is read.
        """
        with self.aside():
            target = part.values[part.index]
            part.values[part.index] = target + values if add else values
        self.written[part.name] += target.numel()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not watch what happens in here: slow memory's own work, positions for a mask."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        if self._aside:
            return func(*args, **(kwargs or {}))
        for tensor in stored_tensors((args, kwargs or {})):
            if tensor.dim() and tensor.untyped_storage()._cdata not in self._references:
                raise RuntimeError(
                    f"{func} takes a tensor of shape {tuple(tensor.shape)} that was not loaded"
                )
        result = func(*args, **(kwargs or {}))
        for tensor in stored_tensors(result):
            self._take(tensor, str(func))
        return result

    def _take(self, tensor: Tensor, what: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() // tensor.element_size()
        if not self._references[key]:
            self.used += size
            self.peak = max(self.peak, self.used)
        self._references[key] += 1
        weakref.finalize(tensor, self._leave, key, size)
        if self.capacity is not None and self.used > self.capacity:
            raise OutOfFastMemoryError(
                f"{what} makes {tuple(tensor.shape)}: {self.used:,} elements at a time, "
                f"but the fast memory holds {self.capacity:,}"
            )

    def _leave(self, key: int, size: int) -> None:
        self._references[key] -= 1
        if not self._references[key]:
            self.used -= size
            del self._references[key]
