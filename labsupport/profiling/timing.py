"""Time of calls in milliseconds, with its spread.

The first calls pay for compiling and caching: they are thrown away. A call is repeated until the
notch of a box plot, 1.57 * IQR / sqrt(n), is at most `precision` of the median (McGill, Tukey and
Larsen, "Variations of Box Plots", 1978). `measure_ratio` runs two calls in turns (A B A B ...) and
takes the ratio of each pair. On a CPU a call of less than a millisecond counts as the fastest of a
few in a row, since one may lose its core to another process.

On a GPU the time is taken between two of its own events, with the L2 cache overwritten between two
calls (as in `triton.testing.do_bench`). Short calls follow a few that do not count, which keep the
GPU busy while Python starts the one that does.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from labsupport.profiling.units import format_ms

Call = Callable[[], Any]

WARMUP_SECONDS = 0.1  # as long as the first call has been paid for, this wakes up clocks and caches
MIN_FLUSH_BYTES = 256 * 2**20  # larger than any L2 cache sold so far
LEAD_CALLS, LEAD_MS = 4, 10.0  # calls in front of a timed one on a GPU, and their time, at most
SHORT_MS, IN_A_ROW = 1.0, 5  # on a CPU
SLOW_CALL_SECONDS = 0.5  # a CPU call slower than this gets no second warm-up call


@dataclass(frozen=True)
class Samples:
    """Repeated readings of one figure, with their median and quartiles."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def q1(self) -> float:
        """First quartile."""
        return float(np.quantile(self.samples, 0.25))

    @property
    def q3(self) -> float:
        """Third quartile."""
        return float(np.quantile(self.samples, 0.75))


@dataclass(frozen=True)
class Timing(Samples):
    """Repeated times of one call, in milliseconds."""

    device: str = "cpu"

    @property
    def min(self) -> float:
        """Fastest sample."""
        return min(self.samples)

    @property
    def max(self) -> float:
        """Slowest sample."""
        return max(self.samples)

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.samples)

    @property
    def repeats(self) -> int:
        """Number of samples."""
        return len(self.samples)

    @property
    def notch(self) -> float:
        """Half width of an approximate 95% interval of the median, in milliseconds."""
        return 1.57 * (self.q3 - self.q1) / self.repeats**0.5

    def __str__(self) -> str:
        spread = f"{format_ms(self.q1)}-{format_ms(self.q3)}"
        return f"{format_ms(self.median)} ms (IQR {spread}, n={self.repeats})"


@dataclass(frozen=True)
class Ratio(Samples):
    """The time of one call over that of another, pair by pair in one run."""

    names: tuple[str, str] = ("a", "b")

    def __str__(self) -> str:
        spread = f"{self.q1:.2f}-{self.q3:.2f}"
        name = " / ".join(self.names)
        return f"{name} = {self.median:.2f} (IQR {spread}, n={len(self.samples)})"


def measure_time(
    fn: Call,
    *,
    device: torch.device | str | None = None,
    max_seconds: float = 2.0,
    **bounds: Any,
) -> Timing:
    """Time `fn()` until its median is known to `precision`, or the time or the repeats are used up.

    Args:
        fn: the call; takes no argument, its result is dropped.
        device: where it runs; by default the current GPU if there is one, else the CPU.
        max_seconds: time spent measuring, without the warm-up.
        bounds: warmup, min_repeats, max_repeats, min_seconds, precision of `measure_interleaved`.

    >>> timing = measure_time(lambda: torch.ones(1000).sum(), device="cpu", max_seconds=0.1)
    >>> timing.min <= timing.median <= timing.max
    True
    """
    return measure_interleaved({"fn": fn}, device=device, max_seconds=max_seconds, **bounds)["fn"]


