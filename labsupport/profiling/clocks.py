"""One reading of a clock: how long did this call take?

On a GPU the time is taken between two events on the GPU's own clock, because a call returns long
before its kernels finish; and the L2 cache is overwritten between two calls, so that every call
finds its inputs in the main memory, as it would inside a model (`triton.testing.do_bench` does
the same). Short calls are timed behind a few that do not count, which keep the GPU busy while
Python starts the one that does. A call that takes the GPU longer than Python is thus timed without
its start, and one that does not, with a part of it: then Python is what a program waits for, too.
On a CPU the clock is `time.perf_counter`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]

MIN_FLUSH_BYTES = 256 * 2**20  # larger than any L2 cache sold so far
LEAD_CALLS, LEAD_MS = 4, 10.0  # calls in front of a timed one on a GPU, and their time, at most


def cpu_clock(fn: Call) -> Callable[[], float]:
    """A function that calls `fn()` once and returns how long that took, in milliseconds."""

    def clock() -> float:
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3

    return clock


def cuda_clock(fn: Call, device: torch.device) -> Callable[[], float]:
    """The same by the clock of a GPU; it calls `fn()` once now, and then several times a reading.

    Args:
        fn: the call.
        device: the GPU, with its number.
    """
    flush = _larger_than_the_cache(device)

    def clock(lead: int) -> float:
        with torch.cuda.device(device):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            for _ in range(lead + 1):
                flush.zero_()
                begin.record()  # the last record counts
                fn()
                end.record()
            end.synchronize()
            return begin.elapsed_time(end)

    lead = min(LEAD_CALLS, int(LEAD_MS / max(clock(0), 1e-3)))
    return lambda: clock(lead)


@functools.lru_cache(maxsize=1)
def _larger_than_the_cache(device: torch.device) -> torch.Tensor:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(max(MIN_FLUSH_BYTES, 2 * l2_bytes), dtype=torch.int8, device=device)
