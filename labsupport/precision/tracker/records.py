"""What the tracker writes down of one call: dtypes at once, ranges on the device until asked for.

Nothing here holds a tensor of the model: of each tensor only its dtype is kept and, where ranges
are recorded, eight numbers (`dtypes.range_tensor`). They are read from the device together, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labsupport.precision.dtypes import Range, as_range, range_tensor, short

# What `range_tensor` gives, still on its device, and how many entries there are.
Numbers = tuple[Tensor, int]
MEASURED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

COLUMNS = {
    "order": "when the call began (forward), or the gradient came; counts all of them",
    "pass": "forward, backward (gradient of a call's output), or weight gradient",
    "name": "the module's name in the model, or the parameter's; (model) is the model itself",
    "class": "the module's class, or the attention function",
    "kind": "module, block (attention module or whole model), or attention call",
    "call": "0 for the first call of this module, 1 for the second, ...",
    "dtype_in": "dtypes of what went in",
    "dtype_weights": "dtypes of the module's own parameters",
    "dtype_out": "dtypes of what came out; of the gradient in the other two passes",
    "cast": "where a dtype changed on the way that nobody wrote down as a cast; else empty",
    "backend": "which backend of `labsupport.attention` ran, where it is known",
    "kernel": "which kernel that backend launched",
    "largest": "largest finite magnitude of what came out, or of the gradient",
    "smallest": "smallest magnitude of it that is not 0",
    "nan": "how many of its entries are NaN",
    "inf": "how many are infinite",
    "minus_inf": "how many of those are -inf",
    "subnormal": "how many are below the dtype's smallest normal magnitude, and not 0",
    "bottom": "how many of those have at most 3 bits left (`dtypes.BOTTOM`)",
    "zero": "how many are 0",
    "entries": "how many it has",
    "largest_in": "largest finite magnitude of what went in",
    "smallest_in": "smallest magnitude of it that is not 0",
    "nonfinite_in": "how many of its entries are NaN or infinite",
    "nonfinite_weights": "how many entries of the weights are",
}


_COUNTS = ("nan", "inf", "minus_inf", "subnormal", "bottom", "zero", "entries")


class Part:
    """Some tensors that belong together: what went in, the weights, or what came out.

    Attributes:
        dtypes: of each tensor.
        names: what each is called, where that matters (q, k, v).
        pending: the numbers of each measured tensor, still on its device, and its entries.
        range: the range of all of them together; None if nothing was measured (or read yet).
        rank: the number of dimensions of the first.
    """

    __slots__ = ("dtypes", "names", "pending", "range", "rank")

    def __init__(
        self, tensors: list[Tensor], meter: Meter | None, names: tuple[str, ...] = ()
    ) -> None:
        self.dtypes = tuple([tensor.dtype for tensor in tensors])
        self.names = names
        self.rank = tensors[0].ndim if tensors else 0
        self.range: Range | None = None
        self.pending = [pair for t in tensors if (pair := meter(t))] if meter is not None else []

    @property
    def floating(self) -> tuple[torch.dtype, ...]:
        """The floating dtypes, each once, in order."""
        return tuple(dict.fromkeys(dtype for dtype in self.dtypes if dtype.is_floating_point))

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(short(dtype) for dtype in self.dtypes))

    def by_name(self) -> str:
        """Which tensors have which dtype: "q, k float32, v bfloat16"."""
        groups: dict[torch.dtype, list[str]] = {}
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            groups.setdefault(dtype, []).append(name)
        return ", ".join(f"{', '.join(names)} {short(dtype)}" for dtype, names in groups.items())


_shared: dict[tuple[Any, ...], Part] = {}


def shared_part(tensors: list[Tensor], names: tuple[str, ...] = ()) -> Part:
    """A `Part` without a range: the same object for the same dtypes, which is quick to get."""
    key = names, *[tensor.dtype for tensor in tensors]
    part = _shared.get(key)
    if part is None:
        part = _shared[key] = Part(tensors, None, names)
    return part


class Meter:
    """Takes the numbers of a tensor, once as long as it does not change.

    What one layer gives, the next one gets: this halves the work. Of a tensor only a weak reference
    is kept.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Numbers]] = {}

    def __call__(self, tensor: Tensor) -> Numbers | None:
        """The numbers of a tensor, or None if its dtype or device has none."""
        if tensor.dtype not in MEASURED or tensor.is_meta or tensor.is_nested:
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None  # inside vmap or grad of torch.func: cannot be read from outside
        if tensor.layout != torch.strided:  # the gradient of an Embedding(sparse=True)
            values = tensor.detach().coalesce().values()
            return range_tensor(values), values.numel()
        if tensor.is_inference():  # does not tell when it is changed
            return range_tensor(tensor), tensor.numel()
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        numbers = range_tensor(tensor), tensor.numel()
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, numbers)
        return numbers


