"""What was found, in sentences: memory, processes, the GPU, and how good the sampling was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from labsupport.profiling.monitoring.gpu import GpuReader
from labsupport.profiling.monitoring.recording import Recording
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    from labsupport.profiling.monitoring.sampler import Sampler

SHARED = "sum of resident set sizes; counts shared pages more than once"
MISSED = "Samples can miss peaks that are shorter than the gap between two of them."


def gpu_column(recording: Recording) -> str | None:
    """The column that says how much GPU memory the work used, the best that was read."""
    return next((c for c in ("gpu_tree_bytes", "gpu_used_bytes") if recording.points(c)), None)


def gpu_limit(gpu: GpuReader | None) -> tuple[str, int] | None:
    """What a GPU's memory curve is judged by."""
    return (f"memory of this GPU ({gpu.name})", gpu.total_bytes) if gpu else None


def memory_lines(sampler: Sampler, *, extra: bool = False) -> list[str]:
    """What was found, as sentences: memory, processes, the GPU."""
    recording = sampler.recording
    lines = [_memory_line("memory", recording, "rss_bytes", SHARED, extra)]
    if readings := recording.points("pss_bytes"):
        text = f"PSS: shared pages counted once; {len(readings)} of the samples"
        lines.append(_memory_line("memory", recording, "pss_bytes", text, False))
    most = max((int(n) for _, n in recording.points("processes")), default=0)
    lines.append(f"processes: {most} at once at most, {sampler.tree.seen} seen in all")
    return lines + (_gpu_lines(sampler, extra) if sampler.gpu else [])


def _memory_line(what: str, recording: Recording, column: str, caption: str, extra: bool) -> str:
    when, peak = recording.peak(column)
    above = ""
    if extra:
        above = f" ({format_bytes(peak - recording.start(column))} above the start)"
    return (
        f"{what}: peak {format_bytes(peak)}{above} at {when:.1f} s, "
        f"{format_bytes(recording.mean(column))} on average ({caption})"
    )


def _gpu_lines(sampler: Sampler, extra: bool) -> list[str]:
    recording, gpu = sampler.recording, sampler.gpu
    assert gpu is not None
    words = {"gpu_tree_bytes": "of these processes", "gpu_used_bytes": "used by everybody"}
    lines = [
        _memory_line(f"{gpu.name}, memory {text}", recording, column, "NVML", extra)
        for column, text in words.items()
        if recording.points(column)
    ]
    if gpu.note:
        lines.append(gpu.note)
    figures = [
        f"{name} {recording.mean(column):.0f} {unit}"
        for column, name, unit in (
            ("gpu_util_percent", "some kernel ran in", "% of the time"),
            ("gpu_sm_mhz", "SM clock", "MHz"),
            ("gpu_memory_mhz", "memory clock", "MHz"),
            ("gpu_power_w", "power", "W"),
        )
        if recording.points(column)
    ]
    if figures:
        lines.append(f"{gpu.name}, on average: {', '.join(figures)}")
    if slowed := recording.throttled():
        shares = ", ".join(f"{name} in {share:.0%}" for name, share in slowed.items())
        lines.append(f"{gpu.name}, clocks held down by: {shares} of the samples")
    return lines


def sampling_line(sampler: Sampler, overhead: float) -> str:
    """How good the sampling was: how many, how late, how costly."""
    recording = sampler.recording
    times = recording.column("time_s")
    return (
        f"samples: {len(times)}, one every {recording.interval:g} s; largest gap "
        f"{recording.largest_gap():.3f} s; sampling took {overhead:.1%} of a core"
    )


def small_print(sampler: Sampler) -> str:
    """Where the numbers of a chart come from."""
    recording = sampler.recording
    parts = [
        sampler.gpu.name if sampler.gpu else f"{os.cpu_count()} CPU cores, no NVIDIA GPU",
        sampler.date[:10],
        f"{len(recording.column('time_s'))} samples, one every {recording.interval:g} s, "
        f"largest gap {recording.largest_gap():.2f} s",
    ]
    return f"{', '.join(parts)}. Memory is the {SHARED}. {MISSED}"
