"""Grading many submissions, several at a time, so that nothing is lost when interrupted."""

import concurrent.futures
import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import filelock

from grader.grade.one import KilledError, grade_one, not_run
from grader.grade.results import NAME, Flag, SubmissionResult, read_results, write_result
from grader.grade.sandbox import confinement_missing, package_folder
from grader.grade.settings import Settings
from grader.grade.submissions import Submission
from labsupport.course.files import write_new

_PR_SET_PDEATHSIG, _LOCK_S = 1, 5.0


def _key(one: Submission | SubmissionResult) -> tuple[str, str, str, str]:
    return one.student, one.notebook, one.path, one.digest


def run_batch(
    submissions: list[Submission],
    out: Path,
    settings: Settings,
    *,
    resume: bool = False,
    tell: Callable[[SubmissionResult, int], None] = lambda result, done: None,
) -> list[SubmissionResult]:
    """Grade all; each result is on disk (OUT/results.jsonl) before the next is begun.

    Args:
        submissions: from `find_submissions`.
        out: the folder for the results; it is created if need be.
        settings: limits.
        resume: go on in an OUT that holds results, without grading the same file again.
        tell: called with each new result, and how many are done.

    Returns:
        the results of these submissions in their order, also those of earlier runs.

    Raises:
        ValueError: OUT holds results, and `resume` is False.
        RuntimeError: another grader works in OUT, or no submission can be run on this machine.
        OSError: OUT cannot be written to.
    """
    with _alone(out):
        known = {_key(result): result for result in read_results(out)}
        if known and not resume:
            raise ValueError(
                f"{out / NAME} holds {len(known)} results; go on with --resume, or choose another "
                "folder with --out"
            )
        new = [one for one in submissions if _key(one) not in known]
        for done, result in enumerate(_graded(new, settings), len(submissions) - len(new) + 1):
            write_result(out, result)
            known[_key(result)] = result
            tell(result, done)
    return [known[_key(one)] for one in submissions]


def _graded(new: list[Submission], settings: Settings) -> Iterator[SubmissionResult]:
    left = [one for one in new if not one.refused]
    if left:
        # Before anything is graded: if nothing can be run here, that is no submission's fault.
        confinement_missing(settings.unconfined)
        package_folder()
    yield from (grade_one(one, settings) for one in new if one.refused)
    # A worker that dies takes the pool with it. What it held, and what the system killed while
    # others ran, is graded once more, one at a time.
    for jobs in (settings.jobs, 1):
        todo, left = left, []
        grade = functools.partial(grade_one, settings=settings, alone=jobs == 1)
        with _pool(jobs) as pool:
            futures = {pool.submit(grade, one): one for one in todo}
            try:
                for future in concurrent.futures.as_completed(futures):
                    if isinstance(future.exception(), BrokenProcessPool | KilledError):
                        left.append(futures[future])
                    else:
                        yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list((pool._processes or {}).values()):
                    process.kill()
    for one in left:
        # No points and no blame: an instructor has to look.
        why = "the process that graded it ended"
        flag = Flag("", "not graded", f"Grade it by hand: {why}.")
        yield not_run(one, settings, why, flag)


def _pool(jobs: int) -> concurrent.futures.ProcessPoolExecutor:
    # PyTorch reads it when it is imported, before any code of ours could set it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return concurrent.futures.ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_begin_work, initargs=(os.getpid(),)
    )


def _begin_work(parent: int) -> None:
    # Control-C reaches the whole terminal; the parent decides what it means. It takes us with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep a second grader out of OUT; the system lifts the lock even if we are killed."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        # A grader that was killed a moment ago may be still about to start a program, which holds
        # the lock until it has started.
        with filelock.FileLock(out / ".lock", timeout=_LOCK_S):
            if not (out / ".gitignore").exists():
                # Points and names of students do not belong into a repository.
                write_new(out / ".gitignore", "*\n")
            yield
    except filelock.Timeout:
        raise RuntimeError(f"another grader is at work in {out}") from None