@dataclass(slots=True, eq=False)
class Record:
    """One call, or one gradient; the columns of `COLUMNS`, not yet written out."""

    order: int
    direction: str
    name: str
    class_name: str
    kind: str
    call: int = 0
    inputs: Part | None = None
    weights: Part | None = None
    output: Part | None = None
    backend: str = ""
    kernel: str = ""
    autocast: bool = False
    end: int = -1  # when the call returned, on the clock of `order`
    raised: bool = False

    @property
    def parts(self) -> Iterator[Part]:
        """Those that there are."""
        return (part for part in (self.inputs, self.weights, self.output) if part is not None)

    @property
    def where(self) -> str:
        """The call in words."""
        call = f", call {self.call + 1}" if self.call else ""
        if self.kind == "attention call":
            return f"attention call of {self.name} ({self.class_name}{call})"
        return f"{self.name}{call}"

    @property
    def cast(self) -> str:
        """Where a dtype changed on the way: "float32 -> bfloat16"; empty if nowhere."""
        if self.direction != "forward" or self.kind == "block":
            return ""
        went_in = self.inputs.floating if self.inputs else ()
        weights = self.weights.floating if self.weights else ()
        out = self.output.floating if self.output else ()
        result = ", ".join(map(short, out))
        changed = [dtype for dtype in went_in if dtype not in out]
        if self.inputs and self.inputs.names and len(went_in) > 1:
            return self.inputs.by_name() + (f" -> {result}" if out else "")
        if not out:
            return ""
        casts = [f"{', '.join(map(short, changed))} -> {result}"] if changed else []
        if heavier := [dtype for dtype in weights if dtype not in out]:
            casts.append(f"weights {', '.join(map(short, heavier))} -> {result}")
        return "; ".join(casts)

    def row(self) -> dict[str, Any]:
        """A row of the data frame."""
        held = self.output.range if self.output else None
        came = self.inputs.range if self.inputs else None
        weights = self.weights.range if self.weights else None
        return {
            "order": self.order,
            "pass": self.direction,
            "name": self.name,
            "class": self.class_name,
            "kind": self.kind,
            "call": self.call,
            "dtype_in": str(self.inputs or ""),
            "dtype_weights": str(self.weights or ""),
            "dtype_out": str(self.output or ""),
            "cast": self.cast,
            "backend": self.backend,
            "kernel": self.kernel,
            **{
                name: getattr(held, name) if held else None
                for name in ("largest", "smallest", *_COUNTS)
            },
            "largest_in": came.largest if came else None,
            "smallest_in": came.smallest if came else None,
            "nonfinite_in": came.nan + came.inf if came else None,
            "nonfinite_weights": weights.nan + weights.inf if weights else None,
        }


@dataclass
class Log:
    """All records of one with-block, and the clock that orders them."""

    records: list[Record] = field(default_factory=list)
    clock: int = 0
    runs: int = 0  # calls of the whole model
    error: str = ""  # what ended the with-block, if it was an exception

    def tick(self) -> int:
        """The next number of the clock."""
        self.clock += 1
        return self.clock

    def read(self) -> list[Record]:
        """The records with their ranges: waits once for each device, and only the first time."""
        parts = [part for record in self.records for part in record.parts if part.pending]
        by_device: dict[torch.device, list[Tensor]] = {}
        for part in parts:
            for numbers, _ in part.pending:
                by_device.setdefault(numbers.device, []).append(numbers)
        values = {
            device: iter(torch.stack(numbers).tolist()) for device, numbers in by_device.items()
        }
        for part in parts:
            ranges = [as_range(next(values[x.device]), entries) for x, entries in part.pending]
            part.range, part.pending = _together(ranges), []
        return self.records


def _together(ranges: list[Range]) -> Range:
    return Range(
        max(r.largest for r in ranges),
        min((r.smallest for r in ranges if r.smallest), default=0.0),
        *(sum(getattr(r, name) for r in ranges) for name in _COUNTS),
    )


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an argument or a result: in tuples, lists and mappings, too."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):  # quicker than tuple | list
        for inner in value:
            _collect(inner, found)
    elif value is not None and isinstance(value, Mapping):
        for inner in value.values():
            _collect(inner, found)


def arguments(
    names: tuple[str, ...], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors among a call's arguments, but for masks: -inf is no alarm there.

    Args:
        names: what the positional arguments are called; may be shorter.
        args, kwargs: the arguments.
    """
    found: list[Tensor] = []
    for i, value in enumerate(args):
        if i >= len(names) or "mask" not in names[i]:
            _collect(value, found)
    for name, value in kwargs.items():
        if "mask" not in name:
            _collect(value, found)
    return found
