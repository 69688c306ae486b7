"""Exercise 3-6: data parallelism by hand: hooks, buckets, accumulation, and a sharded layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed, kind
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    explain,
    judge,
    mistakes,
    passed,
    results,
    values,
    within,
)
from labsupport.distributed.by_hand import Comm, gradients_on_rank, layer_on_rank, rehearse

Log = list[tuple[str, int]]


### BEGIN SOLUTION
def average_each(parameters: Sequence[Tensor], comm: Comm, is_last: Callable[[], bool]) -> None:
    """Attach a hook to each parameter that averages its gradient over the ranks."""

    def average(p: Any) -> None:
        if is_last():
            comm.all_reduce(p.grad)()
            p.grad /= comm.world

    for p in parameters:
        p.register_post_accumulate_grad_hook(average)


HOOK_MISTAKES = mistakes(r"""
The gradients are added up over the ranks, but not divided by their number, or are divided before
the wait, which overwrites the quotient.
    p.grad /= comm.world -> pass
The sum never arrives in the gradient. `all_reduce` only starts it, in the tensor that it gets: give
it `p.grad` itself, not a clone, and call the function that it returns, which waits.
    comm.all_reduce(p.grad)() -> comm.all_reduce(p.grad)
The gradients are still this rank's own. Either nothing is sent: call `is_last()` in the hook, not
when you attach it. Or the average is not in `p.grad`: average that in place; no clone, and not the
weights.
    p.grad -> p.data
The gradients of the micro-batches before the last are lost: leave `p.grad` alone while `is_last()`
is false.
    if is_last() -> if not is_last(): p.grad = None\n        if is_last()
Only the first parameter has a hook.
    for p in parameters -> for p in parameters[:1]
The micro-batches before the last are averaged, and the last one is not.
    if is_last() -> if not is_last()
""")


def make_buckets(sizes: Sequence[int], cap: int) -> list[list[int]]:
    """Return the numbers of the parameters in each bucket, in the order of their gradients."""
    buckets, filled = [[]], 0
    for i in reversed(range(len(sizes))):
        if filled >= cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += sizes[i]
    return buckets


BUCKET_MISTAKES = mistakes(r"""
The first parameter's gradient comes last: go through the parameters from the last to the first.
    reversed(range(len(sizes))) -> range(len(sizes))
A bucket that holds exactly `cap` bytes is full.
    filled >= cap -> filled > cap
A bucket never becomes fuller than `cap` here. As in DDP, it takes tensors until it holds `cap`
bytes or more, and so its last tensor may go beyond.
    filled >= cap -> buckets[-1] and filled + sizes[i] > cap
The bytes of the bucket before are still counted: a new bucket is empty.
    filled = 0\n        buckets -> filled = cap - 1\n        buckets
The tensors are counted, not their bytes.
    filled += sizes[i] -> filled += 1
The last bucket is missing: it need not be full.
    return buckets -> return buckets[:-1]
Within a bucket the numbers ascend: keep the order in which gradients come.
    return buckets -> return [sorted(b) for b in buckets]
""")


def average_in_buckets(
    parameters: Sequence[Any],
    buckets: Sequence[Sequence[int]],
    comm: Comm,
    is_last: Callable[[], bool],
) -> Callable[[], None]:
    """Attach hooks that start a bucket's all-reduce when its last gradient is complete."""
    missing, running = [len(bucket) for bucket in buckets], []

    def arrived(number: int) -> None:
        if not is_last():
            return
        missing[number] -= 1
        if missing[number] == 0:
            own = [parameters[i] for i in buckets[number]]
            flat = torch.cat([p.grad.flatten() for p in own])
            running.append((own, flat, comm.all_reduce(flat)))

    for number, bucket in enumerate(buckets):
        for i in bucket:
            parameters[i].register_post_accumulate_grad_hook(lambda _, n=number: arrived(n))

    def finish() -> None:
        for own, flat, wait in running:
            wait()
            parts = flat.split([p.numel() for p in own])
            for p, part in zip(own, parts, strict=True):
                p.grad.copy_(part.view_as(p) / comm.world)
        running.clear()
        missing[:] = [len(bucket) for bucket in buckets]

    return finish


