"""What do GPU and machine do now?  `labsupport monitor --live`: a view that renews itself.

In a terminal the view stands still and its figures change; elsewhere each refresh is a block of
lines. While a program runs under it, the view goes to stderr, and what the program says to the
terminal is passed on above it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from labsupport.profiling.monitoring.child import PASSED_ON, Signals
from labsupport.profiling.monitoring.gpu_state import Gpus, GpuState, open_gpus
from labsupport.profiling.monitoring.sampler import SHORTEST_INTERVAL_S
from labsupport.profiling.monitoring.view import Moment, as_table, plain_lines, read_machine

if TYPE_CHECKING:
    from rich.live import Live

LIVE_INTERVAL_S = 1.0
FIRST_LOOK_S = 0.1  # CPU use is counted between two moments: the first refresh waits for it


class LiveView:
    """The view: `refresh` renews it, `close` leaves the terminal as it was.

    Args:
        interval: seconds between refreshes, for `due`.
        file: where it goes.

    Raises:
        ValueError: the interval is too short.
    """

    def __init__(self, interval: float = LIVE_INTERVAL_S, file: TextIO | None = None) -> None:
        from rich.console import Console

        if not SHORTEST_INTERVAL_S <= interval < math.inf:
            raise ValueError(
                f"the interval is {interval} s; it must be {SHORTEST_INTERVAL_S} s or more"
            )
        self.interval = interval
        self.console = Console(file=file or sys.stdout, highlight=False)
        self._gpus: Gpus | None = None
        self._live: Live | None = None
        self._last_words = ""
        self._readers: list[threading.Thread] = []
        read_machine()
        self._next = time.perf_counter() + FIRST_LOOK_S

    def __enter__(self) -> LiveView:
        self.open()
        return self

    def open(self) -> None:
        """Take the terminal, if there is one."""
        if self.console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the view; its last state stays on the screen, and the cursor is back."""
        for reader in self._readers:
            reader.join(timeout=1.0)
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None

    def refresh_if_due(self) -> None:
        """Refresh once an interval, however often this is called."""
        if time.perf_counter() >= self._next:
            self.refresh()

    def refresh(self) -> None:
        """Read everything once, and show it."""
        now = time.perf_counter()
        self._next = now + self.interval
        gpus, trouble = self._read_gpus()
        moment = Moment(datetime.datetime.now().astimezone(), read_machine(), gpus, trouble)
        if self._live is not None:
            self._live.update(as_table(moment, self.interval, self._last_words), refresh=True)
            return
        self.console.file.write("\n".join(plain_lines(moment)) + "\n")
        self.console.file.flush()

    def pipes(self) -> dict[str, tuple[int, int]]:
        """(read, write) for those of a program's streams that would write across the view."""
        if not self.console.is_terminal:
            return {}
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        return {name: os.pipe() for name, stream in streams.items() if stream.isatty()}

    def pass_on(self, stream: int) -> None:
        """Show what comes out of a pipe above the view; a progress bar's last state in it."""
        reader = threading.Thread(target=self._pass_on, args=(stream,), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read_gpus(self) -> tuple[list[GpuState], str]:
        try:
            self._gpus = self._gpus or open_gpus()
            return (self._gpus.read(), "") if self._gpus else ([], "")
        except Exception as error:  # one interval's failure is not the end: it is opened anew
            if self._gpus is not None:
                with contextlib.suppress(Exception):
                    self._gpus.close()
                self._gpus = None
            return [], str(error) or type(error).__name__

    def _pass_on(self, stream: int) -> None:
        from rich.text import Text

        rest = b""
        with os.fdopen(stream, "rb", buffering=0) as file:
            while chunk := file.read(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
                    self.console.print(Text.from_ansi(shown), soft_wrap=True)
                self._last_words = rest.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if rest:
            self.console.print(Text.from_ansi(rest.decode(errors="replace")), soft_wrap=True)
        self._last_words = ""


def watch(interval: float = LIVE_INTERVAL_S, count: int | None = None) -> int:
    """Show GPUs and the machine until Control-C, or `count` times.

    Returns:
        0 after Control-C or the last refresh; 128 + n if another signal ended it.

    Raises:
        ValueError: the interval is too short, or the count below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"--count is {count}; it must be 1 or more")
    with Signals() as signals, LiveView(interval) as view:
        began, shown = time.perf_counter() + FIRST_LOOK_S, 0
        ended_by = _wait_until(began, signals)
        while ended_by is None:
            try:
                view.refresh()
            except BrokenPipeError:  # as of `... | head`
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115  Python flushes it at its end
                return 0
            shown += 1
            if shown == count:
                return 0
            # The grid is fixed, so that delays do not add up.
            ended_by = _wait_until(began + shown * interval, signals)
    return 0 if ended_by == signal.SIGINT else 128 + ended_by


def _wait_until(moment: float, signals: Signals) -> int | None:
    """The signal that ends the view, at once if it has come already; None after the wait."""
    while True:
        left = moment - time.perf_counter()
        for number in signals.wait(max(0.0, left)):
            if number in PASSED_ON:
                return number
        if left <= 0:
            return None
