"""What this system lets us do to keep a submission in its place; the plan for `jail.py`."""

import functools
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader.grade.settings import Settings

JAIL = Path(__file__).with_name("jail.py")
# A user that owns nothing. Each grading process has one of its own, so that limits and signals of
# one submission do not reach another.
FIRST_UID, UIDS = 64_000, 500
# Of the system, as far as they exist. The interpreter's own folders are added.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/nix/store")
PREFIX = "labsupport-grade-"
# What to do where nothing would hold submissions back, by whom they would run as.
_INSTEAD = {
    "root": "Install the environment where all users can read it",
    "you": "Let your user make namespaces (GRADING.md says how), or grade with sudo",
}
_CPUS = "/sys/devices/system"
# What a kernel, pytest and PyTorch start by themselves.
_THREADS_BESIDE = 96


@dataclass(frozen=True)
class Confinement:
    """How submissions are confined here.

    Attributes:
        namespaces: own file system, own processes, no network.
        uid: the user that they run as; None: as ourselves.
        missing: what is not kept from them, a sentence each, for the instructor.
    """

    namespaces: bool
    uid: int | None
    missing: tuple[str, ...] = ()


def new_folder() -> Path:
    """A new temporary folder, named after this process; others may pass through it, not list it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
    folder.chmod(0o711)
    return folder


def prepare_folder() -> Path:
    """A new folder for one run."""
    folder = new_folder()
    (folder / "given").mkdir(mode=0o755)
    (folder / "root").mkdir(mode=0o755)
    return folder


def write_plan(
    folder: Path,
    command: list[str],
    notebook: Path,
    package: Path,
    settings: Settings,
    confinement: Confinement,
) -> Path:
    """Write what `jail.py` shall do, and return the file.

    Args:
        folder: of this run, from `prepare_folder`.
        command: absolute path of the program, and its arguments.
        notebook: is copied into the folder `run`, where the program starts.
        package: the folder that holds the `labsupport` which the program imports.
        settings: limits.
        confinement: from `confinement_here`.
    """
    run = folder / "run"
    plan: dict[str, Any] = {
        "parent": os.getpid(),
        "command": command,
        "env": _environment(run, package, settings),
        "notebook": str(notebook),
        "run": str(run),
        "home": str(run / "home"),
        "root": str(folder / "root"),
        "readable": _readable(folder, package),
        "uid": confinement.uid,
        "namespaces": confinement.namespaces,
        "network": settings.network,
        "folder_bytes": settings.folder_bytes,
        "limits": _limits(settings, confinement),
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def _environment(run: Path, package: Path, settings: Settings) -> dict[str, str]:
    """Nothing of the instructor's own: tokens and passwords stand in environments."""
    threads = str(settings.threads)
    folders = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    env = {
        "PATH": os.pathsep.join(folders),
        "HOME": str(run / "home"),
        "TMPDIR": str(run / "home"),
        "LABSUPPORT_CACHE": str(run / "home" / "cache"),
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        # Grading is the same on every machine: on the CPU, Triton interpreted.
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
    }
    kept = ("LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV", "CONDA_PREFIX")
    return env | {name: os.environ[name] for name in kept if name in os.environ}


def _readable(folder: Path, package: Path) -> list[str]:
    """What a program sees of the file system, in the order in which it has to be mounted."""
    project = Path(__file__).resolve().parents[2]
    wanted = [Path(path) for path in _SYSTEM]
    wanted += [Path(_CPUS), folder / "given", package]
    # Not sys.path: a folder on PYTHONPATH may hold anything.
    packages = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages += site.getsitepackages()
    for path in (sys.prefix, sys.base_prefix, sys.exec_prefix, *packages):
        # An editable installation puts the project itself on the path: it holds the solutions.
        if path and os.path.isdir(path) and Path(path).resolve() != project:
            wanted.append(Path(path))
            wanted.append(Path(path).resolve())
    wanted += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    kept: list[str] = []
    for path in sorted({str(path.absolute()) for path in wanted if path.exists()}):
        # A folder that holds the project (such as a home) would show it.
        holds_project = project.is_relative_to(path)
        if not holds_project and not any(
            Path(path).is_relative_to(one) and not os.path.islink(one) for one in kept
        ):
            kept.append(path)
    return kept


