"""The card that opens each notebook: this device, and which attention backends run on it."""

from __future__ import annotations

import html
import platform
from dataclasses import dataclass

from labsupport.profiling.provenance import package_version


@dataclass(frozen=True)
class BackendLine:
    """One backend: whether it runs on this device, and if not, every reason."""

    name: str
    runs: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvironmentCard:
    """What the reader must know about the machine before the first measurement."""

    device: str
    memory: str
    dtypes: str
    versions: str
    backends: tuple[BackendLine, ...]
    note: str = ""

    def rows(self) -> list[tuple[str, str]]:
        """The facts as (label, text) pairs, without the backends."""
        rows = [
            ("Device", self.device),
            ("Memory", self.memory),
            ("dtypes", self.dtypes),
            ("Versions", self.versions),
        ]
        return [*rows, ("Note", self.note)] if self.note else rows

    def __str__(self) -> str:
        runs, refused = self._split()
        lines = [f"{label + ':':10}{text}" for label, text in self.rows()]
        lines.append(f"{'Runs:':10}{', '.join(line.name for line in runs) or 'no backend'}")
        lines += [f"{'Not here:' if i == 0 else '':10}{_reason(b)}" for i, b in enumerate(refused)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        runs, refused = self._split()
        rows = [(label, html.escape(text)) for label, text in self.rows()]
        names = ", ".join(f"<code>{html.escape(line.name)}</code>" for line in runs)
        rows.append(("Attention that runs here", names or "none"))
        if refused:
            rows.append(("Not here", "<br>".join(html.escape(_reason(line)) for line in refused)))
        cells = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{label}</th>'
            f'<td style="text-align:left">{text}</td></tr>'
            for label, text in rows
        )
        return f"<table>{cells}</table>"

    def _split(self) -> tuple[list[BackendLine], list[BackendLine]]:
        runs = [line for line in self.backends if line.runs]
        return runs, [line for line in self.backends if not line.runs]


def environment_card(device: str | None = None) -> EnvironmentCard:
    """The card for a device; by default the current GPU if there is one, else the CPU.

    Example:
        >>> environment_card()          # in a notebook: a table; print() gives plain text
    """
    import psutil
    import torch

    from labsupport.attention.backends import available_backends
    from labsupport.profiling.hardware import detect_device
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    info = detect_device(where)
    gib = 2**30
    if where.type == "cuda":
        free, total = torch.cuda.mem_get_info(where)
        name = f"{info.name}, compute capability {info.compute_capability}"
        memory = f"{free / gib:.1f} GiB free of {total / gib:.1f} GiB on the GPU"
        ampere = torch.cuda.get_device_capability(where) >= (8, 0)
        dtypes = "float32, float16, bfloat16" if ampere else "float32, float16 (no bfloat16)"
    else:
        ram = psutil.virtual_memory()
        name = f"CPU: {info.name}, {torch.get_num_threads()} threads"
        memory = f"{ram.available / gib:.1f} GiB available of {ram.total / gib:.1f} GiB"
        dtypes = "float64, float32, bfloat16, float16"
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.version.cuda:
        versions.append(f"CUDA {torch.version.cuda}")
    versions += [
        f"{package} {version}"
        for package in ("triton", "flash-attn", "flash-attn-4", "xformers")
        if (version := package_version(package))
    ]
    backends = tuple(
        BackendLine(status.name, status.runs, tuple(status.reasons))
        for status in available_backends(device=where)
    )
    note = info.note if where.type == "cuda" else ""
    return EnvironmentCard(name, memory, dtypes, ", ".join(versions), backends, note)


def _reason(line: BackendLine) -> str:
    return f"{line.name}: {'; '.join(line.reasons)}"
