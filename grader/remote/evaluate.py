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
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grader.grade.submissions import printable
from grader.remote.session import Session, SessionDied, SessionTimeout
from labsupport import checks
from labsupport.attention.flash_torch import flash_attention_forward
from labsupport.checks.errors import CheckFailed
from labsupport.checks.ex_1_4_tiled_forward import NAMES as FORWARD_NAMES
from labsupport.checks.ex_1_5_backward import NAMES as BACKWARD_NAMES
from labsupport.checks.verdict import call, judge, passed, unpack
from labsupport.profiling.units import format_bytes

MIB = 2**20
# 8192 x 8192 scores are 256 MiB, a mask of them 64; Q, K, V and O 2; 512 x 512 tiles 1 each.
BLOCK, LENGTH, MOST = 512, 8192, 48 * MIB


class NotWatchedError(Exception):
    """The sandbox's memory cannot be watched; says why."""


def judges(session: Session) -> dict[str, Callable[..., None]]:
    """Return the checks that are judged from outside: name -> what to call in the check's place."""

    def check(name: str, student: Any, **options: Any) -> None:
        getattr(checks, name)(student, **options)
        prepare = JUDGES[name]
        prepare(student, 600)()
        ask = prepare(student, LENGTH)
        session.compute("library", ("grader.remote.worker", "tidy"), (), {})
        if (taken := extra_memory(session.pid, ask)) > MOST:
            raise CheckFailed(
                f"for seqlen {LENGTH:,}, head_dim 16, blocks of {BLOCK} the process took "
                f"{format_bytes(taken)} more than before, seen from outside; {format_bytes(MOST)} "
                "are enough without a matrix of scores."
            )
        passed("no matrix of scores: little memory, seen from outside")

    return {name: partial(check, name) for name in JUDGES}


def extra_memory(pid: int, ask: Callable[[], object]) -> int:
    """Return the bytes that a process takes during `ask()`; raise NotWatchedError."""
    files = Path(f"/proc/{pid}")
    try:
        before = _bytes(files / "status", "VmRSS")
        (files / "clear_refs").write_text("5")
        ask()
        most, after = _bytes(files / "status", "VmHWM"), _bytes(files / "status", "VmRSS")
    except OSError as error:
        raise NotWatchedError(
            f"the memory of the student's process cannot be watched ({error}): the grader needs to "
            "be root, or the same user, on Linux"
        ) from error
    # What gave back memory that was there before had room that was not measured.
    return max(most - before, before - after, 0)


def _bytes(file: Path, name: str) -> int:
    """Read an entry such as "VmHWM:  12 kB"."""
    lines = file.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _forward(student: Any, n: int) -> Callable[[], None]:
    return _rows_alike(student, n, *torch.randn(3, 1, n, 16), names=FORWARD_NAMES, by_rows=1)


def _backward(student: Any, n: int) -> Callable[[], None]:
    q, k, v, out, lse = _forward_results(n)
    given = (torch.randn_like(q), q, out, lse[..., None], k, v)

    def ordered(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, *kv_and_more: Any) -> Any:
        return student(dout, q, *kv_and_more[:2], out, lse[..., 0], *kv_and_more[2:])

    return _rows_alike(ordered, n, *given, names=BACKWARD_NAMES, by_rows=4)


def _rows_alike(
    student: Any, n: int, *given: Tensor, names: Sequence[str], by_rows: int
) -> Callable[[], None]:
    """Return a call for n queries; of some it must give what one for these queries alone gives.

    So it is no matter whether that is right, which other checks judge. The first `by_rows` of the
    tensors have rows for queries, and so has the first result.
    """
    rows = torch.randint(n, (8,))
    some = [x[:, rows] if i < by_rows else x for i, x in enumerate(given)]

    def ask() -> None:
        # Copies: a process that says it changed its arguments must not reach the next student's.
        copies = [x.clone() for x in given]
        first = [
            unpack(call(student, *one, False, BLOCK, BLOCK), names)[0] for one in (copies, some)
        ]
        if first[0].shape != given[0].shape:
            raise CheckFailed(f"{tuple(given[0].shape)} was expected, not {tuple(first[0].shape)}.")
        judge(f"{names[0]} (some rows)", first[0][:, rows], first[1], allowed=1e-3)

    return ask


@lru_cache(maxsize=4)
def _forward_results(n: int) -> tuple[Tensor, ...]:
    """Compute q, k, v, out, lse."""
    q, k, v = torch.randn(3, 1, n, 16, generator=torch.Generator().manual_seed(n))
    return q, k, v, *flash_attention_forward(q, k, v, False, block_q=512, block_k=512)


# By a check's name: what draws inputs of a length, and returns the call that is looked at after it.
JUDGES = {"check_forward_memory": _forward, "check_backward_memory": _backward}


MAX_MESSAGE = 4000
SEEDS = range(100, 1000)  # small: checks count positions and lengths with them
NOT_WRITTEN = "is not written yet: replace"
_UNJUDGED = "what came back cannot be judged"


class Outcome(NamedTuple):
    """Status, and [ok] lines or diagnosis; at something `unexpected`, a person should look.

    The `diagnosis` alone is that of `CheckFailed`.
    """

    status: str
    message: str
    unexpected: bool
    diagnosis: str = ""


def evaluate_check(
    source: str, names: tuple[str, ...], session: Session, *, seed: int, limit_s: float = 120.0
) -> Outcome:
    """Run a check cell on a student's functions; nothing that these do raises here.

    The last definition of a name in the notebook counts. If the session's `failure` is set
    afterwards, it is over. Each `seed=` in the solved notebook's source becomes one that is drawn
    from `seed`; `limit_s` is for all calls together.
    """
    session.deadline = time.monotonic() + limit_s
    status, message, diagnosis = _run(source, names, session, seed)
    session.deadline = None
    if session.failure is not None and status == "passed":
        status, message = "died", str(session.failure)
    kept = printable(message[:MAX_MESSAGE], "\n")
    return Outcome(status, kept, message.startswith(_UNJUDGED), diagnosis)


def seeded(source: str, seed: int) -> ast.Module:
    """Return the cell's tree, every number given as `seed=` replaced by one drawn from `seed`."""
    draw = random.Random(f"{seed} {source}")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "seed":
            node.value = ast.copy_location(ast.Constant(draw.choice(SEEDS)), node.value)
    return tree


def _run(source: str, names: tuple[str, ...], session: Session, seed: int) -> tuple[str, str, str]:
    code = compile(seeded(source, seed), "<check>", "exec")
    printed = io.StringIO()
    try:
        namespace: dict[str, Any] = {name: session.remote(name) for name in names}
        missing = [name for name, value in namespace.items() if value is None]
        if missing:
            return "failed", f"{missing[0]} is not defined: did its cell run to its end?", ""
        known = {name: getattr(checks, name) for name in checks.__all__}
        namespace["checks"] = SimpleNamespace(**{**known, **judges(session)})
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(code, namespace)
    except checks.CheckFailed as failure:
        status = "not written" if NOT_WRITTEN in str(failure) else "failed"
        return status, str(failure), failure.diagnosis
    except SessionTimeout as failure:
        return "timeout", str(failure), ""
    except SessionDied as failure:
        return "died", str(failure), ""
    except NotWatchedError as problem:
        return "not run", str(problem), ""
    except Exception as error:
        # A value that no check expects: of another kind, shape or size than an honest mistake's.
        return "failed", f"{_UNJUDGED} ({type(error).__name__}: {error})", ""
    return "passed", printed.getvalue().strip(), ""
