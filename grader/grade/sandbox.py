"""A sandbox for one submission: bubblewrap around the program that runs its cells.

Inside, there are Python and its packages, read-only, an empty folder in memory, and nothing else:
no network, no processes but threads, no home, no /etc beyond what programs need to start.
"""

import atexit
import compileall
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

import grader
import labsupport
from grader.grade.plan import Step
from grader.grade.results import Settings
from grader.remote import programs
from grader.remote.session import Session, SessionDied, SessionTimeout
from grader.remote.values import FrameError, receive, unpack
from labsupport.profiling.units import format_bytes

START_TIMEOUT_S, GRACE_S = 90.0, 5.0
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store")
_ETC = ("/etc/ld.so.cache", "/etc/localtime", "/etc/fonts", "/etc/alternatives")
_SPACE = 40 * 2**20  # of the folder in memory; a matrix that is looked for doesn't fit
_PACKAGE, _OURS = "LABSUPPORT_GRADING_PACKAGE", "labsupport-grade-"
# The grader's own files that run in the student's process.
_INSIDE = ("__init__", "programs", "refuse", "values", "watch", "worker")
# Of an exercise's file in labsupport/checks: its solution and its mistakes, which quote it.
_SOLUTION = re.compile(r"^### BEGIN SOLUTION\n.*?^### END SOLUTION\n", re.MULTILINE | re.DOTALL)
_PROGRAM = "import sys, grader.remote.worker; grader.remote.worker.main(sys.argv[1])"


def package_folder() -> Path:
    """Return the folder with the package that a sandbox imports: a copy without the solutions.

    It is made once, for this process and its workers; at the end it goes, or with the next grader.
    """
    if _PACKAGE not in os.environ:
        for left in Path(tempfile.gettempdir()).glob(f"{_OURS}*-*"):
            if not Path("/proc", left.name.removeprefix(_OURS).split("-")[0]).exists():
                shutil.rmtree(left, ignore_errors=True)
        made = tempfile.TemporaryDirectory(prefix=f"{_OURS}{os.getpid()}-")
        atexit.register(made.cleanup)
        folder, own = Path(made.name).resolve() / "package", Path(grader.__file__).parent
        folder.mkdir()
        ignored = shutil.ignore_patterns(".*", "__pycache__", "project")  # a wheel's notebooks
        package = Path(labsupport.__file__).parent
        shutil.copytree(package, folder / "labsupport", ignore=ignored)
        for file in (folder / "labsupport" / "checks").glob("*.py"):
            text = without_solutions(file.read_text(encoding="utf-8"))
            file.write_text(text, encoding="utf-8")
        # `paths.project_root()` then finds this folder, and nothing of the real one.
        (folder / "pyproject.toml").touch()
        (folder / "grader" / "remote").mkdir(parents=True)
        for path in ("__init__.py", *(f"remote/{name}.py" for name in _INSIDE)):
            shutil.copy(own / path, folder / "grader" / path)
        # Compiled, so that no sandbox spends its time on that.
        compileall.compile_dir(folder, quiet=2, workers=1)
        for one in (folder, folder.parent):
            one.chmod(0o755)
        os.environ[_PACKAGE] = str(folder)
    return Path(os.environ[_PACKAGE])


def without_paths(text: str) -> str:
    """Return a text without the folders of this machine that a submission can name."""
    folders = {str(Path.home()), str(package_folder().parent), sys.prefix, sys.base_prefix}
    for folder in sorted(folders - {"/", "/usr"}, key=len, reverse=True):
        text = text.replace(folder, "…")
    return text


def without_solutions(source: str) -> str:
    """Return a module's text without the lines between its solution markers."""
    return _SOLUTION.sub("", source)


