"""Grading: a submission's cells run in a sandbox, its functions are judged here.

Several are graded at a time, and nothing is lost when grading is interrupted.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from grader.grade.plan import MAY_USE_FUSED, Plan, make_plan
from grader.grade.results import (
    NAME,
    CheckResult,
    Flag,
    Settings,
    SubmissionResult,
    read_results,
    write_result,
)
from grader.grade.sandbox import Sandbox, confinement_missing, package_folder, without_paths
from grader.grade.submissions import Cell, Submission, printable, pristine_notebooks
from grader.remote.evaluate import UNJUDGED, evaluate_check
from grader.remote.session import Session, SessionDied
from grader.remote.watch import TAKES
from labsupport.course.files import write_new

# Runs of a notebook: the first, and others without the cell or the call that ended one.
_RUNS = 6


class KilledError(RuntimeError):
    """The system ended a submission's program; as a rule because the machine is out of memory."""


def grade_one(
    submission: Submission, settings: Settings, *, alone: bool = True
) -> SubmissionResult:
    """Grade one submission; there is always a result, and no process of it is left.

    Raises:
        KilledError: the system ended its program, and it was not `alone`: that does not count.
        RuntimeError: no submission can be run on this machine.
    """
    if submission.refused:
        return not_run(submission, settings, submission.refused)
    start = time.monotonic()
    notebook = pristine_notebooks(settings.notebooks)[submission.notebook]
    plan = make_plan(notebook, submission)
    missing = confinement_missing(settings.unconfined)
    run = _Run(list(notebook.graded.values()), plan, settings, alone)
    for _ in range(_RUNS):
        run.once()
    why = "died", "the program ended again and again before this check"
    if time.monotonic() >= run.end:
        why = "timeout", "the time for the whole notebook was over before this check"
    for check in run.todo:
        run.record(check, *why)
    flags = [*submission.flags, *plan.flags, *run.flags]
    return SubmissionResult(
        *_key(submission),
        checks=tuple(run.results[name] for name in notebook.graded),
        flags=(*flags, *(Flag("", "not confined", text) for text in missing)),
        seconds=round(time.monotonic() - start, 2),
    )


def not_run(one: Submission, settings: Settings, why: str, *flags: Flag) -> SubmissionResult:
    """Return the result of a submission that could not be run: no points, and the reason."""
    if one.refused:
        flags = (*flags, Flag("", "refused", f"{one.path}: {printable(why)}"))
    known = pristine_notebooks(settings.notebooks).get(one.notebook)
    checks = tuple(
        CheckResult(name, cell.exercise, cell.points, "not run", why)
        for name, cell in (known.graded.items() if known else ())
    )
    return SubmissionResult(*_key(one), one.refused, checks, (*one.flags, *flags))


