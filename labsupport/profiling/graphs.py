"""Calls that take less time on a GPU than the CPU needs to launch them, recorded as CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from labsupport.profiling.timing import Call


def captured(fn: Call, device: torch.device, warmup: int = 2) -> tuple[Call, bool]:
    """Record what `fn()` launches as a CUDA graph, whose replay costs the CPU some microseconds.

    Args:
        fn: the call; every replay reads the tensors that it read here. Its result is dropped.
        device: on a CPU nothing is recorded.
        warmup: calls before the recording, in which kernels may be compiled.

    Returns:
        the replay and True; `fn` itself and False where it cannot be recorded (it waits for the
        GPU, for example).
    """
    if device.type != "cuda":
        return fn, False
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                fn()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return fn, False
    return graph.replay, True
