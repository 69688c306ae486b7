"""The grader's side: a connection to a sandbox, and functions that are computed there."""

import builtins
import socket
import time
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from grader.remote.values import MAX_REPLY, FrameError, graded_in, pack, receive, send, unpack
from labsupport.checks.errors import CheckFailed

_NO_ANSWER = "the process sent something that is no answer"


class SessionDied(BaseException):
    """The student's process ended, or sent an invalid answer. Checks must not catch it."""

    status = "died"


class SessionTimeout(SessionDied):
    """The student's process took too long."""

    status = "timeout"


class Session:
    """A connection to a process that runs `worker.serve`, until `failure` is set.

    Calls share a `deadline` by time.monotonic(). `fused` attention stays allowed once it was.
    """

    def __init__(self, connection: socket.socket, pid: int, timeout_s: float = 30.0) -> None:
        self.connection, self.pid, self.timeout_s = connection, pid, timeout_s
        self.failure: SessionDied | None = None
        self.deadline: float | None = None
        self.fused = False
        self.notes: list[str] = []  # what the student's code called of the lab's answers
        self._asked = 0

    def close(self) -> None:
        """End the connection, and `serve` over there with it."""
        self.failure = self.failure or SessionDied("the session was closed")
        self.connection.close()

    def remote(self, name: str) -> Any:
        """Return a stand-in for the student's object of that name; None where there is none."""
        match self._ask("describe", name, (), {})["value"]:
            case "missing":
                return None
            case "function class":  # `apply` of a class like the student's runs over there
                apply = RemoteFunction(self, f"{name}.apply")
                members: dict[str, Any] = {"apply": apply, "remote_target": name}
                members |= {"within": RemoteFunction(self, name).within, "__module__": __name__}
                return type(name, (torch.autograd.Function,), members)
        return RemoteFunction(self, name)

    def compute(self, do: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Call ("call") a student's function over there, or one of a module there ("library").

        Raises:
            CheckFailed: the function changed an argument.
            Exception: what the function raised, as a class of the same name that derives from the
                nearest built-in one.
            SessionDied: nothing came back.
        """
        reply = self._ask(do, target, args, kwargs)
        match reply.get("changed"):
            case [int(position), *_]:
                if do == "library":  # a harness, whose first argument is the function
                    target, position = args[0].remote_target, position - 1
                raise CheckFailed(
                    f"{target} changed its argument number {position} in place, but its caller "
                    "still needs it. Compute new values, or work on a copy."
                )
        value = reply["value"]
        leaves, outputs = graded_in((args, kwargs)), graded_in(value)
        if reply.get("graph") is True and leaves and outputs:
            with torch.enable_grad():
                tied = iter(_Backward.apply(self, reply["id"], outputs, *leaves))
            return tree_map_only(Tensor, lambda x: next(tied) if x.requires_grad else x, value)
        return value

    def _ask(self, do: str, target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        end = time.monotonic() + self.timeout_s
        end = end if self.deadline is None else min(end, self.deadline)
        self._asked += 1
        modes = _get_current_dispatch_mode_stack()
        request = {
            "id": self._asked, "do": do, "target": target, "args": args, "kwargs": kwargs,
            "grad": torch.is_grad_enabled(), "fused": self.fused,
            "modes": [[type(m).__module__, type(m).__qualname__] for m in modes],
        }  # fmt: skip
        try:
            with _disable_current_modes():
                self.connection.settimeout(max(end - time.monotonic(), 1e-3))
                send(self.connection, pack(request, _name_of))
                reply = unpack(receive(self.connection, limit=MAX_REPLY, deadline=end))
                if not isinstance(reply, dict):
                    raise FrameError("an answer that is no dict")
                raised = _exception_of(reply["error"]) if "error" in reply else None
        except TimeoutError:
            self._fail(SessionTimeout("the call took too long"))
        except (EOFError, OSError):
            self._fail(SessionDied("the process ended"))
        except FrameError as error:
            self._fail(SessionDied(f"{_NO_ANSWER}: {error}"))
        if reply.get("id") != self._asked or type(reply.get("id")) is not int:
            self._fail(SessionDied("the process answered another request"))
        self.notes += [one for one in reply.get("notes") or () if isinstance(one, str)][:20]
        if raised is not None:
            raise raised
        if "value" not in reply:
            self._fail(SessionDied(_NO_ANSWER))
        for mode, seen in zip(modes, reply.get("modes") or [], strict=False):
            known = seen if isinstance(seen, dict) else {}
            vars(mode).update({name: known[name] for name in vars(mode) if name in known})
        return reply

    def _fail(self, failure: SessionDied) -> NoReturn:
        self.failure = failure
        self.connection.close()
        raise failure from None


def _name_of(value: Any) -> Any:
    """Return the node for a stand-in of a student's object; None for other values."""
    target = getattr(value, "remote_target", None)
    return ["name", target] if isinstance(target, str) else None


class RemoteFunction:
    """A student's function, class or kernel: called like it, computed in the sandbox."""

    def __init__(self, session: Session, target: str) -> None:
        self.session, self.remote_target = session, target
        self.__name__ = self.__qualname__ = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it over there; see `Session.compute`."""
        return self.session.compute("call", self.remote_target, args, kwargs)

    def within(self, function: Any, *args: Any) -> Any:
        """Run a function of the lab's over there, on this one."""
        target = function.__module__, function.__name__
        return self.session.compute("library", target, (self, *args), {})

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, session: Session, call: int, outputs: list[Tensor], *leaves: Tensor
    ) -> Any:
        ctx.session, ctx.call, ctx.wanted = session, call, len(leaves)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given = ctx.session._ask("backward", "", (ctx.call, *gradients), {})["value"]
        if not isinstance(given, tuple) or len(given) != ctx.wanted:
            ctx.session._fail(SessionDied(_NO_ANSWER))
        return None, None, None, *(one if isinstance(one, Tensor) else None for one in given)


def _exception_of(chain: Any) -> Exception:
    """Make an exception from the names of its classes and its message, with its causes."""
    if not isinstance(chain, list) or not 0 < len(chain) <= 8:
        raise FrameError("an exception that is none")
    first, *causes = made = [_exception(one) for one in chain]
    for one, cause in zip(made, causes, strict=False):
        one.__cause__ = cause
    return first


def _exception(one: Any) -> Exception:
    match one:
        case [[str(first), *rest], str(message)] if all(isinstance(n, str) for n in rest):
            known = [getattr(builtins, name, None) for name in (first, *rest)]
        case _:
            raise FrameError("an exception that is none")
    # What would end a loop, or the grader itself, becomes an ordinary error.
    bases = (b for b in known if isinstance(b, type) and issubclass(b, Exception))
    base = next(bases, RuntimeError)
    if issubclass(base, StopIteration | StopAsyncIteration | Warning | BaseExceptionGroup):
        base = RuntimeError
    shown = "".join(c if c.isalnum() or c == "_" else "_" for c in first[:80]) or "Exception"
    members = {"__init__": lambda self: None, "__str__": lambda self: message[:300]}
    return type(shown, (base,), members | {"__module__": "builtins"})()
