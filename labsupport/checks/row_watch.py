"""Watches on a computation: how far it reads along rows, and whether a ready kernel does it all.

They know no answer.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.attention import last_call
from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import Student


class RowWatch(TorchDispatchMode):
    """A watch on operators that read along the last dimension.

    Attributes:
        longest: of the rows that one operator read together.
        operator: which one that was.
        maxima_before_exp: how many maxima were taken before the first exponential.
    """

    MAXIMA = ("amax", "max", "cummax", "sort", "topk")
    OTHERS = (
        *("sum", "mean", "norm", "cumsum", "prod", "softmax", "logsumexp", "logcumsumexp"),
        *("mm", "bmm", "mv", "dot"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.operator = 0, ""
        self.maxima_before_exp, self._exp_seen = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.lstrip("_")
        self._exp_seen |= name in ("exp", "exp_", "exp2", "logsumexp")
        first = args[0] if args and isinstance(args[0], Tensor) and args[0].ndim else None
        # max(a, b) of two tensors compares entry by entry: it reduces nothing.
        elementwise = name == "max" and len(args) > 1 and isinstance(args[1], Tensor)
        if first is not None and not elementwise and name in (*self.MAXIMA, *self.OTHERS):
            if first.shape[-1] > self.longest:
                self.longest, self.operator = first.shape[-1], name
            self.maxima_before_exp += name in self.MAXIMA and not self._exp_seen
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """A watch that notes the last ready attention kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name:
            self.name = name
        return func(*args, **(kwargs or {}))


def by_hand(student: Student) -> Student:
    """Return the student's function, which raises `CheckFailed` where a ready kernel ran in it."""

    @functools.wraps(student)
    def run(*args: Any, **options: Any) -> Any:
        before = last_call()
        with _Kernels() as seen:
            result = student(*args, **options)
        report = last_call()
        if seen.name or report is not before:
            ready = seen.name or f"attention(...), by {report.backend if report else ''},"
            raise CheckFailed(f"{ready} did the work: write the loop yourself.")
        return result

    return run