def measure_interleaved(
    functions: Mapping[str, Call],
    *,
    device: torch.device | str | None = None,
    warmup: int | None = None,
    min_repeats: int = 5,
    max_repeats: int = 200,
    min_seconds: float = 0.1,
    max_seconds: float = 10.0,
    precision: float = 0.02,
) -> dict[str, Timing]:
    """Time several calls in turns (A B C A B C ...), so that drift meets all of them alike.

    Args:
        functions: the calls by name; they take no argument, and their results are dropped.
        device: where they run; by default the current GPU if there is one, else the CPU.
        warmup: number of calls before the first that counts; by default about 0.1 s of them.
        min_repeats, max_repeats: bounds on the number of samples (min_repeats wins over time).
        min_seconds, max_seconds: bounds on the time of all together, without the warm-up.
        precision: stop when 1.57 * IQR / sqrt(n) of each is at most this fraction of its median.

    Returns:
        A `Timing` by name. The i-th samples of two calls were taken right after each other.

    Raises:
        ValueError: no function; bounds that are negative or NaN.
    """
    amounts = (warmup or 0, min_seconds, max_seconds)
    if not functions or min_repeats < 0 or max_repeats < 1:
        raise ValueError(
            f"{len(functions)} functions, at least {min_repeats} and at most {max_repeats} "
            "repeats: give a function, and 1 or more repeats"
        )
    if not all(amount >= 0 for amount in amounts) or math.isnan(precision):
        raise ValueError(
            f"warmup {warmup}, min_seconds {min_seconds}, max_seconds {max_seconds} are 0 or more, "
            f"and precision {precision} is a number"
        )
    where = resolve_device(device)
    for fn in functions.values():
        _warm_up(fn, where, warmup)

    clock_of = cuda_clock if where.type == "cuda" else cpu_clock
    clocks = {name: clock_of(fn, where) for name, fn in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    start = time.perf_counter()
    while True:
        for name, clock in clocks.items():
            samples[name].append(clock())
        spent = time.perf_counter() - start
        timings = {name: Timing(tuple(s), str(where)) for name, s in samples.items()}
        rounds = next(iter(timings.values())).repeats
        if rounds >= max_repeats:
            return timings
        if rounds < min_repeats or spent < min_seconds:
            continue
        if spent >= max_seconds or all(t.notch <= precision * t.median for t in timings.values()):
            return timings


def cpu_clock(fn: Call, _: torch.device) -> Callable[[], float]:
    """A function that calls `fn()` and returns how long one call took, in milliseconds.

    As soon as one took less than `SHORT_MS`, it makes `IN_A_ROW` calls and returns the fastest.
    """
    fastest = math.inf

    def once() -> float:
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3

    def clock() -> float:
        nonlocal fastest
        took = once()
        fastest = min(fastest, took)
        return min(took, *(once() for _ in range(IN_A_ROW - 1))) if fastest < SHORT_MS else took

    return clock


def cuda_clock(fn: Call, device: torch.device) -> Callable[[], float]:
    """The same by a GPU's clock; calls `fn()` once now, and then several times a reading."""
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


def captured(fn: Call, device: torch.device) -> tuple[Call, bool]:
    """Record what `fn()` launches as a CUDA graph, whose replay costs the CPU some microseconds.

    Args:
        fn: the call; every replay reads the tensors that it read here. Its result is dropped.
        device: on a CPU nothing is recorded.

    Returns:
        the replay and True; `fn` itself and False where it cannot be recorded (it waits for the
        GPU, for example).
    """
    if device.type != "cuda":
        return fn, False
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                fn()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return fn, False
    return graph.replay, True


def ratio_of(a: Timing, b: Timing, names: tuple[str, str] = ("a", "b")) -> Ratio:
    """The pairwise ratio a / b of two timings that `measure_interleaved` took in one run.

    Raises:
        ValueError: the two have different numbers of samples, so they were not taken in turns.
    """
    if len(a.samples) != len(b.samples):
        raise ValueError(
            f"{len(a.samples)} and {len(b.samples)} samples: measure both by measure_interleaved"
        )
    pairs = tuple(x / y for x, y in zip(a.samples, b.samples, strict=True))
    return Ratio(pairs, names)


def measure_ratio(
    a: Call,
    b: Call,
    *,
    names: tuple[str, str] = ("a", "b"),
    device: torch.device | str | None = None,
    **bounds: Any,
) -> Ratio:
    """Measure the time of `a` over that of `b`, run in turns: the median of the pairs' ratios.

    `bounds` are those of `measure_interleaved`.  A ratio above 1 means that `a` is slower.

    >>> short, long = (lambda: torch.ones(100)), (lambda: torch.ones(1_000_000))
    >>> print(measure_ratio(long, short, names=("long", "short"), max_seconds=0.2))
    long / short = ... (IQR ..., n=...)
    """
    timings = measure_interleaved({"a": a, "b": b}, device=device, **bounds)
    return ratio_of(timings["a"], timings["b"], names)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device itself, a GPU with its number; by default the current GPU, or else the CPU.

    Raises:
        ValueError: an unknown device, or a GPU that PyTorch does not find.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: it is cpu, cuda or cuda:1, say") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "PyTorch finds none" if built else "this PyTorch is built for CPUs only"
        raise ValueError(f"no GPU here ({why}): leave out --device (device=)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"no {device} here: PyTorch finds {torch.cuda.device_count()} GPUs")
    if device.type == "cuda" and device.index is None:  # some of PyTorch's functions want a number
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _warm_up(fn: Call, device: torch.device, calls: int | None) -> None:
    start = now(device)
    for _ in range(1 if calls is None else calls):
        fn()
    took = now(device) - start
    if calls is not None or (device.type == "cpu" and took > SLOW_CALL_SECONDS):
        return
    # The first call may have compiled something for seconds: the clock starts after it.
    start = now(device)
    for _ in range(25):
        fn()
        if now(device) - start > WARMUP_SECONDS:
            return


def now(device: torch.device) -> float:
    """Seconds on a clock, read when the GPU has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
