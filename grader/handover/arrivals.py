"""What comes back from a student's process becomes local: exceptions, gradients, views, changes."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grader.handover.codec import MAX_BYTES, HandoverError, dense_span
from grader.handover.wire import tensors_in


def exception_of(chain: Any) -> Exception:
    """An exception from the names of its classes and its message, with its causes.

    Raises:
        HandoverError: it is no such list.
    """
    if not isinstance(chain, list) or not 0 < len(chain) <= 8:
        raise HandoverError("an exception that is none")
    made = [_exception(one) for one in chain]
    for one, cause in pairwise(made):
        one.__cause__ = cause
    return made[0]


def _exception(one: Any) -> Exception:
    if not isinstance(one, list) or len(one) != 2 or not isinstance(one[1], str):
        raise HandoverError("an exception that is none")
    names, message = one
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise HandoverError("an exception that is none")
    base: type[Exception] = RuntimeError
    for name in names[:16]:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            base = found
            break
    if issubclass(base, StopIteration | StopAsyncIteration | Warning):
        base = RuntimeError
    shown = "".join(c if c.isalnum() or c == "_" else "_" for c in names[0][:80]) or "Exception"
    message = message[:4000]
    members = {
        "__init__": lambda self: None,
        "__str__": lambda self: message,
        "__module__": "builtins",
    }
    return type(shown, (base,), members)()


# --- gradients, views, changed arguments ----------------------------------------------------------


class _Graph:
    """A call's results over there; dropped when nobody can ask for their gradients any more."""

    def __init__(self, session: Any, number: int) -> None:
        self.session, self.number = session, number

    def __del__(self) -> None:
        self.session.drop(self.number)


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, outputs: list[Tensor], *leaves: Tensor) -> Any:
        ctx.graph, ctx.wanted = graph, len(leaves)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given = ctx.graph.session.backward(ctx.graph.number, gradients, ctx.wanted)
        return None, None, *given


def with_gradients(session: Any, number: int, value: Any, arguments: list[Tensor]) -> Any:
    """The value, its tensors that require gradients tied to the arguments that do."""
    leaves = [one for one in arguments if one.requires_grad]
    outputs = [one for one in tensors_in(value) if one.requires_grad]
    if not outputs or not leaves:
        return value
    with torch.enable_grad():
        tied = iter(_Remote.apply(_Graph(session, number), outputs, *leaves))
    return _replaced(value, tied)


def _replaced(value: Any, tied: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tied) if value.requires_grad else value
    if isinstance(value, tuple | list):
        return type(value)(_replaced(one, tied) for one in value)
    if isinstance(value, dict):
        return {key: _replaced(one, tied) for key, one in value.items()}
    return value


def view_of(content: Any, arguments: list[Tensor]) -> Tensor:
    """Part of the memory of an argument."""
    index, shape, stride, offset = content
    whole = [index, offset, *shape, *stride]
    if not all(type(n) is int and 0 <= n < 2**40 for n in whole) or len(shape) != len(stride):
        raise HandoverError("a view that is none")
    argument = arguments[index].detach()
    count, span = 1, 1
    for n, s in zip(shape, stride, strict=True):
        count, span = count * n, span + (n - 1) * s
    if not count or count * argument.element_size() > MAX_BYTES:
        raise HandoverError("a view that is too large")
    if offset + span > dense_span(argument):
        raise HandoverError("a view of memory that is not the argument's")
    return argument.as_strided(shape, stride, argument.storage_offset() + offset)


def take_over(ours: Any, theirs: Any) -> None:
    """Change arguments in place as they were changed over there.

    Raises:
        HandoverError: they became something that they cannot become.
    """
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        with torch.no_grad():
            if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
                ours.detach().copy_(theirs.detach())
            else:
                ours.data = theirs.detach()
    elif isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        if ours.shape != theirs.shape:
            raise HandoverError("an array changed its shape")
        np.copyto(ours, theirs, casting="unsafe")
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for one, other in zip(ours, theirs, strict=True):
            take_over(one, other)
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            ours[:] = theirs
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if _is_container(one):
                take_over(one, other)
            else:
                ours[i] = other
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        for key, other in theirs.items():
            if _is_container(ours.get(key)):
                take_over(ours[key], other)
    elif hasattr(ours, "_update_inplace") and type(ours) is type(theirs):
        ours._update_inplace(theirs)  # a DataFrame: checks compare it with a copy


def _is_container(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | tuple | list | dict) or hasattr(
        value, "_update_inplace"
    )
