"""Start several processes, show what rank 0 prints, and come back whatever happens.

    launcher ──┬── rank 0   train(...)     each finds RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
      │ store  ├── rank 1   train(...)     in its environment, as under torchrun, and meets the
      └────────┴── ...                     others at the store, which the launcher keeps

How a run ends:

    all return              launch returns what they returned
    one raises, or dies     the others would wait for it for ever: they are ended, and one
                            LaunchError carries the traceback of the rank that failed first
    one does not come       the others wait in a collective for the process group's timeout
                            (20 s), then fail; the error says where the late rank was
    Ctrl-C, a closed        all processes are ended. If the launcher itself is killed, Linux ends
    notebook, SIGKILL       them (prctl's PR_SET_PDEATHSIG); elsewhere they look each second

The launcher holds the store where the processes meet on a port that the system chose: nobody else
can take it in between. torchrun's agent does the same.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labsupport.distributed.launch.errors import failed, not_ending, too_long
from labsupport.distributed.launch.output import Output
from labsupport.distributed.launch.processes import PATIENCE, Worker, end
from labsupport.distributed.launch.target import find

GRACE = 3.0  # seconds for the cause to show, once a rank says that it lost another
ENDING = 10.0  # seconds for a process to end once its work is done
_POLL = 0.05


def launch(
    target: str | Path | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    processes: int = 2,
    device: str | None = None,
    timeout: float = 20.0,
    limit: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a script or a function in several processes of this machine, and wait for them.

    Args:
        target: "train.py" or "package.module", run as a program; "train.py:main" or
            "package.module:main", a function; or the function itself, if others can import it.
        args, kwargs: the function's (what can be pickled), or the program's strings.
        processes: how many. Rank 0 ... processes - 1 is in the environment variable RANK.
        device: "cuda": each has the GPU of its rank. "cpu": they see no GPU. None: "cuda" if there
            are as many GPUs as processes.
        timeout: seconds that a rank waits in a collective for the others, before the run is given
            up: also in scripts that make their process group without a timeout. If one rank has
            something long to do while others wait (to save a large model), it needs more.
        limit: seconds for the whole run; None: no limit. What no timeout can see, such as a rank
            that loops for ever by itself, is ended by this, or by Ctrl-C.
        env: more environment variables. The threads of this process are divided among the
            processes (OMP_NUM_THREADS) unless it says otherwise.

    Returns:
        What each rank's function returned, by rank; None for each rank of a program.

    What rank 0 prints is shown as it comes, stdout and stderr together.

    Raises:
        LaunchError: a rank failed, was killed, or did not come to a collective; the limit was
            reached. No process is left.
        ValueError: fewer than one process, more than there are GPUs, times that are not above 0.
        FileNotFoundError, ModuleNotFoundError, TypeError: a target or arguments that another
            process cannot load.

    >>> launch("labsupport.distributed.data_parallel.process_group:ranks", processes=2)
    [(0, 2), (1, 2)]
    """
    found = find(target)
    device = _checked(processes, device, timeout, limit)
    job = found.job(args, kwargs or {}, timeout)
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    environment = _environment(processes, device, timeout, store.port) | dict(env or {})
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        (folder / "job.pickle").write_bytes(job)
        output = None
        try:
            for rank in range(processes):
                workers.append(Worker.start(rank, folder, environment))
            output = Output(workers)
            _watch(workers, output, limit)
            output.show(PATIENCE)  # all of it; something that a rank started may keep its end open
            return [worker.result() for worker in workers]
        finally:
            end(workers)
            if output is not None:
                output.close()
            del store  # the processes met at it


def _watch(workers: Sequence[Worker], output: Output, limit: float | None) -> None:
    """Return when all ranks are done and gone; raise LaunchError when that will not be."""
    began = time.monotonic()
    lost_since = done_since = None
    while True:
        if not output.show(_POLL):
            time.sleep(_POLL)
        now = time.monotonic()
        failures = [failure for worker in workers if (failure := worker.failure()) is not None]
        if failures:
            lost_since = lost_since or now
            known = not all(failure.lost for failure in failures)
            if known or len(failures) == len(workers) or now - lost_since > GRACE:
                output.show(0.5)
                raise failed(failures, workers, output)
        elif all(worker.finished for worker in workers):
            done_since = done_since or now
            left = [worker for worker in workers if worker.running]
            if not left:
                return
            if now - done_since > ENDING:
                raise not_ending(left, ENDING)
        if limit is not None and now - began > limit:
            raise too_long(limit, workers)


def _environment(processes: int, device: str, timeout: float, port: int) -> dict[str, str]:
    """What torchrun would set, and a few more."""
    values = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is the launcher's: rank 0 must not start another one on that port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "LABSUPPORT_COLLECTIVE_TIMEOUT": str(timeout),
        # Processes that each use all cores spend their time waiting for one another.
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes)),
        "PYTHONUNBUFFERED": "1",
        # NCCL's watchdog ends a process that waited in vain; it need not write a report first.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
    }
    if device == "cpu":
        values["CUDA_VISIBLE_DEVICES"] = ""
    # All are on this machine: what its name resolves to, or a VPN, need not matter.
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if interface is not None:
        values["GLOO_SOCKET_IFNAME"] = interface
    return dict(os.environ) | values


def _checked(processes: int, device: str | None, timeout: float, limit: float | None) -> str:
    if processes < 1:
        raise ValueError(f"processes is {processes}, and must be at least 1")
    for name, value in (("timeout", timeout), ("limit", limit)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value} s, and must be above 0")
    gpus = torch.cuda.device_count()
    if device is None:
        return "cuda" if gpus >= processes else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device is {device!r}, and must be "cpu" or "cuda"')
    if device == "cuda" and gpus < processes:
        raise ValueError(
            f"{processes} processes need as many GPUs, and there are {gpus}. NCCL does not let two "
            'ranks share one: take fewer processes, or device="cpu"'
        )
    return device