OVERLAP_MISTAKES = mistakes(r"""
The sums are not divided by the number of ranks, or are divided before the wait, which overwrites
the quotient.
    part.view_as(p) / comm.world -> part.view_as(p)
The second step averages nothing: reset the counts of missing gradients after each step.
    missing[:] = [len(bucket) for bucket in buckets] -> pass
All hooks serve the last bucket: a lambda looks the loop's variable up when it is called. Bind it:
`lambda _, n=number: ...`.
    lambda _, n=number: arrived(n) -> lambda _: arrived(len(buckets) - 1)
The micro-batches before the last are sent as well: while `is_last()` is false, gradients only
accumulate.
    not is_last() -> False
The all-reduce starts with the first gradient of a bucket, when the others are still incomplete.
    missing[number] == 0 -> missing[number] == len(buckets[number]) - 1
The gradients are still this rank's own. Either no bucket is sent: count a gradient only while
`is_last()` is true. Or the averages stay in the bucket: `finish` copies each part back into its
parameter's gradient; return `finish` itself, which is called after the backward pass.
    p.grad.copy_(part.view_as(p) / comm.world) -> pass
The sums are not in the bucket yet. Call what `all_reduce` returned, which waits, before you read
the tensor that you gave it (not a clone).
    wait() -> pass
The gradients of the micro-batches before the last are lost: leave them alone while `is_last()` is
false.
    return\n        missing -> LOST\n        missing
    LOST -> return setattr(parameters[buckets[number][0]], "grad", None)
The parts come back in another order than they went into the bucket.
    zip(own, parts, strict=True) -> zip(own, [flat[-part.numel():] for part in parts], strict=True)
""")


class ShardedLinear(torch.autograd.Function):
    """y = x Wᵀ, of which each rank holds some rows of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, comm: Comm) -> Tensor:
        """Gather the weight, use it, forget it."""
        ctx.save_for_backward(x, shard)
        ctx.comm = comm
        weight = comm.all_gather(shard)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gather the weight again; each rank gets the mean gradient of its rows."""
        x, shard = ctx.saved_tensors
        weight = ctx.comm.all_gather(shard)
        dx = dy @ weight
        dweight = dy.mT @ x
        return dx, ctx.comm.reduce_scatter(dweight) / ctx.comm.world, None


SHARD_MISTAKES = mistakes(r"""
The gradients are added up over the ranks, but not divided by their number.
    ctx.comm.reduce_scatter(dweight) / ctx.comm.world -> ctx.comm.reduce_scatter(dweight)
The shard's gradient is divided by the number of ranks twice.
    ctx.comm.reduce_scatter(dweight) / -> ctx.comm.reduce_scatter(dweight / ctx.comm.world) /
The shard's gradient comes from this rank's own inputs alone: the others' must be added, which
reduce_scatter does.
    dweight = dy.mT @ x -> own = (dy.mT @ x).chunk(ctx.comm.world)[ctx.comm.rank]
    ctx.comm.reduce_scatter(dweight) / ctx.comm.world -> own
dx comes from this rank's rows of the weight alone: gather the whole weight again.
    dx = dy @ weight -> dx = dy.chunk(ctx.comm.world, dim=1)[ctx.comm.rank] @ shard
dx is averaged over the ranks, too. It belongs to this rank's inputs, and to no others.
    dx = dy @ weight -> dx = sum(ctx.comm.all_gather(dy @ weight).split(len(x))) / ctx.comm.world
""")
### END SOLUTION


# --- rehearsals -----------------------------------------------------------------------------------


def rehearsed_hooks(attach: Any, weights: Sequence[Tensor], inputs: Tensor, *buckets: Any) -> Any:
    """Return each rank's gradients and log, with `average_each`, or `average_in_buckets`."""

    def attached(parameters: Sequence[Tensor], comm: Comm, is_last: Callable[[], bool]) -> Any:
        return attach(parameters, *buckets, _without_log(comm), is_last)

    return rehearse(lambda comm: gradients_on_rank(attached, comm, weights, inputs), len(inputs))


def rehearsed_layer(layer: Any, weight: Tensor, inputs: Tensor, douts: Tensor) -> Any:
    """Return each rank's results, gradients, memory and log, with `ShardedLinear`."""

    def apply(x: Tensor, shard: Tensor, comm: Comm) -> Tensor:
        return layer.apply(x, shard, _without_log(comm))

    ours = SimpleNamespace(apply=apply)
    return rehearse(lambda comm: layer_on_rank(ours, comm, weight, inputs, douts), len(inputs))


def _without_log(comm: Comm) -> Comm:
    """Return the rank's communication, whose log and list of gathered tensors are not the lab's."""
    shown = Comm(comm.rank, comm.world)
    for name in ("send_on", "all_reduce", "all_gather", "reduce_scatter"):
        setattr(shown, name, getattr(comm, name))
    return shown


# --- checks ---------------------------------------------------------------------------------------


