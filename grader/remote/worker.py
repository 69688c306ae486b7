"""The program in the sandbox: runs a student's cells, then answers calls of what they defined.

Nothing of this decides a point: the student's code runs in the same process and can change all of
it. It keeps an endless loop in one cell from costing the others, and tells the student's own error.
A result that depends on an argument with requires_grad stays here, and the grader asks for its
backward pass.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from traitlets.config import Config

from grader.remote import programs
from grader.remote.refuse import hide_kernels, refuse
from grader.remote.values import (
    MAX_BYTES,
    MAX_REPLY,
    FrameError,
    graded_in,
    is_plain,
    pack,
    receive,
    send,
    span,
    unpack,
)
from grader.remote.watch import Leaving, Watch, changed

# Nothing is compiled here, and to import the compiler, as dispatch modes do, takes a second.
_same: Any = lambda function=None, recursive=True: function or _same  # noqa: E731
torch._disable_dynamo = _same
_REDIRECT = contextlib.redirect_stdout, contextlib.redirect_stderr
MAX_MESSAGE, CAUSES = 300, 5  # letters of an exception's message; exceptions in a chain


class CellTimeout(BaseException):
    """The cell took too long; no Exception, which a loop around the work would catch."""


def main(descriptor: str) -> None:
    """Run the cells of the plan on stdin, with reports to the socket of this descriptor; serve."""
    with contextlib.suppress(OSError):  # the grader knows, and says so
        programs.forbid()
    hide_kernels()
    tempfile.gettempdir()  # looked for and remembered, before cells may fill it
    plan = json.load(sys.stdin)
    connection = socket.socket(fileno=int(descriptor))
    plain = {"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}}
    shell = InteractiveShell.instance(config=Config(plain))
    # Nothing is installed and no program is started by a line of the notebook's.
    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    shell.system = shell.getoutput = shell.enable_gui = nothing
    magic: Any = shell.run_line_magic

    def forgiving(name: str, line: str, _stack_depth: int = 1) -> Any:
        # What Jupyter knows and this shell does not: `%config InlineBackend...`, extensions.
        with contextlib.suppress(UsageError, NotImplementedError, ImportError):
            return magic(name, line, _stack_depth=_stack_depth + 1)

    shell.run_line_magic = forgiving  # type: ignore[method-assign]
    first_error = ""
    watch = Watch()
    left = plan["own_cells_s"]
    signal.signal(signal.SIGALRM, _too_long)
    with open(os.devnull, "w") as sink, _REDIRECT[0](sink), _REDIRECT[1](sink):
        for number, (source, exercise) in enumerate(plan["steps"]):
            send(connection, pack({"step": number}))
            limit, start = plan["cell_timeout_s"], time.monotonic()
            error = _run(shell, source, limit if exercise else max(1.0, min(limit, left)))
            first_error = first_error or error
            left -= 0.0 if exercise else time.monotonic() - start
    send(connection, pack({"first_error": first_error}))
    serve(shell.user_ns, connection, watch)


def _run(shell: InteractiveShell, source: str, limit_s: float) -> str:
    """Run a cell; return its error, or ""."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        result = shell.run_cell(source, store_history=False)
        error = result.error_before_exec or result.error_in_exec
    except CellTimeout as problem:
        error = problem
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if error is None:
        return ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def _too_long(number: int, frame: Any) -> None:
    raise CellTimeout("the cell took longer than its limit")


def serve(names: dict[str, Any], connection: socket.socket, watch: Watch) -> None:
    """Answer the grader's requests, for objects of these names, until it closes the connection."""
    worker = _Worker(names, connection, watch)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            worker.answer()
    worker.allow()


