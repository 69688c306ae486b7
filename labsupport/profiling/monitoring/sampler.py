"""How much memory does a piece of work use over time: its peak, its average, its curve?

    with monitor(interval=0.05) as watch:
        train()
    print(watch)          # peak, average, and how good the sampling was
    watch.chart()

Memory is sampled, so a peak shorter than the gap between two samples can be missed. Beside it
stands the operating system's own peak, which misses nothing but knows single processes only.
`labsupport.profiling.measure_peak_memory` counts the tensors of one call exactly.
"""

from __future__ import annotations

import datetime
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from labsupport.profiling.monitoring import gpu as gpu_readings
from labsupport.profiling.monitoring.gpu import GpuReader, open_gpu
from labsupport.profiling.monitoring.processes import ProcessTree, memory_limit
from labsupport.profiling.monitoring.recording import Recording
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.plotting import Chart

DEFAULT_INTERVAL_S = 0.1
SHORTEST_INTERVAL_S = 0.001
SHARED = "sum of resident set sizes; counts shared pages more than once"
MISSED = "Samples can miss peaks that are shorter than the gap between two of them."
NOT_STARTED = "nothing is sampled yet: use `with monitor() as watch: ...`"


class Sampler:
    """Takes samples of a process tree, and of a GPU if there is one, into `recording`."""

    def __init__(self, tree: ProcessTree, gpu: GpuReader | None, interval: float) -> None:
        if not SHORTEST_INTERVAL_S <= interval < math.inf:
            raise ValueError(
                f"the interval is {interval} s; it must be {SHORTEST_INTERVAL_S} s or more"
            )
        self.tree, self.gpu = tree, gpu
        columns = ("processes", "rss_bytes", "pss_bytes", *(gpu_readings.COLUMNS if gpu else ()))
        self.recording = Recording(columns, interval)
        self.began = time.perf_counter()
        self.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.cpu_s = 0.0

    def sample(self) -> tuple[float, ...]:
        """Take one sample, and return it."""
        used = time.thread_time()
        now = time.perf_counter() - self.began
        processes, rss = self.tree.read()
        row = (now, float(processes), float(rss), self.tree.pss())
        if self.gpu is not None:
            row += self.gpu.read(self.tree.pids())
        self.recording.add(row)
        self.cpu_s += time.thread_time() - used
        return row

    def next_sample_at(self) -> float:
        """When the next sample is due, on the clock of time.perf_counter.

        The grid is fixed, so that delays do not add up; moments that were missed are left out.
        """
        interval = self.recording.interval
        steps = math.floor((time.perf_counter() - self.began) / interval) + 1
        return self.began + steps * interval


