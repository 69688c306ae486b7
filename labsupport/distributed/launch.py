"""Run a function in several processes of this machine, from a notebook or a program.

    launch(train, args, processes=2)

The processes find each other by the environment variables that torchrun sets, so what runs here
runs under torchrun too, which is the tool for scripts and for several machines. The function may be
defined in a notebook, what the ranks return comes back, and every run ends:

    all ranks return        launch returns what they returned
    one raises, or dies     a LaunchError carries the traceback of the rank that failed first
    one does not come       the others wait for it in a collective until the timeout (20 s), then
                            fail; the error says where the late rank was
    Control-C, SIGKILL      all processes end, within a second of the launcher

torch.distributed.elastic takes the signal handlers of the process that launches, and
torch.multiprocessing imports its main module again: neither is right in a notebook.
"""

from __future__ import annotations

import codecs
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from labsupport.distributed.failures import end_process, is_lost

GRACE_S = 3.0  # for the cause to show, once a rank says that it lost another one
KILL_AFTER_S = 2.0  # between asking a process to end and killing it


class LaunchError(RuntimeError):
    """A launched run failed. All of its processes are ended.

    Attributes:
        rank: the one that failed first, or that the others waited for.
        traceback: that of the first exception, as text; "" if there was none.

    >>> try:
    ...     raise LaunchError("rank 1 stopped", rank=1)
    ... except LaunchError as error:
    ...     error.rank
    1
    """

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


def launch(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    processes: int = 2,
    device: str | None = None,
    timeout: float = 20.0,
    forward: Sequence[signal.Signals] = (),
) -> list[Any]:
    """Run a function in several processes of this machine, and wait for them.

    Args:
        function: any function that cloudpickle can send.
        args, kwargs: the function's.
        processes: number of ranks; each finds its own in the environment variable RANK. The threads
            of this process are divided among them (OMP_NUM_THREADS).
        device: "cuda": each has the GPU of its rank. "cpu": they see no GPU. None: "cuda" if there
            are as many GPUs as processes.
        timeout: seconds that a rank waits for the others in a collective. If one rank does
            something long while others wait (it saves a large model), it needs more.
        forward: signals to this process that are sent on to the ranks, while they run; only in the
            main thread.

    Returns:
        What the function returned on each rank, by rank.

    The output of rank 0 is shown as it comes, stdout and stderr together.

    Raises:
        LaunchError: a rank failed, was killed, or did not reach a collective.
        ValueError: fewer than one process, or more than there are GPUs.
        TypeError: a function or arguments that cannot be sent to another process.

    >>> launch(lambda: setup_ddp().rank, processes=2)
    [0, 1]
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}, and must be at least 1")
    gpus = torch.cuda.device_count()
    if device is None:
        device = "cuda" if gpus >= processes else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device is {device!r}, and must be "cpu" or "cuda"')
    if device == "cuda" and gpus < processes:
        raise ValueError(
            f"{processes} processes need as many GPUs, but there are {gpus}: use fewer processes, "
            'or device="cpu"'
        )
    try:
        job = cloudpickle.dumps((function, tuple(args), dict(kwargs or {}), timeout))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{function} with its arguments cannot be sent to another process: {error}. Send plain "
            "data, and build models and datasets inside the function"
        ) from None
    # The processes meet at a port that the system chose and this process has: nobody takes it away.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = _environment(processes, device, store.port)
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder, workers = Path(name), list[_Worker]()
        (folder / "job").write_bytes(job)

        def send_on(number: int, _: object) -> None:
            for worker in workers:
                worker.process.send_signal(number)

        before = {number: signal.signal(number, send_on) for number in forward}
        try:
            for rank in range(processes):
                workers.append(_Worker(rank, folder, environment))
            return _results(workers)
        finally:
            _end(workers)
            for number, handler in before.items():
                signal.signal(number, handler)


# --- the processes, from outside ------------------------------------------------------------------


class _Failure(NamedTuple):
    """Cause of a rank's end; `lost`: it says that other ranks are gone or late."""

    what: str
    traceback: str = ""
    at: float = 0.0
    lost: bool = False


