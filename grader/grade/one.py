"""Grading one submission: in one kernel if all goes well, in several if something breaks."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grader.grade.assemble import FAILURES, Assembled, Check, assemble
from grader.grade.confinement import confinement_here
from grader.grade.package import kernel_package
from grader.grade.pristine import Pristine, current_edition, pristine_notebooks
from grader.grade.results import CheckResult, Flag, SubmissionResult
from grader.grade.sandbox import START_TIMEOUT_S, NotServing, Sandbox
from grader.grade.settings import Settings
from grader.grade.source_rules import flags_of
from grader.grade.submissions import Refused, Submission

_TIME_IS_OVER = "the time for the whole notebook was over before this check"


@dataclass
class _Run:
    """What is known of a submission while it is graded."""

    assembled: Assembled
    settings: Settings
    package: Path
    seed: int
    end: float
    todo: dict[str, list[Check]]
    results: dict[str, CheckResult] = field(default_factory=dict)
    alone: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    to_lend: float = START_TIMEOUT_S
    peak_memory_bytes: int = 0

    def record(self, check: Check, status: str, message: str, seconds: float = 0.0) -> None:
        """Keep the result of a check; it is then no longer to be done."""
        self.results[check.grade_id] = CheckResult(
            check.grade_id, check.exercise, check.points, status, message, round(seconds, 3)
        )
        left = self.todo.get(check.exercise, [])
        self.todo[check.exercise] = [one for one in left if one.grade_id != check.grade_id]
        if not self.todo[check.exercise]:
            del self.todo[check.exercise]


def grade_one(
    submission: Submission | Refused, settings: Settings | None = None
) -> SubmissionResult:
    """Grade one submission; whatever it does, there is a result, and no process of it is left.

    Args:
        submission: from `find_submissions` or `read_submission`.
        settings: limits; the defaults if None.

    Raises:
        RuntimeError: no submission can be run on this machine, or the kernel did not start.
        labsupport.course.editions.ReleaseError: the instructor's notebooks are not there.
    """
    settings = settings or Settings()
    start = time.monotonic()
    pristine = pristine_notebooks(settings.notebooks)
    if isinstance(submission, Refused):
        return _refused(submission, pristine)
    notebook = pristine[submission.notebook]
    assembled = assemble(notebook, submission)
    rules = flags_of(assembled.sources, notebook)
    flags = [*submission.flags, *_edition_flags(submission, settings), *assembled.flags]
    flags += rules.flags
    run = _Run(
        assembled,
        settings,
        kernel_package(),
        secrets.randbelow(2**31) if settings.seed is None else settings.seed,
        # Reading and assembling is the grader's work, and bounded by the file's size.
        time.monotonic() + settings.notebook_timeout_s,
        {},
    )
    for check in assembled.checks:
        known = assembled.settled.get(check.grade_id) or assembled.settled.get(check.exercise)
        if known is not None:
            run.record(check, *known)
        elif check.exercise in rules.forbidden:
            run.record(check, "failed", f"Not judged: {rules.forbidden[check.exercise]}.")
        else:
            run.todo.setdefault(check.exercise, []).append(check)
    for exercise, why in rules.forbidden.items():
        flags.append(Flag(exercise, "library call", f"No points: {why}."))
    if run.todo:
        missing = confinement_here(settings).missing
        flags += [Flag("", "not confined", text) for text in missing]
        _run_all(run)
    return SubmissionResult(
        student=submission.student,
        notebook=submission.notebook,
        path=submission.path,
        digest=submission.digest,
        edition=submission.edition,
        checks=tuple(run.results[check.grade_id] for check in assembled.checks),
        flags=(*flags, *run.flags),
        seconds=round(time.monotonic() - start, 2),
        peak_memory_bytes=run.peak_memory_bytes,
    )


def _refused(one: Refused, pristine: dict[str, Pristine]) -> SubmissionResult:
    checks: tuple[CheckResult, ...] = ()
    if one.notebook in pristine:
        notebook = pristine[one.notebook]
        checks = tuple(
            CheckResult(name, notebook.exercise_of(name), cell.points, "not run", one.reason)
            for name, cell in notebook.graded.items()
        )
    return SubmissionResult(
        one.student, one.notebook, one.path, one.digest,
        status="refused", reason=one.reason, checks=checks,
    )  # fmt: skip


def _edition_flags(submission: Submission, settings: Settings) -> Iterator[Flag]:
    if submission.edition:
        current = current_edition(submission.notebook, settings.notebooks)
        if current and current != submission.edition:
            text = f"It was begun with edition {submission.edition}; today's is {current}."
            yield Flag("", "other edition", text)


def _run_all(run: _Run) -> None:
    """Kernel after kernel, until every check has a result."""
    extended = False
    while run.todo:
        if time.monotonic() >= run.end:
            for check in [one for left in run.todo.values() for one in left]:
                run.record(check, "timeout", _TIME_IS_OVER)
            return
        in_order = [name for name in run.assembled.exercises if name in run.todo]
        alone = [name for name in run.alone if name in run.todo]
        first = [n for n in in_order if n not in run.later and n not in alone]
        # What broke a kernel comes last, by itself: it must not use up the time of the others.
        if first:
            chosen = first
        else:
            chosen = (alone or [name for name in run.later if name in run.todo] or in_order)[:1]
            if not extended:
                run.end += run.settings.notebook_timeout_s
                extended = True
        _run_kernel(run, chosen)


def _run_kernel(run: _Run, exercises: list[str]) -> None:
    """Run some exercises in one kernel; what is not done afterwards is done in another."""
    settings = run.settings
    with Sandbox(len(exercises), run.package, settings) as box:
        text, numbers = run.assembled.notebook(
            exercises, box.started, box.sockets, settings.cell_timeout_s
        )
        # A slow start is the machine's doing: it takes nothing of the submission's time.
        lent = min(box.start(text), run.to_lend)
        run.to_lend -= lent
        run.end += lent
        for index, exercise in enumerate(exercises):
            survived = _run_exercise(run, box, index, exercise, numbers[exercise])
            run.peak_memory_bytes = max(run.peak_memory_bytes, box.peak_memory_bytes)
            if not survived:
                break


def _run_exercise(run: _Run, box: Sandbox, index: int, exercise: str, cells: list[int]) -> bool:
    """Evaluate an exercise's checks; False if the kernel is of no more use."""
    from grader.handover.evaluate import evaluate_check
    from grader.handover.remote import Session

    left = list(run.todo[exercise])
    limit = run.settings.cell_timeout_s
    try:
        connection = box.connect(index, min(limit * len(cells), max(run.end - time.monotonic(), 1)))
    except NotServing as problem:
        # Whatever ran before in this kernel may have done it.
        if index > 0:
            run.alone.append(exercise)
        else:
            for check in left:
                run.record(check, problem.status, f"When its cell was run: {problem}.")
        return False
    session = Session(connection, timeout_s=limit)
    try:
        for check in left:
            if time.monotonic() >= run.end:
                return False
            outcome = evaluate_check(
                check.source, check.needs, session, seed=run.seed, limit_s=limit
            )
            if session.failure is None:
                message = outcome.message
                if outcome.status == "failed" and "is not defined" in message:
                    message = _why_undefined(session, message, cells)
                run.record(check, outcome.status, message, outcome.seconds)
                if outcome.unexpected:
                    text = "The check stumbled over what came back: was it the student's fault?"
                    run.flags.append(Flag(check.grade_id, "not judged", text))
                continue
            if outcome.status == "died" and index > 0 and exercise not in run.alone:
                run.alone.append(exercise)
                return False
            reason = box.settle()
            known = not reason or reason == "its process ended"
            message = outcome.message if known else f"{outcome.message}: {reason}"
            status = outcome.status if outcome.status in ("died", "timeout") else "died"
            run.record(check, status, message, outcome.seconds)
            run.later.append(exercise)
            return False
    finally:
        if session.failure is None:
            session.close()
        else:
            connection.close()
    return True


def _why_undefined(session: object, message: str, cells: list[int]) -> str:
    """The student's own error, if the kernel tells: the text is theirs, so it is only shown."""
    from grader.handover.remote import SessionDied, SessionTimeout

    try:
        failures = session.call(FAILURES)  # type: ignore[attr-defined]
    except (Exception, SessionDied, SessionTimeout):
        return message
    if isinstance(failures, dict):
        for number in cells:
            if isinstance(said := failures.get(str(number)), str):
                return f"{message} It ended with {''.join(filter(str.isprintable, said))[:400]}"
    return message
