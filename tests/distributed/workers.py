"""A pool of processes in one process group, which serves many tests.

Smaller worlds are groups of its first ranks. Nothing waits for ever: a task has a time limit. When
it is over, or when a process has died, all of them are ended, and the test fails.
"""

import contextlib
import os
import pickle
import queue
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_SECONDS = 180.0  # several processes may import PyTorch on a busy machine at the same time
TASK_SECONDS = 60.0


class WorkerError(AssertionError):
    """A task failed on a rank, or did not end in time."""


class Workers:
    """`world_size` processes with gloo groups of 1, 2, ..., world_size ranks."""

    def __init__(self, world_size, folder):
        self.world_size, self.closed = world_size, False
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(world_size)]
        common = world_size, str(folder / "rendezvous")
        self.processes = [
            context.Process(target=_serve, args=(rank, *common, tasks, self.results), daemon=True)
            for rank, tasks in enumerate(self.tasks)
        ]
        for process in self.processes:
            process.start()
        self._collect(world_size, START_SECONDS)

    def run(self, function, *args, ranks=None, **options):
        """Results of `function(rank, group, *args, **options)` on the first `ranks` ranks."""
        ranks = ranks or self.world_size
        # As bytes: tensors in a queue would share memory with a process that may be gone.
        task = pickle.dumps((function, ranks, args, options))
        for tasks in self.tasks[:ranks]:
            tasks.put(task)
        return self._collect(ranks, TASK_SECONDS)

    def close(self):
        self.closed = True
        for process in self.processes:
            process.kill()
            process.join()

    def _collect(self, ranks, seconds):
        results, failures, end = {}, {}, time.monotonic() + seconds
        while len(results) + len(failures) < ranks:
            try:
                rank, failed, answer = self.results.get(timeout=0.5)
            except queue.Empty:
                dead = [rank for rank, p in enumerate(self.processes) if not p.is_alive()]
                if not dead and time.monotonic() < end:
                    continue
                self.close()
                why = f"ranks {dead} have died" if dead else f"{seconds} s are over"
                raise WorkerError("\n".join([why, *failures.values()])) from None
            (failures if failed else results)[rank] = pickle.loads(answer)
        if failures:
            raise WorkerError("\n".join(f"rank {r}: {text}" for r, text in failures.items()))
        return [results[rank] for rank in range(ranks)]


def _serve(rank, world_size, rendezvous, tasks, results):
    torch.set_num_threads(1)
    # All are on this machine: what its name resolves to need not matter.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size,
        # A rank that fails on its own leaves the others waiting: gloo gives up for them.
        timeout=timedelta(seconds=TASK_SECONDS / 2),
    )  # fmt: skip
    groups = {size: dist.new_group(range(size)) for size in range(1, world_size + 1)}
    results.put((rank, False, pickle.dumps(None)))
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(queue.Empty):
            function, ranks, args, options = pickle.loads(tasks.get(timeout=5.0))
            try:
                answer = False, pickle.dumps(function(rank, groups[ranks], *args, **options))
            except Exception:
                answer = True, pickle.dumps(traceback.format_exc())
            results.put((rank, *answer))