class _Run:
    """A submission while it is graded."""

    def __init__(self, checks: list[Cell], plan: Plan, settings: Settings, alone: bool) -> None:
        self.checks, self.plan, self.settings, self.alone = checks, plan, settings, alone
        self.seed = secrets.randbelow(2**31)
        self.end = time.monotonic() + settings.notebook_timeout_s
        self.steps = list(plan.steps)
        self.results: dict[str, CheckResult] = {}
        self.died: set[str] = set()  # exercises
        self.late: set[str] = set()  # exercises
        self.charged: set[tuple[str, str]] = set()  # exercises and diagnoses
        self.flags: list[Flag] = []

    @property
    def todo(self) -> list[Cell]:
        return [check for check in self.checks if check.grade_id not in self.results]

    def record(self, check: Cell, status: str, message: str) -> None:
        self.results[check.grade_id] = CheckResult(
            check.grade_id, check.exercise, check.points, status, without_paths(message)
        )

    def once(self) -> None:
        """Run the cells in a sandbox, and judge checks until all are done or something breaks."""
        left = self.end - time.monotonic()
        if left <= 0 or not self.todo:
            return
        with Sandbox(self.settings) as box:
            try:
                with contextlib.closing(box.run(self.steps, left)) as session:
                    self._judge_all(session, box)
            except SessionDied as problem:
                self._leave_out(problem.status, str(problem), box.step)
        if box.killed and not self.alone:
            raise KilledError("the system ended its program")

    def _leave_out(self, status: str, why: str, at: int | None) -> None:
        """Go on without the cell that ended the program; the exercise that it solves is lost."""
        if at is None or not 0 <= at < len(self.steps):
            for check in self.todo:
                self.record(check, status, f"When the notebook was run: {why}.")
            return
        step = self.steps.pop(at)
        if not step.exercise:
            first = step.source.strip().split("\n")[0][:60]
            text = f"A cell was left out, because {why}. It begins: {first}"
            self.flags.append(Flag("", "cell left out", text))
        for check in (one for one in self.todo if one.exercise == step.exercise):
            self.record(check, status, f"When its cell was run: {why}.")

    def _judge_all(self, session: Session, box: Sandbox) -> None:
        # Exercises that ended a session come late, lest their endless loops use up the others'
        # time. Fused attention, once allowed, stays so until the end.
        def order(check: Cell) -> tuple[bool, bool]:
            return check.exercise.startswith(MAY_USE_FUSED), check.exercise in self.late

        for check in sorted(self.todo, key=order):
            if time.monotonic() >= self.end:
                return
            session.fused, _ = order(check)
            limit_s = self.settings.cell_timeout_s
            made = evaluate_check(check.source, session, seed=self.seed, limit_s=limit_s)
            status, message, diagnosis = made
            notes, session.notes = dict.fromkeys(session.notes), []
            said = "While this was judged, its code"
            out = [note for note in notes if note.startswith(TAKES)]
            if out:
                text = f"{said} {out[0]}, where the check watches PyTorch's operators."
                self.flags.append(Flag(check.grade_id, "outside PyTorch", text))
            if (calls := [one for one in notes if one not in out]) and not session.fused:
                text = f"{said} {', '.join(calls[:10])}."
                self.flags.append(Flag(check.grade_id, "library call", text))
            if session.failure is not None:
                self.late.add(check.exercise)
                if status == "died":
                    message = f"{message}: {box.why_died()}"
                if status == "died" and check.exercise not in self.died:
                    # Another call may have done it: once more, after the others.
                    self.died.add(check.exercise)
                else:
                    self.record(check, status, message)
                return
            if status == "failed" and "is not defined" in message:
                if check.exercise in self.plan.absent:
                    status, message = self.plan.absent[check.exercise]
                elif box.first_error:
                    message += f" A cell ended with {box.first_error[:300]}"
            if status == "failed" and diagnosis:
                # One mistake costs the points of the first check that finds it.
                known = (check.exercise, diagnosis) in self.charged
                status = "known mistake" if known else status
                self.charged.add((check.exercise, diagnosis))
            self.record(check, status, message)
            if message.startswith(UNJUDGED):
                text = "The check crashed on the returned value: was it the student's fault?"
                self.flags.append(Flag(check.grade_id, "not judged", text))


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
    """Grade all, and return their results; each is in OUT/results.jsonl before the next is begun.

    To `resume` is to go on in an OUT that holds results, without grading the same file again.
    `tell` is called with each new result, and how many are done.

    Raises:
        ValueError: OUT holds results, and `resume` is False.
        RuntimeError: another grader works in OUT, or no submission can be run on this machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        # The system lifts the lock even if we are killed. A grader that was killed a moment ago may
        # be still about to start a program, which holds the lock until it has started.
        lock = filelock.FileLock(out / ".lock", timeout=_LOCK_S).acquire()
    except filelock.Timeout:
        raise RuntimeError(f"another grader is at work in {out}") from None
    with lock:
        if not (out / ".gitignore").exists():
            # Points and names of students do not belong into a repository.
            write_new(out / ".gitignore", "*\n")
        known = {_key(result): result for result in read_results(out)}
        if known and not resume:
            raise ValueError(
                f"{out / NAME} holds {len(known)} results; go on with --resume, or choose another "
                "folder with --out"
            )
        # A late file that was graded may be refused now, or the other way round.
        new = [
            one
            for one in submissions
            if (old := known.get(_key(one))) is None
            or (old.status == "refused") != bool(one.refused)
        ]
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
    # A worker that dies takes the pool with it. What it held, what the system killed while others
    # ran, and what our own code failed on, is graded once more, one at a time.
    for jobs in (settings.jobs, 1):
        todo, left, errors = left, [], []
        grade = functools.partial(grade_one, settings=settings, alone=jobs == 1)
        # PyTorch reads it when it is imported, before any code of ours could set it.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with concurrent.futures.ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), _begin_work, (os.getpid(),)
        ) as pool:
            futures = {pool.submit(grade, one): one for one in todo}
            try:
                for future in concurrent.futures.as_completed(futures):
                    if error := future.exception():
                        left.append(futures[future])
                        errors.append(f"{type(error).__name__}: {error}"[:300])
                    else:
                        yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list((pool._processes or {}).values()):
                    process.kill()
    # No points and no blame: an instructor has to look.
    for one, why in zip(left, errors, strict=True):
        yield not_run(one, settings, why, Flag("", "not graded", f"Grade it by hand: {why}"))


def _begin_work(parent: int) -> None:
    # Control-C reaches the whole terminal; the parent decides what it means. It takes us with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
