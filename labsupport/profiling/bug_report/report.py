"""What does a bug report need?  One Markdown file, without anything private.

`labsupport doctor --report FILE` writes it: versions, system, GPU, what `doctor` found, which
attention runs here and why the rest does not, which kernel ran, a self-test, the end of a log. The
part that needs PyTorch is a program of its own (`attention`), so that a broken PyTorch ends up in
the report instead of ending it. The whole text goes through `scrub` before it is written.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from labsupport import __version__
from labsupport.profiling.bug_report.scrub import SECRET, Scrubber
from labsupport.profiling.provenance import PACKAGES, git_commit, gpu_state, package_version

ATTENTION_SECONDS = 180.0
LOG_LINES = 200
LOG_BYTES = 2**20
LINE_CHARACTERS = 2000

MORE_PACKAGES = (
    "tokenizers", "safetensors", "accelerate", "gguf", "pandas", "matplotlib", "psutil",
    "nvidia-ml-py", "typer", "jupyterlab", "ipykernel", "nbgrader",
)  # fmt: skip
# Switches that change what is computed, and how. No other variable is read into the report.
SWITCHES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "LABSUPPORT_ATTENTION", "MKL_NUM_THREADS",
    "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET",
)  # fmt: skip
BEFORE_POSTING = (
    "Read the file once, from start to end: it becomes public.",
    "Home folders, the names of user and machine, e-mail addresses and what looks like a token "
    "were replaced. What no rule can know was not: names of colleagues, projects, customers and "
    "internal servers, IP addresses, text of your own data in a log.",
    "Add what no program can know: what you ran, what you expected, what happened instead.",
)


def write_report(path: Path, log: Path | None = None) -> Path:
    """Collect everything, and write it to `path`.

    Args:
        path: a file that does not exist yet; Markdown.
        log: a file whose last 200 lines are added.

    Returns:
        `path`.

    Raises:
        FileExistsError: `path` exists; nothing is overwritten.
        FileNotFoundError: its folder, or the log, does not exist.
        OSError: a file cannot be read or written.
    """
    _refuse_existing(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    if log is not None:
        log_tail(log)  # before the half minute that the rest takes
    save_new(path, collect(log))
    return path


def save_new(path: Path, text: str) -> None:
    """Write a new file: the whole of it or, on a full disk, nothing.

    Raises:
        FileExistsError: `path` exists.
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        _refuse_existing(path)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FileExistsError(
            f"{path} exists, and a report overwrites nothing: choose another name"
        )


def collect(log: Path | None = None) -> str:
    """The report's text, scrubbed."""
    parts = [
        f"# labsupport {__version__}: report for a bug\n\n"
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit "
        f"{git_commit() or 'unknown (no git checkout)'}",
        _section("System", _system),
        _section("GPU, as the driver says it", _gpu),
        _section("Packages", _packages),
        _section("Doctor", _doctor),
        _attention(),
    ]
    if log is not None:
        parts.append(_section(f"End of the log {log.name}", lambda: log_tail(log)))
    checks = "\n".join(f"- {line}" for line in BEFORE_POSTING)
    parts.append(f"## Before you post this\n\n{checks}")
    return Scrubber().scrub("\n\n".join(parts)) + "\n"


def log_tail(path: Path) -> str:
    """The last 200 lines of a log, scrubbed, of progress bars the last state only.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    # A key whose beginning lies further up.
    text = re.sub(r"\A(?:(?!-----BEGIN).)*-----END [A-Z ]*KEY-----", SECRET, text, flags=re.DOTALL)
    lines = Scrubber().scrub(text.replace("\r\n", "\n")).split("\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(line[:LINE_CHARACTERS] for line in lines[-LOG_LINES:])


def _section(title: str, content: Callable[[], str]) -> str:
    """A section; if its content fails, the error is the content."""
    try:
        text = content()
    except Exception:
        text = traceback.format_exc()
    # Longer than any fence in a log.
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"## {title}\n\n{fence}text\n{text.rstrip()}\n{fence}"


def _system() -> str:
    import psutil

    from labsupport.profiling.hardware import cpu_name
    from labsupport.profiling.monitoring.processes import memory_limit

    memory = psutil.virtual_memory()
    limit, what = memory_limit()
    lines = [
        f"system   {_distribution()}, {platform.platform()}",
        f"python   {sys.version.split()[0]} ({platform.python_implementation()}), {sys.executable}",
        f"venv     {'yes' if sys.prefix != sys.base_prefix else 'no'}, "
        f"conda {'yes' if os.path.isdir(os.path.join(sys.prefix, 'conda-meta')) else 'no'}",
        f"cpu      {cpu_name()}, {os.cpu_count()} logical cores",
        f"memory   {memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f} GiB",
        f"limit    {limit / 2**30:.1f} GiB ({what})",
    ]
    lines += [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
    return "\n".join(lines)


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system()


def _gpu() -> str:
    from labsupport.profiling.environment import nvidia_driver
    from labsupport.profiling.monitoring.gpu import open_gpu

    lines = []
    while (gpu := open_gpu(index := len(lines))) is not None:
        lines.append(
            f"GPU {index}: {gpu.name}, {gpu.total_bytes / 2**30:.1f} GiB, driver {gpu.driver}, "
            f"which takes CUDA up to {gpu.cuda}; {gpu_state(index)}"
        )
        gpu.close()
    if lines:
        return "\n".join(lines)
    trace = nvidia_driver()
    return (
        f"none that NVML sees; an NVIDIA driver: {f'traces in {trace}' if trace else 'none found'}"
    )


def _packages() -> str:
    names = dict.fromkeys((*PACKAGES, *MORE_PACKAGES))
    found = importlib.metadata.distributions()
    cuda = sorted({str(one.name) for one in found if str(one.name).startswith("nvidia-")})
    names |= dict.fromkeys(cuda)
    width = max(map(len, names))
    return "\n".join(
        f"{name:{width}}  {package_version(name) or 'not installed'}" for name in names
    )


def _doctor() -> str:
    from labsupport.profiling.environment import diagnose

    return "\n".join(map(str, diagnose(quick=True)))


def _attention(seconds: float = ATTENTION_SECONDS) -> str:
    """What `attention` prints, and how it ended if not well."""
    module = "labsupport.profiling.bug_report.attention"
    with tempfile.TemporaryFile() as file:
        # Its own session: what it started (compilers) can be ended with it.
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", module],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=seconds)
            ending = _ending(status)
        except subprocess.TimeoutExpired:
            ending = f"It did not end within {seconds:g} s, and was ended."
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        file.seek(0)
        printed = file.read().decode("utf-8", errors="replace").strip()
    if ending and printed.count("```") % 2:
        printed += "\n```"
    return "\n\n".join(filter(None, [printed, f"**{ending}**" if ending else ""]))


def _ending(status: int) -> str:
    if status < 0:
        return f"It was ended by signal {-status} ({signal.Signals(-status).name})."
    return f"It ended with status {status}." if status else ""
