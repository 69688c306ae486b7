"""What the front door says: which backends run and why others do not, and what a call did."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

from labsupport.attention.implementations import by_name


class BackendUnavailableError(RuntimeError):
    """No backend asked for can run this call here; `reasons` maps each to all of its reasons."""

    def __init__(self, message: str, reasons: dict[str, tuple[str, ...]]) -> None:
        super().__init__(message)
        self.reasons = reasons


@dataclass(frozen=True)
class BackendStatus:
    """Whether one backend can run a call here, and every reason if it cannot."""

    name: str
    runs: bool
    reasons: tuple[str, ...]
    description: str
    io_aware: bool


class BackendTable(list[BackendStatus]):
    """The backends' states, in order of preference; prints as a table."""

    def __getitem__(self, key: Any) -> Any:
        """By position, or by name: `available_backends()["sdpa_flash"].runs`."""
        if isinstance(key, str):
            return next(status for status in self if status.name == by_name(key).name)
        return super().__getitem__(key)

    def __str__(self) -> str:
        width = max(len(status.name) for status in self)
        return "\n".join(
            f"{status.name:{width}}  "
            f"{'runs' if status.runs else 'no: ' + '; '.join(status.reasons)}"
            for status in self
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{status.name}</code></td><td>{'runs' if status.runs else 'no'}</td>"
            f"<td style='text-align:left'>"
            f"{escape(status.description if status.runs else '; '.join(status.reasons))}</td></tr>"
            for status in self
        )
        return f"<table><tr><th>backend</th><th>here</th><th></th></tr>{rows}</table>"


@dataclass(frozen=True)
class CallReport:
    """What the last call did: which backend and kernel ran, and why better ones did not."""

    backend: str
    kernel: str
    io_aware: bool
    requested: str
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.backend} ran ({self.kernel}); {self.requested!r} was asked for"]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.refused.items()]
        return "\n".join(lines)
