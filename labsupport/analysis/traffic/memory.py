"""A fast memory of M elements beside a slow one: what does not fit is refused, what passes counts.

    slow memory                fast memory: at most M elements at any time
      Slow Q, K, V, O  -load-> tensors that operators may compute with, and what they make
                       <-store-

`FastMemory` watches every operator while it is active. A tensor takes room from the moment when an
operator creates it until nobody refers to its storage any more: intermediate results count, and in
place is cheaper than beside. Computing with a tensor that was not loaded is an error. So a block
size that runs here is one that fits.
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


class OutOfFastMemoryError(MemoryError):
    """More elements at a time than the fast memory holds."""


class Slow:
    """A tensor in slow memory, of any size. Only `FastMemory` reads and writes it.

    `slow[rows]` or `slow[rows, cols]` names a part of it, and moves nothing.
    """

    def __init__(self, name: str, values: Tensor) -> None:
        self.name = name
        self.values = values

    def __getitem__(self, index: Any) -> Place:
        return Place(self, index)


class Place:
    """A part of a `Slow`: where to load from, or to store to."""

    def __init__(self, slow: Slow, index: Any) -> None:
        self.slow = slow
        self.index = index


class FastMemory(TorchDispatchMode):
    """At most `capacity` elements at a time; counts what is loaded and stored.

    Attributes:
        capacity: M, in elements; None for any number.
        read, written: elements, by the name of the tensor in slow memory.
        used, peak: elements in fast memory, now and at most.

    Raises (while it is active):
        OutOfFastMemoryError: a load or a result does not fit beside what is there.
        RuntimeError: an operator takes a tensor that was never loaded.

    Example:
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
        # storage -> [elements, tensors that refer to it]
        self._here: dict[int, list[int]] = {}

    def room(self, name: str, rows: int, cols: int, dtype: torch.dtype) -> Slow:
        """Room for a matrix in slow memory, of zeros that cost nothing: write before you read."""
        with self.aside():
            return Slow(name, torch.zeros(rows, cols, dtype=dtype))

    def load(self, place: Place) -> Tensor:
        """Copy a part of a slow tensor into fast memory."""
        with self.aside():
            source = place.slow.values[place.index]
        self.read[place.slow.name] += source.numel()
        loaded = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        with self.aside():
            loaded.copy_(source)
        return loaded

    def store(self, place: Place, values: Tensor) -> None:
        """Write values to slow memory."""
        with self.aside():
            place.slow.values[place.index] = values
        self.written[place.slow.name] += values.numel()

    def add(self, place: Place, values: Tensor) -> None:
        """Send values that the slow memory adds to its own: an atomic addition, nothing is read."""
        with self.aside():
            place.slow.values[place.index] += values
        self.written[place.slow.name] += values.numel()

    def fill(self, slow: Slow, value: float) -> None:
        """Write one value everywhere."""
        with self.aside():
            slow.values.fill_(value)
        self.written[slow.name] += slow.values.numel()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Operators in here are not watched: slow memory's own, and the positions for a mask."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    @property
    def total(self) -> int:
        """Elements that passed, in either direction."""
        return self.read.total() + self.written.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        if self._aside:
            return func(*args, **(kwargs or {}))
        for tensor in _tensors((args, kwargs or {})):
            if tensor.dim() and tensor.untyped_storage()._cdata not in self._here:
                raise RuntimeError(
                    f"{func} takes a tensor of shape {tuple(tensor.shape)} that was not loaded"
                )
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._take(tensor, str(func))
        return result

    def _take(self, tensor: Tensor, what: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._here.setdefault(key, [storage.nbytes() // tensor.element_size(), 0])
        if entry[1] == 0:
            self.used += entry[0]
            self.peak = max(self.peak, self.used)
        entry[1] += 1
        weakref.finalize(tensor, self._leave, key)
        if self.capacity is not None and self.used > self.capacity:
            raise OutOfFastMemoryError(
                f"{what} makes {tuple(tensor.shape)}: {self.used:,} elements at a time, "
                f"but the fast memory holds {self.capacity:,}"
            )

    def _leave(self, key: int) -> None:
        entry = self._here[key]
        entry[1] -= 1
        if entry[1] == 0:
            self.used -= entry[0]
            del self._here[key]


def _tensors(value: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
