"""Limits for all processes of a submission together: a control group, by systemd or our own."""

import contextlib
import functools
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
# For each process: open files, size of a file in blocks of 512 bytes, no dumps; where the whole
# machine is short of memory, the system ends a submission before anything else.
_EACH = "ulimit -n 256; ulimit -f 65536; ulimit -c 0; echo 1000 > /proc/self/oom_score_adj"


@contextlib.contextmanager
def limits(memory_bytes: int) -> Iterator[tuple[list[str], str]]:
    """Limit memory, tasks (threads) and cores (one) of a submission's processes together.

    systemd makes the group where it runs the machine; otherwise we do, in the groups that this
    process is in (version 2 or 1).

    Yields:
        what to put before the program's own command, and what is not limited here: a sentence, or
        "" if nothing.
    """
    if Path("/run/systemd/system").is_dir() and shutil.which("systemd-run"):
        options = [f"MemoryMax={memory_bytes}", "MemorySwapMax=0", "TasksMax=256", "CPUQuota=100%"]
        command = ["systemd-run", "--scope", "--quiet", "--collect"]
        command += [] if os.geteuid() == 0 else ["--user"]
        command += [part for option in options for part in ("-p", option)]
        yield [*command, "/bin/sh", "-c", f'{_EACH}; exec "$@"', "sh"], ""
        return
    values = {
        "memory": {"memory.max": memory_bytes, "memory.limit_in_bytes": memory_bytes}
        | {"memory.swap.max": 0, "memory.memsw.limit_in_bytes": memory_bytes},
        "pids": {"pids.max": 256},
        "cpu": {"cpu.max": "100000 100000", "cpu.cfs_quota_us": 100_000},
    }
    folders: list[Path] = []
    why = "" if _parents() else "there is no control group to be in"
    try:
        for parent, controllers in _parents():
            folders.append(parent / f"labsupport-{os.getpid()}-{uuid.uuid4().hex[:12]}")
            folders[-1].mkdir()
            for controller in controllers:
                for name, value in values[controller].items():
                    if (folders[-1] / name).exists():
                        (folders[-1] / name).write_text(str(value))
    except OSError as error:
        why = str(error)
    joins = "" if why else "".join(f"echo $$ > {one}/cgroup.procs && " for one in folders)
    try:
        missing = f"memory and processes are not limited: {why}" if why else ""
        yield ["/bin/sh", "-c", f'{_EACH}; {joins}exec "$@"', "sh"], missing
    finally:
        for folder in folders:
            _remove(folder)


@functools.cache
def _parents() -> tuple[tuple[Path, tuple[str, ...]], ...]:
    """Return our own control groups, and what they can limit."""
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
