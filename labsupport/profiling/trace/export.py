"""Timelines as files that are whole or not there, and what they say of a GPU's kernels."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import torch

# What torch.profiler writes beside each kernel of an NVIDIA GPU: its name there, and ours.
LAUNCH = {
    "grid": "grid",
    "block": "block",
    "registers per thread": "registers",
    "shared memory": "shared_bytes",
    "blocks per SM": "blocks_per_sm",
    "warps per SM": "warps_per_sm",
    "est. achieved occupancy %": "occupancy_percent",
}


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` if all goes well, else it is removed.

    So a reader finds the file as it was before, or the new one, never a part of it. Raises what
    writing raises: OSError on a full disk, for one.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, or leave what was there."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def timeline(profiler: torch.profiler.profile, folder: Path) -> bytes:
    """The profiler's timeline as Chrome's JSON, compressed; it can be asked for once only.

    Args:
        folder: a place for the plain file, which may be large, while it is compressed.

    Raises:
        OSError: it could not be written whole.
    """
    # In a folder of its own, for the library that writes it leaves parts when it fails.
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=folder) as own:
        plain = Path(own) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        # It also says nothing when the disk is full: so the end is checked.
        if not _is_complete(plain):
            raise OSError(f"the trace could not be written whole to {folder}: is the disk full?")
        packed = io.BytesIO()
        with (
            plain.open("rb") as source,
            gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6) as target,
        ):
            shutil.copyfileobj(source, target, 2**20)
    return packed.getvalue()


def save_timeline(packed: bytes, path: Path) -> None:
    """Write a compressed timeline to `path`, whole or not at all; plain if its name says so."""
    with whole_file(path) as part, part.open("wb") as file:
        if path.name.endswith(".gz"):
            file.write(packed)
        else:
            with gzip.GzipFile(fileobj=io.BytesIO(packed)) as source:
                shutil.copyfileobj(source, file, 2**20)


def _is_complete(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 256))
        return file.read().rstrip().endswith(b"}")


def read_launches(path: Path) -> pd.DataFrame:
    """What each GPU kernel of a saved trace was launched with, one row for each kernel.

    Returns:
        name, calls, ms (all calls together), grid, block, registers (of a thread), shared_bytes (of
        a block), blocks_per_sm, warps_per_sm (launched blocks and warps over multiprocessors),
        occupancy_percent (estimated by the profiler: resident warps over the most possible; None
        where it says 0: its estimate knows 48 KiB of shared memory a block, and kernels may ask
        for more).
        Figures are those of the kernel's longest launch. Empty for a trace of a CPU.
    """
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8") as file:
        return launches(json.load(file)["traceEvents"])


def launches(events: list[dict[str, Any]]) -> pd.DataFrame:
    """The table of `read_launches` from a trace's events."""
    import pandas as pd

    rows: dict[str, dict[str, Any]] = {}
    longest: dict[str, float] = {}
    for event in events:
        if event.get("cat") != "kernel":
            continue
        name, took = event["name"], float(event.get("dur", 0))
        row = rows.setdefault(name, {"name": name, "calls": 0, "ms": 0.0})
        row["calls"] += 1
        row["ms"] += took / 1e3
        if took >= longest.get(name, 0):
            longest[name] = took
            row |= {LAUNCH[key]: value for key, value in event["args"].items() if key in LAUNCH}
            row["occupancy_percent"] = row.get("occupancy_percent") or None
    table = pd.DataFrame(list(rows.values()), columns=["name", "calls", "ms", *LAUNCH.values()])
    return table.sort_values("ms", ascending=False, ignore_index=True)
