"""One process of a launched run: started, asked how it is, ended."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 2.0  # seconds between asking a process to end and ending it


@dataclass(frozen=True)
class Failure:
    """How one rank ended that should not have.

    what: one line. traceback: Python's, or "". at: seconds of the monotonic clock. lost: it says
    that other ranks are gone or did not come, so that the cause is theirs.
    """

    rank: int
    what: str
    traceback: str
    at: float
    lost: bool


@dataclass
class Worker:
    """A process that runs worker.py as one rank, and the files it leaves in the run's folder."""

    rank: int
    folder: Path
    process: subprocess.Popen[bytes]
    ended_at: float | None = None

    @classmethod
    def start(cls, rank: int, folder: Path, environment: dict[str, str]) -> Worker:
        """Start a process, in a process group of its own: a Ctrl-C in the terminal passes it by.

        It is the launcher that ends the processes, with whatever these have started in turn.
        """
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), folder, str(os.getpid())],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(rank, folder, process)

    @property
    def finished(self) -> bool:
        """Whether the target has come to its end."""
        return (self.folder / f"result-{self.rank}.pickle").exists()

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        if self.process.poll() is None:
            return True
        if self.ended_at is None:
            self.ended_at = time.monotonic()
        return False

    def result(self) -> Any:
        """What the function returned."""
        return pickle.loads((self.folder / f"result-{self.rank}.pickle").read_bytes())

    def failure(self) -> Failure | None:
        """How it failed, if it did. An exception is known before its process has ended."""
        running = self.running  # before the files: an ended process writes no more
        report = self.folder / f"error-{self.rank}.json"
        if report.exists():
            said = json.loads(report.read_text())
            return Failure(self.rank, said["text"], said["traceback"], said["at"], said["lost"])
        code = self.process.returncode
        if running or (self.finished and code == 0):
            return None
        at = self.ended_at or time.monotonic()
        if code < 0:
            known = -code in set(signal.Signals)
            name = signal.Signals(-code).name if known else f"signal {-code}"
            hint = {
                "SIGKILL": " (by somebody, or by the system because memory ran out)",
                "SIGABRT": " (as NCCL does after a collective in which others did not come)",
            }.get(name, "")
            lost = name == "SIGABRT"
            return Failure(self.rank, f"killed by {name}{hint}", "", at, lost)
        return Failure(self.rank, f"ended with exit code {code} before it was done", "", at, False)

    def ask_where(self) -> None:
        """Let it write to its file where it is; `where` reads it a moment later."""
        if self.running and hasattr(signal, "SIGUSR1"):
            self.process.send_signal(signal.SIGUSR1)

    def where(self, *, all_threads: bool = False) -> str:
        """The innermost frames of its main thread, or of all; "" if it gave no answer."""
        path = self.folder / f"stacks-{self.rank}.txt"
        text = path.read_text() if path.exists() else ""
        frames: list[str] = []
        for line in text.splitlines():
            if "most recent call first" in line:
                frames = frames if all_threads else []  # the main thread comes last
            elif line.startswith("  File") and "runpy" not in line and "worker.py" not in line:
                frames.append(line)
        return "\n".join(frames if all_threads else frames[:6])

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and to all that it has started."""
        try:
            if os.name == "posix":
                os.killpg(self.process.pid, number)
            elif self.process.poll() is None:
                self.process.kill()
        except (ProcessLookupError, PermissionError):  # nobody is left (macOS says the latter)
            pass


def end(workers: Sequence[Worker]) -> None:
    """End all processes: politely, then for good. When this returns they are gone."""
    try:
        alive = [worker for worker in workers if worker.running]
        for worker in alive:
            worker.signal_group(signal.SIGTERM)
        limit = time.monotonic() + PATIENCE
        while any(worker.running for worker in alive) and time.monotonic() < limit:
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.signal_group(getattr(signal, "SIGKILL", signal.SIGTERM))
        for worker in workers:
            worker.process.wait()
