"""Memory of a block of code, or of any program, over time; and of the GPU beside it.

    with monitor(interval=0.05) as watch:
        train()
    print(watch)          # peak and average

`labsupport monitor -- COMMAND` does the same for a program. Memory is sampled: shorter peaks can be
missed (`measure_peak_memory` counts the tensors of one call exactly). Nothing here imports PyTorch.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import math
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from labsupport.profiling.gpu import GpuState, read_gpus
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.plotting import Chart

DEFAULT_INTERVAL_S = 0.1
SHORTEST_INTERVAL_S = 0.001
COLUMNS = ("time_s", "processes", "rss_bytes")
MEMORY = {
    "rss_bytes": "memory",
    "gpu_tree_bytes": "GPU memory of these processes",
    "gpu_used_bytes": "GPU memory of all processes",
}
AVERAGES = {
    "gpu_util_percent": "GPU: some kernel ran in {:.0f}% of the time",
    "gpu_sm_mhz": "GPU: SM clock {:.0f} MHz on average",
    "gpu_power_w": "GPU: power {:.0f} W on average",
}
GPU_COLUMNS = (*list(MEMORY)[1:], *AVERAGES, "gpu_throttle")


class monitor:  # lower case: it reads as a statement, `with monitor() as watch: ...`
    """Sample the memory of a process, its descendants and a GPU while a block runs.

    A thread takes the samples, the first at the start and the last at the end.

    Args:
        interval: seconds between samples, 0.001 or more.
        device: the GPU, in PyTorch's count; without an NVIDIA driver only the processes are seen.
        pid: the process; by default this one.
        out: a CSV file, to which each sample is written when it is taken.

    Raises:
        ValueError: the interval is too short.

    >>> with monitor(interval=0.01) as watch:
    ...     ones = torch.ones(1_000_000)
    >>> watch.peak_bytes >= watch.mean_bytes
    True
    """

    def __init__(
        self,
        interval: float = DEFAULT_INTERVAL_S,
        device: int = 0,
        *,
        pid: int | None = None,
        out: Path | None = None,
    ) -> None:
        self.interval, self._device = checked_interval(interval), device
        root = psutil.Process(pid)
        self._members: set[psutil.Process] = {root}  # those that outlive a parent too
        self._looked_at: set[int] = {root.pid}
        gpus = read_gpus()
        self.gpu: GpuState | None = gpus[device] if device < len(gpus) else None
        self.columns = (*COLUMNS, *(GPU_COLUMNS if self.gpu else ()))
        self._rows: list[tuple[Any, ...]] = []
        self._file: TextIO | None = out.open("w", newline="", encoding="utf-8") if out else None
        if self._file is not None:
            csv.writer(self._file).writerow(self.columns)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began = time.perf_counter()

    def __enter__(self) -> monitor:
        self._began = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            # The grid is fixed, so that delays do not add up.
            passed = time.perf_counter() - self._began
            if not self._stop.wait(self.interval - passed % self.interval):
                self._sample()

    def _sample(self) -> None:
        row = (round(time.perf_counter() - self._began, 3), *self._read_tree())
        if self.gpu is not None:
            row += self._read_gpu()
        self._rows.append(row)
        if self._file is not None:
            csv.writer(self._file).writerow(row)
            self._file.flush()

    def _read_tree(self) -> tuple[int, int]:
        """Number of processes, and the sum of their resident set sizes in bytes."""
        now = set(psutil.pids())
        for pid in sorted(now - self._looked_at):  # a parent is usually older than its child
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.ppid() in {member.pid for member in self._members}:
                    self._members.add(process)
        self._looked_at = now
        sizes = []
        for process in list(self._members):
            try:
                sizes.append(process.memory_info().rss)
            except psutil.Error:
                self._members.discard(process)
        used = [size for size in sizes if size]  # a process that has ended has none
        return len(used), sum(used)

    def _read_gpu(self) -> tuple[Any, ...]:
        gpus = read_gpus()
        if self._device >= len(gpus):
            return (None,) * len(GPU_COLUMNS)
        gpu = gpus[self._device]
        pids = {process.pid for process in self._members}
        return (
            *(gpu.bytes_of(pids), gpu.used_bytes, gpu.busy_percent),
            *(gpu.sm_mhz, gpu.power_w, gpu.held_down_by()),
        )

    def samples(self) -> pd.DataFrame:
        """All samples: `COLUMNS`, and on a GPU `GPU_COLUMNS`; NaN where one was not read."""
        import pandas as pd

        table = pd.DataFrame(list(self._rows), columns=list(self.columns))
        numbers = [name for name in self.columns if name != "gpu_throttle"]
        return table.astype(dict.fromkeys(numbers, float))

    @property
    def peak_bytes(self) -> int:
        """The most resident memory of the process tree."""
        return int(self.samples()["rss_bytes"].max())

    @property
    def mean_bytes(self) -> float:
        """Resident memory of the process tree, averaged over time."""
        return mean_over_time(self.samples(), "rss_bytes")

    def __str__(self) -> str:
        table = self.samples()
        lines = []
        for column, words in MEMORY.items():
            if column in table and table[column].notna().any():
                peak, when = table[column].max(), table["time_s"][table[column].idxmax()]
                extra = format_bytes(peak - table[column].dropna().iloc[0])
                mean = format_bytes(mean_over_time(table, column))
                found = f"peak {format_bytes(peak)} ({extra} above the start) at {when:.1f} s"
                lines.append(f"{words}: {found}, {mean} on average")
        lines.append(f"processes: at most {table['processes'].max():.0f}")
        for column, words in AVERAGES.items():
            if column in table and table[column].notna().any():
                lines.append(words.format(mean_over_time(table, column)))
        if "gpu_throttle" in table:
            shares = table["gpu_throttle"].replace("", None).value_counts() / len(table)
            lines += [f"GPU clocks limited by: {k} ({v:.0%})" for k, v in shares.items()]
        return "\n".join([*lines, self._small_print()])

    __repr__ = __str__

    def chart(self, title: str) -> Chart:
        """The curve of a program, whose name is the title."""
        from labsupport.plotting.monitor import plot_monitor

        gpu = self.gpu
        found = f"at most {format_bytes(self.peak_bytes)}, {format_bytes(self.mean_bytes)}"
        return plot_monitor(
            self.samples(),
            title=f"{title}: {found} on average",
            limit=memory_limit(),
            gpu_limit=(f"memory of this GPU ({gpu.name})", gpu.total_bytes or 0) if gpu else None,
            small_print=f"{gpu.name if gpu else 'no NVIDIA GPU'}, {os.cpu_count()} CPU cores, "
            f"{datetime.date.today()}. {self._small_print()}",
        )

    def _small_print(self) -> str:
        gap = self.samples()["time_s"].diff().max()
        return (
            f"{len(self._rows)} samples, one every {self.interval:g} s, largest gap {gap:.3f} s: "
            "shorter peaks can be missed. Memory is the sum of resident set sizes, in which shared "
            "pages count more than once."
        )


def mean_over_time(samples: pd.DataFrame, column: str) -> float:
    """The average of a column over time: between two samples the value changes evenly."""
    import numpy as np

    read = samples[["time_s", column]].dropna().to_numpy(float)
    if len(read) < 2 or read[-1, 0] == read[0, 0]:
        return float(read[0, 1]) if len(read) else math.nan
    return float(np.trapezoid(read[:, 1], read[:, 0]) / (read[-1, 0] - read[0, 0]))


def memory_limit() -> tuple[str, int]:
    """Name what limits the memory of processes here; and that limit in bytes."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        if limit < total:
            return "memory limit of this container or job", limit
    return "memory of this machine", total


