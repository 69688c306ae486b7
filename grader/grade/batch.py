"""Grading a folder of submissions, several at a time, so that nothing is lost when interrupted."""

import concurrent.futures
import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import filelock

from grader.grade.journal import NAME, Journal, read_results
from grader.grade.one import KilledError, grade_one, not_run
from grader.grade.package import shared_package
from grader.grade.pristine import pristine_notebooks
from grader.grade.results import Flag, SubmissionResult
from grader.grade.sandbox import confinement_missing
from grader.grade.settings import Settings
from grader.grade.submissions import Refused, Submission, find_submissions
from labsupport.course.files import write_new

_PR_SET_PDEATHSIG, _LOCK_S = 1, 5.0
_Key = tuple[str, str, str, str]


def _key(one: Submission | Refused | SubmissionResult) -> _Key:
    return one.student, one.notebook, one.path, one.digest


def run_batch(
    folder: Path,
    out: Path,
    settings: Settings | None = None,
    *,
    resume: bool = False,
    tell: Callable[[SubmissionResult, int, int], None] | None = None,
) -> list[SubmissionResult]:
    """Grade all; each result is on disk (OUT/results.jsonl) before the next is begun.

    Args:
        folder: the submissions.
        out: for the results; it is created if need be.
        settings: limits; the defaults if None.
        resume: go on in an OUT that holds results; without it such an OUT is refused. A file that
            was graded, and is the same, is not graded again.
        tell: called with each new result, how many are done and how many there are.

    Returns:
        the results of all submissions in the folder, also those of earlier runs, by student and
        notebook.

    Raises:
        ValueError: the folder holds no submissions, or OUT holds results and `resume` is False.
        RuntimeError: another grader works in OUT, or no submission can be run on this machine.
        OSError: OUT cannot be written to.
    """
    settings = settings or Settings()
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{out} lies in the folder of submissions; choose another with --out")
    with _alone(out):
        known = {_key(result): result for result in read_results(out)}
        if known and not resume:
            raise ValueError(
                f"{out / NAME} holds {len(known)} results; go on with --resume, or choose another "
                "folder with --out"
            )
        found = find_submissions(folder, notebooks=settings.notebooks, due=settings.due)
        if settings.only:
            found = _only(found, settings.only, settings.notebooks)
        if not found:
            raise ValueError(f"there is no submission of {settings.only} in {folder}")
        done = sum(_key(one) in known for one in found)
        with contextlib.closing(Journal(out)) as journal:
            for result in _graded([one for one in found if _key(one) not in known], settings):
                journal.add(result)
                known[_key(result)] = result
                done += 1
                if tell is not None:
                    tell(result, done, len(found))
    return [known[_key(one)] for one in found]


def _only(
    found: list[Submission | Refused], only: str, notebooks: Path | None
) -> list[Submission | Refused]:
    """Those of one notebook, and the refused ones that may be of any; none if there is no such."""
    if not any(name.startswith(only) for name in pristine_notebooks(notebooks)):
        return []
    return [one for one in found if one.notebook.startswith(only) or not one.notebook]


def _graded(new: list[Submission | Refused], settings: Settings) -> Iterator[SubmissionResult]:
    submissions = [one for one in new if isinstance(one, Submission)]
    if submissions:
        # Before anything is graded: if nothing can be run here, that is no submission's fault.
        confinement_missing(settings.unconfined)
    for one in new:
        if isinstance(one, Refused):
            yield grade_one(one, settings)
    with shared_package() if submissions else contextlib.nullcontext():
        # A worker that dies takes the pool with it. What it held, and what the system killed while
        # others ran, is graded once more, one at a time.
        for alone in (settings.jobs == 1, True):
            left = []
            with _pool(replace(settings, jobs=1) if alone else settings) as pool:
                grade = functools.partial(grade_one, settings=settings, alone=alone)
                futures = {pool.submit(grade, one): one for one in submissions}
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
            submissions = left
    for one in submissions:
        # No points and no blame: an instructor has to look.
        why = "the process that graded it ended"
        flags = (*one.flags, Flag("", "not graded", f"Grade it by hand: {why}."))
        yield not_run(one, pristine_notebooks(settings.notebooks), why, reason="", flags=flags)


def _pool(settings: Settings) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    # PyTorch reads it when it is imported, before any code of ours could set it.
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    return concurrent.futures.ProcessPoolExecutor(
        settings.jobs, context, initializer=_begin_work, initargs=(os.getpid(), settings.threads)
    )


def _begin_work(parent: int, threads: int) -> None:
    # Control-C reaches the whole terminal; the parent decides what it means. It takes us with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    import torch

    torch.set_num_threads(threads)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep a second grader out of OUT; the system lifts the lock even if we are killed."""
    out.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out / ".lock")
    try:
        # A grader that was killed a moment ago may be still about to start a program, which holds
        # the lock until it has started.
        lock.acquire(timeout=_LOCK_S)
    except filelock.Timeout:
        raise RuntimeError(f"another grader is at work in {out}") from None
    try:
        ignore = out / ".gitignore"
        if not ignore.exists():
            # Points and names of students do not belong into a repository.
            write_new(ignore, "*\n")
        yield
    finally:
        lock.release()
