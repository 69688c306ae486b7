"""Grading one submission: its cells run in a sandbox, its functions are judged here."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from grader.grade.package import kernel_package
from grader.grade.plan import Check, Plan, Step, make_plan
from grader.grade.pristine import Pristine, current_edition, pristine_notebooks
from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.grade.rules import flags_of
from grader.grade.sandbox import NotServing, Sandbox, confinement_missing
from grader.grade.settings import Settings
from grader.grade.submissions import Refused, Submission
from grader.remote.evaluate import evaluate_check
from grader.remote.session import Session

_TIME_IS_OVER = "the time for the whole notebook was over before this check"
_ENDED_OFTEN = "the program ended again and again before this check"
# Runs of a notebook: the first, and others without the cell or the call that ended one.
_RUNS = 6


class KilledError(RuntimeError):
    """The system ended a submission's program; as a rule because the machine is out of memory."""


@dataclass
class _Run:
    """A submission while it is graded."""

    plan: Plan
    settings: Settings
    alone: bool
    seed: int
    end: float
    steps: list[Step]
    todo: list[Check]
    results: dict[str, CheckResult] = field(default_factory=dict)
    died: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    flags: list[Flag] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def record(self, check: Check, status: str, message: str, seconds: float = 0.0) -> None:
        """Keep the result of a check; it is then no longer to be done."""
        result = CheckResult(
            check.grade_id, check.exercise, check.points, status, message, round(seconds, 3)
        )
        self.results[check.grade_id] = result
        self.todo = [one for one in self.todo if one is not check]


def grade_one(
    submission: Submission | Refused, settings: Settings | None = None, *, alone: bool = True
) -> SubmissionResult:
    """Grade one submission; whatever it does, there is a result, and no process of it is left.

    Args:
        submission: from `find_submissions` or `read_submission`.
        settings: limits; the defaults if None.
        alone: whether no other submission runs: then nobody else uses up the memory.

    Raises:
        KilledError: the system ended its program, and others were running: that does not count.
        RuntimeError: no submission can be run on this machine.
        labsupport.course.editions.ReleaseError: the solved notebooks are not there.
    """
    settings = settings or Settings()
    start = time.monotonic()
    pristine = pristine_notebooks(settings.notebooks)
    if isinstance(submission, Refused):
        return not_run(submission, pristine, submission.reason, status="refused")
    notebook = pristine[submission.notebook]
    plan = make_plan(notebook, submission)
    missing = confinement_missing(settings.unconfined)
    seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
    end = time.monotonic() + settings.notebook_timeout_s
    run = _Run(plan, settings, alone, seed, end, list(plan.steps), list(plan.checks))
    for check in plan.checks:
        if check.grade_id in plan.settled:
            run.record(check, *plan.settled[check.grade_id])
    for _ in range(_RUNS):
        if run.todo:
            _run_once(run)
    for check in run.todo:
        over = time.monotonic() >= end
        run.record(check, "timeout" if over else "died", _TIME_IS_OVER if over else _ENDED_OFTEN)
    flags = [*submission.flags, *_edition_flags(submission, settings), *plan.flags]
    flags += [*flags_of(plan, notebook), *run.flags]
    flags += [Flag("", "not confined", text) for text in missing]
    return SubmissionResult(
        student=submission.student,
        notebook=submission.notebook,
        path=submission.path,
        digest=submission.digest,
        edition=submission.edition,
        checks=tuple(run.results[check.grade_id] for check in plan.checks),
        flags=tuple(flags),
        seconds=round(time.monotonic() - start, 2),
        peak_memory_bytes=run.peak_memory_bytes,
    )


def not_run(
    one: Submission | Refused, pristine: dict[str, Pristine], why: str, **fields: Any
) -> SubmissionResult:
    """Return the result of what could not be run: all its points to lose, and why."""
    checks: tuple[CheckResult, ...] = ()
    if known := pristine.get(one.notebook):
        checks = tuple(
            CheckResult(name, known.exercise_of(name), cell.points, "not run", why)
            for name, cell in known.graded.items()
        )
    given: dict[str, Any] = {"reason": why, "checks": checks} | fields
    return SubmissionResult(one.student, one.notebook, one.path, one.digest, **given)


def _edition_flags(submission: Submission, settings: Settings) -> Iterator[Flag]:
    if submission.edition:
        current = current_edition(submission.notebook, settings.notebooks)
        if current and current != submission.edition:
            text = f"It was begun with edition {submission.edition}; today's is {current}."
            yield Flag("", "other edition", text)


def _run_once(run: _Run) -> None:
    """Run the cells in one sandbox, and judge checks until all are done or something breaks."""
    left = run.end - time.monotonic()
    if left <= 0:
        return
    with Sandbox(kernel_package(), run.settings) as box:
        try:
            with contextlib.closing(box.run(run.steps, left)) as session:
                _judge_all(run, session, box)
        except NotServing as problem:
            _leave_out(run, problem, box.step)
    run.peak_memory_bytes = max(run.peak_memory_bytes, box.peak_memory_bytes)
    if box.killed and not run.alone:
        raise KilledError("the system ended its program")


def _leave_out(run: _Run, problem: NotServing, at: int | None) -> None:
    """Go on without the cell that ended the program; the exercise that it solves is lost."""
    if at is None or not 0 <= at < len(run.steps) or not run.steps[at].source:
        for check in list(run.todo):
            run.record(check, problem.status, f"When the notebook was run: {problem}.")
        return
    step = run.steps.pop(at)
    for check in list(run.todo):
        if step.exercise and check.exercise == step.exercise:
            run.record(check, problem.status, f"When its cell was run: {problem}.")
    if not step.exercise:
        first = step.source.strip().split("\n")[0][:60]
        text = f"A cell was left out, because {problem}. It begins: {first}"
        run.flags.append(Flag("", "cell left out", text))


def _judge_all(run: _Run, session: Session, box: Sandbox) -> None:
    # Exercises that ended a session come late, lest their endless loops use up the others' time.
    # Fused attention, once allowed, stays so until the end.
    order = sorted(run.todo, key=lambda one: (one.may_use_fused, one.exercise in run.late))
    for check in order:
        if time.monotonic() >= run.end:
            return
        session.fused = check.may_use_fused
        outcome = evaluate_check(
            check.source, check.needs, session, version=check.grade_id, seed=run.seed,
            limit_s=run.settings.cell_timeout_s,
        )  # fmt: skip
        status, message = outcome.status, outcome.message
        if session.failure is not None:
            run.late.add(check.exercise)
            if status == "died":
                message = f"{message}: {box.why_died()}"
            if check.grade_id not in run.died and status == "died":
                # Another call may have done it: once more, after the others.
                run.died.add(check.grade_id)
            else:
                run.record(check, status, message, outcome.seconds)
            return
        if status == "failed" and "is not defined" in message:
            if check.exercise in run.plan.absent:
                status, message = run.plan.absent[check.exercise]
            elif box.first_error:
                message += f" A cell ended with {box.first_error[:300]}"
        run.record(check, status, message, outcome.seconds)
        if outcome.unexpected:
            text = "The check stumbled over what came back: was it the student's fault?"
            run.flags.append(Flag(check.grade_id, "not judged", text))
