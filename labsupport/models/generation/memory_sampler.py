"""The memory that a block of code takes, at the peak and on average, sampled while it runs.

On a GPU: what PyTorch's allocator has handed out, with the allocator's own peak. On a CPU: the
resident memory of this process, which is coarser: the C library keeps memory that was freed. To
count a call to the byte, use `labsupport.profiling.measure_peak_memory`, which slows it down.
"""

from __future__ import annotations

import threading

import psutil
import torch


class MemorySampler:
    """Sampler of the memory that a block of code takes, beyond the memory at its start.

    Attributes, once the block has ended:
        peak_bytes, mean_bytes: beyond the start.
        what: in words, what was counted.
    """

    def __init__(self, device: torch.device, interval_s: float = 0.005) -> None:
        self.device, self._gpu = device, device.type == "cuda"
        self.peak_bytes = self.mean_bytes = 0
        self.what = "the GPU's allocator" if self._gpu else "resident memory of the process"
        self._interval_s, self._samples = interval_s, [0]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemorySampler:
        if self._gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._samples = [self._now()]
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        start, *samples = [*self._samples, self._now()]
        peak = torch.cuda.max_memory_allocated(self.device) if self._gpu else max(samples)
        self.peak_bytes = max(0, peak - start)
        self.mean_bytes = max(0, round(sum(samples) / len(samples)) - start)

    def _watch(self) -> None:
        while not self._end.wait(self._interval_s):
            self._samples.append(self._now())

    def _now(self) -> int:
        if self._gpu:
            return torch.cuda.memory_allocated(self.device)
        return psutil.Process().memory_info().rss