class _Worker:
    def __init__(self, names: dict[str, Any], connection: socket.socket, watch: Watch) -> None:
        self.names, self.connection, self.watch = names, connection, watch
        self.graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.allow = refuse()

    def answer(self) -> None:
        request = unpack(receive(self.connection, limit=2 * MAX_BYTES), self.resolve)
        if request["fused"]:
            self.allow()
        number = request["id"]
        out, err = (redirect(io.StringIO()) for redirect in _REDIRECT)
        try:
            with out, err, torch.set_grad_enabled(request["grad"]):
                reply = getattr(self, f"do_{request['do']}")(request)
            reply |= {"id": number, "notes": self.watch.taken()}
            frame = pack(reply, limit=MAX_REPLY - 2**20)
        except BaseException as error:  # any error of the student's: sys.exit() too
            notes = self.watch.taken()
            frame = pack({"id": number, "notes": notes, "error": _chain(error)})
        del request  # and the arguments with it, before the next ones arrive
        send(self.connection, frame)

    def resolve(self, kind: str, content: Any) -> Any:
        if kind == "name":
            return self.find(content)
        raise FrameError(f"no known kind: {kind}")

    def find(self, name: str) -> Any:
        """Return the student's object of this name, or an attribute of it."""
        first, *rest = name.split(".")
        if first not in self.names:
            raise NameError(f"name {first!r} is not defined")
        return functools.reduce(getattr, rest, self.names[first])

    def do_describe(self, request: Any) -> dict[str, Any]:
        self.graphs.clear()  # a new check
        with contextlib.suppress(Exception):  # an object may raise anything at any attribute
            found = self.find(request["target"])
            is_class = isinstance(found, type) and issubclass(found, torch.autograd.Function)
            return {"value": "function class" if is_class else "function"}
        return {"value": "missing"}

    def do_library(self, request: Any) -> dict[str, Any]:
        module, name = request["target"]
        function = getattr(importlib.import_module(module), name)
        return self.run(request, function, module, student=False)

    def do_call(self, request: Any) -> dict[str, Any]:
        return self.run(request, self.find(request["target"]), student=True)

    def run(self, request: Any, function: Any, *modules: str, student: bool) -> dict[str, Any]:
        """Call a function; note calls of the lab's answers, and which argument it changed."""
        args, kwargs = request["args"], request["kwargs"]
        given = [*args, *kwargs.values()]
        before = [_digest(one) for one in given]
        with _watched(request, self.watch.notes) as modes, self.watch.calls(student=student):
            result = function(*args, **kwargs)
        for module in {*modules, *(m for m, _ in request["modes"])}:
            if module.startswith("labsupport."):
                self.watch.notes |= {f"has changed {one}" for one in changed(module)}
        spoilt = [i for i, one in enumerate(given, 1) if _digest(one) != before[i - 1]]
        wanted, outputs = graded_in((args, kwargs)), graded_in(result)
        if outputs and wanted:
            self.graphs[request["id"]] = outputs, wanted
        reply = {"value": result, "changed": spoilt[:1], "modes": _seen(modes)}
        return reply | {"graph": bool(wanted)}

    def do_backward(self, request: Any) -> dict[str, Any]:
        number, *incoming = request["args"]
        outputs, leaves = self.graphs[number]
        with _watched(request, self.watch.notes) as modes, self.watch.calls(student=True):
            gradients = torch.autograd.grad(
                outputs, leaves, incoming, retain_graph=True, allow_unused=True
            )
        return {"value": tuple(gradients), "modes": _seen(modes)}


def tidy() -> None:
    """Give freed memory back to the system, so that a call's memory can be seen from outside."""
    gc.collect()
    gc.freeze()  # or a collection during the call would touch every object there is
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _watched(request: Any, notes: set[str]) -> Iterator[list[Any]]:
    """The check's dispatch modes around a call: they watch it as in the student's notebook."""
    with contextlib.ExitStack() as stack:
        modes = [getattr(importlib.import_module(m), kind)() for m, kind in request["modes"]]
        if modes:
            stack.enter_context(Leaving(notes))
        for mode in modes:
            stack.enter_context(mode)
        if modes and _get_current_dispatch_mode_stack()[-len(modes) :] != modes:
            notes.add("has switched the check's own watch off")
        yield modes


def _seen(modes: list[Any]) -> list[dict[str, Any]]:
    """Plain values that the modes noted."""
    return [
        {
            name: value
            for name, value in vars(mode).items()
            if is_plain(value) or (isinstance(value, tuple) and all(map(is_plain, value)))
        }
        for mode in modes
    ]


def _digest(value: Any) -> bytes:
    """Return a hash of an argument's numbers."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        x = value.detach()  # without a copy: it would show in the checks of memory
        flat = x.as_strided((span(x),), (1,)).view(torch.uint8).numpy().data
        return hashlib.blake2b(flat, person=str(tuple(x.shape)).encode()[:16]).digest()
    return hashlib.blake2b(b"".join(pack(value))).digest()


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
