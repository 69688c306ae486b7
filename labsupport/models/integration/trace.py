"""The attention that really ran, layer by layer: counted where it ran, and logged once.

    INFO labsupport.models: Using FlashAttention for layer 3 (sdpa_flash)

The counts belong to a model's attention modules and vanish with them: two models do not mix, and a
copy of a model starts at zero.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from labsupport.attention.implementations import BACKENDS

log = logging.getLogger("labsupport.models")

IO_AWARE = {entry.name: entry.io_aware for entry in BACKENDS}
# Of each attention module: calls of each (backend, kernel, io_aware).
_calls: WeakKeyDictionary[nn.Module, Counter[tuple[str, str, bool | None]]] = WeakKeyDictionary()


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
    """The lines of `attention_used`; printed, equal layers share one."""

    def __str__(self) -> str:
        layers: dict[tuple[str, int], list[int]] = {}
        for use in self:
            kind = kind_of_attention(use.backend, use.io_aware)
            name = f"{kind} ({use.backend}: {use.kernel})"
            layers.setdefault((name, use.calls), []).append(use.layer)
        lines = [
            f"{name} in layers {ranges(numbers)}, calls a layer: {calls}"
            for (name, calls), numbers in layers.items()
        ]
        return "\n".join(lines) or "labsupport's attention has not run in this model"

    __repr__ = __str__


def attention_used(model: nn.Module) -> UsedTable:
    """Return what ran in a model's layers since `set_attention` or `reset_attention_used`.

    Only labsupport's functions count: after `set_attn_implementation("sdpa")` nothing is added.

    >>> model = load_model("stories15m", device="cpu").model
    >>> set_attention(model, "flash")
    >>> logits = model(torch.arange(8)[None]).logits
    >>> print(attention_used(model))
    FlashAttention (sdpa_flash: ...) in layers 0-5, calls a layer: 1
    """
    recorded = [(name, module) for name, module in model.named_modules() if module in _calls]
    table = UsedTable()
    for order, (name, module) in enumerate(recorded):
        layer = getattr(module, "layer_idx", None)
        layer = order if layer is None else layer
        table += [Used(layer, name, *what, calls) for what, calls in _calls[module].items()]
    return table


def reset_attention_used(model: nn.Module) -> None:
    """Forget what ran in this model; the log may name it again."""
    for module in model.modules():
        _calls.pop(module, None)


def note(module: nn.Module, backend: str, kernel: str, io_aware: bool | None) -> None:
    """Count one call of an attention module, and log the first of each kind."""
    calls = _calls.setdefault(module, Counter())
    new = all((backend, io_aware) != (seen, aware) for seen, _, aware in calls)
    calls[backend, kernel, io_aware] += 1
    if new:
        index = getattr(module, "layer_idx", None)
        layer = type(module).__name__ if index is None else f"layer {index}"
        log.info("Using %s for %s (%s)", kind_of_attention(backend, io_aware), layer, backend)


def kind_of_attention(backend: str, io_aware: bool | None) -> str:
    """Name what ran: "FlashAttention", "standard attention", or what is neither."""
    if io_aware is None:
        return "your function"
    if io_aware:
        return "FlashAttention"
    # A fused kernel that was given a stored mask has lost what FlashAttention is for.
    fused = IO_AWARE.get(backend, True)
    return "a fused kernel with a stored mask" if fused else "standard attention"


def ranges(numbers: Iterable[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    ordered = sorted(set(numbers))
    starts = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Log nothing inside: for calls that repeat logged ones."""
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False
