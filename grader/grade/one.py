"""Grading one submission: its cells run in a sandbox, its functions are judged here."""

import contextlib
import secrets
import time

from grader.grade.notebooks import pristine_notebooks
from grader.grade.plan import Check, Plan, make_plan
from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.grade.rules import flags_of
from grader.grade.sandbox import NotServing, Sandbox, confinement_missing
from grader.grade.settings import Settings
from grader.grade.submissions import Submission
from grader.remote.evaluate import evaluate_check
from grader.remote.session import Session

_TIME_IS_OVER = "the time for the whole notebook was over before this check"
_ENDED_OFTEN = "the program ended again and again before this check"
# Runs of a notebook: the first, and others without the cell or the call that ended one.
_RUNS = 6


class KilledError(RuntimeError):
    """The system ended a submission's program; as a rule because the machine is out of memory."""


def grade_one(
    submission: Submission, settings: Settings, *, alone: bool = True
) -> SubmissionResult:
    """Grade one submission; whatever it does, there is a result, and no process of it is left.

    Raises:
        KilledError: the system ended its program, and it was not `alone`: that does not count.
        RuntimeError: no submission can be run on this machine.
    """
    if submission.refused:
        return not_run(submission, settings, submission.refused, status="refused")
    start = time.monotonic()
    notebook = pristine_notebooks(settings.notebooks)[submission.notebook]
    plan = make_plan(notebook, submission)
    missing = confinement_missing(settings.unconfined)
    run = _Run(plan, settings, alone)
    for _ in range(_RUNS):
        run.once()
    for check in run.todo:
        over = time.monotonic() >= run.end
        run.record(check, "timeout" if over else "died", _TIME_IS_OVER if over else _ENDED_OFTEN)
    flags = [*submission.flags, *plan.flags, *flags_of(plan, notebook), *run.flags]
    return SubmissionResult(
        submission.student, submission.notebook, submission.path, submission.digest,
        checks=tuple(run.results[check.grade_id] for check in plan.checks),
        flags=(*flags, *(Flag("", "not confined", text) for text in missing)),
        seconds=round(time.monotonic() - start, 2),
    )  # fmt: skip


def not_run(
    one: Submission, settings: Settings, why: str, *flags: Flag, status: str = "graded"
) -> SubmissionResult:
    """Return the result of what could not be run: all its points to lose, and why."""
    checks: tuple[CheckResult, ...] = ()
    if known := pristine_notebooks(settings.notebooks).get(one.notebook):
        checks = tuple(
            CheckResult(name, known.exercise_of(name), cell.points, "not run", why)
            for name, cell in known.graded.items()
        )
    whose = one.student, one.notebook, one.path, one.digest
    return SubmissionResult(*whose, status, one.refused, checks, (*one.flags, *flags))


class _Run:
    """A submission while it is graded."""

    def __init__(self, plan: Plan, settings: Settings, alone: bool) -> None:
        self.plan, self.settings, self.alone = plan, settings, alone
        self.seed = secrets.randbelow(2**31)
        self.end = time.monotonic() + settings.notebook_timeout_s
        self.steps = list(plan.steps)
        self.results: dict[str, CheckResult] = {}
        self.died: set[str] = set()  # checks
        self.late: set[str] = set()  # exercises
        self.flags: list[Flag] = []

    @property
    def todo(self) -> list[Check]:
        return [check for check in self.plan.checks if check.grade_id not in self.results]

    def record(self, check: Check, status: str, message: str) -> None:
        self.results[check.grade_id] = CheckResult(
            check.grade_id, check.exercise, check.points, status, message
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
            except NotServing as problem:
                self._leave_out(problem, box.step)
        if box.killed and not self.alone:
            raise KilledError("the system ended its program")

    def _leave_out(self, problem: NotServing, at: int | None) -> None:
        """Go on without the cell that ended the program; the exercise that it solves is lost."""
        if at is None or not 0 <= at < len(self.steps) or not self.steps[at].source:
            for check in self.todo:
                self.record(check, problem.status, f"When the notebook was run: {problem}.")
            return
        step = self.steps.pop(at)
        if not step.exercise:
            first = step.source.strip().split("\n")[0][:60]
            text = f"A cell was left out, because {problem}. It begins: {first}"
            self.flags.append(Flag("", "cell left out", text))
        for check in self.todo:
            if check.exercise == step.exercise:
                self.record(check, problem.status, f"When its cell was run: {problem}.")

    def _judge_all(self, session: Session, box: Sandbox) -> None:
        # Exercises that ended a session come late, lest their endless loops use up the others'
        # time. Fused attention, once allowed, stays so until the end.
        for check in sorted(self.todo, key=lambda c: (c.may_use_fused, c.exercise in self.late)):
            if time.monotonic() >= self.end:
                return
            session.fused = check.may_use_fused
            status, message, unexpected = evaluate_check(
                check.source, check.names, session, version=check.grade_id, seed=self.seed,
                limit_s=self.settings.cell_timeout_s,
            )  # fmt: skip
            if session.failure is not None:
                self.late.add(check.exercise)
                if status == "died":
                    message = f"{message}: {box.why_died()}"
                if status == "died" and check.grade_id not in self.died:
                    # Another call may have done it: once more, after the others.
                    self.died.add(check.grade_id)
                else:
                    self.record(check, status, message)
                return
            if status == "failed" and "is not defined" in message:
                if check.exercise in self.plan.absent:
                    status, message = self.plan.absent[check.exercise]
                elif box.first_error:
                    message += f" A cell ended with {box.first_error[:300]}"
            self.record(check, status, message)
            if unexpected:
                text = "The check stumbled over what came back: was it the student's fault?"
                self.flags.append(Flag(check.grade_id, "not judged", text))
