"""Run a program so that it lives as without us: its signals, its terminal, its descendants.

Away from a terminal the program has a process group of its own, and signals are passed on to the
group. At a terminal it stays in ours, as only the group in the foreground may read the keyboard;
the terminal itself then sends Control-C to everybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

import psutil

from labsupport.profiling.monitoring.processes import ProcessTree
from labsupport.profiling.monitoring.sampler import maxrss_bytes

TERM_S = 5.0  # from SIGTERM to SIGKILL
PASSED_ON = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)


class Child:
    """A program that runs, and what came of it: `status` and `maxrss` (bytes) when it has ended.

    `streams` gives its "stdout" and "stderr" another file descriptor than ours.
    """

    def __init__(
        self,
        command: list[str],
        tree: ProcessTree,
        signals: Signals,
        grace: float,
        streams: dict[str, int] | None = None,
    ) -> None:
        self._tree, self._signals, self._grace = tree, signals, grace
        self._own_group = not _has_terminal()
        self._interrupts = 0
        self._deadline: float | None = None
        self._terminated = False
        self.status: int | None = None
        self.maxrss = 0
        streams = streams or {}
        self._process = subprocess.Popen(
            command,
            process_group=0 if self._own_group else None,
            stdout=streams.get("stdout"),
            stderr=streams.get("stderr"),
        )

    def wait_until(self, moment: float) -> None:
        """Return at `moment` (time.perf_counter), or as soon as the program has ended."""
        while self.status is None:
            left = moment - time.perf_counter()
            for number in self._signals.wait(max(0.0, left)):
                self._handle(number)
            self._reap()
            self._enforce()
            if left <= 0:
                return

    def end_all(self) -> list[str]:
        """End whatever the program has left running; returns what that was."""
        left = self._tree.descendants()
        names = [_describe(process) for process in left]
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.perf_counter() + TERM_S
            self._send(number, self._tree.descendants())
            while self._tree.descendants() and time.perf_counter() < deadline:
                self._signals.wait(0.02)
                self._reap()
        self._reap()
        return names

    def _handle(self, number: int) -> None:
        if number not in PASSED_ON:
            return
        self._interrupts += 1
        name = signal.Signals(number).name
        if self._interrupts >= 3:
            say(f"{name} for the third time: the command is ended")
            self._send(signal.SIGKILL, self._tree.descendants())
            return
        if not (number in FROM_KEYBOARD and not self._own_group and _in_foreground()):
            self._pass_on(number)
        if self._deadline is None:
            self._deadline = time.perf_counter() + self._grace
            say(f"{name}: the command has it too, and {self._grace:g} s to end")

    def _enforce(self) -> None:
        """After the time of grace: SIGTERM, then SIGKILL."""
        if self.status is not None or self._deadline is None:
            return
        if time.perf_counter() >= self._deadline:
            number = signal.SIGKILL if self._terminated else signal.SIGTERM
            self._send(number, self._tree.descendants())
            self._terminated = True
            self._deadline = time.perf_counter() + TERM_S

    def _pass_on(self, number: int) -> None:
        if self._own_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        else:
            self._send(number, self._tree.descendants())

    def _send(self, number: int, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _reap(self) -> None:
        """Collect what has ended: the program, and orphans of its that became ours."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._process.pid:
                self.status = status
                self.maxrss = maxrss_bytes(usage.ru_maxrss, sys.platform)
                self._process.returncode = os.waitstatus_to_exitcode(status)


class Signals:
    """Collects the signals that this process gets, and wakes whoever waits for them.

    What was ignored before (as by nohup) stays ignored, here and in the command.
    """

    def __enter__(self) -> Signals:
        self._receive, self._send = socket.socketpair()
        self._receive.setblocking(False)
        self._send.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
        self._old = {
            number: signal.signal(number, _nothing)
            for number in (*PASSED_ON, signal.SIGCHLD)
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._receive.close()
        self._send.close()

    def wait(self, seconds: float) -> bytes:
        """The numbers of the signals that came, at once if any; empty after `seconds`."""
        ready, _, _ = select.select([self._receive], [], [], seconds)
        return self._receive.recv(4096) if ready else b""


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler: with one, Python passes the number on to the wake-up socket."""


def adopt_orphans() -> None:
    """Let processes of the command whose parents have ended become children of this one (Linux)."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({process.pid})"
    except psutil.Error:
        return str(process.pid)


def say(text: str) -> None:
    """Say something beside the program's own output."""
    # A reader of stderr that has gone away must not end the watch.
    with contextlib.suppress(OSError):
        print(f"labsupport monitor: {text}", file=sys.stderr, flush=True)
