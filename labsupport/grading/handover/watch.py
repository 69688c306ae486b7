"""How much memory a process and its children use during a call, seen from outside (Linux).

What they took: the larger one of VmHWM, the highest resident set of the process since it
was reset (/proc/PID/clear_refs, 5), and of the resident sets of all processes of the tree, sampled.
What they touched: the pages referenced since they were marked (clear_refs, 1), which shows a buffer
that was there before the call. The system marks other pages, too, now and then: in 2 of about
30 calls this figure was 60 to 160 MiB too high, so it wants a second look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil

SAMPLE_S = 0.01
LIBRARIES = 64 * 2**20  # bytes of code and of small objects that any call touches


class NotWatched(Exception):
    """The student's process cannot be watched; says why."""


def extra_memory(pid: int, ask: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a process and its children take during `ask()`, and bytes that they touch.

    Raises:
        NotWatched: /proc does not show it. What `ask` raises passes through.
    """
    files = Path(f"/proc/{pid}")
    try:
        _reset(files, "1")  # pages touched from here on count as referenced
        _reset(files, "5")
        before = _resident(pid)
        own = _status(files, "VmRSS")
        untouched = _touched(files)
        sampler = _Sampler(pid)
        with sampler:
            ask()
        peak = _status(files, "VmHWM") - own
        after = _status(files, "VmRSS")
        touched = _touched(files) - untouched
    except (OSError, psutil.Error, KeyError, ValueError) as error:
        raise NotWatched(
            f"the memory of the student's process cannot be watched ({type(error).__name__}: "
            f"{error}): the grader needs to be root, or the same user, on Linux"
        ) from error
    # Whoever gives back memory that was there before had room that was not measured.
    given_back = own - after
    return max(peak, sampler.most - before, given_back, 0), max(touched - LIBRARIES, 0)


class _Sampler:
    """The most that all processes of the tree had together, looked at every few milliseconds."""

    def __init__(self, pid: int) -> None:
        self.pid, self.most = pid, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                self.most = max(self.most, _resident(self.pid))
            except psutil.Error:
                return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident(pid: int) -> int:
    """Resident bytes of a process and its descendants; what two share counts in each."""
    process = psutil.Process(pid)
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _reset(files: Path, what: str) -> None:
    (files / "clear_refs").write_text(what)


def _status(files: Path, name: str) -> int:
    for line in (files / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _touched(files: Path) -> int:
    for line in (files / "smaps_rollup").read_text().splitlines():
        if line.startswith("Referenced:"):
            return int(line.split()[1]) * 1024
    raise KeyError("Referenced")
