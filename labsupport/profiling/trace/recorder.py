"""One call under torch.profiler: which operators and kernels ran, how long, with what memory.

The profiler itself takes time, some microseconds an operator: the table says where the time of a
call goes; how long the call takes is said by `labsupport.profiling.measure_time`.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The profiler of PyTorch 2.13 writes lines to stderr at every start unless told so before the
# first one.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from labsupport.profiling.memory import _without_allocator_warning
from labsupport.profiling.timing import format_ms, resolve_device
from labsupport.profiling.trace.export import launches, save_timeline, timeline
from labsupport.profiling.trace.moved import moved_bytes
from labsupport.profiling.trace.tables import kernel_table, memory_table, span_of
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

SPAN = "the traced call"


class Trace:
    """What one call did; `trace` makes it.

    Attributes:
        device: where it ran.
        wall_ms: from the start of the call until the device had finished, under the profiler.
    """

    def __init__(
        self,
        profiler: torch.profiler.profile,
        device: torch.device,
        moved: Mapping[str, int] | None = None,
    ) -> None:
        self.device = device
        self._profiler = profiler
        self._moved = moved
        self._packed: bytes | None = None
        self._span = span_of(profiler, SPAN)
        self.wall_ms = (self._span[1] - self._span[0]) / 1e6 if self._span else float("nan")

    def kernels(self) -> pd.DataFrame:
        """Kernels on a GPU, operators on a CPU, the longest first.

        Columns: name, kind, operator, calls, device_ms, share, cpu_ms, flops, bytes; see
        `labsupport.profiling.trace.tables.kernel_table`.
        """
        table = kernel_table(self._profiler.events() or [], gpu=self._on_gpu, moved=self._moved)
        return table[table["name"] != SPAN].reset_index(drop=True)

    def memory(self) -> pd.DataFrame:
        """The device's memory during the call, one row for each allocation and release.

        Columns: time_ms, change_bytes, extra_bytes (what exists beyond the start); see
        `labsupport.profiling.trace.tables.memory_table`.
        """
        return memory_table(self._profiler, gpu=self._on_gpu, span=self._span)

    @property
    def peak_bytes(self) -> int:
        """The most that existed beyond the start."""
        return int(self.memory()["extra_bytes"].max())

    def launches(self) -> pd.DataFrame:
        """How a GPU's kernels were launched: grid, block, registers, occupancy; empty on a CPU.

        See `labsupport.profiling.trace.export.read_launches`.
        """
        if not self._on_gpu:
            return launches([])
        with tempfile.TemporaryDirectory() as folder:
            packed = self._timeline(Path(folder))
        return launches(json.loads(gzip.decompress(packed))["traceEvents"])

    def save(self, path: Path | str) -> Path:
        """Write the timeline for https://ui.perfetto.dev or chrome://tracing; returns the path.

        Raises:
            ValueError: the name ends neither in .json nor in .json.gz.
            OSError: it could not be written whole; then there is no file.
        """
        path = Path(path)
        if not path.name.endswith((".json", ".json.gz")):
            raise ValueError(f"{path}: a trace's name ends in .json or .json.gz")
        save_timeline(self._timeline(path.parent), path)
        return path

    def _timeline(self, folder: Path) -> bytes:
        if self._packed is None:  # the profiler gives it away once
            self._packed = timeline(self._profiler, folder)
        return self._packed

    def __str__(self) -> str:
        lines = [
            f"{format_ms(self.wall_ms)} ms under the profiler on {self.device}, "
            f"{format_bytes(self.peak_bytes)} extra at the peak"
        ]
        for row in self.kernels().head(8).to_dict("records"):
            took = format_ms(row["device_ms"])
            lines.append(f"{row['share']:6.1%} {took:>8} ms  {row['name']}")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"


def trace(
    fn: Callable[[], Any],
    *,
    device: torch.device | str | None = None,
    warmup: int = 1,
    count_bytes: bool = True,
) -> Trace:
    """Call `fn()` once under torch.profiler.

    Args:
        fn: the call; takes no argument. Its result is kept until the trace ends.
        device: where it works; by default the current GPU if there is one, else the CPU.
        warmup: calls before the traced one, for what happens only once (compiling, workspaces).
        count_bytes: call it once more, to count the bytes that its operators move. Leave it out
            for compiled functions (`torch.compile`): that counts them as they were written.

    Raises:
        RuntimeError: a profiler is active already. Whatever `fn` raises passes through.

    Example:
        >>> seen = trace(lambda: torch.softmax(scores, dim=-1))
        >>> seen.kernels().head()
        >>> seen.save("softmax.json.gz")
    """
    where = resolve_device(device)
    if torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is active here already: trace outside of it")
    for _ in range(warmup):
        fn()
    moved = moved_bytes(fn) if count_bytes else None
    _finish(where)
    with (
        _without_allocator_warning(),
        new_profiler(where.type == "cuda") as profiler,
        torch.profiler.record_function(SPAN),
    ):
        result = fn()
        _finish(where)
    del result
    return Trace(profiler, where, moved)


def new_profiler(gpu: bool) -> torch.profiler.profile:
    """A profiler of times, shapes, FLOPs and memory."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=kinds,
        record_shapes=True,
        with_flops=True,
        profile_memory=True,
        acc_events=True,
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
