"""How much memory do a process and its descendants use now?

Resident set sizes are summed. Pages that processes share (libraries, and what a forked worker has
not written to yet) are in each one's resident set, so the sum counts them more than once. The
proportional set size (PSS) counts them once, but reading it walks all pages: 2.5 ms for a process
of 226 MB here, against 0.01 ms for the resident set. So PSS is read beside it, on Linux, when there
are several processes, and only as often as costs one percent of a core.
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import psutil

PSS_SHARE = 0.01  # of one core


class ProcessTree:
    """A process and its descendants, those that outlive their parents included.

    Attributes:
        seen: how many processes were counted so far, at any time.
    """

    def __init__(self, root: int | None = None, *, count_root: bool = True) -> None:
        self.root = os.getpid() if root is None else root
        self.seen = 0
        self._count_root = count_root
        self._members: dict[int, psutil.Process] = {self.root: psutil.Process(self.root)}
        self._looked_at: set[int] = {self.root}
        self._met: set[int] = set()
        self._counted: set[int] = set()
        self._next_pss = 0.0
        self._pss_pids: set[int] = set()

    def read(self) -> tuple[int, int]:
        """How many processes there are now, and the sum of their resident set sizes in bytes."""
        self._find_new()
        sizes: dict[int, tuple[int, int]] = {}
        for pid, process in list(self._members.items()):
            try:
                info = process.memory_info()
            except psutil.AccessDenied:  # it changed its user: not ours to look at
                continue
            except psutil.Error:
                self._forget(pid)
                continue
            sizes[pid] = (info.rss, info.vms)
        # A process that was just made may still have its parent's memory (vfork), until it starts
        # its own program: what looks the same is counted from the next reading on.
        copies = {pid for pid in set(sizes) - self._met if self._is_copy(pid, sizes)}
        self._met = set(sizes)
        counted = {
            pid: rss
            for pid, (rss, _) in sizes.items()
            if pid not in copies and rss > 0 and (self._count_root or pid != self.root)
        }
        self.seen += len(set(counted) - self._counted)
        self._counted |= set(counted)
        return len(counted), sum(counted.values())

    def pids(self) -> set[int]:
        """The processes of the last reading, the root included."""
        return set(self._members)

    def descendants(self) -> list[psutil.Process]:
        """Those that run now, without the root; what has ended but is not reaped is left out."""
        self._find_new()
        return [
            process for pid, process in self._members.items() if pid != self.root and _runs(process)
        ]

    def pss(self) -> float:
        """The sum of their proportional set sizes in bytes; NaN where it was not read.

        It is read on Linux, of several processes, and if the last reading is long enough ago. They
        must be the same as a sample ago: a page shared with a child that is not known yet would
        count by half.
        """
        start = time.perf_counter()
        pids = {pid for pid in self._members if self._count_root or pid != self.root}
        settled, self._pss_pids = pids == self._pss_pids, pids
        if sys.platform != "linux" or len(pids) < 2 or not settled or start < self._next_pss:
            return math.nan
        total = sum(map(_pss, pids))
        end = time.perf_counter()
        self._next_pss = end + (end - start) / PSS_SHARE
        return total

    def _find_new(self) -> None:
        now = set(psutil.pids())
        parents: dict[int, tuple[int, psutil.Process]] = {}
        for pid in now - self._looked_at:
            try:
                process = psutil.Process(pid)
                parents[pid] = (process.ppid(), process)
            except psutil.Error:
                now.discard(pid)  # gone, or not there yet: it is looked at again
        self._looked_at = now
        # The parent of a new process may be new itself.
        while found := [pid for pid, (parent, _) in parents.items() if parent in self._members]:
            for pid in found:
                self._members[pid] = parents.pop(pid)[1]

    def _forget(self, pid: int) -> None:
        self._counted.discard(pid)
        if pid != self.root:
            del self._members[pid]

    def _is_copy(self, pid: int, sizes: dict[int, tuple[int, int]]) -> bool:
        try:
            parent = self._members[pid].ppid()
        except psutil.Error:
            return False
        return parent in sizes and sizes[parent][1] == sizes[pid][1]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:  # it has just ended
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024


def memory_limit() -> tuple[int, str]:
    """The most that processes here can use, in bytes, and what sets that limit.

    It is the machine's memory, or less where the control group of this process (a container, a
    batch job) is given less.
    """
    total = psutil.virtual_memory().total
    limit = min(_group_limits(), default=total)
    if limit < total:
        return limit, "memory limit of this container or job"
    return total, "memory of this machine"


def _group_limits() -> list[int]:
    """The limits of this process's control groups (Linux, version 2), the groups above included."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if group is None:
        return []
    mount = Path("/sys/fs/cgroup")
    folder = mount / group
    return [
        int(text)
        for place in (folder, *folder.parents)
        if place.is_relative_to(mount) and (text := _read(place / "memory.max")).isdigit()
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
