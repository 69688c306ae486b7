"""Checks of memory, judged from outside the student's process: what it says of itself is no proof.

Such a check runs twice. First in the student's process, as a student sees it: its diagnosis is the
better one, and a failure counts. Then from here, at a length where what must not exist shows: the
operating system's figures for the process (`watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grader.handover.remote import Session
from grader.handover.watch import extra_memory
from labsupport import checks
from labsupport.attention.flash_torch import flash_attention_forward
from labsupport.checks.chunked_loss import require_gradients
from labsupport.checks.flash import BACKWARD_NAMES, FORWARD_NAMES
from labsupport.checks.softmax import require_maximum
from labsupport.checks.verdict import CheckFailed, call, judge, passed, unpack
from labsupport.profiling.units import format_bytes

MIB = 2**20
LOOKS = 3
BLOCK, LENGTHS = 512, ((4096, False), (8192, True))
TILES = 48 * MIB  # more than any number of 512 x 512 tiles that a solution has names for


def judges(session: Session, pid: int | None = None) -> dict[str, Callable[..., None]]:
    """The checks that are judged from outside: name -> what to call in the check's place.

    Args:
        pid: of the student's kernel; by default the session's peer.
    """
    watch = _Watch(session, session.pid if pid is None else pid)
    return {name: partial(judge, watch) for name, judge in JUDGES.items()}


class _Watch:
    def __init__(self, session: Session, pid: int) -> None:
        self.session, self.pid = session, pid

    def inside(self, check: str, student: Any) -> None:
        """Run a check in the student's process, for its diagnosis; that it passes means nothing.

        Raises:
            CheckFailed: it failed there.
        """
        try:
            self.session.library(f"labsupport.checks:{check}", student)
        except Exception as error:
            if type(error).__name__ == "CheckFailed":
                raise CheckFailed(str(error)) from None

    def limit(self, what: str, most: int, prepare: Callable[[], Callable[[], object]]) -> None:
        """Refuse a call during which the process takes or touches more than `most` bytes.

        Args:
            what: was called, for the message.
            most: bytes.
            prepare: draws inputs, and returns the call, which refuses a wrong answer: little memory
                is no merit of it. Where the bytes touched alone are too many, they are looked at
                again (see `watch`), with other inputs: no answer is kept.

        Raises:
            CheckFailed: saying `what` was called, and how much it took.
        """
        used = 0
        for _ in range(LOOKS):
            ask = prepare()
            self.session.library("grader.handover.worker:tidy")
            taken, touched = extra_memory(self.pid, ask)
            used = max(taken, touched)
            if taken > most or touched <= most:
                break
        if used > most:
            raise CheckFailed(
                f"{what} the process took {format_bytes(used)} more than before, seen from "
                f"outside; {format_bytes(most)} are plenty without it."
            )


def _running_streams(watch: _Watch, student: Any) -> None:
    """A whole row's exponentials take as much as the scores; one block's next to nothing.

    There is one row, so that looking at row after row is no way around.
    """
    watch.inside("check_running_streams", student)
    call(student, torch.randn(2, 60), 10)
    n, block = 2**23, 2**15
    size = n * 4

    def stream(scores: Tensor) -> None:
        require_maximum(call(student, scores, block), scores)

    watch.limit(
        f"with a row of {n:,} scores ({format_bytes(size)}) and blocks of {block:,}",
        # What arrives takes as much once, and the allocator half of it now and then; a whole row's
        # exponentials make it twice at least.
        int(1.8 * size),
        lambda: partial(stream, torch.randn(1, n)),
    )
    passed("no exponentials of whole rows, seen from outside")


def _forward_memory(watch: _Watch, student: Any) -> None:
    """8192 x 8192 scores are 256 MiB, a mask of them 64; 4096 x 4096 scores are 64 MiB.

    Q, K, V and O are 2 MiB together.
    """
    watch.inside("check_forward_memory", student)

    def forward(n: int, is_causal: bool) -> None:
        q, k, v = torch.randn(3, 1, n, 16)
        out, _ = unpack(call(student, q, k, v, is_causal, BLOCK, BLOCK), FORWARD_NAMES)
        if not is_causal:
            rows = torch.randint(q.shape[-2], (8,))
            weights = (q[:, rows] @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            judge("out (some rows)", _rows(out, q)[:, rows], weights @ v, allowed=1e-3)

    forward(600, True)
    for n, is_causal in LENGTHS:
        watch.limit(
            f"for seqlen {n:,}, head_dim 16, is_causal={is_causal}, blocks of {BLOCK}",
            TILES,
            lambda n=n, is_causal=is_causal: partial(forward, n, is_causal),
        )
    passed("no matrix of scores: little memory, seen from outside")


def _backward_memory(watch: _Watch, student: Any) -> None:
    """As of the forward pass."""
    watch.inside("check_backward_memory", student)

    def backward(given: Sequence[Tensor], is_causal: bool) -> None:
        result = call(student, *given, is_causal, BLOCK, BLOCK)
        _, _, dv = unpack(result, BACKWARD_NAMES)
        if not is_causal:
            dout, q, k, _, _, lse = given
            rows = torch.randint(k.shape[-2], (8,))
            columns = (q @ k[:, rows].mT / q.shape[-1] ** 0.5 - lse[..., None]).exp()
            judge("dv (some rows)", _rows(dv, k)[:, rows], columns.mT @ dout, allowed=1e-3)

    backward([one.clone() for one in _forward_results(600, True)], True)
    for n, is_causal in LENGTHS:
        # Copies: a process that says it changed its arguments must not reach the next student's.
        given = [one.clone() for one in _forward_results(n, is_causal)]

        def prepare(
            given: list[Tensor] = given, is_causal: bool = is_causal
        ) -> Callable[[], object]:
            dout = torch.randn_like(given[0])
            return partial(backward, [dout, *given[1:]], is_causal)

        watch.limit(
            f"for seqlen {n:,}, head_dim 16, is_causal={is_causal}, blocks of {BLOCK}",
            TILES,
            prepare,
        )
    passed("no matrix of probabilities: little memory, seen from outside")


@lru_cache(maxsize=4)
def _forward_results(n: int, is_causal: bool) -> tuple[Tensor, ...]:
    """dout, q, k, v, out, lse."""
    generator = torch.Generator().manual_seed(n)
    dout, q, k, v = torch.randn(4, 1, n, 16, generator=generator)
    out, lse = flash_attention_forward(q, k, v, is_causal, block_q=512, block_k=512)
    return dout, q, k, v, out, lse


def _loss_memory(watch: _Watch, student: Any) -> None:
    """All the logits are 128 MiB, a chunk's 2 MiB."""
    watch.inside("check_loss_memory", student)
    tokens, vocab, chunk = 4096, 8192, 64

    def step(count: int) -> None:
        leaves = [torch.randn(count, 16).requires_grad_(), torch.randn(vocab, 16).requires_grad_()]
        loss = call(student.apply, *leaves, torch.randint(vocab, (count,)), chunk)
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise CheckFailed("the loss does not know that it depends on hidden and weight.")
        loss.backward()
        require_gradients([leaf.grad for leaf in leaves])

    step(chunk)
    watch.limit(
        f"for {tokens:,} tokens, a vocabulary of {vocab:,} and chunk {chunk}",
        tokens * vocab * 4 // 2,
        lambda: partial(step, tokens),
    )
    passed("never all the logits, seen from outside")


