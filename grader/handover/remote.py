"""In the grader: a connection to a student's kernel, and functions that are computed there."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from grader.handover.arrivals import (
    exception_of,
    take_over,
    view_of,
    with_gradients,
)
from grader.handover.codec import (
    MAX_BYTES,
    MAX_HEADER,
    HandoverError,
    decode,
    encode,
)
from grader.handover.wire import ASK_LIMIT, receive, send, tensors_in

RUN_UPDATE = "labsupport.attention.kernels.template:run_update"


class SessionDied(BaseException):
    """The student's process is gone, or sent what is no answer.

    No Exception: a check reports those as the student's own.
    """


class SessionTimeout(BaseException):
    """The student's process took too long. No Exception: a check reports those."""


class Session:
    """A connection to a student's process that runs `worker.serve`.

    The grader binds a Unix socket and listens, starts the kernel with the socket's path, accepts
    one connection (with a time limit), and gives it to a Session.

    Args:
        connection: the accepted stream socket.
        timeout_s: for the answer to one call.

    Attributes:
        failure: None, or the SessionDied or SessionTimeout that ended the session: nothing can be
            asked any more.
        deadline: by time.monotonic(), for all calls together; None for none.
        stubs: whether a call met NotImplementedError, the mark of an exercise not written yet.
    """

    def __init__(self, connection: socket.socket, timeout_s: float = 30.0) -> None:
        self.connection, self.timeout_s = connection, timeout_s
        self.failure: SessionDied | SessionTimeout | None = None
        self.deadline: float | None = None
        self.stubs = False
        self._asked = 0
        self._drop: list[int] = []
        self._streams: dict[int, Iterator[Any]] = {}

    @property
    def pid(self) -> int:
        """Of the process at the other end, from the operating system."""
        peer = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.unpack("3i", peer)[0]

    def close(self) -> None:
        """Tell the worker to end `serve` (its cell ends normally), and close the connection."""
        if self.failure is None:
            with contextlib.suppress(OSError):
                self.connection.settimeout(self.timeout_s)
                send(self.connection, self._request("close", "", (), {}))
        self.failure = self.failure or SessionDied("the session was closed")
        self.connection.close()

    def names(self, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What stands under each name over there: {"kind": "missing" | "function" | ...}."""
        found = self._ask("names", "", (list(wanted),), {})["value"]
        if not isinstance(found, dict) or not all(
            isinstance(found.get(name), dict) for name in wanted
        ):
            self._fail(SessionDied("the process sent something that is no answer"))
        return found

    def remote(self, name: str) -> Any:
        """What stands in for the student's object of that name; None if there is none."""
        found = self.names([name])[name]
        kind = found.get("kind")
        if kind == "missing":
            return None
        if kind == "function class":
            return function_class(self, name)
        if kind == "kernel":
            return RemoteKernel(self, name, found.get("stub") is True)
        return RemoteFunction(self, name)

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Call a student's function, such as "merge" or "ChunkedLoss.apply".

        Raises:
            Exception: what the student's function raised, as a class of the same name that derives
                from the nearest built-in one.
            SessionDied, SessionTimeout: nothing came back.
        """
        return self._compute("call", target, args, kwargs)

    def library(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the library over there, "module:function", as `call` does."""
        return self._compute("library", target, args, kwargs)

    def _compute(self, do: str, target: str, args: Any, kwargs: Any) -> Any:
        reply = self._ask(do, target, args, kwargs)
        with self._reading():
            value, graph = reply["value"], reply.get("graph")
            if reply.get("changed") is not None:
                take_over((args, kwargs), reply["changed"])
            if isinstance(graph, int):
                value = with_gradients(self, graph, value, list(tensors_in((args, kwargs))))
        return value

    def backward(self, graph: int, gradients: Sequence[Tensor], wanted: int) -> list[Tensor | None]:
        """Gradients of a call's arguments, given those of its results."""
        given = self._ask("backward", "", (graph, *gradients), {})["value"]
        if not isinstance(given, tuple) or len(given) != wanted:
            self._fail(SessionDied("the process sent something that is no answer"))
        return [one if isinstance(one, Tensor) else None for one in given]

    def drop(self, graph: int) -> None:
        """Say with the next request that a call's backward pass is not wanted any more."""
        self._drop.append(graph)

    # --- one request ------------------------------------------------------------------------------

    def _request(self, do: str, target: str, args: Any, kwargs: Any) -> list[Any]:
        self._asked += 1
        dropped, self._drop = self._drop, []
        request = {
            "id": self._asked,
            "do": do,
            "target": target,
            "args": args,
            "kwargs": kwargs,
            "grad": torch.is_grad_enabled(),
            "drop": dropped,
        }
        return encode(request, refer=self._refer, limit=ASK_LIMIT, compact=False)

    def _refer(self, kind: str, value: Any) -> Any:
        if kind == "object" and isinstance(value, RemoteFunction | RemoteKernel):
            return ["name", value.target]
        if kind == "object" and isinstance(value, type) and hasattr(value, "remote_name"):
            return ["name", value.remote_name]
        if kind == "object" and isinstance(value, Iterator):
            number = len(self._streams)
            self._streams[number] = value
            return ["stream", number]
        return None

    def _ask(self, do: str, target: str, args: Any, kwargs: Any) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        end = time.monotonic() + self.timeout_s
        end = end if self.deadline is None else min(end, self.deadline)
        self._streams = {}
        frame = self._request(do, target, args, kwargs)
        number = self._asked
        arguments = list(tensors_in((args, kwargs)))
        try:
            self._send(frame, end)
            while True:
                reply = self._receive(end, arguments)
                if "next" not in reply:
                    break
                self._send(self._next(reply["next"]), end)
        except TimeoutError:
            self._fail(SessionTimeout("the call took too long"))
        except (EOFError, OSError):
            self._fail(SessionDied("the process ended"))
        except HandoverError as error:
            self._fail(SessionDied(f"the process sent something that is no answer: {error}"))
        if reply.get("id") != number or type(reply.get("id")) is not int:
            self._fail(SessionDied("the process answered another request"))
        if "error" in reply:
            with self._reading():
                raised = exception_of(reply["error"])
            self.stubs |= isinstance(raised, NotImplementedError)
            raise raised
        if "value" not in reply:
            self._fail(SessionDied("the process sent something that is no answer"))
        return reply

    def _send(self, frame: list[Any], end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        send(self.connection, frame)

    def _receive(self, end: float, arguments: list[Tensor]) -> dict[str, Any]:
        limit = MAX_BYTES + MAX_HEADER + 4096
        frame = receive(self.connection, limit=limit, deadline=end)

        def resolve(kind: str, content: Any) -> Any:
            if kind == "view":
                return view_of(content, arguments)
            raise HandoverError("a value of no known kind")

        reply = decode(frame, resolve=resolve)
        if not isinstance(reply, dict):
            raise HandoverError("an answer that is no dict")
        return reply

    def _next(self, number: Any) -> list[Any]:
        stream = self._streams.get(number) if type(number) is int else None
        if stream is None:
            raise HandoverError("no such stream")
        for item in stream:
            return encode({"stop": False, "item": item}, limit=ASK_LIMIT, compact=False)
        return encode({"stop": True})

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except HandoverError as error:
            self._fail(SessionDied(f"the process sent something that is no answer: {error}"))

    def _fail(self, failure: SessionDied | SessionTimeout) -> NoReturn:
        self.failure = failure
        self.connection.close()
        raise failure from None


class RemoteFunction:
    """A student's function: called like it, computed in the student's process."""

    def __init__(self, session: Session, target: str) -> None:
        self.session, self.target = session, target
        self.__name__ = self.__qualname__ = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it over there; see `Session.call`."""
        return self.session.call(self.target, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<function {self.target}>"


class RemoteKernel:
    """A student's `@triton.jit` function: runs inside of the lab's kernel, over there.

    Attributes:
        stub: whether it still raises NotImplementedError (as the student's process says).
    """

    def __init__(self, session: Session, target: str, stub: bool) -> None:
        self.session, self.target, self.stub = session, target, stub
        self.__name__ = target

    def run_update(self, *tensors: Tensor, **options: Any) -> Any:
        """`attention.kernels.template.run_update` with this function."""
        return self.session.library(RUN_UPDATE, self, *tensors, **options)


def function_class(session: Session, name: str) -> type[torch.autograd.Function]:
    """Looks like the student's torch.autograd.Function: `apply` and its backward run over there."""

    def apply(*args: Any) -> Any:
        return session.call(f"{name}.apply", *args)

    members = {"apply": staticmethod(apply), "remote_name": name, "__module__": __name__}
    return type(name, (torch.autograd.Function,), members)