class monitor:  # lower case: it reads as a statement, `with monitor() as watch: ...`
    """Sample the memory of this process, its descendants and the GPU while a block runs.

    A thread takes the samples, one at the start and one at the end among them. Everything below can
    also be read while the block runs.

    Args:
        interval: seconds between samples, 0.001 or more.
        device: the GPU, in PyTorch's count; without an NVIDIA driver only the processes are seen.

    Attributes:
        peak_bytes, mean_bytes: resident memory of the process tree; the average is over time.
        start_bytes: the same at the start; extra_peak_bytes: the peak above it.
        gpu_peak_bytes, gpu_start_bytes, extra_gpu_peak_bytes: memory of the GPU that this process
            tree used; where the driver does not say that, memory used by everybody. None without
            a GPU.
        kernel_peak_bytes: the operating system's peak of this process alone, if the block set a new
            one; None if an older peak was higher, so that nothing is known about this one.
        largest_gap_s: the longest time between two samples.
        overhead: CPU time that sampling took, as a share of one core.

    Raises:
        ValueError: the interval is too short.

    Example:
        >>> with monitor(interval=0.05) as watch:
        ...     train()
        >>> watch.peak_bytes, watch.mean_bytes
    """

    def __init__(self, interval: float = DEFAULT_INTERVAL_S, device: int = 0) -> None:
        self._sampler = Sampler(ProcessTree(), None, interval)  # refuses a wrong interval at once
        self._device = device
        self._gpu: GpuReader | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended: float | None = None
        self._error: Exception | None = None
        self._kernel_peak = self._kernel_start = 0

    def __enter__(self) -> monitor:
        if self._thread is not None:
            raise RuntimeError("this monitor has been used: make a new one with monitor(...)")
        self._gpu = open_gpu(self._device)
        self._sampler = Sampler(ProcessTree(), self._gpu, self._sampler.recording.interval)
        self._kernel_peak = self._kernel_start = own_peak()
        self._sampler.sample()
        self._thread = threading.Thread(target=self._run, name="labsupport-monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._error is None:
                self._sampler.sample()
        finally:
            self._ended = time.perf_counter()
            self._kernel_peak = own_peak()
            if self._gpu is not None:
                self._gpu.close()
        if self._error is not None and error is None:
            raise RuntimeError(f"the sampling ended early: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._sampler.next_sample_at() - time.perf_counter()):
                self._sampler.sample()
        except Exception as error:  # said where the block ends: a thread's own error is lost
            self._error = error

    @property
    def recording(self) -> Recording:
        """The samples themselves."""
        return self._sampler.recording

    @property
    def peak_bytes(self) -> int:
        """See the class."""
        return int(self._peak("rss_bytes"))

    @property
    def mean_bytes(self) -> float:
        """See the class."""
        return self._started().mean("rss_bytes")

    @property
    def start_bytes(self) -> int:
        """See the class."""
        return int(self._started().start("rss_bytes"))

    @property
    def extra_peak_bytes(self) -> int:
        """See the class."""
        return self.peak_bytes - self.start_bytes

    @property
    def gpu_peak_bytes(self) -> int | None:
        """See the class."""
        column = gpu_column(self.recording)
        return int(self._peak(column)) if column else None

    @property
    def gpu_start_bytes(self) -> int | None:
        """See the class."""
        column = gpu_column(self.recording)
        return int(self.recording.start(column)) if column else None

    @property
    def extra_gpu_peak_bytes(self) -> int | None:
        """See the class."""
        if self.gpu_peak_bytes is None or self.gpu_start_bytes is None:
            return None
        return self.gpu_peak_bytes - self.gpu_start_bytes

    @property
    def kernel_peak_bytes(self) -> int | None:
        """See the class."""
        return self._kernel_peak if self._kernel_peak > self._kernel_start else None

    @property
    def largest_gap_s(self) -> float:
        """See the class."""
        return self.recording.largest_gap()

    @property
    def overhead(self) -> float:
        """See the class."""
        lasted = (self._ended or time.perf_counter()) - self._sampler.began
        return self._sampler.cpu_s / lasted

    def samples(self) -> pd.DataFrame:
        """All samples: time_s, processes, rss_bytes, pss_bytes, and on a GPU its columns.

        pss_bytes counts shared pages once; it is read now and then, else NaN.
        """
        return self._started().frame()

    def chart(self, title: str | None = None) -> Chart:
        """The curve; `title` is the finding, by default the peak and the average."""
        from labsupport.plotting.monitor import plot_monitor

        if title is None:
            title = (
                f"At most {format_bytes(self.peak_bytes)}, {format_bytes(self.mean_bytes)} on "
                f"average; {format_bytes(self.extra_peak_bytes)} above the start"
            )
        limit, label = memory_limit()
        return plot_monitor(
            self.samples(),
            title=title,
            limit=(label, limit),
            gpu_limit=gpu_limit(self._gpu),
            start_bytes=self.start_bytes,
            small_print=small_print(self._sampler),
        )

    def __str__(self) -> str:
        if self._thread is None:
            return NOT_STARTED
        lines = memory_lines(self._sampler, extra=True)
        if self.kernel_peak_bytes is not None:
            peak = format_bytes(self.kernel_peak_bytes)
            lines.insert(1, f"the system's own peak of this process: {peak} (misses nothing)")
        return "\n".join([*lines, sampling_line(self._sampler, self.overhead), MISSED])

    __repr__ = __str__

    def _started(self) -> Recording:
        if self._thread is None:
            raise RuntimeError(NOT_STARTED)
        return self.recording

    def _peak(self, column: str) -> float:
        return self._started().peak(column)[1]


def own_peak() -> int:
    """The system's peak of this program's resident set since it started, in bytes."""
    if sys.platform == "linux":
        # getrusage would also count what the process was a copy of before it started this program.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return maxrss_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sys.platform)


def maxrss_bytes(ru_maxrss: int, system: str) -> int:
    """`ru_maxrss` in bytes: macOS counts bytes, Linux and the BSDs KiB (getrusage(2))."""
    return ru_maxrss if system == "darwin" else ru_maxrss * 1024


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