def _registered_memory(watch: _Watch, student: Any) -> None:
    """Scores of 8 heads of 2048 x 2048 are 128 MiB; keys and values for 4 heads 64 MiB."""
    watch.inside("check_registered_memory", student)

    def registered(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
        result = call(student, layer, q, k, v, None)
        out = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(out, Tensor):
            raise CheckFailed("the first value that came back is no tensor.")
        if not layer.is_causal:
            rows = torch.randint(q.shape[-2], (4,))
            right = F.scaled_dot_product_attention(q[..., rows, :], k, v, enable_gqa=True)
            given = _rows(out, q.transpose(1, 2))[:, rows]
            judge("out (some rows)", given, right.transpose(1, 2), allowed=1e-3)

    for n_q, n_k, kv_heads, is_causal, most in (
        (2048, 2048, 4, True, 64 * MIB),
        (2048, 2048, 4, False, 64 * MIB),
        (4, 2**16, 1, False, 48 * MIB),
    ):
        layer = _layer(is_causal)
        registered(layer, *_model_inputs(4, 64, kv_heads))

        def prepare(
            layer: nn.Module = layer, sizes: tuple[int, ...] = (n_q, n_k, kv_heads)
        ) -> Callable[[], object]:
            return partial(registered, layer, *_model_inputs(*sizes))

        watch.limit(
            f"for {n_q:,} queries in 4 heads, {n_k:,} keys in {kv_heads}, is_causal={is_causal}",
            most,
            prepare,
        )
    passed("no matrix of scores, and no repeated keys, seen from outside")


def _rows(result: Tensor, like: Tensor) -> Tensor:
    """A result whose rows can be taken.

    Raises:
        CheckFailed: its shape is wrong.
    """
    if result.shape != like.shape:
        raise CheckFailed(f"{tuple(like.shape)} was expected, not {tuple(result.shape)}.")
    return result


def _model_inputs(n_q: int, n_k: int, kv_heads: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(2, n, h, 16).transpose(1, 2)
        for n, h in ((n_q, 4), (n_k, kv_heads), (n_k, kv_heads))
    )


def _layer(is_causal: bool) -> nn.Module:
    module: Any = nn.Module()
    module.is_causal, module.layer_idx = is_causal, 0
    return module.eval()


def _merge_all(watch: _Watch, student: Any, seed: int = 0) -> None:
    """The check itself, whose stream arrives over there part by part; then a stream of 160 MiB."""
    checks.check_merge_all(student, seed)
    count, rows = 40, 2**15

    def coming(rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        part = torch.randn(rows, 32, generator=generator)
        for _ in range(count):
            yield part, torch.randn(rows, generator=generator)

    call(student, coming(8))
    each = rows * 33 * 4
    watch.limit(
        f"while {count} parts of {format_bytes(each)} came one at a time",
        count * each // 2,
        lambda: lambda: call(student, coming(rows)),
    )


JUDGES: dict[str, Callable[..., None]] = {
    "check_running_streams": _running_streams,
    "check_forward_memory": _forward_memory,
    "check_backward_memory": _backward_memory,
    "check_loss_memory": _loss_memory,
    "check_registered_memory": _registered_memory,
    "check_merge_all": _merge_all,
}
