"""Start a program confined; a script of its own, which imports nothing of ours.

    python -I -S jail.py PLAN.json

With namespaces, the program sees a file system of its own (what PLAN lists, read-only, and a small
one in memory to write to), only its own processes, and no network. When it ends, or when this
script is killed, the kernel ends every process of it. Without them, this script adopts orphans and
kills what is left. The plan is made, and its fields are explained, in `confinement.py`.
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    32,
    4096,
    16384,
    1 << 18,
)
# statvfs flags that a bind mount in a user namespace has to keep: they are the same bits.
KEPT_FLAGS = MS_NOSUID | MS_NODEV | 8 | 1024 | 2048
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> None:
    """A function of the C library; OSError where it fails."""
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(
    source: str | None,
    target: str,
    kind: str | None = None,
    flags: int = 0,
    options: str | None = None,
) -> None:
    """mount(2)."""
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), options.encode() if options else None)


def die_with_parent(number: int) -> None:
    """Have the kernel send us a signal when our parent ends, however it ends."""
    call("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)


def loopback_up() -> None:
    """The only interface of an empty network namespace: Jupyter's kernels listen there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def bind(source: str, root: str, writable: bool = False) -> None:
    """Make a file or folder appear under the same path in the new root."""
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            open(target, "x").close()
    mount(source, target, flags=MS_BIND | MS_REC)
    if not writable:
        kept = os.statvfs(target).f_flag & KEPT_FLAGS
        mount(None, target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def new_root(plan: dict[str, Any]) -> None:
    """A file system of our own: everything that is not listed does not exist."""
    mount(None, "/", flags=MS_PRIVATE | MS_REC)
    root = plan["root"]
    size = f"size={plan['folder_bytes']},nr_inodes=20000,mode=755"
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for source in plan["readable"]:
        if os.path.islink(source):
            target = root + source
            if not os.path.lexists(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.symlink(os.readlink(source), target)
        else:
            bind(source, root)
    for device in ("null", "zero", "random", "urandom"):
        bind(f"/dev/{device}", root, writable=True)
    for name in ("tmp", "dev/shm", "proc", "old"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name in ("tmp", "dev/shm"):
        os.chmod(f"{root}/{name}", 0o1777)
    os.makedirs(root + plan["run"], exist_ok=True)
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | 8)
    os.chdir(root)
    call("pivot_root", b".", b"old")
    os.chdir("/")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")


def user_namespace() -> None:
    """All rights over namespaces of our own, none over anything else."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                       ("gid_map", f"{gid} {gid} 1")):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def give_up_rights(plan: dict[str, Any]) -> None:
    """Limits, another user, and no way back."""
    for name, value in plan["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    if plan["namespaces"]:
        for number in range(64):
            if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
                break
    if plan["uid"] is not None:
        os.setgroups([])
        os.setgid(plan["uid"])
        os.setuid(plan["uid"])
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.umask(0o077)


def start(plan: dict[str, Any]) -> int:
    """Fork the program; returns its process id."""
    os.makedirs(plan["home"], exist_ok=True)
    name = os.path.join(plan["run"], os.path.basename(plan["notebook"]))
    with open(plan["notebook"], "rb") as given, open(name, "wb") as copy:
        copy.write(given.read())
    if plan["uid"] is not None:
        for path in (plan["run"], plan["home"], name):
            os.chown(path, plan["uid"], plan["uid"])
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(plan["run"])
        give_up_rights(plan)
        os.execve(plan["command"][0], plan["command"], plan["env"])
    except BaseException as error:
        os.write(2, f"jail: {error}\n".encode())
    os._exit(125)


def reap_until(child: int) -> int:
    """Wait for one child, and bury all others that end meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def kill_the_rest() -> None:
    """Without a process namespace: kill all that descends from us, until nothing is left."""
    for _ in range(1000):
        parents: dict[int, list[tuple[int, str]]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        fields = file.read().rpartition(")")[2].split()
                    parents.setdefault(int(fields[1]), []).append((int(name), fields[0]))
                except (OSError, IndexError):
                    pass
        todo, found = [os.getpid()], False
        while todo:
            for pid, state in parents.get(todo.pop(), ()):
                todo.append(pid)
                if state not in "ZX":
                    found = True
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            if not found:
                return
        time.sleep(0.01)


def run_in_namespaces(plan: dict[str, Any]) -> int:
    """The first process of a new process namespace: with it, all others end."""
    if os.getuid() != 0:
        user_namespace()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
    call("unshare", flags if plan["network"] else flags | CLONE_NEWNET)
    first = os.fork()
    if first:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
        return reap_until(first)
    try:
        die_with_parent(signal.SIGKILL)
        if not plan["network"]:
            loopback_up()
        new_root(plan)
        code = reap_until(start(plan))
    except BaseException as error:
        os.write(2, f"jail: {error}\n".encode())
        code = 125
    os._exit(code & 0xFF)


def run_watched(plan: dict[str, Any]) -> int:
    """The same without namespaces: we are the parent of every orphan."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def stop(*_: Any) -> None:
        kill_the_rest()
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    os.makedirs(plan["run"], exist_ok=True)
    code = reap_until(start(plan))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_the_rest()
    return code


def main() -> int:
    """Run the plan; the exit status is the program's, 125 if it could not be started."""
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != plan["parent"]:
        return 125
    return (run_in_namespaces if plan["namespaces"] else run_watched)(plan)


if __name__ == "__main__":
    sys.exit(main())
