"""Everything that a bug report needs, in one Markdown file: `labsupport doctor --report FILE`.

System and versions are those of `python -m torch.utils.collect_env`; the lab adds what its doctor
says, which attention runs here and why the rest does not, which kernel ran, how right it is, and
the end of a log. Nothing is taken out: read the file before you post it.

`python -m labsupport.profiling.bug_report` prints the part that needs PyTorch. It is a program of
its own: should PyTorch, a driver or a kernel crash or hang, the report says so.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

from labsupport import __version__
from labsupport.paths import project_root
from labsupport.profiling.environment import diagnose
from labsupport.profiling.provenance import git_commit

SECONDS = 180.0
LOG_LINES = 200
BEFORE_POSTING = (
    "Read it before you post it: it becomes public. It holds paths of this machine and, with "
    "--log, everything your program printed; take out names and secrets.\n"
    "Add what no program can know: what you ran, what you expected, what happened instead."
)


def write_report(path: Path, log: Path | None = None) -> None:
    """Collect everything, and write it to `path`; takes half a minute.

    Args:
        path: a Markdown file that does not exist yet.
        log: a file whose last 200 lines are added.

    Raises:
        FileExistsError: `path` exists; nothing is overwritten.
        OSError: a file cannot be read or written.
    """
    tail = ""
    if log is not None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-LOG_LINES:])
    with path.open("x", encoding="utf-8") as file:
        when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        file.write(f"# labsupport {__version__}: bug report\n\n{BEFORE_POSTING}\n\n")
        file.write(f"{when}, commit {git_commit() or 'unknown'}\n")
        for title, text in (
            ("Doctor", "\n".join(map(str, diagnose(quick=True)))),
            ("System and versions", _run("torch.utils.collect_env")),
            ("Attention", _run(__name__)),
            *([(f"End of {log.name}", tail)] if log is not None else []),
        ):
            file.write(f"\n## {title}\n\n````text\n{text.strip()}\n````\n")


def _run(module: str) -> str:
    """Run a module as a program; return its output, and its status if it failed."""
    command = [sys.executable, "-X", "faulthandler", "-m", module]
    try:
        done = subprocess.run(
            command,
            cwd=project_root(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")
        return f"{printed}\n{module} did not end within {SECONDS:g} s"
    return done.stdout + (f"\n{module}: status {done.returncode}" if done.returncode else "")


def main() -> None:
    """Print which attention runs here, which kernel ran for each dtype, and the errors."""
    import torch

    from labsupport.attention.backends import attention, available_backends, last_call
    from labsupport.profiling.benchmark import errors_by_dtype
    from labsupport.profiling.environment import check_device
    from labsupport.profiling.timing import resolve_device

    print(*check_device(), "", available_backends(), "", sep="\n", flush=True)
    device = resolve_device(None)
    dtypes = ("float32", "float16", "bfloat16")
    for dtype in dtypes:
        q = torch.ones(1, 64, 2, 64, device=device, dtype=getattr(torch, dtype))
        attention(q, q, q, causal=True)
        print(f"{dtype}, causal: {last_call()}", flush=True)
    runs = [state.name for state in available_backends(device=device) if state.runs]
    # On a CPU, FlexAttention's first call runs a C++ compiler for longer than all of this.
    runs = [name for name in runs if name != "flex" or device.type == "cuda"]
    table = errors_by_dtype(runs, dtypes, seqlen=128, device=device)
    verdict = f"all {len(table)} within the allowed error" if table["ok"].all() else "WRONG RESULTS"
    print(f"\n{table.to_string(index=False)}\n\nself-test: {verdict}")


if __name__ == "__main__":
    main()
