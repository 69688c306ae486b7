"""Processes that grade, one submission at a time each; one that dies costs nothing but time."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from grader.grade import processes
from grader.grade.confinement import remove_stale
from grader.grade.pristine import pristine_notebooks
from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.grade.sandbox import START_TIMEOUT_S
from grader.grade.settings import Settings
from grader.grade.submissions import Submission

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# On top of what a submission may take by its own limits (`_most_seconds`).
_PATIENCE_S = 60.0
_ATTEMPTS = 2


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    submission: Submission | None = None
    begun: float = 0.0


def grade_all(
    submissions: Sequence[Submission], settings: Settings
) -> Generator[SubmissionResult, None, None]:
    """Grade submissions, `settings.jobs` at a time.

    Args:
        submissions: what is to be graded.
        settings: limits.

    Yields:
        results, in the order in which they are ready. Leaving the loop ends all work.
    """
    todo = deque(submissions)
    attempts: dict[Submission, int] = {}
    workers = [_started(settings) for _ in range(min(settings.jobs, len(todo)))]
    try:
        while workers:
            for number, worker in enumerate(workers):
                if worker.submission is None and todo:
                    if not worker.process.is_alive():
                        _end(worker)
                        worker = workers[number] = _started(settings)
                    worker.submission, worker.begun = todo.popleft(), time.monotonic()
                    # One that dies now is noticed when its result is asked for.
                    with contextlib.suppress(OSError):
                        worker.connection.send(worker.submission)
            busy = [worker for worker in workers if worker.submission is not None]
            if not busy:
                return
            wait([worker.connection for worker in busy], timeout=1.0)
            for worker in busy:
                submission = cast("Submission", worker.submission)
                result = _result_of(worker, settings)
                if result == "":
                    continue
                worker.submission = None
                if isinstance(result, SubmissionResult):
                    yield result
                    continue
                _end(worker)
                workers[workers.index(worker)] = _started(settings)
                attempts[submission] = attempts.get(submission, 0) + 1
                if attempts[submission] < _ATTEMPTS:
                    todo.append(submission)
                else:
                    yield _given_up(submission, settings, result)
    finally:
        for worker in workers:
            _end(worker)
        remove_stale()


def _result_of(worker: _Worker, settings: Settings) -> SubmissionResult | str:
    """The result; "" if there is none yet; else why there will be none."""
    try:
        if worker.connection.poll():
            return cast("SubmissionResult | str", worker.connection.recv())
    except (EOFError, OSError):
        worker.process.join(timeout=5)
        return f"the process that graded it ended with status {worker.process.exitcode}"
    if time.monotonic() - worker.begun > _most_seconds(settings):
        return "the process that graded it did not come to an end"
    return ""


def _most_seconds(settings: Settings) -> float:
    """By when every submission is done: no kernel is started, and no check begun, after its end."""
    in_flight = 2 * START_TIMEOUT_S + 2 * settings.cell_timeout_s  # one start lent, one begun
    return 2 * settings.notebook_timeout_s + in_flight + _PATIENCE_S


def _started(settings: Settings) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # PyTorch reads it when it is imported, before any code of ours could set it.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    try:
        process = context.Process(target=_work, args=(theirs, settings, os.getpid()), daemon=True)
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    theirs.close()
    return _Worker(process, ours)


def _end(worker: _Worker) -> None:
    if worker.process.pid is not None and worker.process.is_alive():
        processes.kill_below(worker.process.pid)
        worker.process.kill()
    worker.process.join(timeout=10)
    worker.connection.close()


def _given_up(submission: Submission, settings: Settings, why: str) -> SubmissionResult:
    """No points and no blame: an instructor has to look."""
    notebook = pristine_notebooks(settings.notebooks)[submission.notebook]
    checks = tuple(
        CheckResult(name, notebook.exercise_of(name), cell.points, "not run", why)
        for name, cell in notebook.graded.items()
    )
    flag = Flag("", "not graded", f"Grade it by hand: {why}.")
    return SubmissionResult(
        submission.student, submission.notebook, submission.path, submission.digest,
        edition=submission.edition, checks=checks, flags=(*submission.flags, flag),
    )  # fmt: skip


def _work(connection: Connection, settings: Settings, parent: int) -> None:
    """What a worker does until its parent closes the connection, or ends."""
    # Control-C reaches the whole terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        return
    import torch

    from grader.grade.one import grade_one

    torch.set_num_threads(settings.threads)
    while True:
        try:
            submission = connection.recv()
        except (EOFError, OSError):
            return
        answer: SubmissionResult | str
        try:
            answer = grade_one(submission, settings)
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            answer = f"the grader failed on it ({type(error).__name__}: {said})"
        # As a subreaper we inherit whatever a submission left; nothing of it may stay.
        processes.kill_below(os.getpid())
        connection.send(answer)
