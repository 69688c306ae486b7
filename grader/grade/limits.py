"""Limits for all processes of a submission together: a control group, by systemd or our own."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
# For each process: open files, size of a file in blocks of 512 bytes, no dumps; where the whole
# machine is short of memory, the system ends a submission before anything else.
_EACH = "ulimit -n 256; ulimit -f 65536; ulimit -c 0; echo 1000 > /proc/self/oom_score_adj"


@dataclass(frozen=True)
class Limits:
    """A control group for a submission's processes.

    Attributes:
        command: what to put before the program's own command.
        missing: what is not limited here, a sentence; "" if nothing.
        folders: of the control groups that we made.
    """

    command: list[str]
    missing: str = ""
    folders: tuple[Path, ...] = ()

    def peak_bytes(self) -> int:
        """Return the most memory that all had together; 0 where the system doesn't say."""
        for folder in self.folders:
            for name in ("memory.max_usage_in_bytes", "memory.peak"):
                with contextlib.suppress(OSError):
                    return int((folder / name).read_text())
        return 0


@contextlib.contextmanager
def limits(memory_bytes: int, cores: int = 1, tasks: int = 256) -> Iterator[Limits]:
    """Limit memory, cores and tasks (threads) of what is started with `command`.

    systemd makes the group where it runs the machine; otherwise we do, in the groups that this
    process is in (version 2 or 1). Where neither works, `missing` says so.
    """
    if Path("/run/systemd/system").is_dir() and shutil.which("systemd-run"):
        options = [f"MemoryMax={memory_bytes}", "MemorySwapMax=0", f"TasksMax={tasks}"]
        options += [f"CPUQuota={100 * cores}%"]
        command = ["systemd-run", "--scope", "--quiet", "--collect"]
        command += [] if os.geteuid() == 0 else ["--user"]
        command += [part for option in options for part in ("-p", option)]
        yield Limits([*command, "/bin/sh", "-c", f'{_EACH}; exec "$@"', "sh"])
        return
    values = {
        "memory": {"memory.max": memory_bytes, "memory.limit_in_bytes": memory_bytes}
        | {"memory.swap.max": 0, "memory.memsw.limit_in_bytes": memory_bytes},
        "pids": {"pids.max": tasks},
        "cpu": {"cpu.max": f"{cores}00000 100000", "cpu.cfs_quota_us": cores * 100_000},
    }
    folders, missing = [], ""
    try:
        for parent, controllers in _parents():
            folder = parent / f"labsupport-{os.getpid()}-{uuid.uuid4().hex[:12]}"
            folder.mkdir()
            folders.append(folder)
            for controller in controllers:
                for name, value in values[controller].items():
                    if (folder / name).exists():
                        (folder / name).write_text(str(value))
        if not folders:
            missing = "memory and processes are not limited: there is no control group to be in"
    except OSError as error:
        missing = f"memory and processes are not limited: {error}"
    joins = "".join(f"echo $$ > {one}/cgroup.procs && " for one in ([] if missing else folders))
    try:
        command = ["/bin/sh", "-c", f'{_EACH}; {joins}exec "$@"', "sh"]
        yield Limits(command, missing, tuple(folders))
    finally:
        for folder in folders:
            _remove(folder)


@functools.cache
def _parents() -> tuple[tuple[Path, tuple[str, ...]], ...]:
    """Our own control groups, and what they can limit."""
    found, known = [], ("memory", "pids", "cpu")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        folder = _GROUPS / names / path.lstrip("/")
        if names in known:
            found.append((folder, (names,)))
        elif not names and (allowed := folder / "cgroup.subtree_control").exists():
            controllers = tuple(one for one in allowed.read_text().split() if one in known)
            if "memory" in controllers:
                found.append((folder, controllers))
    # Those of graders that were killed.
    for folder in (one for parent, _ in found for one in parent.glob("labsupport-*-*")):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
    return tuple(found)


def _remove(folder: Path) -> None:
    """Remove a group; its processes may take a moment to end."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), 9)
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
