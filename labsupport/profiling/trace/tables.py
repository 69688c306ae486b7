"""From the events of torch.profiler to tables.

On a GPU an operator launches kernels and returns; a row is a kernel, with the operator that
launched it. On a CPU the operators themselves do the work; a row is an operator, and its time is
its own, without that of operators that it calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.autograd import DeviceType

from labsupport.profiling.memory import cpu_memory_changes

if TYPE_CHECKING:
    import pandas as pd
    import torch

KERNEL_COLUMNS = (
    *("name", "kind", "operator", "calls", "device_ms", "share", "cpu_ms", "flops", "bytes"),
)
_NO_WORK = ("[memory]", "ProfilerStep")
# What CUPTI itself spends time on. Such an event may carry the number of an operator, and then
# PyTorch gives it the operator's kernels a second time. Names: overheadKindString in kineto's
# libkineto/src/cupti_strings.cpp.
_OVERHEAD = {
    "Unknown", "Driver Compiler", "Buffer Flush", "Instrumentation", "Resource",
    "Runtime Triggered Module Loading", "Lazy Function Loading", "Command Buffer Full",
    "Activity Buffer Request", "UVM Activity Init",
}  # fmt: skip


def kernel_table(
    events: Iterable[Any], *, gpu: bool, moved: Mapping[str, int] | None = None
) -> pd.DataFrame:
    """Work by kernel (on a GPU) or operator (on a CPU), the longest first.

    Args:
        events: what `torch.profiler.profile.events()` returns.
        gpu: whether a GPU did the work.
        moved: bytes by operator, as `moved_bytes` returns them.

    Returns:
        name; kind ("kernel" or "operator"); operator (that launched it, or itself); calls;
        device_ms (time of the device that did the work); share (of the sum of device_ms); cpu_ms
        (the operator's own time on the CPU; that of launching, for a kernel); flops (for the few
        operators that PyTorch counts: matrix products, convolutions; else NaN); bytes (see `moved`;
        NaN where unknown, and for all but the longest kernel of an operator).
    """
    import pandas as pd

    events = [event for event in events if _is_work(event)]
    rows = _kernels(events) if gpu else _operators(events)
    table = pd.DataFrame(rows, columns=[c for c in KERNEL_COLUMNS if c not in ("share", "bytes")])
    table = table.sort_values("device_ms", ascending=False, ignore_index=True)
    total = table["device_ms"].sum()
    table["share"] = table["device_ms"] / total if total else 0.0
    first = ~table["operator"].duplicated()
    table["bytes"] = table["operator"].map(dict(moved or {})).where(first).astype(float)
    table["flops"] = table["flops"].astype(float).where(table["flops"] > 0)
    return table[list(KERNEL_COLUMNS)]


def _is_work(event: Any) -> bool:
    if event.name.startswith(_NO_WORK) or event.name in _OVERHEAD:
        return False
    return not getattr(event, "is_user_annotation", False)


def _operators(events: list[Any]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        row = rows.setdefault(event.name, _row(event.name, "operator", event.name))
        own = event.self_cpu_time_total / 1e3
        row["calls"] += 1
        row["device_ms"] += own
        row["cpu_ms"] += own
        row["flops"] += event.flops or 0
    return list(rows.values())


def _kernels(events: list[Any]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    known: dict[str, int] = {}  # launches by kernel for which there is an operator
    for event in events:
        if event.device_type != DeviceType.CPU or not event.kernels:
            continue
        longest = max(event.kernels, key=lambda kernel: kernel.duration)
        for kernel in event.kernels:
            key = (kernel.name, event.name)
            row = rows.setdefault(key, _row(kernel.name, "kernel", event.name))
            row["calls"] += 1
            row["device_ms"] += kernel.duration / 1e3
            row["cpu_ms"] += event.self_cpu_time_total / 1e3 / len(event.kernels)
            row["flops"] += (event.flops or 0) if kernel is longest else 0
            known[kernel.name] = known.get(kernel.name, 0) + 1
    # Kernels that no operator launched: a graph's replay, a kernel called directly.
    seen: dict[str, list[float]] = {}
    for event in events:
        if event.device_type != DeviceType.CPU:
            seen.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    for name, times in seen.items():
        if name not in known:
            row = rows.setdefault((name, ""), _row(name, "kernel", ""))
            row["calls"] += len(times)
            row["device_ms"] += sum(times)
    return list(rows.values())


def _row(name: str, kind: str, operator: str) -> dict[str, Any]:
    return {
        "name": name,
        "kind": kind,
        "operator": operator,
        "calls": 0,
        "device_ms": 0.0,
        "cpu_ms": 0.0,
        "flops": 0,
    }


def memory_table(
    profiler: torch.profiler.profile, *, gpu: bool, span: tuple[int, int] | None = None
) -> pd.DataFrame:
    """What was allocated and released, in order of time.

    Args:
        profiler: one that ran with profile_memory=True.
        gpu: whether to look at the GPU's allocator, or at the CPU's.
        span: the time that counts, in the profiler's nanoseconds; by default all of it.

    Returns:
        time_ms (since the start, on the CPU's clock: a GPU's allocator hands memory out when a
        kernel is launched, before it runs); change_bytes; extra_bytes (all that exists beyond the
        start). The first and the last row mark start and end.
    """
    import pandas as pd

    changes = _gpu_memory_changes(profiler) if gpu else cpu_memory_changes(profiler)
    if span is not None:
        changes = [change for change in changes if span[0] <= change[0] <= span[1]]
    begin = span[0] if span else changes[0][0] if changes else 0
    end = span[1] if span else changes[-1][0] if changes else 0
    table = pd.DataFrame([(begin, 0), *changes, (end, 0)], columns=["time_ms", "change_bytes"])
    table["time_ms"] = (table["time_ms"] - begin) / 1e6
    table["extra_bytes"] = table["change_bytes"].cumsum()
    return table


def _gpu_memory_changes(profiler: torch.profiler.profile) -> list[tuple[int, int]]:
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = (
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CUDA
    )
    return sorted(changes, key=lambda change: change[0])


def span_of(profiler: torch.profiler.profile, name: str) -> tuple[int, int] | None:
    """Start and end, in the profiler's nanoseconds, of what record_function(name) enclosed."""
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in results.events():
        if event.name() == name and event.device_type() == DeviceType.CPU:
            return event.start_ns(), event.end_ns()
    return None
