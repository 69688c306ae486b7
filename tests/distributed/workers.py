"""A pool of processes in one process group, which serves many tests.

Each process takes seconds to import PyTorch, so a module's tests share the pool. Smaller worlds are
groups of its first ranks. Nothing waits for ever: a task has a time limit. When it is over, or when
a process has died, all of them are ended, and the test fails with what is known.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_SECONDS = 180.0  # eight processes may import PyTorch on a busy machine at the same time
TASK_SECONDS = 60.0


class WorkerError(AssertionError):
    """A task failed on a rank, or did not end in time."""


class Workers:
    """`world_size` processes with gloo groups of 1, 2, ..., world_size ranks."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(world_size)]
        rendezvous = str(folder / "rendezvous")
        self.processes = [
            context.Process(
                target=_serve, args=(rank, world_size, rendezvous, tasks, self.results), daemon=True
            )
            for rank, tasks in enumerate(self.tasks)
        ]
        for process in self.processes:
            process.start()
        self._collect(world_size, START_SECONDS)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        seconds: float = TASK_SECONDS,
        **options: Any,
    ) -> list[Any]:
        """Run `function(rank, group, *args, **options)` on the first `ranks` ranks.

        Arguments and results are pickled; tensors too. Returns the results in the order of ranks.
        """
        ranks = self.world_size if ranks is None else ranks
        blob = _packed((function, ranks, args, options))
        for tasks in self.tasks[:ranks]:
            tasks.put(blob)
        return self._collect(ranks, seconds)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()

    def _collect(self, ranks: int, seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + seconds
        while len(results) + len(failures) < ranks:
            try:
                rank, failed, blob = self.results.get(timeout=0.5)
            except queue.Empty:
                dead = [rank for rank, p in enumerate(self.processes) if not p.is_alive()]
                if not dead and time.monotonic() < end:
                    continue
                missing = set(range(ranks)) - set(results) - set(failures)
                self.close()
                said = "\n".join(failures.values())
                why = f"ranks {dead} have died" if dead else f"{seconds} s are over"
                raise WorkerError(
                    f"no answer from ranks {sorted(missing)}: {why}\n{said}"
                ) from None
            (failures if failed else results)[rank] = _unpacked(blob)
        if failures:
            raise WorkerError("\n".join(f"rank {r}: {text}" for r, text in failures.items()))
        return [results[rank] for rank in range(ranks)]


def _serve(rank: int, world_size: int, rendezvous: str, tasks: Any, results: Any) -> None:
    # A rank that fails on its own leaves the others waiting: gloo gives up for them.
    limit = timedelta(seconds=TASK_SECONDS / 2)
    torch.set_num_threads(1)
    # All are on this machine: what its name resolves to need not matter.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=limit
    )
    groups = {size: dist.new_group(range(size)) for size in range(1, world_size + 1)}
    results.put((rank, False, _packed(None)))
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(queue.Empty):
            function, ranks, args, options = _unpacked(tasks.get(timeout=5.0))
            try:
                answer = rank, False, _packed(function(rank, groups[ranks], *args, **options))
            except Exception:
                answer = rank, True, _packed(traceback.format_exc())
            results.put(answer)


def _packed(thing: Any) -> bytes:
    """As bytes: tensors in a queue would share memory with a process that may be gone."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _unpacked(blob: bytes) -> Any:
    return torch.load(io.BytesIO(blob), weights_only=False)
