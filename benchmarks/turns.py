"""Calls timed in turns, each recorded as a CUDA graph where it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labsupport.profiling.benchmark import refusal
from labsupport.profiling.graphs import captured
from labsupport.profiling.timing import measure_interleaved


def in_turns(
    calls: Mapping[Any, Callable[[], Any]],
    device: torch.device,
    max_seconds: float,
    *,
    graphs: bool = True,
) -> dict[Any, dict[str, Any]]:
    """Time each call, all in turns; at least three repeats, `max_seconds` for each on average.

    Returns:
        by key: in_graph, median_ms, q1_ms, q3_ms and repeats; or status and reason of a call that
        does not run.
    """
    rows: dict[Any, dict[str, Any]] = {}
    ready: dict[str, Callable[[], Any]] = {}
    for key, call in calls.items():
        try:
            replay, in_graph = captured(call, device) if graphs else (call, False)
        except Exception as problem:
            rows[key] = {"in_graph": False, **refusal(problem)}
        else:
            rows[key] = {"in_graph": in_graph}
            ready[str(len(rows) - 1)] = replay
    if ready:
        timings = measure_interleaved(
            ready, device=device, warmup=1, min_repeats=3, min_seconds=0.0,
            max_seconds=max_seconds * len(ready),
        )  # fmt: skip
        keys = list(rows)
        for number, timing in timings.items():
            row = rows[keys[int(number)]]
            row |= {f"{part}_ms": getattr(timing, part) for part in ("median", "q1", "q3")}
            row["repeats"] = timing.repeats
    return rows
