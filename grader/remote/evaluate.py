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
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grader.grade.submissions import printable
from grader.remote.session import Session, SessionDied, SessionTimeout
from labsupport import checks
from labsupport.attention.flash_torch import flash_attention_forward
from labsupport.checks.errors import CheckFailed
from labsupport.checks.ex_1_3_online_softmax import require_maximum
from labsupport.checks.ex_1_4_tiled_forward import NAMES as FORWARD_NAMES
from labsupport.checks.ex_1_5_backward import NAMES as BACKWARD_NAMES
from labsupport.checks.ex_3_2_chunked_loss import require_gradients
from labsupport.checks.verdict import call, judge, passed, unpack
from labsupport.profiling.units import format_bytes

MIB = 2**20
BLOCK, LENGTH = 512, 8192
TILES = 48 * MIB  # more than any number of 512 x 512 tiles that a solution has names for
# What was called, for the message; most bytes; draws inputs, and returns the call.
Look = tuple[str, int, Callable[[], Callable[[], object]]]


class NotWatchedError(Exception):
    """The sandbox's memory cannot be watched; says why."""


def judges(session: Session) -> dict[str, Callable[..., None]]:
    """Return the checks that are judged from outside: name -> what to call in the check's place."""

    def check(name: str, student: Any, **options: Any) -> None:
        getattr(checks, name)(student, **options)
        looks, seen = JUDGES[name]
        for look in looks(student):
            _limit(session, *look)
        passed(f"{seen}, seen from outside")

    return {name: partial(check, name) for name in JUDGES}


def _limit(
    session: Session, what: str, most: int, prepare: Callable[[], Callable[[], object]]
) -> None:
    """Refuse a call during which the sandbox takes more than `most` bytes."""
    ask = prepare()
    session.compute("library", ("grader.remote.worker", "tidy"), (), {})
    if (taken := extra_memory(session.pid, ask)) > most:
        raise CheckFailed(
            f"{what} the process took {format_bytes(taken)} more than before, seen from outside; "
            f"{format_bytes(most)} are enough without it."
        )


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


def _running_streams(student: Any) -> Iterator[Look]:
    # A whole row's exponentials take as much as the scores; one block's next to nothing. There is
    # one row, so that looking at row after row is no way around.
    call(student, torch.randn(2, 60), 10)
    n, block = 2**23, 2**15

    def stream(scores: Tensor) -> None:
        require_maximum(call(student, scores, block), scores)

    what = f"with a row of {n:,} scores ({format_bytes(4 * n)}) and blocks of {block:,}"
    # What arrives takes as much twice for a moment; a whole row's differences and exponentials make
    # it three times.
    yield what, int(2.5 * 4 * n), lambda: partial(stream, torch.randn(1, n))


def _no_matrix(prepare: Callable[[int, bool], Callable[[], object]]) -> Iterator[Look]:
    # 8192 x 8192 scores are 256 MiB, a mask of them 64; Q, K, V and O 2.
    prepare(600, True)()
    for is_causal in (False, True):
        what = f"for seqlen {LENGTH:,}, head_dim 16, is_causal={is_causal}, blocks of {BLOCK}"
        yield what, TILES, partial(prepare, LENGTH, is_causal)


