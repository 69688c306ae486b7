"""Exercise 3-7: the backward pass of a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    explain,
    judge,
    mistakes,
    passed,
    results,
    unpack,
    within,
)
from labsupport.distributed.by_hand import Comm, rehearse

NAMES = "dq", "dk", "dv"


### BEGIN SOLUTION
def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's shards of causal attention."""
    scale = q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for step in range(comm.world):
        arriving = comm.send_on((k, v))
        if step <= comm.rank:
            scores = scale * q @ k.mT
            if step == 0:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            p = (scores - lse[..., None]).exp()
            ds = scale * p * (dout @ v.mT - delta)
            dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ dout
        dk, dv = comm.send_on((dk, dv))()
        k, v = arriving()
    return dq, dk, dv


MISTAKES = mistakes(r"""
dK and dV do not travel: what this rank adds to them belongs to the keys that are here now, which
are another rank's.
    dk, dv = comm.send_on((dk, dv))() -> pass
dK and dV stop one rank too early. Each step adds a share and sends them on, the last one too: W
hops in W steps.
    (dk, dv))() -> (dk, dv))() if step + 1 < comm.world else (dk, dv)
dK and dV travel the other way round than their keys.
    dk, dv = comm -> for _ in range(1, comm.world): dk, dv = comm
dQ travels, too. The queries stay, and so does their gradient.
    k, v = arriving() -> k, v = arriving(); dq, _ = comm.send_on((dq, dq))()
dK travels, but dV stays.
    dk, dv = comm.send_on((dk, dv))() -> dk, _ = comm.send_on((dk, dv))()
dV travels, but dK stays.
    dk, dv = comm.send_on((dk, dv))() -> _, dv = comm.send_on((dk, dv))()
dQ and dK lack the scale: scores are q kᵀ times 1 / sqrt(head_dim), and so are both gradients.
    scale * p * (dout -> p * (dout
dQ lacks the scale, 1 / sqrt(head_dim).
    dq + ds @ k -> dq + ds @ k / scale
dK lacks the scale, 1 / sqrt(head_dim).
    dk + ds.mT @ q -> dk + ds.mT @ q / scale
In step 0 a query does not see its own key: hide what is above the diagonal, triu(1).
    triu(1) -> triu()
The scores are not scaled: p is exp(q kᵀ / sqrt(head_dim) - lse).
    scale * q @ k.mT -> q @ k.mT
D is missing: dS is P times (dO Vᵀ - D).
    v.mT - delta -> v.mT
The diagonal block has no mask: in step 0 a query sees the keys up to its own.
    if step == 0 -> if False
All blocks have the diagonal's mask: it belongs to step 0 alone.
    if step == 0 -> if True
Later tokens' keys count: in step s the keys are those of rank r - s, and hidden where s > r.
    if step <= comm.rank -> if True
Keys that only step 0 brings count: all earlier ranks' keys do.
    if step <= comm.rank -> if step == 0
P is a softmax of the block: it must be exp(scores - lse), with the whole row's log-sum-exp.
    (scores - lse[..., None]).exp() -> scores.softmax(-1)
The keys and values do not travel: each rank needs those of all W ranks.
    k, v = arriving() -> arriving()
The gradients are in another order: return dq, dk, dv.
    return dq, dk, dv -> return dk, dv, dq
The gradients are in another order: return dq, dk, dv.
    return dq, dk, dv -> return dk, dq, dv
The gradients are in another order: return dq, dk, dv.
    return dq, dk, dv -> return dq, dv, dk
The gradients are in another order: return dq, dk, dv.
    return dq, dk, dv -> return dv, dk, dq
""")
### END SOLUTION


def rehearsed_ring(backward: Any, *shards: Tensor) -> list[tuple[Tensor, ...]]:
    """Run a backward pass as rehearsed ranks.

    Args:
        backward: the function, as `ring_backward`.
        shards: dout, q, k, v, out (world, heads, tokens, head_dim), lse (world, heads, tokens).

    Returns:
        each rank's dq, dk and dv.
    """
    return rehearse(lambda comm: backward(*(x[comm.rank] for x in shards), comm), len(shards[0]))


def check_ring_backward(
    student: Student,
    seed: int = 0,
    *,
    worlds: Sequence[int] = (3, 4),
    run: Callable[..., Any] = rehearsed_ring,
) -> None:
    """Exercise 3-7: each rank's dq, dk and dv, for three ranks and for four.

    Args:
        student: one rank's backward pass.
        seed: draws other inputs.
        worlds: numbers of ranks.
        run: runs it on all ranks, as `rehearsed_ring` does.
    """
    for world in worlds:
        arguments = _inputs(world, seed)
        given = [unpack(rank, NAMES) for rank in call(within(run, student), *arguments)]
        right = _lists(rehearsed_ring(ring_backward, *arguments))
        known = results(
            ring_backward, MISTAKES, lambda f, a=arguments: _lists(rehearsed_ring(f, *a))
        )
        if not _near(given, right) and (say := explain(given, known, _near)):
            raise CheckFailed(f"({world} ranks) {say}")
        for rank, (ours, theirs) in enumerate(zip(given, right, strict=True)):
            for name, a, b in zip(NAMES, ours, theirs, strict=True):
                judge(f"({world} ranks) rank {rank}: {name}", a, b, allowed=1e-4)
    passed("dQ stays, dK and dV return to their own rank", seed)


def _lists(ranks: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    return [list(rank) for rank in ranks]


def _near(a: Sequence[Sequence[Tensor]], b: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-5)
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def _inputs(world: int, seed: int) -> tuple[Tensor, ...]:
    """Return dout, q, k, v, out and lse of one causal sequence, a shard for each rank."""
    heads, tokens, dim = 2, 5, 4
    dout, q, k, v = draw(4, heads, world * tokens, dim, seed=seed + world)
    hidden = torch.ones(world * tokens, world * tokens, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / dim**0.5).masked_fill(hidden, -torch.inf)
    whole = dout, q, k, v, scores.softmax(-1) @ v
    shards = [torch.stack(x.chunk(world, 1)) for x in whole]
    return *shards, torch.stack(scores.logsumexp(-1).chunk(world, 1))
