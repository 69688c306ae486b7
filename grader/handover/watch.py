"""How much memory a submission's processes use during a call, seen from outside (Linux).

All of them count, not only the one that answers and its children: a process that detached itself
can compute for it.
What they took: the larger one of VmHWM, the highest resident set of the process since it
was reset (/proc/PID/clear_refs, 5), and of its resident set, sampled; of the others as sampled.
What they touched: the pages referenced since they were marked (clear_refs, 1), which shows a buffer
that was there before the call. The system marks other pages, too, now and then: in 2 of about
30 calls this figure was 60 to 160 MiB too high, so it wants a second look.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

SAMPLE_S = 0.01
LIBRARIES = 64 * 2**20  # bytes of code and of small objects that any call touches


class NotWatched(Exception):
    """The student's process cannot be watched; says why."""


def extra_memory(pid: int, ask: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a submission's processes take during `ask()`, and bytes that they touch.

    Args:
        pid: of the one that is asked.
        ask: the call.

    Raises:
        NotWatched: /proc does not show it. What `ask` raises passes through.
    """
    files = Path(f"/proc/{pid}")
    try:
        sandbox = _sandbox(pid)
        for one in _resident(sandbox):
            _mark(one)
        _reset(files, "5")
        before = _resident(sandbox)
        untouched = _touched(before)
        sampler = _Sampler(sandbox)
        with sampler:
            ask()
        after = _resident(sandbox)
        touched = _touched(after) - untouched
        highest = _status(files, "VmHWM")
    except (OSError, psutil.Error, KeyError, ValueError) as error:
        raise NotWatched(
            f"the memory of the student's process cannot be watched ({type(error).__name__}: "
            f"{error}): the grader needs to be root, or the same user, on Linux"
        ) from error
    most = sampler.most | {pid: max(highest, sampler.most.get(pid, 0))}
    # Each by itself: what one gives back is no room for another.
    taken = sum(max(size - before.get(one, 0), 0) for one, size in most.items())
    # Whoever gives back memory that was there before had room that was not measured.
    given_back = sum(before.values()) - sum(after.values())
    return max(taken, given_back, 0), max(touched - LIBRARIES, 0)


class _Sampler:
    """The most that each process of a sandbox had, looked at every few milliseconds."""

    def __init__(self, sandbox: psutil.Process) -> None:
        self.sandbox = sandbox
        self.most: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                for pid, size in _resident(self.sandbox).items():
                    self.most[pid] = max(self.most.get(pid, 0), size)
            except psutil.Error:
                return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _sandbox(pid: int) -> psutil.Process:
    """What this process started to have the other one run: it adopts those that detach."""
    line, ours = [psutil.Process(pid), *psutil.Process(pid).parents()], psutil.Process()
    return line[line.index(ours) - 1] if ours in line[1:] else line[0]


def _resident(sandbox: psutil.Process) -> dict[int, int]:
    """Resident bytes of each process of a sandbox; what two share counts in each."""
    found = {sandbox.pid: sandbox.memory_info().rss}
    for child in sandbox.children(recursive=True):
        try:
            found[child.pid] = child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def _mark(pid: int) -> None:
    """Have pages that are touched from here on count as referenced."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        _reset(Path(f"/proc/{pid}"), "1")


def _reset(files: Path, what: str) -> None:
    (files / "clear_refs").write_text(what)


def _status(files: Path, name: str) -> int:
    for line in (files / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _touched(pids: Iterable[int]) -> int:
    """Referenced bytes of these processes together."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            total += _referenced(Path(f"/proc/{pid}"))
    return total


def _referenced(files: Path) -> int:
    for line in (files / "smaps_rollup").read_text().splitlines():
        if line.startswith("Referenced:"):
            return int(line.split()[1]) * 1024
    raise KeyError("Referenced")
