"""Pools of processes that serve many tests: forks of one process that has imported what they need.

Nothing waits for ever: a task has a time limit. When it is over, or when a process has died, all of
them are ended, and the test fails.
"""

import os
import pickle
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist

START_SECONDS = 120.0  # on a busy machine
TASK_SECONDS = 60.0
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("labsupport.attention", "labsupport.distributed.data_parallel", "tests.models.tiny"),
        *("labsupport.distributed.sequence_parallel", "labsupport.distributed.ring_programs"),
        "torch._dynamo",  # an optimizer's first step would: a second in each fork
    ]
)


class WorkerError(AssertionError):
    """A task failed on a rank, or did not end in time."""


class Workers:
    """Ranks 0 to `world_size` - 1.

    joined: they are in one process group of gloo, and in one of the first 1, 2, ... of them each.
    Otherwise each finds the environment that torchrun sets, and joins a group when it likes.
    """

    def __init__(self, world_size, folder, *, joined=True):
        self.world_size, self.joined, self.closed = world_size, joined, False
        self.connections, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = FORKS.Pipe()
            task = theirs, rank, world_size, str(folder), joined
            self.processes.append(FORKS.Process(target=serve, args=task, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.connections.append(ours)
        assert all(each.poll(START_SECONDS) and each.recv() for each in self.connections)

    def run(self, function, *args, ranks=None, **options):
        """Results of a function on the first `ranks` ranks.

        It is called as `function(rank, group, *args, **options)` in a joined pool, and otherwise as
        `function(*args, **options)`.
        """
        ranks, port = ranks or self.world_size, 0
        if not self.joined:  # groups of different tests must not meet in one store
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
        # As bytes: tensors would share memory with a process that may be gone.
        task = pickle.dumps((function, ranks, port, args, options))
        waiting = {connection: rank for rank, connection in enumerate(self.connections[:ranks])}
        for connection in waiting:
            connection.send_bytes(task)
        results, failures, end = {}, {}, time.monotonic() + TASK_SECONDS
        while waiting and (ready := wait(list(waiting), max(0, end - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    failed, answer = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    failed, answer = True, "has died"
                    end = min(end, time.monotonic() + TASK_SECONDS / 2)
                    self.closed = True
                (failures if failed else results)[rank] = answer
        failures |= dict.fromkeys(waiting.values(), "did not end in time")
        if self.closed or waiting:
            self.close()
        if failures:
            raise WorkerError("\n".join(f"rank {r}: {text}" for r, text in failures.items()))
        return [results[rank] for rank in range(ranks)]

    def close(self):
        self.closed = True
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """`pool(world_size, joined=True)`: a pool, another one if a test has broken it."""
    pools = {}

    def get(world_size, *, joined=True):
        key = world_size, joined
        if key not in pools or pools[key].closed:
            pools[key] = Workers(world_size, tmp_path_factory.mktemp("workers"), joined=joined)
        return pools[key]

    yield get
    for one in pools.values():
        one.close()


def serve(connection, rank, world_size, folder, joined):
    """Run tasks in a process, until the tests end."""
    torch.set_num_threads(1)
    # All are on this machine: what its name resolves to need not matter.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if not joined:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
            # A rank that fails on its own leaves the others waiting: gloo gives up for them.
            timeout=timedelta(seconds=TASK_SECONDS / 3),
        )  # fmt: skip
        groups = [None, *(dist.new_group(range(size + 1)) for size in range(world_size))]
    connection.send(True)
    with suppress(EOFError, ConnectionError):  # the test process has ended
        while True:
            function, ranks, store, args, options = pickle.loads(connection.recv_bytes())
            if joined:
                args = rank, groups[ranks], *args
            else:
                sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                os.environ |= {name: str(value) for name, value in sizes.items()}
                # Rank 0 must not start a store: the test has it.
                os.environ |= {"MASTER_PORT": str(store), "MASTER_ADDR": "127.0.0.1"}
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            try:
                answer = False, function(*args, **options)
            except Exception:
                answer = True, traceback.format_exc()
            if not joined and dist.is_initialized():
                dist.destroy_process_group()
            connection.send_bytes(pickle.dumps(answer))
    os._exit(0)
