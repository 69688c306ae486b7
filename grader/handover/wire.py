"""Frames over a socket, and what both ends agree on about a call's arguments."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from grader.handover.codec import HandoverError, encode, frame_sizes

ASK_LIMIT = 2**30  # bytes of tensors that the grader may send


def send(connection: socket.socket, frame: list[Any]) -> None:
    """Send the buffers of a frame."""
    for part in frame:
        connection.sendall(part)


def receive(connection: socket.socket, *, limit: int, deadline: float | None = None) -> bytearray:
    """One whole frame.

    Args:
        limit: bytes that a frame may have.
        deadline: by time.monotonic(); None waits for ever.

    Raises:
        HandoverError: it is no frame, or too large.
        EOFError: the other end is gone.
        TimeoutError: it did not arrive whole in time.
    """
    start = bytearray(12)
    _fill(connection, memoryview(start), deadline)
    size = frame_sizes(bytes(start))
    if size > limit:
        raise HandoverError("a frame that is too large")
    frame = bytearray(size)
    frame[:12] = start
    _fill(connection, memoryview(frame)[12:], deadline)
    return frame


def _fill(connection: socket.socket, space: memoryview, deadline: float | None) -> None:
    while space.nbytes:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        got = connection.recv_into(space)
        if not got:
            raise EOFError("the other end is gone")
        space = space[got:]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts, in the order in which a frame holds them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def digest(value: Any) -> bytes:
    """Of everything that is handed over of a value: two are equal if nothing was changed."""
    made = hashlib.blake2b()
    for part in encode(value, limit=ASK_LIMIT, compact=False):
        made.update(part)
    return made.digest()
