"""Which rank failed first, and what to say about it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from labsupport.distributed.launch.output import Output
from labsupport.distributed.launch.processes import Failure, Worker


class LaunchError(RuntimeError):
    """A launched run failed, or came to a halt. All of its processes are ended.

    Attributes:
        rank: of the process that failed first, or for which the others waited in vain; None if the
            run as a whole took too long.
        traceback: that of the first exception, as text; "" if there was none.
    """

    def __init__(self, message: str, rank: int | None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


def failed(failures: Sequence[Failure], workers: Sequence[Worker], output: Output) -> LaunchError:
    """The error about ranks that failed.

    When a rank ends, the others lose their connection to it and fail as well, at nearly the same
    time. So a failure that does not speak of others is the cause; among several, the first.
    """
    first = min(failures, key=lambda failure: (failure.lost, failure.at))
    missing = [worker for worker in workers if worker.running and not worker.finished]
    missing = [w for w in missing if w.rank not in {failure.rank for failure in failures}]
    if first.lost and missing:
        return _halted(first, missing, len(workers))
    message = f"rank {first.rank} of {len(workers)} failed: {first.what}"
    if first.traceback:
        message += f"\n\n{first.traceback.rstrip()}"
    elif tail := output.tail(first.rank):
        message += f"\n\nThe last lines that it printed:\n{tail}"
    return LaunchError(message, first.rank, first.traceback)


def _halted(first: Failure, missing: Sequence[Worker], ranks: int) -> LaunchError:
    where = _places(missing)
    # Those that stand in a collective wait as the failed one did: it is the others who are late.
    late = [w for w in missing if "torch/distributed" not in where[w.rank]] or missing
    names = " and ".join(f"rank {worker.rank}" for worker in late)
    message = (
        f"{names} of {ranks} did not come to a collective in which rank {first.rank} waited for "
        f"{'it' if len(late) == 1 else 'them'}. Rank {first.rank} said: {first.what}\n"
        f"{_where(late, where)}\nAll ranks must call the same collectives in the same order. If "
        "one of them may take longer: launch(..., timeout=seconds)."
    )
    if first.traceback:
        message += f"\n\nWhere rank {first.rank} waited:\n{first.traceback.rstrip()}"
    return LaunchError(message, late[0].rank, first.traceback)


def too_long(limit: float, workers: Sequence[Worker]) -> LaunchError:
    """The error about a run that is not done in time."""
    alive = [worker for worker in workers if worker.running]
    ranks = ", ".join(str(worker.rank) for worker in alive)
    return LaunchError(
        f"the run was not done after its limit of {limit:g} s; of {len(workers)} ranks, these were "
        f"running: {ranks}\n{_where(alive, _places(alive))}",
        None,
    )


def not_ending(workers: Sequence[Worker], seconds: float) -> LaunchError:
    """The error about processes that stay although their work is done."""
    ranks = ", ".join(str(worker.rank) for worker in workers)
    return LaunchError(
        f"rank {ranks}: the work is done, but {seconds:g} s later the process is still there. A "
        "thread that is not a daemon keeps it, or a process group that was not closed "
        f"(cleanup_ddp())\n{_where(workers, _places(workers, all_threads=True))}",
        workers[0].rank,
    )


def _places(workers: Sequence[Worker], *, all_threads: bool = False) -> dict[int, str]:
    for worker in workers:
        worker.ask_where()
    time.sleep(0.5)
    return {worker.rank: worker.where(all_threads=all_threads) for worker in workers}


def _where(workers: Sequence[Worker], places: dict[int, str]) -> str:
    return "\n".join(
        f"\nWhere rank {worker.rank} was (innermost call first):\n{places[worker.rank]}"
        if places[worker.rank]
        else f"\nRank {worker.rank} gave no answer: it is stopped, or inside of the system."
        for worker in workers
    )
