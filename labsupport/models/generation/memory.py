"""How much memory a block of code takes, at the peak and on average, sampled while it runs.

On a GPU: what PyTorch's allocator has handed out; the peak is the allocator's own, so that no
moment is missed. On a CPU: the resident memory of this process, as the operating system counts it.
That is coarser: it holds what libraries took for themselves, and the C library keeps memory that
was freed, so that a second run may seem to need little. (On Linux it is asked to give it back
before the block starts.) To count a call to the byte, use
`labsupport.profiling.measure_peak_memory`; that slows the call down, this does not.
"""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType

import torch

INTERVAL_S = 0.005


class MemorySampler:
    """Watches a block for the memory that it takes beyond what was there at its start.

    Attributes, once the block has ended:
        peak_bytes, mean_bytes: beyond the start.
        what: in words, what was counted.
    """

    def __init__(self, device: torch.device, interval_s: float = INTERVAL_S) -> None:
        self.device = device
        self.peak_bytes = self.mean_bytes = 0
        gpu = device.type == "cuda"
        self.what = "the GPU's allocator" if gpu else "resident memory of the process, sampled"
        self._interval_s = interval_s
        self._samples: list[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemorySampler:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _give_back_freed_memory()
        self._start = self._now()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._samples.append(self._now())
        self._end.set()
        self._thread.join()
        peak = max(self._samples)
        if self.device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated(self.device))
        self.peak_bytes = max(0, peak - self._start)
        mean = sum(self._samples) / len(self._samples)
        self.mean_bytes = max(0, round(mean) - self._start)

    def _watch(self) -> None:
        while not self._end.wait(self._interval_s):
            self._samples.append(self._now())

    def _now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        import psutil

        return psutil.Process().memory_info().rss


def _give_back_freed_memory() -> None:
    """Let the C library return freed memory to the system; only glibc (Linux) can be asked."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (
        OSError,
        AttributeError,
        TypeError,
    ):  # another C library, macOS; Windows has no CDLL(None)
        return
