"""Which attention really ran, layer by layer: counted where it ran, and said once in the log.

    INFO labsupport.models: Using FlashAttention for layer 3 (sdpa_flash)

The counts belong to the attention modules of a model and vanish with them. So two models do not
mix, and a copy of a model starts at zero.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from labsupport.attention.implementations import BACKENDS

log = logging.getLogger("labsupport.models")

What = tuple[str, str, bool | None]  # backend, kernel, io_aware
_FUSED = {entry.name for entry in BACKENDS if entry.io_aware}


@dataclass
class LayerRecord:
    """What ran in one attention module: calls of each (backend, kernel, io_aware)."""

    index: int | None
    calls: dict[What, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Used:
    """One line of `attention_used`.

    Attributes:
        layer: the layer's number.
        module: the attention module's name in the model.
        backend, kernel: as in `labsupport.attention.last_call()`.
        io_aware: no matrix of N_q x N_k was stored; None for a function of the user's own.
        calls: how often; a forward that checkpointing repeats counts again.
    """

    layer: int
    module: str
    backend: str
    kernel: str
    io_aware: bool | None
    calls: int


class UsedTable(list[Used]):
    """The lines of `attention_used`; prints as a table in which equal layers share a line."""

    def __str__(self) -> str:
        if not self:
            return "labsupport's attention has not run in this model"
        layers: dict[tuple[str, bool | None, int, str], list[int]] = {}
        for use in self:
            same = (use.backend, use.io_aware, use.calls, use.kernel)
            layers.setdefault(same, []).append(use.layer)
        stored = {True: "no N x N tensor", False: "N x N tensor", None: "not known"}
        rows = [("layers", "backend", "stored", "calls each", "kernel")]
        rows += [
            (ranges(which), backend, stored[io_aware], str(calls), kernel)
            for (backend, io_aware, calls, kernel), which in layers.items()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            f"{row[0]:>{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  "
            f"{row[3]:>{widths[3]}}  {row[4]}"
            for row in rows
        )

    __repr__ = __str__


def attention_used(model: nn.Module) -> UsedTable:
    """What ran in a model's attention layers since `set_attention` or `reset_attention_used`.

    Only what labsupport's functions did: after `set_attn_implementation("sdpa")` nothing is added.

    >>> set_attention(model, "flash")
    >>> model.generate(ids, max_new_tokens=8)
    >>> print(attention_used(model))
    """
    table = UsedTable()
    for order, (name, record) in enumerate(_recorded(model)):
        layer = order if record.index is None else record.index
        table += [Used(layer, name, *what, count) for what, count in record.calls.copy().items()]
    return table


def reset_attention_used(model: nn.Module) -> None:
    """Forget what ran in this model; the log may say it again."""
    with _lock:
        for module in model.modules():
            _records.pop(module, None)


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    ordered = sorted(set(numbers))
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def note(module: nn.Module, backend: str, kernel: str, io_aware: bool | None) -> None:
    """Count one call of an attention module."""
    what = backend, kernel, io_aware
    with _lock:
        record = _records.get(module)
        if record is None:
            record = _records[module] = LayerRecord(getattr(module, "layer_idx", None))
        calls = record.calls
        if what in calls:
            calls[what] += 1
            return
        new = all(what[::2] != other[::2] for other in calls)  # another kernel is not news
        calls[what] = 1
    if new:
        layer = type(module).__name__ if record.index is None else f"layer {record.index}"
        log.info("Using %s for %s (%s)", kind_of_attention(backend, io_aware), layer, backend)


@contextlib.contextmanager
def each_line_once() -> Iterator[None]:
    """Inside, the log says each line once, also where the counts begin again."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        line = record.getMessage()
        new = line not in said
        said.add(line)
        return new

    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


def kind_of_attention(backend: str, io_aware: bool | None) -> str:
    """What ran, in words: "FlashAttention", "standard attention", and what is neither."""
    if io_aware is None:
        return "your function"
    if io_aware:
        return "FlashAttention"
    # A fused kernel that was given a stored mask has lost what FlashAttention is for.
    return "a fused kernel with a stored mask" if backend in _FUSED else "standard attention"


def _recorded(model: nn.Module) -> Iterator[tuple[str, LayerRecord]]:
    for name, module in model.named_modules():
        record = _records.get(module)
        if record is not None:
            yield name, record


_records: WeakKeyDictionary[nn.Module, LayerRecord] = WeakKeyDictionary()
_lock = threading.Lock()
