"""One run of an assembled notebook by nbval, confined and watched."""

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from grader.grade import processes
from grader.grade.confinement import (
    JAIL,
    confinement_here,
    prepare_folder,
    remove_folder,
    write_plan,
)
from grader.grade.settings import Settings

NOTEBOOK = "submission.ipynb"
WATCH_INTERVAL_S = 0.1
START_TIMEOUT_S = 90.0
_LOG_BYTES = 20_000
# `python -m pytest`, but nbformat's schema checker would build a grammar of web addresses first,
# which takes longer than all the rest of the start. It does without it where it is not installed.
_PYTEST = "import sys; sys.modules['rfc3987_syntax'] = None; import pytest; sys.exit(pytest.main())"


class NotStarted(RuntimeError):
    """The kernel did not come up: the machine's fault, since nothing of the student's has run."""


class NotServing(RuntimeError):
    """The notebook ended, or took too long, before its last cell asked for work."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Sandbox:
    """A running notebook; leaving the `with` block ends it, and everything that it started.

    Attributes:
        reason: why the watchdog ended it; "" if it did not.
        peak_memory_bytes: of all its processes together, sampled.
    """

    def __init__(self, exercises: int, package: Path, settings: Settings) -> None:
        """Prepare a run.

        Args:
            exercises: how many times the notebook will ask for work, each time at a socket of its
                own (`sockets`), after it said at another one (`started`) that it begins.
            package: the folder that holds the `labsupport` that it imports.
            settings: limits.
        """
        self.settings, self._package = settings, package
        self.reason, self.peak_memory_bytes = "", 0
        self.confinement = confinement_here(settings)
        self.folder = prepare_folder()
        self._process: subprocess.Popen[bytes] | None = None
        self.started = str(self.folder / "given" / "started.sock")
        self.sockets = [str(self.folder / "given" / f"{n}.sock") for n in range(exercises)]
        self._listeners: list[socket.socket] = []
        self._known: dict[int, int] = {}
        self._kernel: int | None = None
        self._over = threading.Event()
        self._log = bytearray()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def start(self, text: str) -> float:
        """Start the notebook, and wait until its kernel is about to run the student's cells.

        Args:
            text: the assembled notebook, a file's text.

        Returns:
            the seconds that took.

        Raises:
            NotStarted: it took too long, or ended before.
        """
        begun = time.monotonic()
        notebook = self.folder / "given" / NOTEBOOK
        notebook.write_text(text, encoding="utf-8")
        for path in (self.started, *self.sockets):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listeners.append(listener)
            listener.bind(path)
            os.chmod(path, 0o666)
            listener.listen(4)
        run = self.folder / "run"
        limit = str(self.settings.notebook_timeout_s * 2)
        command = [sys.executable, "-c", _PYTEST, "--nbval-lax", "--nbval-current-env"]
        command += ["-p", "nbval.plugin", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["--noconftest", f"--rootdir={run}", "-q", "--tb=line", "--color=no"]
        command += [f"--nbval-cell-timeout={limit}", str(run / NOTEBOOK)]
        if self.confinement.uid is not None and not self.confinement.namespaces:
            run.mkdir()
            os.chown(run, self.confinement.uid, self.confinement.uid)
        plan = write_plan(
            self.folder, command, notebook, self._package, self.settings, self.confinement
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL), str(plan)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for work in (self._watch, self._read_log):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            self._accept(self._listeners[0], START_TIMEOUT_S).close()
        except NotServing as problem:
            raise NotStarted(f"the kernel did not start: {problem}") from None
        return time.monotonic() - begun

    def connect(self, index: int, timeout_s: float) -> socket.socket:
        """Wait until the notebook asks for work.

        Args:
            index: which socket.
            timeout_s: for the cells before it.

        Raises:
            NotServing: with `status` "died" or "timeout".
        """
        return self._accept(self._listeners[1 + index], timeout_s)

    def _accept(self, listener: socket.socket, timeout_s: float) -> socket.socket:
        assert self._process is not None
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if select.select([listener], [], [], 0.05)[0]:
                connection, _ = listener.accept()
                if self._is_ours(connection):
                    return connection
                connection.close()
            if self.reason or self._process.poll() is not None:
                self._process.wait()
                raise NotServing("died", self.reason or "its process ended before it was asked")
        raise NotServing("timeout", "its cells took too long")

    def _is_ours(self, connection: socket.socket) -> bool:
        """Whether it is from a process of this run, not from another submission's."""
        assert self._process is not None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("iII", credentials)[0]
        return pid in processes.descendants(self._process.pid)

    @property
    def log(self) -> str:
        """The end of what pytest printed. It may hold anything that the student wrote."""
        return self._log.decode("utf-8", "replace")

    def settle(self) -> str:
        """After a connection broke: give the watchdog a moment to say whether it was the cause."""
        assert self._process is not None
        end = time.monotonic() + 3 * WATCH_INTERVAL_S
        while not self.reason and time.monotonic() < end:
            time.sleep(0.02)
        return self.reason

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:
            self._over.set()
            for listener in self._listeners:
                listener.close()
            for thread in self._threads:
                thread.join(timeout=5)
            remove_folder(self.folder)

    def _end(self) -> None:
        """End the jail, which ends the rest, and make sure."""
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            processes.kill_below(process.pid)
            process.kill()
            process.wait()
        # Only where a submission killed the jail itself is anything left here.
        processes.kill_known(self._known)
        if process.stdout is not None and not self._threads:
            process.stdout.close()

    def _watch(self) -> None:
        process, settings = self._process, self.settings
        assert process is not None
        started, round_ = time.monotonic(), 0
        while not self._over.wait(WATCH_INTERVAL_S):
            living = processes.descendants(process.pid)
            for pid in living:
                if pid not in self._known and (begun := processes.start_time(pid)) is not None:
                    self._known[pid] = begun
            if self._kernel is None:
                self._kernel = next((pid for pid in living if _is_kernel(pid)), None)
            used = sum(living.values())
            self.peak_memory_bytes = max(self.peak_memory_bytes, used)
            round_ += 1
            if used > settings.memory_bytes:
                reason = f"it used more than {settings.memory_bytes / 2**30:.1f} GiB of memory"
            # The jail, its first process, pytest and the kernel are not the student's.
            elif len(living) > settings.processes + 4:
                reason = f"it started more than {settings.processes} processes"
            elif self._kernel is not None and self._kernel not in living:
                # nbval would wait for its answer until the last second.
                reason = "its process ended"
            elif time.monotonic() - started > START_TIMEOUT_S + settings.notebook_timeout_s:
                reason = f"it ran longer than {settings.notebook_timeout_s:g} s"
            elif (
                not self.confinement.namespaces
                and round_ % 5 == 0
                and processes.folder_bytes(str(self.folder), settings.folder_bytes)
                > settings.folder_bytes
            ):
                reason = f"it wrote more than {settings.folder_bytes / 2**20:.0f} MiB"
            else:
                continue
            self.reason = reason
            process.send_signal(signal.SIGTERM)
            return

    def _read_log(self) -> None:
        """Drain the pipe, so that nobody waits for us, and keep its end only."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while chunk := os.read(stream.fileno(), 65536):
                self._log += chunk
                if len(self._log) > 2 * _LOG_BYTES:
                    del self._log[:-_LOG_BYTES]


def _is_kernel(pid: int) -> bool:
    try:
        return b"ipykernel" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
