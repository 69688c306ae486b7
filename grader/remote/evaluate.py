"""One check cell of the instructor's notebook, run in the grader on a student's functions.

The student's names in it stand for functions that are computed in the sandbox. What a process says
of its memory is no proof, so checks of memory also look from outside, at a length where a matrix
shows in the student's process: its highest resident set since that was reset
(/proc/PID/clear_refs, 5).
"""

import ast
import contextlib
import io
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from grader.grade.plan import names_of
from grader.grade.submissions import printable
from grader.remote.session import Session, SessionDied
from labsupport import checks
from labsupport.attention.flash_torch import flash_attention_forward
from labsupport.checks import ex_1_4_tiled_forward, ex_1_5_backward
from labsupport.checks.verdict import call, judge, passed, unpack
from labsupport.profiling.units import format_bytes

# 8192 x 8192 scores are 256 MiB, a mask of them 64; Q, K, V and O 2; 512 x 512 tiles 1 each.
BLOCK, LENGTH, MOST = 512, 8192, 48 * 2**20
# By check of memory: the names of the results, and the arguments that have a row for each query,
# as the first result has.
WATCHED = {
    "check_forward_memory": (ex_1_4_tiled_forward.NAMES, (0,)),
    "check_backward_memory": (ex_1_5_backward.NAMES, (0, 1, 4, 5)),
}
MAX_MESSAGE = 4000
SEEDS = range(100, 1000)  # small: checks count positions and lengths with them
NOT_WRITTEN = "is not written yet: replace"
UNJUDGED = "what came back cannot be judged"


class NotWatchedError(Exception):
    """The sandbox's memory cannot be watched; says why."""

    status = "not run"


def watch_memory(name: str, session: Session, student: Any, **options: Any) -> None:
    """Run a check of memory, then look at the student's process from outside."""
    getattr(checks, name)(student, **options)
    _ask(name, student, 600)
    session.compute("library", ("grader.remote.worker", "tidy"), (), {})
    if (taken := extra_memory(session.pid, partial(_ask, name, student, LENGTH))) > MOST:
        raise checks.CheckFailed(
            f"for seqlen {LENGTH:,}, head_dim 16, blocks of {BLOCK} the process took "
            f"{format_bytes(taken)} more than before, seen from outside; {format_bytes(MOST)} "
            "are enough without a matrix of scores."
        )
    passed("no matrix of scores: little memory, seen from outside")


def extra_memory(pid: int, ask: Callable[[], object]) -> int:
    """Return the bytes that a process takes during `ask()`; raise NotWatchedError."""
    files = Path(f"/proc/{pid}")

    def kib(name: str) -> int:
        lines = (files / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    try:
        before = kib("VmRSS")
        (files / "clear_refs").write_text("5")
        ask()
        most, after = kib("VmHWM"), kib("VmRSS")
    except OSError as error:
        raise NotWatchedError(
            f"the memory of the student's process cannot be watched ({error}): the grader needs to "
            "be root, or the same user, on Linux"
        ) from error
    # What gave back memory that was there before had room that was not measured.
    return 1024 * max(most - before, before - after, 0)


def _ask(name: str, student: Any, n: int) -> None:
    """Call a function for n queries; some of them alone must give the same results.

    So the work is done, and it is no matter whether it is right, which other checks judge.
    """
    names, by_rows = WATCHED[name]
    given = q, k, v = tuple(torch.randn(3, 1, n, 16))
    if name == "check_backward_memory":
        forward = flash_attention_forward(q, k, v, False, block_q=BLOCK, block_k=BLOCK)
        given = (torch.randn_like(q), q, k, v, *forward)
    rows = torch.randint(n, (8,))
    some = [x[:, rows] if i in by_rows else x for i, x in enumerate(given)]
    all_rows, few = (
        unpack(call(student, *one, False, BLOCK, BLOCK), names)[0] for one in (given, some)
    )
    if all_rows.shape != q.shape:
        raise checks.CheckFailed(f"{tuple(q.shape)} was expected, not {tuple(all_rows.shape)}.")
    judge(f"{names[0]} (some rows)", all_rows[:, rows], few, allowed=1e-3)


class Outcome(NamedTuple):
    """Status, and [ok] lines or diagnosis; the `diagnosis` alone is that of `CheckFailed`."""

    status: str
    message: str
    diagnosis: str = ""


def evaluate_check(source: str, session: Session, *, seed: int, limit_s: float = 120.0) -> Outcome:
    """Run a check cell on a student's functions; nothing that these do raises here.

    The last definition of a name in the notebook counts. If the session's `failure` is set
    afterwards, it is over. Each `seed=` in the solved notebook's source becomes one that is drawn
    from `seed`; `limit_s` is for all calls together.
    """
    session.deadline = time.monotonic() + limit_s
    printed = io.StringIO()
    try:
        needed = sorted(names_of(source)[0] - {"checks"})
        namespace: dict[str, Any] = {name: session.remote(name) for name in needed}
        if missing := [name for name in needed if namespace[name] is None]:
            raise checks.CheckFailed(f"{missing[0]} is not defined: did its cell run to its end?")
        known = {name: getattr(checks, name) for name in checks.__all__}
        known |= {name: partial(watch_memory, name, session) for name in WATCHED}
        namespace["checks"] = SimpleNamespace(**known)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(seeded(source, seed), "<check>", "exec"), namespace)
        made = Outcome("passed", printed.getvalue().strip())
    except checks.CheckFailed as failure:
        status = "not written" if NOT_WRITTEN in str(failure) else "failed"
        made = Outcome(status, str(failure), failure.diagnosis)
    except (SessionDied, NotWatchedError) as problem:
        made = Outcome(problem.status, str(problem))
    except Exception as error:
        # A value that no check expects: of another kind, shape or size than an honest mistake's.
        made = Outcome("failed", f"{UNJUDGED} ({type(error).__name__}: {error})")
    session.deadline = None
    if session.failure is not None and made.status == "passed":
        made = Outcome("died", str(session.failure))
    return made._replace(message=printable(made.message[:MAX_MESSAGE], "\n"))


def seeded(source: str, seed: int) -> ast.Module:
    """Return the cell's tree, every number given as `seed=` replaced by one drawn from `seed`."""
    draw = random.Random(f"{seed} {source}")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "seed":
            node.value = ast.copy_location(ast.Constant(draw.choice(SEEDS)), node.value)
    return tree
