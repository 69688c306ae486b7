"""The processes of a submission, seen from outside: how many, how large, and ended for good."""

import contextlib
import os
import signal
import time

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(root: int) -> dict[int, int]:
    """Living processes below one, and their resident memory.

    Args:
        root: a process id; it is not part of the answer.

    Returns:
        bytes by process id.
    """
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The program's name, in parentheses, may hold anything, also parentheses.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(name))
            resident[int(name)] = int(fields[21]) * _PAGE
    found: dict[int, int] = {}
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop()
        if pid not in found:
            found[pid] = resident[pid]
            todo += children.get(pid, ())
    return found


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with its id, it names one process for good."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None


def kill_known(known: dict[int, int]) -> None:
    """Kill processes that were seen before, wherever they hang now.

    Args:
        known: their start times, by id; an id that was given to another process is left alone.
    """
    for pid, started in known.items():
        if start_time(pid) == started:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def kill_below(root: int, timeout_s: float = 10.0) -> bool:
    """Kill all that descends from a process, until nothing is left.

    Returns:
        whether nothing is left.
    """
    end = time.monotonic() + timeout_s
    while living := descendants(root):
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def folder_bytes(folder: str, limit: int) -> int:
    """How much a folder holds, on disk; counting ends above the limit."""
    total, todo = 0, [folder]
    while todo and total <= limit:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512 + 256
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
        except OSError:
            continue
    return total
