"""One call under torch.profiler: which operators and kernels ran, how long, with what memory.

    from labsupport.profiling.trace import trace

    seen = trace(lambda: attention(q, k, v))
    seen.kernels()               # a table: name, calls, time, FLOPs, bytes
    seen.peak_bytes              # what it allocated, at the fullest moment
    seen.save("call.json.gz")    # the timeline, for https://ui.perfetto.dev
    seen.profiler                # PyTorch's own tables: .key_averages().table()

The profiler itself takes some microseconds an operator: the table says where the time of a call
goes; `labsupport.profiling.measure_time` says how long the call takes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from labsupport.profiling.memory import (
    cpu_memory_changes,
    trace_tensors,
    without_allocator_warning,
)
from labsupport.profiling.timing import now, resolve_device

if TYPE_CHECKING:
    import pandas as pd

SPAN = "the traced call"
# Operators whose work the profiler shows under the name of another, which they call.
_DONE_BY = {"clone": "copy_", "_to_copy": "copy_"}


class Trace:
    """Operators, kernels and memory of one call; `trace` makes it.

    Attributes:
        device: where it ran.
        profiler: the `torch.profiler.profile` that saw it.
        wall_ms: from the start of the call until the device had finished, under the profiler.
    """

    def __init__(self, profiler: profile, device: torch.device, moved: Mapping[str, int]) -> None:
        self.device, self.profiler, self._moved = device, profiler, moved
        results = profiler.profiler.kineto_results  # type: ignore[union-attr]
        spans = [e for e in results.events() if e.name() == SPAN]
        span = next(e for e in spans if e.device_type() == DeviceType.CPU)
        self._span = span.start_ns(), span.end_ns()
        self.wall_ms = (self._span[1] - self._span[0]) / 1e6

    def kernels(self) -> pd.DataFrame:
        """Work by kernel (on a GPU) or operator (on a CPU), the longest first.

        Returns:
            name; operator (that launched the kernel, or itself); calls; device_ms (the time of the
            device that did the work, without that of operators called from within); share (of the
            sum of device_ms); flops (of the few operators that PyTorch counts: matrix products,
            convolutions; else NaN); bytes (that the operator read and wrote, see
            `trace_tensors`; NaN where unknown, and for all but the longest kernel of an operator).
        """
        import pandas as pd

        rows = self._kernels() if self.device.type == "cuda" else self._operators()
        table = pd.DataFrame(rows, columns=["name", "operator", "device_ms", "flops"])
        sums = {
            "calls": ("device_ms", "size"),
            "device_ms": ("device_ms", "sum"),
            "flops": ("flops", "sum"),
        }
        table = table.groupby(["name", "operator"], as_index=False, sort=False).agg(**sums)
        table = table.sort_values("device_ms", ascending=False, ignore_index=True)
        table["share"] = table["device_ms"] / table["device_ms"].sum()
        table["flops"] = table["flops"].astype(float).where(table["flops"] > 0)
        first = ~table["operator"].duplicated()
        bare = table["operator"].str.split("::").str[-1]
        table["bytes"] = bare.map(dict(self._moved)).where(first).astype(float)
        return table[["name", "operator", "calls", "device_ms", "share", "flops", "bytes"]]

    def _operators(self) -> list[tuple[str, str, float, float]]:
        return [
            (event.name, event.name, event.self_cpu_time_total / 1e3, event.flops or 0)
            for event in self.profiler.events() or []
            if not event.is_user_annotation and event.name != "[memory]"
        ]

    def _kernels(self) -> list[tuple[str, str, float, float]]:
        rows, known = [], set()
        events = list(self.profiler.events() or [])
        for event in events:
            # What the tracer itself does may carry the number of an operator, and its kernels.
            if event.device_type != DeviceType.CPU or "::" not in event.name:
                continue
            flops = event.flops or 0  # charged to the operator's longest kernel
            for kernel in sorted(event.kernels, key=lambda kernel: -kernel.duration):
                rows.append((kernel.name, event.name, kernel.duration / 1e3, flops))
                known.add(kernel.name)
                flops = 0
        # Kernels that no operator launched: a graph's replay, a kernel called directly.
        for event in events:
            on_gpu = event.device_type != DeviceType.CPU and not event.is_user_annotation
            if on_gpu and event.name not in known:
                rows.append((event.name, "", event.time_range.elapsed_us() / 1e3, 0))
        return rows

    @property
    def peak_bytes(self) -> int:
        """The most that existed at a moment of the call beyond what existed at its start."""
        if self.device.type == "cuda":
            results = self.profiler.profiler.kineto_results  # type: ignore[union-attr]
            changes = sorted(
                (event.start_ns(), event.nbytes())
                for event in results.events()
                if event.name() == "[memory]" and event.device_type() == DeviceType.CUDA
            )
        else:
            changes = cpu_memory_changes(self.profiler)
        begin, end = self._span
        during = [change for when, change in changes if begin <= when <= end]
        return max(itertools.accumulate(during, initial=0))

    def save(self, path: Path | str) -> Path:
        """Write the timeline (.json or .json.gz) for https://ui.perfetto.dev, which works once."""
        self.profiler.export_chrome_trace(str(path))
        return Path(path)


def trace(
    fn: Callable[[], Any],
    *,
    device: torch.device | str | None = None,
    count_bytes: bool = True,
) -> Trace:
    """Call `fn()` to warm up, and once under torch.profiler.

    Args:
        fn: the call; takes no argument. Its result is kept until the trace ends.
        device: where it works; by default the current GPU if there is one, else the CPU.
        count_bytes: call it once more, to count the bytes that its operators move. Leave it out
            for compiled functions (`torch.compile`): that counts them as they were written.

    Raises:
        RuntimeError: a profiler is active already. Errors of `fn` pass through.

    Example:
        >>> seen = trace(lambda: torch.softmax(scores, dim=-1))
        >>> seen.kernels().head()
    """
    where = resolve_device(device)
    if torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is active here already: trace outside of it")
    fn()  # for what happens only once: compiling, workspaces
    moved: dict[str, int] = defaultdict(int)
    for name, (_, read, written) in trace_tensors(fn).operators.items() if count_bytes else ():
        moved[_DONE_BY.get(name, name)] += read + written
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (where.type == "cuda")
    options = {"record_shapes": True, "with_flops": True, "profile_memory": True}
    now(where)
    with (
        without_allocator_warning(),
        profile(activities=kinds, acc_events=True, **options) as seen,
        record_function(SPAN),
    ):
        result = fn()
        now(where)
    del result
    return Trace(seen, where, moved)