def check_average_each(student: Student, seed: int = 0) -> None:
    """Exercise 3-6, step 1: gradients averaged by hooks, once a step."""
    for world, micro in ((2, 2), (3, 1)):
        arguments = _network(world, micro, seed)
        ranks = _averages(student, average_each, HOOK_MISTAKES, arguments)
        started = [name for name, _ in ranks[0][1]].count("all_reduce")
        if started != len(arguments[0]):
            raise CheckFailed(
                f"({micro} micro-batches) a rank starts {started} all-reduces in a step, for "
                f"{len(arguments[0])} parameters. While the call `is_last()` gives False, "
                "gradients only accumulate: one all-reduce for each parameter, with the last "
                "micro-batch."
            )
    passed("the gradients of all ranks are averaged, once a step", seed)


def check_buckets(student: Student, seed: int = 0) -> None:
    """Exercise 3-6, step 2: parameters by bucket, from the last to the first, as in DDP."""
    rows = draw(6, seed=seed).abs().mul(100).int().add(20).tolist()
    cases = [([400, 300, 200, 100], 300), ([40] * 5, 80), ([8, 4000, 8], 100), (rows, 150)]
    for sizes, cap in cases:
        given = call(student, sizes, cap)
        if not isinstance(given, list | tuple) or not all(
            isinstance(b, list | tuple) for b in given
        ):
            raise CheckFailed(f"return a list of lists of numbers, not {kind(given)}.")
        given = [list(bucket) for bucket in given]
        right = make_buckets(sizes, cap)
        known = results(make_buckets, BUCKET_MISTAKES, lambda f, a=(sizes, cap): f(*a))
        if given != right:
            say = explain(given, known, lambda a, b: a == b)
            if [] in given:
                say = say or "A bucket is empty: open one only when a tensor goes into it."
            raise CheckFailed(
                f"for sizes {sizes} and cap {cap} you return {given}, and right is {right}. {say}"
            )
    passed("buckets in the order in which gradients come, each full", seed)


def check_average_in_buckets(student: Student, seed: int = 0) -> None:
    """Exercise 3-6, step 3: gradients averaged in buckets, and only once with accumulation."""
    for world, micro, buckets in ((2, 2, [[3, 2], [1, 0]]), (3, 1, [[3], [2, 1], [0]])):
        arguments = (*_network(world, micro, seed), buckets)
        _averages(student, average_in_buckets, OVERLAP_MISTAKES, arguments)
    passed("the gradients of all ranks are averaged in buckets, once a step", seed)


def check_overlap(student: Student, seed: int = 0) -> None:
    """Exercise 3-6, step 3: each bucket starts as soon as it is full; nothing waits before."""
    weights, inputs = _network(2, 2, seed)
    buckets = [[3], [2, 1], [0]]
    for rank, (_, log) in enumerate(
        _ranks(within(rehearsed_hooks, student), weights, inputs, buckets)
    ):
        names = [name for name, _ in log]
        if (n := names.count("all_reduce")) != len(buckets):
            raise CheckFailed(
                f"rank {rank} starts {n} all-reduce{'s' * (n != 1)} in a step, for "
                f"{len(buckets)} buckets: one for each, and none before the last micro-batch."
            )
        if "wait" in names and names.index("wait") < _last(names, "gradient"):
            raise CheckFailed(
                "Something waits while the backward pass still runs, and holds it up. Start the "
                "all-reduce in the hook; wait in finish()."
            )
        if names.count("wait") != len(buckets):
            raise CheckFailed(
                f"In its second step rank {rank} waits {names.count('wait')} times, for "
                f"{len(buckets)} buckets: wait once for each, and forget it when the step is done."
            )
        for bucket, size in zip(buckets, _sizes(weights, buckets), strict=True):
            started = log.index(("all_reduce", size)) if ("all_reduce", size) in log else None
            complete = max(log.index(("gradient", i)) for i in bucket)
            if started is None:
                raise CheckFailed(
                    f"No all-reduce of {size:,} bytes, which bucket {bucket} has: send its "
                    "gradients in one tensor."
                )
            if any(name == "gradient" for name, _ in log[complete + 1 : started]):
                raise CheckFailed(
                    f"Bucket {bucket} is complete, but its all-reduce starts later, after other "
                    "gradients: nothing overlaps. Start it in the hook of its last gradient."
                )
    passed("each bucket travels as soon as it is full, while the backward goes on", seed)


