"""The card that opens each notebook: this device, and which attention backends run on it."""

from __future__ import annotations

import html
import platform
from dataclasses import dataclass

from labsupport.profiling.provenance import package_version
from labsupport.profiling.units import format_bytes


@dataclass(frozen=True)
class EnvironmentCard:
    """(label, text) of the machine; the backends that run here; why each other one does not."""

    rows: list[tuple[str, str]]
    runs: list[str]
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{label + ':':10}{text}" for label, text in self.rows]
        lines.append(f"{'Runs:':10}{', '.join(self.runs) or 'no backend'}")
        for i, (name, reason) in enumerate(self.refused.items()):
            lines.append(f"{'' if i else 'Not here:':10}{name}: {reason}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(label, html.escape(text)) for label, text in self.rows]
        names = ", ".join(f"<code>{html.escape(name)}</code>" for name in self.runs)
        rows.append(("Attention that runs here", names or "none"))
        if self.refused:
            lines = [html.escape(f"{name}: {reason}") for name, reason in self.refused.items()]
            rows.append(("Not here", "<br>".join(lines)))
        cells = "".join(
            f'<tr><th style="text-align:left;vertical-align:top">{label}</th>'
            f'<td style="text-align:left">{text}</td></tr>'
            for label, text in rows
        )
        return f"<table>{cells}</table>"


def environment_card(device: str | None = None) -> EnvironmentCard:
    """The card for a device; by default the current GPU if there is one, else the CPU.

    >>> card = environment_card("cpu")  # at the end of a cell a table; print() gives plain text
    """
    import psutil
    import torch

    from labsupport.attention.backends import available_backends
    from labsupport.profiling.hardware import detect_device
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    info = detect_device(where)
    if where.type == "cuda":
        free, total = torch.cuda.mem_get_info(where)
        name = f"{info.name}, compute capability {info.compute_capability}"
        memory = f"{format_bytes(free)} free of {format_bytes(total)} on the GPU"
        ampere = torch.cuda.get_device_capability(where) >= (8, 0)
        dtypes = f"float32, float16{', bfloat16' if ampere else ' (no bfloat16)'}"
    else:
        ram = psutil.virtual_memory()
        threads = torch.get_num_threads()
        name = f"CPU: {info.name}, {threads} thread{'s' * (threads > 1)}"
        memory = f"{format_bytes(ram.available)} available of {format_bytes(ram.total)}"
        dtypes = "float64, float32, bfloat16, float16"
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    versions += [
        f"{package} {version}"
        for package in ("triton", "flash-attn", "flash-attn-4", "xformers")
        if (version := package_version(package))
    ]
    rows = [("Device", name), ("Memory", memory), ("dtypes", dtypes)]
    rows.append(("Versions", ", ".join(versions)))
    if where.type == "cuda" and info.note:
        rows.append(("Note", info.note))
    found = list(available_backends(device=where))
    return EnvironmentCard(
        rows,
        [state.name for state in found if state.runs],
        {state.name: "; ".join(state.reasons) for state in found if not state.runs},
    )