class _Worker:
    """One rank's process, and the files that it leaves in the run's folder."""

    def __init__(self, rank: int, folder: Path, environment: Mapping[str, str]) -> None:
        """Start the process in a new session: the terminal's Control-C is for the launcher."""
        self.rank, self.folder = rank, folder
        code = (
            f"import sys; sys.path[:] = {[entry or os.getcwd() for entry in sys.path]!r}; "
            f"from labsupport.distributed import launch; launch._work({str(folder)!r})"
        )
        with (folder / f"output-{rank}").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def failure(self) -> _Failure | None:
        """Return how the rank failed; None if it runs or has succeeded."""
        code = self.process.poll()
        if not code:
            return None
        with suppress(FileNotFoundError):
            return pickle.loads((self.folder / f"error-{self.rank}").read_bytes())
        if code > 0:
            return _Failure(f"ended with exit code {code} before it was done", at=time.time())
        name = signal.Signals(-code).name
        hint = " (by a user, or by the system because memory ran out)" * (name == "SIGKILL")
        # NCCL aborts a process whose collective the others did not reach.
        return _Failure(f"killed by {name}{hint}", at=time.time(), lost=name == "SIGABRT")

    def tail(self) -> str:
        """The last lines of the output; of a rank that was ended, its stack."""
        text = (self.folder / f"output-{self.rank}").read_text("utf-8", "replace")
        return "\n".join(text.splitlines()[-20:])


def _results(workers: Sequence[_Worker]) -> list[Any]:
    """Wait for all ranks, showing rank 0's output; raise LaunchError when one fails."""
    lost_since = None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with (workers[0].folder / "output-0").open("rb") as output:
        while True:
            running = any(worker.process.poll() is None for worker in workers)
            if text := decoder.decode(output.read()):
                sys.stdout.write(text)
                sys.stdout.flush()
            failures = {w.rank: failure for w in workers if (failure := w.failure())}
            if failures:
                lost_since = lost_since or time.monotonic()
                patient = time.monotonic() - lost_since < GRACE_S and len(failures) < len(workers)
                if not (patient and all(failure.lost for failure in failures.values())):
                    raise _error(failures, workers)
            elif not running:
                return [pickle.loads((w.folder / f"result-{w.rank}").read_bytes()) for w in workers]
            time.sleep(0.05)


def _error(failures: Mapping[int, _Failure], workers: Sequence[_Worker]) -> LaunchError:
    """Return the error that names the cause.

    When a rank ends, the others lose their connection to it and fail too, at nearly the same time.
    So a failure that does not speak of others is the cause; among several, the first.
    """
    rank, first = min(failures.items(), key=lambda item: (item[1].lost, item[1].at))
    missing = [worker for worker in workers if worker.rank not in failures]
    _end(workers)  # each writes its stack
    if first.lost and missing:
        late = missing[0]
        message = (
            f"rank {late.rank} of {len(workers)} did not reach a collective in which rank {rank} "
            f"waited for it: {first.what}\n\nRank {late.rank} was here:\n{late.tail()}\n\nAll "
            "ranks must call the same collectives in the same order. If one of them may take "
            f"longer: launch(..., timeout=seconds).\n\n{first.traceback}"
        )
        return LaunchError(message.rstrip(), late.rank, first.traceback)
    tail = workers[rank].tail()
    about = first.traceback or (tail and f"Its last lines:\n{tail}")
    message = f"rank {rank} of {len(workers)} failed: {first.what}\n\n{about}"
    return LaunchError(message.rstrip(), rank, first.traceback)


def _end(workers: Sequence[_Worker]) -> None:
    """End all processes and what they started, after each rank has written its stack."""
    for number in (signal.SIGUSR1, signal.SIGKILL):
        for worker in workers:
            with suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(worker.process.pid, number)
        deadline = time.monotonic() + KILL_AFTER_S
        while any(w.process.poll() is None for w in workers) and time.monotonic() < deadline:
            time.sleep(0.02)


def _environment(processes: int, device: str, port: int) -> dict[str, str]:
    """Return what torchrun would set, and a few more."""
    # All ranks are on this machine: what its name resolves to, or a VPN, need not matter.
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    return {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 must not start a store on that port
        # Processes that each use all cores spend their time waiting for one another.
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes)),
        "PYTHONUNBUFFERED": "1",
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
    }


# --- one process, from inside ---------------------------------------------------------------------


def _work(name: str) -> None:
    """Run the folder's job as this rank; leave result-RANK or error-RANK there."""
    folder, rank = Path(name), os.environ["RANK"]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Show its stack, and end. SIGTERM is left to the job, which may save a checkpoint then.
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)
    try:
        function, args, kwargs, timeout = pickle.loads((folder / "job").read_bytes())
        # For process groups that are made without a timeout: not half an hour.
        c10d: Any = dist.distributed_c10d
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout)
        result = cloudpickle.dumps(function(*args, **kwargs))
        (folder / f"result-{rank}").write_bytes(result)
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        frames = error.__traceback__ and error.__traceback__.tb_next  # without this file
        text = "".join(traceback.format_exception(type(error), error, frames))
        failure = _Failure(what, text, time.time(), is_lost(error))
        (folder / f"error-{rank}").write_bytes(pickle.dumps(failure))
        end_process(1)
    end_process(0)


def _end_with(launcher: int) -> None:
    """End this process when its launcher ends, however that ends."""
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)