def _forward_memory(student: Any) -> Iterator[Look]:
    def forward(is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> None:
        out, _ = unpack(call(student, q, k, v, is_causal, BLOCK, BLOCK), FORWARD_NAMES)
        if not is_causal:
            rows = torch.randint(q.shape[-2], (8,))
            weights = (q[:, rows] @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            judge("out (some rows)", _like(out, q)[:, rows], weights @ v, allowed=1e-3)

    return _no_matrix(lambda n, is_causal: partial(forward, is_causal, *torch.randn(3, 1, n, 16)))


def _backward_memory(student: Any) -> Iterator[Look]:
    def backward(is_causal: bool, *given: Tensor) -> None:
        result = call(student, *given, is_causal, BLOCK, BLOCK)
        _, _, dv = unpack(result, BACKWARD_NAMES)
        if not is_causal:
            dout, q, k, _, _, lse = given
            rows = torch.randint(k.shape[-2], (8,))
            columns = (q @ k[:, rows].mT / q.shape[-1] ** 0.5 - lse[..., None]).exp()
            judge("dv (some rows)", _like(dv, k)[:, rows], columns.mT @ dout, allowed=1e-3)

    def prepare(n: int, is_causal: bool) -> Callable[[], None]:
        # Copies: a process that says it changed its arguments must not reach the next student's.
        given = [one.clone() for one in _forward_results(n, is_causal)]
        return partial(backward, is_causal, torch.randn_like(given[0]), *given)

    return _no_matrix(prepare)


@lru_cache(maxsize=4)
def _forward_results(n: int, is_causal: bool) -> tuple[Tensor, ...]:
    """Compute q, k, v, out, lse."""
    q, k, v = torch.randn(3, 1, n, 16, generator=torch.Generator().manual_seed(n))
    return q, k, v, *flash_attention_forward(q, k, v, is_causal, block_q=512, block_k=512)


def _loss_memory(student: Any) -> Iterator[Look]:
    """All the logits are 128 MiB, a chunk's 2 MiB."""
    tokens, vocab, chunk = 4096, 8192, 64

    def step(count: int) -> None:
        leaves = [torch.randn(n, 16, requires_grad=True) for n in (count, vocab)]
        loss = call(student.apply, *leaves, torch.randint(vocab, (count,)), chunk)
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise CheckFailed("the loss does not know that it depends on hidden and weight.")
        loss.backward()
        require_gradients([leaf.grad for leaf in leaves])

    step(chunk)
    what = f"for {tokens:,} tokens, a vocabulary of {vocab:,} and chunk {chunk}"
    yield what, tokens * vocab * 4 // 2, lambda: partial(step, tokens)


def _registered_memory(student: Any) -> Iterator[Look]:
    """Scores of 8 heads of 2048 x 2048 are 128 MiB; keys and values for 4 heads 64 MiB."""

    def registered(is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> None:
        layer: Any = nn.Module().eval()
        layer.is_causal, layer.layer_idx = is_causal, 0
        result = call(student, layer, q, k, v, None)
        out = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(out, Tensor):
            raise CheckFailed("the first value that came back is no tensor.")
        if not is_causal:
            rows = torch.randint(q.shape[-2], (4,))
            right = F.scaled_dot_product_attention(q[..., rows, :], k, v, enable_gqa=True)
            given = _like(out, q.transpose(1, 2))[:, rows]
            judge("out (some rows)", given, right.transpose(1, 2), allowed=1e-3)

    def prepare(n_q: int, n_k: int, kv_heads: int, is_causal: bool) -> Callable[[], None]:
        sizes = (n_q, 4), (n_k, kv_heads), (n_k, kv_heads)
        return partial(
            registered, is_causal, *(torch.randn(2, n, h, 16).transpose(1, 2) for n, h in sizes)
        )

    for n_q, n_k, kv_heads, is_causal, most in (
        (2048, 2048, 4, False, 64 * MIB),
        (4, 2**16, 1, False, 48 * MIB),
    ):
        prepare(4, 64, kv_heads, is_causal)()
        what = f"for {n_q:,} queries in 4 heads, {n_k:,} keys in {kv_heads}, is_causal={is_causal}"
        yield what, most, partial(prepare, n_q, n_k, kv_heads, is_causal)


def _merge_all(student: Any) -> Iterator[Look]:
    """A stream of 160 MiB, which arrives over there part by part."""
    count, rows = 40, 2**15

    def coming(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        part = torch.randn(rows, 32)
        for _ in range(count):
            yield part, torch.randn(rows)

    call(student, coming(8))
    each = rows * 33 * 4
    what = f"while {count} parts of {format_bytes(each)} came one at a time"
    yield what, count * each // 2, lambda: lambda: call(student, coming(rows))


def _like(result: Tensor, right: Tensor) -> Tensor:
    """Return a result whose rows can be taken; refuse a wrong shape."""
    if result.shape != right.shape:
        raise CheckFailed(f"{tuple(right.shape)} was expected, not {tuple(result.shape)}.")
    return result


_SCORES = "no matrix of scores: little memory"
# By a check's name: what to look at after it, and what it says when all is well.
JUDGES: dict[str, tuple[Callable[[Any], Iterator[Look]], str]] = {
    "check_running_streams": (_running_streams, "no exponentials of whole rows"),
    "check_forward_memory": (_forward_memory, _SCORES),
    "check_backward_memory": (_backward_memory, _SCORES),
    "check_loss_memory": (_loss_memory, "never all the logits"),
    "check_registered_memory": (_registered_memory, "no matrix of scores, and no repeated keys"),
    "check_merge_all": (_merge_all, "never all the parts"),
}


MAX_MESSAGE = 4000
SEEDS = range(100, 1000)  # small: checks count positions and lengths with them
NOT_WRITTEN = "is not written yet: replace"
_UNJUDGED = "what came back cannot be judged"


class Outcome(NamedTuple):
    """Status, and [ok] lines or diagnosis; at something `unexpected`, a person should look."""

    status: str
    message: str
    unexpected: bool


def evaluate_check(
    source: str, names: tuple[str, ...], session: Session, *, seed: int, limit_s: float = 120.0
) -> Outcome:
    """Run a check cell on a student's functions; nothing that these do raises here.

    The last definition of a name in the notebook counts. If the session's `failure` is set
    afterwards, it is over. Each `seed=` in the solved notebook's source becomes one that is drawn
    from `seed`; `limit_s` is for all calls together.
    """
    session.deadline = time.monotonic() + limit_s
    status, message = _run(source, names, session, seed)
    session.deadline = None
    if session.failure is not None and status == "passed":
        status, message = "died", str(session.failure)
    kept = printable(message[:MAX_MESSAGE], "\n")
    return Outcome(status, kept, message.startswith(_UNJUDGED))


def seeded(source: str, seed: int) -> ast.Module:
    """Return the cell's tree, every number given as `seed=` replaced by one drawn from `seed`."""
    draw = random.Random(f"{seed} {source}")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "seed":
            node.value = ast.copy_location(ast.Constant(draw.choice(SEEDS)), node.value)
    return tree


def _run(source: str, names: tuple[str, ...], session: Session, seed: int) -> tuple[str, str]:
    code = compile(seeded(source, seed), "<check>", "exec")
    printed = io.StringIO()
    try:
        namespace: dict[str, Any] = {name: session.remote(name) for name in names}
        missing = [name for name, value in namespace.items() if value is None]
        if missing:
            return "failed", f"{missing[0]} is not defined: did its cell run to its end?"
        known = {name: getattr(checks, name) for name in checks.__all__}
        namespace["checks"] = SimpleNamespace(**{**known, **judges(session)})
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(code, namespace)
    except checks.CheckFailed as failure:
        return ("not written" if NOT_WRITTEN in str(failure) else "failed"), str(failure)
    except SessionTimeout as failure:
        return "timeout", str(failure)
    except SessionDied as failure:
        return "died", str(failure)
    except NotWatchedError as problem:
        return "not run", str(problem)
    except Exception as error:
        # A value that no check expects: of another kind, shape or size than an honest mistake's.
        return "failed", f"{_UNJUDGED} ({type(error).__name__}: {error})"
    return "passed", printed.getvalue().strip()