def _limits(settings: Settings, confinement: Confinement) -> dict[str, int]:
    limits = {
        "CORE": 0,
        "FSIZE": settings.folder_bytes,
        "CPU": int(settings.notebook_timeout_s * max(1, settings.threads)) + 60,
        "NOFILE": 2048,
        "DATA": settings.memory_bytes + 2 * 2**30,
        "MSGQUEUE": 0,
    }
    threads = settings.processes * 4 + _THREADS_BESIDE
    if confinement.uid is not None:
        limits["NPROC"] = threads
    elif os.getuid() != 0:
        # Counted for the user, over all that they run.
        limits["NPROC"] = threads + _threads_of(os.getuid())
    return limits


def _threads_of(uid: int) -> int:
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return total


def _own_uid() -> int | None:
    """A free one, by the process that grades; None where we are not root."""
    return FIRST_UID + os.getpid() % UIDS if os.getuid() == 0 else None


def _works(confinement: Confinement, settings: Settings) -> str:
    """Try it: "" if the programs that grading needs start, else what went wrong."""
    folder = prepare_folder()
    try:
        notebook = folder / "given" / "nothing.ipynb"
        notebook.write_text("")
        package = Path(__file__).parent
        code = "import sqlite3, pytest, nbval, ipykernel, zmq; print('works')"
        command = [sys.executable, "-c", code]
        plan = write_plan(folder, command, notebook, package, settings, confinement)
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(JAIL), str(plan)],
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if done.returncode == 0 and "works" in done.stdout:
            return ""
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        remove_folder(folder)


def remove_stale() -> None:
    """Delete the folders of runs whose grading process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).split("-")[0]
        try:
            ours = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
        except OSError:
            continue
        if ours and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Delete a run's folder, also what its owner made unreadable."""
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        for path, _, _ in os.walk(folder):
            if not os.path.islink(path):
                os.chmod(path, 0o700)


@functools.cache
def _probe(settings: Settings) -> Confinement:
    uid = _own_uid() if settings.unprivileged else None
    attempts = [Confinement(True, uid)]
    if uid is not None:
        attempts += [Confinement(False, uid, ("files", "network"))]
    attempts += [Confinement(False, None, ("files", "network"))]
    reasons = []
    for attempt in attempts:
        reason = _works(attempt, settings)
        if not reason:
            break
        reasons.append(reason)
    else:
        raise RuntimeError(
            "no submission can be run here, because pytest, nbval and ipykernel do not start: "
            f"{reasons[-1]}. Install them: pip install 'labsupport[notebook]'"
        )
    missing = []
    if not attempt.namespaces:
        what = "see files that any user may read"
        if attempt.uid is None:
            what = "read, change and delete your files, and end your programs"
        network = "" if settings.network else "use the network, and "
        missing.append(
            f"Submissions can {network}{what}: this system lets us make no namespaces "
            f"({reasons[0]})."
        )
    if os.getuid() == 0 and attempt.uid is None:
        missing.append("Submissions run as root: another user cannot start this Python.")
    return Confinement(attempt.namespaces, attempt.uid, tuple(missing))


def confinement_here(settings: Settings) -> Confinement:
    """The best that works on this system; tried once in a process.

    Raises:
        RuntimeError: not even an unconfined program starts, this is not Linux, or nothing would
            hold submissions back, unasked.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            "submissions are graded on Linux only: elsewhere nothing would hold them back. "
            "Use WSL on Windows, a container or a virtual machine on macOS"
        )
    # Only what the attempt depends on, so that it is not made again for each time limit.
    here = _probe(Settings(network=settings.network, unprivileged=settings.unprivileged))
    refuse_unconfined(here, settings)
    return here


def refuse_unconfined(here: Confinement, settings: Settings) -> None:
    """Raise if submissions would have all rights of who grades although that was not asked for.

    Raises:
        RuntimeError: says what to do.
    """
    if os.getuid() == 0:
        who, held = "root", here.uid is not None or not settings.unprivileged
    else:
        who, held = "you", here.namespaces
    if not held and not settings.unconfined:
        raise RuntimeError(
            f"submissions would run as {who}. {' '.join(here.missing)} {_INSTEAD[who]}; in a "
            "machine that is thrown away afterwards, --unconfined grades all the same"
        )
