"""What does a call do, operator by operator, kernel by kernel?

    from labsupport.profiling.trace import trace

    seen = trace(lambda: attention(q, k, v))
    seen.kernels()               # a table: name, calls, time, FLOPs, bytes
    seen.memory()                # what it allocated, moment by moment
    seen.save("call.json.gz")    # the timeline, for https://ui.perfetto.dev

recorder  one call under torch.profiler: `trace`, and the `Trace` that it returns
tables    from the profiler's events to tables
moved     the bytes that operators are given and make
export    files that are whole or not there; what a GPU kernel was launched with
run       a whole Python program under torch.profiler, without a change to it

Names are imported from these files when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labsupport.profiling.trace.moved import moved_bytes as moved_bytes
    from labsupport.profiling.trace.recorder import Trace as Trace
    from labsupport.profiling.trace.recorder import trace as trace

_HOME = {"Trace": "recorder", "moved_bytes": "moved", "trace": "recorder"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
