"""In the student's kernel: answers the grader's requests.

`serve(globals(), path)` is the last line of the notebook that the grader runs. It looks the
student's functions up by name, calls them on values that arrive, and sends back what they return,
what they raised, which arguments they changed, and which results are views of an argument.
Gradients go through: a result that depends on an argument with requires_grad stays here, and the
grader asks for its backward pass.

Nothing here is trusted by the grader: a student's code can change all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grader.handover.codec import HandoverError, decode, dense_span, encode
from grader.handover.wire import ASK_LIMIT, digest, receive, send, tensors_in

MAX_MESSAGE = 4000
CAUSES = 5  # of an exception


def serve(namespace: dict[str, Any], socket_path: str) -> None:
    """Connect to the grader's Unix socket and answer its requests, until it closes.

    Args:
        namespace: the notebook's globals(); names are looked up in it at each call.
        socket_path: of the Unix socket on which the grader listens.

    Raises:
        OSError: nobody listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(socket_path)
        worker = _Worker(namespace, connection)
        with contextlib.suppress(EOFError, ConnectionError, BrokenPipeError):
            while worker.answer():
                pass


class _Worker:
    def __init__(self, namespace: dict[str, Any], connection: socket.socket) -> None:
        self.namespace, self.connection = namespace, connection
        self.graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.made = 0

    def answer(self) -> bool:
        """Answer one request; False when there are no more."""
        request = self.read()
        do, number = request["do"], request["id"]
        for graph in request["drop"]:
            self.graphs.pop(graph, None)
        if do == "close":
            return False
        try:
            with _quiet(), torch.set_grad_enabled(request["grad"]):
                frame = getattr(self, f"do_{do}")(request)
        except BaseException as error:  # the student's, whatever it is: sys.exit() too
            frame = encode({"id": number, "error": _chain(error)})
        del request  # and with it the arguments, before the next one arrives
        send(self.connection, frame)
        return True

    def read(self) -> Any:
        frame = receive(self.connection, limit=2 * ASK_LIMIT)
        return decode(frame, resolve=self.resolve)

    def resolve(self, kind: str, content: Any) -> Any:
        if kind == "name":
            return self.find(content)
        if kind == "stream":
            return self.stream(content)
        raise HandoverError(f"no known kind: {kind}")

    def find(self, name: str) -> Any:
        """The student's object of this name, or an attribute of it."""
        first, *rest = name.split(".")
        if first not in self.namespace:
            raise NameError(f"name {first!r} is not defined")
        found = self.namespace[first]
        for attribute in rest:
            found = getattr(found, attribute)
        return found

    def stream(self, number: int) -> Iterator[Any]:
        """What the grader's iterator gives, asked for one at a time."""
        while True:
            send(self.connection, encode({"next": number}))
            answer = self.read()
            if answer["stop"]:
                return
            item = answer.pop("item")
            del answer
            yield item
            del item

    # --- requests ---------------------------------------------------------------------------------

    def do_names(self, request: Any) -> list[Any]:
        found = {}
        for name in request["args"][0]:
            try:
                found[name] = describe(self.find(name))
            except (NameError, AttributeError):
                found[name] = {"kind": "missing"}
        return encode({"id": request["id"], "value": found})

    def do_call(self, request: Any) -> list[Any]:
        return self.compute(request, self.find(request["target"]))

    def do_library(self, request: Any) -> list[Any]:
        module, name = request["target"].split(":")
        return self.compute(request, getattr(importlib.import_module(module), name))

    def compute(self, request: Any, function: Any) -> list[Any]:
        args, kwargs = request["args"], request["kwargs"]
        leaves = list(tensors_in((args, kwargs)))
        before = digest((args, kwargs))
        result = function(*args, **kwargs)
        reply: dict[str, Any] = {
            "id": request["id"],
            "value": result,
            "changed": None,
            "graph": None,
        }
        if digest((args, kwargs)) != before:
            frame = encode((args, kwargs), limit=ASK_LIMIT)
            reply["changed"] = decode(bytearray(b"".join(frame)))  # copies: views of no argument
        outputs: list[Tensor] = []

        def refer(kind: str, value: Any) -> Any:
            if kind != "tensor":
                return None
            if value.requires_grad:
                outputs.append(value)
                return None
            return _as_view(value, leaves)

        self.made += 1
        if any(leaf.requires_grad for leaf in leaves):
            reply["graph"] = self.made
        frame = encode(reply, refer=refer)
        if outputs and reply["graph"] is not None:
            self.graphs[self.made] = outputs, [leaf for leaf in leaves if leaf.requires_grad]
        return frame

    def do_backward(self, request: Any) -> list[Any]:
        number, *incoming = request["args"]
        outputs, leaves = self.graphs[number]
        gradients = torch.autograd.grad(
            outputs, leaves, incoming, retain_graph=True, allow_unused=True
        )
        return encode({"id": request["id"], "value": tuple(gradients)})


def tidy() -> None:
    """Give freed memory back to the system, so that what a call takes can be seen from outside."""
    gc.collect()
    gc.freeze()  # or a collection during the call would touch every object there is
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def describe(value: Any) -> dict[str, Any]:
    """What kind of object a student's name stands for.

    Returns:
        {"kind": "function class" | "kernel" | "function" | "value", "name": ..., "stub": whether
        it is a kernel that still raises NotImplementedError}.
    """
    name = str(getattr(value, "__name__", ""))
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return {"kind": "function class", "name": name}
    kernel = getattr(value, "fn", None)
    if kernel is not None and inspect.isroutine(kernel):
        try:
            stub = "raise NotImplementedError" in inspect.getsource(kernel)
        except (OSError, TypeError):
            stub = False
        return {"kind": "kernel", "name": name, "stub": stub}
    return {"kind": "function" if callable(value) else "value", "name": name}


def _as_view(x: Tensor, arguments: list[Tensor]) -> Any:
    """A node that says which part of an argument's memory a result is; None if it is none."""
    if x.layout != torch.strided or not x.numel():
        return None
    for index, argument in enumerate(arguments):
        if x.dtype != argument.dtype or not argument.numel():
            continue
        if x.untyped_storage().data_ptr() != argument.untyped_storage().data_ptr():
            continue
        offset = (x.data_ptr() - argument.data_ptr()) // x.element_size()
        if 0 <= offset <= dense_span(argument) - dense_span(x):
            return ["view", [index, list(x.shape), list(x.stride()), offset]]
    return None


def _chain(error: BaseException) -> list[Any]:
    """An exception and its causes: names of the classes, and the message."""
    chain: list[Any] = []
    one: BaseException | None = error
    while one is not None and len(chain) < CAUSES:
        try:
            message = str(one)[:MAX_MESSAGE]
        except Exception:
            message = "(its message cannot be read)"
        chain.append([[c.__name__ for c in type(one).__mro__][:8], message])
        one = one.__cause__
    return chain


class _Nowhere(io.TextIOBase):
    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    nowhere = _Nowhere()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