def own_peak(who: int = resource.RUSAGE_SELF) -> int:
    """The operating system's peak of a resident set, in bytes: ours, or the largest child's."""
    if who == resource.RUSAGE_SELF and sys.platform == "linux":
        # There, getrusage also counts what the process was before exec.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # macOS counts bytes, Linux KiB: getrusage(2).
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def live_line() -> str:
    """The state of the machine and its GPUs, in one line."""
    memory = psutil.virtual_memory()
    used = f"{format_bytes(memory.total - memory.available)} of {format_bytes(memory.total)}"
    parts = [f"{datetime.datetime.now():%H:%M:%S}  CPU {psutil.cpu_percent():.0f}%, memory {used}"]
    for gpu in read_gpus():
        memory = f"{format_bytes(gpu.used_bytes or 0)} of {format_bytes(gpu.total_bytes or 0)}"
        figures = (
            (gpu.busy_percent, f"{gpu.busy_percent}% in use"),
            (gpu.used_bytes, memory),
            (gpu.sm_mhz, f"SM {gpu.sm_mhz} of {gpu.max_sm_mhz} MHz"),
            (gpu.memory_mhz, f"memory {gpu.memory_mhz} MHz"),
            (gpu.power_w, f"{gpu.power_w or 0:.0f} W"),
            (gpu.celsius, f"{gpu.celsius} °C"),
            (gpu.held_down_by() or None, f"limited by {gpu.held_down_by()}"),
        )
        read = ", ".join(text for value, text in figures if value is not None)
        parts.append(f"GPU {gpu.index} {read or 'not readable here'}")
    return "  |  ".join(parts if len(parts) > 1 else [*parts, "no NVIDIA GPU"])


def checked_interval(interval: float) -> float:
    """Return the interval; raise ValueError if it is too short or infinite."""
    if not SHORTEST_INTERVAL_S <= interval < math.inf:
        raise ValueError(
            f"the interval is {interval} s; it must be {SHORTEST_INTERVAL_S} s or more"
        )
    return interval
