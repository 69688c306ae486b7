"""Signals: the exit status after Control-C, and SIGTERM as a request to stop soon."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STATUS = 130
"""The exit status of a program that SIGINT ended: 128 and the signal's number."""


def interrupted_status() -> int:
    """`STATUS`, for a program that caught the KeyboardInterrupt and now ends normally.

    CPython (3.8 to 3.13, tried) remembers an interrupt that strikes inside `exec` of a text, even
    if it is caught; dataclasses are made with such a call, so that many an import can be struck.
    Started as `python -m`, the program would then kill itself with SIGINT at its end, with any
    exit status. Another `exec` of a text makes CPython forget.
    """
    exec("")
    return STATUS


@contextmanager
def sigterm_noted() -> Iterator[Callable[[], bool]]:
    """Record SIGTERM instead of dying from it; yield a function that tells if it has come.

    For the main thread. Schedulers send SIGTERM some time before they take a machine away.
    """
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)