def check_sharded_layer(student: Student, seed: int = 0) -> None:
    """Exercise 3-6, step 4: a layer of which each rank holds a part, forward and backward."""
    for world in (2, 3):
        arguments = _layer(world, seed)
        given = _layers(student, *arguments)
        right = _tensors(rehearsed_layer(ShardedLinear, *arguments))
        known = results(
            ShardedLinear, SHARD_MISTAKES, lambda f, a=arguments: _tensors(rehearsed_layer(f, *a))
        )
        ours = _tensors(given)
        if not _near(ours, right) and (say := explain(ours, known, _near)):
            raise CheckFailed(f"({world} ranks) {say}")
        for rank, (mine, theirs) in enumerate(zip(ours, right, strict=True)):
            for name, a, b in zip(("y", "dx", "the shard's gradient"), mine, theirs, strict=True):
                judge(f"({world} ranks) rank {rank}: {name}", a, b, allowed=1e-5)
    passed("a sharded layer computes what a whole one does", seed)


def check_sharded_memory(student: Student, seed: int = 0) -> None:
    """Exercise 3-6, step 4: the whole weight lives only while it is used."""
    world = 2
    arguments = _layer(world, seed)
    size = arguments[0].nbytes
    expected = [("all_gather", size // world), ("all_gather", size // world)]
    expected.append(("reduce_scatter", size))
    for *_, alive, log in _layers(student, *arguments):
        if alive[0]:
            raise CheckFailed(
                "After the forward pass the whole weight is still there: save the shard for the "
                "backward pass, and gather again there."
            )
        if alive[1]:
            raise CheckFailed("After the backward pass a whole weight is still there.")
        if sorted(log) != expected:
            raise CheckFailed(
                f"The rank calls {', '.join(f'{n} ({b:,} bytes)' for n, b in log)}. Expected: "
                "gather the shards in the forward and again in the backward pass, and one "
                "reduce_scatter of the whole gradient."
            )
    passed("no whole weight stays; two gathers and a reduce-scatter", seed)


def _averages(student: Any, solution: Any, table: Any, arguments: tuple[Any, ...]) -> list[Any]:
    given = _ranks(within(rehearsed_hooks, student), *arguments)
    right = _gradients(rehearsed_hooks(solution, *arguments))
    known = results(solution, table, lambda f: _gradients(rehearsed_hooks(f, *arguments)))
    world, micro = arguments[1].shape[:2]
    where = f"({world} ranks, {micro} micro-batch{'es' if micro > 1 else ''}) "
    ours = _gradients(given)
    if not _near(ours, right) and (say := explain(ours, known, _near)):
        raise CheckFailed(where + say)
    for rank, (mine, theirs) in enumerate(zip(ours, right, strict=True)):
        if len(mine) != len(theirs):
            raise CheckFailed(f"{where}rank {rank}: not every parameter has a gradient.")
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            step, i = divmod(i, len(arguments[0]))
            name = f"{where}rank {rank}, step {step + 1}: the gradient of parameter {i}"
            judge(name, a, b, allowed=1e-5)
    return given


def _ranks(
    student: Student, *arguments: Any, names: Sequence[str] = ("gradients", "log")
) -> list[Any]:
    return [values(rank, names) for rank in call(student, *arguments)]


def _layers(student: Any, *arguments: Any) -> list[Any]:
    names = ("y", "dx", "dshard", "alive", "log")
    return _ranks(within(rehearsed_layer, student), *arguments, names=names)


def _gradients(ranks: Sequence[Any]) -> list[list[Tensor]]:
    return [list(gradients) for gradients, _ in ranks]


def _tensors(ranks: Sequence[Any]) -> list[list[Tensor]]:
    return [list(rank[:3]) for rank in ranks]


def _near(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    if [len(one) for one in a] != [len(other) for other in b]:
        return False
    pairs = [pair for one, other in zip(a, b, strict=True) for pair in zip(one, other, strict=True)]
    return all(x.shape == y.shape and torch.allclose(x, y, atol=1e-6) for x, y in pairs)


def _last(names: Sequence[str], name: str) -> int:
    return max(i for i, one in enumerate(names) if one == name)


def _sizes(weights: Sequence[Tensor], buckets: Sequence[Sequence[int]]) -> list[int]:
    return [sum(weights[i].nbytes for i in bucket) for bucket in buckets]


def _network(world: int, micro: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Return the weights of four layers of different sizes, and inputs of all ranks."""
    sizes = (6, 5, 4, 3, 2)
    weights = [draw(b, a, seed=seed + i) / a**0.5 for i, (a, b) in enumerate(pairwise(sizes))]
    return weights, draw(world, micro, 3, sizes[0], seed=seed + 9)


def _layer(world: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    weight = draw(4 * world, 5, seed=seed)
    inputs, douts = draw(world, 3, 5, seed=seed + 1), draw(world, 3, 4 * world, seed=seed + 2)
    return weight, inputs, douts