@functools.cache
def wall_missing() -> str:
    """Return why submissions cannot be sandboxed on this machine; "" if they can."""
    try:
        subprocess.run([*_wall(), "/bin/true"], capture_output=True, check=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"bubblewrap does not work here: {' '.join(error.stderr.split())[:200]}"
    except OSError:
        return "bubblewrap is not installed"
    return ""


@functools.cache
def confinement_missing(unconfined: bool) -> tuple[str, ...]:
    """List what this machine does not forbid submissions, a sentence each.

    Raise RuntimeError if there is no wall at all, and `unconfined` is False.
    """
    missing = []
    if why := wall_missing():
        if not unconfined:
            raise RuntimeError(
                f"submissions would run as you: {why}. Install it (apt install bubblewrap), or "
                "grade trusted submissions only, with --unconfined."
            )
        missing.append(f"for trusted submissions only: they run as you, because {why}")
    command = [sys.executable, "-I", "-S", str(programs.__file__)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        missing.append("submissions can start programs: there is no seccomp filter here")
    with limits(2**30) as (_, unlimited):
        return tuple(filter(None, [*missing, unlimited]))


class Sandbox(contextlib.ExitStack):
    """A running submission; leaving the `with` block ends it, and everything that it started.

    The program says which `step` runs, and the `first_error` of a cell. The grader sees whether it
    was `killed`: as a rule by the system, for lack of memory.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.step: int | None = None
        self.first_error, self.killed = "", False

    def run(self, steps: list[Step], timeout_s: float) -> Session:
        """Run cells; return a session for calls of what they defined, or raise SessionDied."""
        end, limit = time.monotonic() + timeout_s, START_TIMEOUT_S
        connection = self._start(steps)
        try:
            while True:
                deadline = min(end, time.monotonic() + limit)
                match unpack(receive(connection, limit=0, deadline=deadline)):
                    case {"step": int(number)}:
                        self.step, limit = number, self.settings.cell_timeout_s + GRACE_S
                    case {"first_error": str(text)}:
                        self.first_error, self.step = text, None
                        # The student's process: the last of a line of parents with one child each.
                        family = psutil.Process(self._process.pid).children(recursive=True)
                        pid = (family or [self._process])[-1].pid
                        return Session(connection, pid, self.settings.cell_timeout_s)
                    case _:
                        raise FrameError("a report that is none")
        except TimeoutError:
            raise SessionTimeout("its cells took too long") from None
        except (EOFError, OSError, FrameError):
            raise SessionDied(self.why_died()) from None

    def _start(self, steps: list[Step]) -> socket.socket:
        plan = {
            "cell_timeout_s": self.settings.cell_timeout_s,
            # Experiments of the student's must not use up the time that the exercises need.
            "own_cells_s": self.settings.notebook_timeout_s / 3,
            "steps": steps,
        }
        limited, _ = self.enter_context(limits(self.settings.memory_bytes))
        package = package_folder()
        folder = tempfile.TemporaryDirectory(dir=package.parent, ignore_cleanup_errors=True)
        ours, theirs = socket.socketpair()
        self.enter_context(folder)
        self.enter_context(ours)
        with theirs:
            wall = [] if wall_missing() else _wall(str(package))
            program = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())]
            self._process = subprocess.Popen(
                [*limited, *wall, *program], cwd=folder.name, text=True,
                env=_environment(package, "/tmp" if wall else folder.name),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.callback(self._end)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            json.dump(plan, stdin)
        return ours

    def why_died(self) -> str:
        """Say what ended the program."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        self.killed = self._process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        if self.killed:
            most = format_bytes(self.settings.memory_bytes)
            return f"its process was killed, as happens to one that uses more than {most} of memory"
        return "its process ended"

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _wall(*places: str) -> list[str]:
    """Return bubblewrap and its options; `places` can be read, too."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent"]
    command += ["--new-session", "--cap-drop", "ALL"]
    command += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--hostname", "lab"]
    # Read-only: what a process writes into /proc/self/clear_refs would hide its memory.
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/proc", "--remount-ro", "/dev"]
    command += ["--size", str(_SPACE), "--tmpfs", "/tmp"]
    # The interpreter and its packages, also what symbolic links point to.
    found = [sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    found += [str(Path(sys.executable).resolve().parent.parent)]
    folders = sorted({path for path in found if os.path.isdir(path)})
    inside = tuple(f"{path}/" for path in (*folders, *_SYSTEM))
    python = [path for path in folders if not path.startswith(inside)]
    for path in [*_SYSTEM, *_ETC, "/sys/devices/system/cpu", *python, *places]:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for path in site.getsitepackages():  # the lab, where its wheel is installed
        for name in ("labsupport", "grader"):
            command += ["--tmpfs", f"{path}/{name}"] if os.path.isdir(f"{path}/{name}") else []
    return [*command, "--chdir", "/tmp", "--remount-ro", "/"]


def _environment(package: Path, home: str) -> dict[str, str]:
    # Nothing of the instructor's own: tokens and passwords stand in environments.
    env = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "HOME": home,
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        # Grading is the same on every machine: on the CPU, Triton interpreted, nothing compiled.
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    kept = ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
    return env | {name: os.environ[name] for name in kept if name in os.environ}


_GROUPS = Path("/sys/fs/cgroup")
# For each process: open files, size of a file in blocks of 512 bytes, no dumps; where the whole
# machine is short of memory, the system ends a submission before anything else.
_EACH = "ulimit -n 256; ulimit -f 65536; ulimit -c 0; echo 1000 > /proc/self/oom_score_adj"


@contextlib.contextmanager
def limits(memory_bytes: int) -> Iterator[tuple[list[str], str]]:
    """Limit memory, tasks (threads) and cores (one) of a submission's processes together.

    systemd makes the group where it runs the machine; otherwise we do, in those of this process
    (version 2 or 1). Yields what to put before the command, and what is not limited, or "".
    """
    if Path("/run/systemd/system").is_dir() and shutil.which("systemd-run"):
        options = [f"MemoryMax={memory_bytes}", "MemorySwapMax=0", "TasksMax=256", "CPUQuota=100%"]
        command = ["systemd-run", "--scope", "--quiet", "--collect"]
        command += [] if os.geteuid() == 0 else ["--user"]
        command += [part for option in options for part in ("-p", option)]
        yield [*command, "/bin/sh", "-c", f'{_EACH}; exec "$@"', "sh"], ""
        return
    values = {"memory.max": memory_bytes, "memory.limit_in_bytes": memory_bytes}
    values |= {"memory.swap.max": 0, "memory.memsw.limit_in_bytes": memory_bytes, "pids.max": 256}
    values |= {"cpu.max": "100000 100000", "cpu.cfs_quota_us": 100_000}
    folders: list[Path] = []
    why = "" if _parents() else "there is no control group to be in"
    try:
        for parent in _parents():
            folders.append(parent / f"labsupport-{os.getpid()}-{uuid.uuid4().hex[:12]}")
            folders[-1].mkdir()
            for name, value in values.items():
                if (folders[-1] / name).exists():
                    (folders[-1] / name).write_text(str(value))
    except OSError as error:
        why = str(error)
    joins = "" if why else "".join(f"echo $$ > {one}/cgroup.procs && " for one in folders)
    try:
        missing = f"memory and processes are not limited: {why}" if why else ""
        yield ["/bin/sh", "-c", f'{_EACH}; {joins}exec "$@"', "sh"], missing
    finally:
        for folder in folders * 100:  # its processes may take a moment to end
            with contextlib.suppress(OSError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), 9)
            with contextlib.suppress(OSError):
                folder.rmdir()
            if folder.exists():
                time.sleep(0.02)


@functools.cache
def _parents() -> tuple[Path, ...]:
    """Return our own control groups that can limit something."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        folder = _GROUPS / names / path.lstrip("/")
        allowed = folder / "cgroup.subtree_control"  # of version 2
        if names in ("memory", "pids", "cpu") or (
            not names and allowed.exists() and "memory" in allowed.read_text().split()
        ):
            found.append(folder)
    # Those of graders that were killed.
    for folder in (one for parent in found for one in parent.glob("labsupport-*-*")):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
    return tuple(found)
