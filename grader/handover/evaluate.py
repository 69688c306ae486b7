"""One check cell of the instructor's notebook, run in the grader on a student's remote functions.

The cell is the instructor's, visible and hidden lines; the check is this process's own. Only the
student's names in it stand for functions that are computed over there. Checks that watch memory
from inside are joined by a judge that looks from outside (`outside`).
"""

from __future__ import annotations

import ast
import contextlib
import io
import random
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from grader.handover import outside
from grader.handover.remote import Session, SessionDied, SessionTimeout
from grader.handover.watch import NotWatched
from labsupport import checks

MAX_MESSAGE = 4000
_UNJUDGED = "what came back cannot be judged"
SEEDS = range(100, 1000)  # small: checks count positions and lengths with them
NOT_WRITTEN = "is not written yet: replace"
# Checks register an attention function with Transformers and capture what is printed: both belong
# to the whole process.
_ONE_AT_A_TIME = threading.RLock()


class Outcome(NamedTuple):
    """What became of a check: as in grade/results.py.

    Attributes:
        status: "passed", "failed", "not written", "died", "timeout", or "not run" where the
            student's process could not be watched from outside.
        message: of a check that passed its [ok] lines; otherwise the diagnosis, or what happened.
        seconds: how long it took.
        unexpected: whether something happened that no check foresees: a person should look.
    """

    status: str
    message: str
    seconds: float
    unexpected: bool = False


def evaluate_check(
    source: str,
    names: Sequence[str],
    session: Session,
    *,
    seed: int,
    pid: int | None = None,
    limit_s: float = 120.0,
) -> Outcome:
    """Run an instructor's check cell, its visible and its hidden lines, on a student's functions.

    Evaluations in threads of one process wait for each other; let processes work side by side.

    Args:
        source: of the *pristine instructor's* check cell. It is executed in this process.
        names: the student's names that it uses.
        session: to the student's kernel. If its `failure` is set afterwards, it is over.
        seed: of this run; each `seed=` in the source becomes one that is drawn from it.
        pid: of the student's kernel, for checks of memory; by default the socket's peer.
        limit_s: for all calls of this check together.

    Returns:
        (status, message, seconds); nothing that the student's process does raises here.
    """
    start = time.monotonic()
    with _ONE_AT_A_TIME:
        session.deadline = time.monotonic() + limit_s
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                status, message = _run(source, names, session, seed, pid)
        finally:
            session.deadline = None
    if session.failure is not None and status == "passed":
        status, message = "died", str(session.failure)
    message = message or printed.getvalue().strip()
    unexpected = message.startswith(_UNJUDGED)
    return Outcome(status, _clean(message), time.monotonic() - start, unexpected)


def seeded(source: str, seed: int) -> ast.Module:
    """The cell with every number given as `seed=` replaced by one drawn from `seed`."""
    draw = random.Random(seed)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "seed":
            node.value = ast.copy_location(ast.Constant(draw.choice(SEEDS)), node.value)
    return tree


def _run(
    source: str, names: Sequence[str], session: Session, seed: int, pid: int | None
) -> tuple[str, str]:
    code = compile(seeded(source, seed), "<check>", "exec")
    try:
        namespace: dict[str, Any] = {name: session.remote(name) for name in names}
        missing = [name for name, value in namespace.items() if value is None]
        if missing:
            return "failed", f"{missing[0]} is not defined: did its cell run to its end?"
        judges = outside.judges(session, pid)
        namespace["checks"] = SimpleNamespace(**{**vars(checks), **judges})
        exec(code, namespace)
    except checks.CheckFailed as failure:
        return ("not written" if NOT_WRITTEN in str(failure) else "failed"), str(failure)
    except SessionTimeout as failure:
        return "timeout", str(failure)
    except SessionDied as failure:
        return "died", str(failure)
    except NotWatched as problem:
        return "not run", str(problem)
    except Exception as error:
        # A value that no check expects: of another kind, shape or size than any honest mistake's.
        return "failed", f"{_UNJUDGED} ({type(error).__name__}: {error})"
    return "passed", ""


def _clean(message: str) -> str:
    """Plain text of bounded length, without control characters."""
    kept = "".join(c if c.isprintable() or c == "\n" else "?" for c in message[:MAX_MESSAGE])
    return kept + ("..." if len(message) > MAX_MESSAGE else "")
