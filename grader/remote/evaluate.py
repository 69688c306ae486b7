"""One check cell of the instructor's notebook, run in the grader on a student's functions.

The cell is the instructor's, visible and hidden lines; only the student's names in it stand for
functions that are computed in the sandbox. Checks of memory are joined by a look from outside.
"""

import ast
import contextlib
import io
import random
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

from grader.remote import memory
from grader.remote.session import Session, SessionDied, SessionTimeout
from labsupport import checks

MAX_MESSAGE = 4000
SEEDS = range(100, 1000)  # small: checks count positions and lengths with them
NOT_WRITTEN = "is not written yet: replace"
_UNJUDGED = "what came back cannot be judged"


class Outcome(NamedTuple):
    """The outcome of a check.

    The message holds the [ok] lines of a check that passed, else the diagnosis, or what happened.
    At something `unexpected`, which no check foresees, a person should look.
    """

    status: str
    message: str
    unexpected: bool


def evaluate_check(
    source: str,
    names: tuple[str, ...],
    session: Session,
    *,
    version: str = "",
    seed: int,
    limit_s: float = 120.0,
) -> Outcome:
    """Run a check cell on a student's functions; nothing that these do raises here.

    The last definition of a name in the notebook counts. Where the check does not pass with it, and
    another one stood there when the notebook came to the check, that one counts too.

    Args:
        source: of the solved notebook's check cell; it is executed in this process.
        names: the student's names that it uses.
        session: to the sandbox. If its `failure` is set afterwards, it is over.
        version: of the names as they stood at the check.
        seed: each `seed=` in the source becomes one that is drawn from it.
        limit_s: for all calls together.
    """
    session.deadline = time.monotonic() + limit_s
    status, message = _run(source, names, session, "", seed)
    if status != "passed" and session.failure is None and _stood_there(names, session, version):
        earlier = _run(source, names, session, version, seed)
        if earlier[0] == "passed" or status == "not written":
            status, message = earlier
    session.deadline = None
    if session.failure is not None and status == "passed":
        status, message = "died", str(session.failure)
    kept = "".join(c if c.isprintable() or c == "\n" else "?" for c in message[:MAX_MESSAGE])
    return Outcome(status, kept, message.startswith(_UNJUDGED))


def _stood_there(names: tuple[str, ...], session: Session, version: str) -> bool:
    """Tell whether other objects stood under these names at the check, and all of them."""
    try:
        found = [session.remote(name, version) for name in names]
    except (SessionDied, SessionTimeout):
        return False
    return all(one is not None for one, _ in found) and not all(same for _, same in found)


def seeded(source: str, seed: int) -> ast.Module:
    """Return the cell's tree, every number given as `seed=` replaced by one drawn from `seed`."""
    draw = random.Random(f"{seed} {source}")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "seed":
            node.value = ast.copy_location(ast.Constant(draw.choice(SEEDS)), node.value)
    return tree


def _run(
    source: str, names: tuple[str, ...], session: Session, version: str, seed: int
) -> tuple[str, str]:
    code = compile(seeded(source, seed), "<check>", "exec")
    printed = io.StringIO()
    try:
        namespace: dict[str, Any] = {name: session.remote(name, version)[0] for name in names}
        missing = [name for name, value in namespace.items() if value is None]
        if missing:
            return "failed", f"{missing[0]} is not defined: did its cell run to its end?"
        namespace["checks"] = SimpleNamespace(**{**vars(checks), **memory.judges(session)})
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(code, namespace)
    except checks.CheckFailed as failure:
        return ("not written" if NOT_WRITTEN in str(failure) else "failed"), str(failure)
    except SessionTimeout as failure:
        return "timeout", str(failure)
    except SessionDied as failure:
        return "died", str(failure)
    except memory.NotWatchedError as problem:
        return "not run", str(problem)
    except Exception as error:
        # A value that no check expects: of another kind, shape or size than an honest mistake's.
        return "failed", f"{_UNJUDGED} ({type(error).__name__}: {error})"
    return "passed", printed.getvalue().strip()
