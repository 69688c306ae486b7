"""Data and sequence parallelism by hand: one rank's communication, for real or rehearsed.

    rehearse(function, world)        runs function(comm) as `world` ranks, threads of this process
    function(ProcessComm())          the same function in a process that `launch` started
    train_on_rank, layer_memory      what notebook 3 runs on real processes

Both kinds of `comm` have the same four operations. The rehearsal starts no process, adds up in the
order of the ranks, and knows when a message can never come: an error instead of a hang.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labsupport.distributed.data_parallel.ddp import AllReduces, wrap
from labsupport.distributed.minimal_ring import send_on

T = TypeVar("T")
Pair = tuple[Tensor, Tensor]


class RehearsalError(RuntimeError):
    """The ranks of a rehearsal do not fit together."""


class Comm:
    """Communication of one rank.

    Attributes:
        rank, world: this rank's number, and the number of ranks.
        log: (operation, bytes of its argument) in the order of the calls; ("wait", bytes) when an
            all-reduce is waited for.
        gathered: weak references to what `all_gather` returned.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.log: list[tuple[str, int]] = []
        self.gathered: list[weakref.ref[Tensor]] = []

    def send_on(self, pair: Pair) -> Callable[[], Pair]:
        """Start sending two tensors to the next rank; the result waits for the previous rank's."""
        raise NotImplementedError

    def all_reduce(self, x: Tensor) -> Callable[[], None]:
        """Start adding up x over all ranks, in place; the result waits until x holds the sum."""
        raise NotImplementedError

    def all_gather(self, shard: Tensor) -> Tensor:
        """Return the shards of all ranks, one below the other (dimension 0)."""
        raise NotImplementedError

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of the sum of `whole` over all ranks."""
        raise NotImplementedError


class ProcessComm(Comm):
    """Communication by torch.distributed, in the default process group.

    Attributes:
        most_gathered: the most bytes of gathered tensors that were alive at a time.
    """

    most_gathered = 0

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())

    def send_on(self, pair: Pair) -> Callable[[], Pair]:
        """See `Comm`."""
        self.log.append(("send_on", sum(x.nbytes for x in pair)))
        return send_on(pair)

    def all_reduce(self, x: Tensor) -> Callable[[], None]:
        """See `Comm`."""
        self.log.append(("all_reduce", x.nbytes))
        dense = x.contiguous()  # of another one gloo writes over the memory between its entries
        work = dist.all_reduce(dense, async_op=True)

        def wait() -> None:
            self.log.append(("wait", x.nbytes))
            work.wait()
            with torch.no_grad():
                x.copy_(dense)

        return wait

    def all_gather(self, shard: Tensor) -> Tensor:
        """See `Comm`."""
        self.log.append(("all_gather", shard.nbytes))
        parts = [torch.empty_like(shard) for _ in range(self.world)]
        dist.all_gather(parts, shard.contiguous())
        whole = torch.cat(parts)
        self.gathered.append(weakref.ref(whole))
        alive = (one() for one in self.gathered)
        self.most_gathered = max(self.most_gathered, sum(x.nbytes for x in alive if x is not None))
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """See `Comm`."""
        self.log.append(("reduce_scatter", whole.nbytes))
        parts = [part.contiguous() for part in equal_parts(whole, self.world)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


def equal_parts(whole: Tensor, world: int) -> Sequence[Tensor]:
    """Cut a tensor's first dimension for the ranks; RehearsalError if it is no multiple of them."""
    if len(whole) % world:
        raise RehearsalError(f"{len(whole)} rows cannot be cut into {world} equal parts")
    return whole.chunk(world)


# --- rehearsal ------------------------------------------------------------------------------------


def rehearse(function: Callable[[Comm], T], world: int) -> list[T]:
    """Run `function(comm)` as `world` ranks, each a thread of this process.

    Returns:
        What the function returned on each rank, by rank.

    Raises:
        ValueError: no ranks.
        RehearsalError: a rank waits for something that no rank will send, or the ranks call
            different operations. An exception of the function's own passes through.

    >>> rehearse(lambda comm: comm.rank, 3)
    [0, 1, 2]
    """
    if world < 1:
        raise ValueError(f"a rehearsal needs at least 1 rank, but {world} were given")
    meeting, results, errors = _Meeting(world), [None] * world, []

    def run(rank: int) -> None:
        try:
            results[rank] = function(_ThreadComm(rank, meeting))  # type: ignore[call-overload]
        except BaseException as error:
            errors.append(error)
        finally:
            meeting.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # a rank whose wait never ends is a consequence
        raise min(errors, key=lambda error: isinstance(error, RehearsalError))
    return results  # type: ignore[return-value]


class _Meeting:
    """Messages of all ranks, and who waits for which."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.posted: dict[Any, Any] = {}
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.ended: set[int] = set()

    def post(self, key: Any, value: Any) -> None:
        with self.changed:
            self.posted[key] = value
            self.changed.notify_all()

    def take(self, rank: int, keys: Sequence[Any], what: str) -> list[Any]:
        def there() -> bool:
            return all(key in self.posted for key in keys)

        with self.changed:
            self.waiting[rank] = there
            self.changed.notify_all()
            try:
                while not there():
                    stuck = len(self.waiting) + len(self.ended) == self.world
                    if stuck and not any(ready() for ready in self.waiting.values()):
                        raise RehearsalError(
                            f"rank {rank} waits for {what}, which never comes: all ranks must make "
                            "the same calls, equally often"
                        )
                    self.changed.wait()
            finally:
                del self.waiting[rank]
            return [self.posted[key] for key in keys]

    def end(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()


class _ThreadComm(Comm):
    """Communication of a rank in a rehearsal."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.world)
        self._meeting, self._sent, self._collectives = meeting, 0, 0

    def send_on(self, pair: Pair) -> Callable[[], Pair]:
        if len(pair) != 2:
            raise ValueError(f"send_on takes two tensors, and got {len(pair)}")
        self.log.append(("send_on", sum(x.nbytes for x in pair)))
        number, versions = self._sent, [x._version for x in pair]
        self._sent += 1
        self._meeting.post(("pair", self.rank, number), [x.detach().clone() for x in pair])

        def wait() -> Pair:
            if [x._version for x in pair] != versions:
                raise RehearsalError(
                    "a tensor was changed in place while it travelled: call what send_on returned "
                    "first, or compute a new tensor"
                )
            key = "pair", (self.rank - 1) % self.world, number
            ((first, second),) = self._meeting.take(
                self.rank, [key], "a pair of the previous rank's"
            )
            return first, second

        return wait

    def all_reduce(self, x: Tensor) -> Callable[[], None]:
        collect = self._meet("all_reduce", x)

        def wait() -> None:
            self.log.append(("wait", x.nbytes))
            with torch.no_grad():
                x.copy_(sum(collect()))  # type: ignore[arg-type]

        return wait

    def all_gather(self, shard: Tensor) -> Tensor:
        whole = torch.cat(self._meet("all_gather", shard)())
        self.gathered.append(weakref.ref(whole))
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        parts = self._meet("reduce_scatter", whole)()
        return equal_parts(torch.stack(parts).sum(0), self.world)[self.rank].clone()

    def _meet(self, what: str, x: Tensor) -> Callable[[], list[Tensor]]:
        """Bring a tensor to a collective; the result waits for those of all ranks."""
        self.log.append((what, x.nbytes))
        number = self._collectives
        self._collectives += 1
        kind = what, f"{tuple(x.shape)} {x.dtype}"
        self._meeting.post((number, self.rank), (kind, x.detach().clone()))

        def collect() -> list[Tensor]:
            keys = [(number, rank) for rank in range(self.world)]
            posts = self._meeting.take(self.rank, keys, f"the others' {what}")
            for rank, (other, _) in enumerate(posts):
                if other != kind:
                    raise RehearsalError(
                        f"rank {self.rank} calls {what} with a tensor {kind[1]} where rank {rank} "
                        f"calls {other[0]} with {other[1]}: all ranks must make the same calls"
                    )
            return [x for _, x in posts]

        return collect


# --- one rank's program ---------------------------------------------------------------------------

Attach = Callable[..., Callable[[], None] | None]
Gradients = tuple[list[Tensor], list[tuple[str, int]]]


def gradients_on_rank(
    attach: Attach, comm: Comm, weights: Sequence[Tensor], inputs: Tensor, steps: int = 2
) -> Gradients:
    """Compute the gradients of a small network from this rank's micro-batches.

    Args:
        attach: `attach(parameters, comm, is_last)` attaches the hooks that average gradients, and
            returns what must be called after the last backward pass, or None. `is_last()` says
            whether the current micro-batch is the step's last.
        comm: of this rank.
        weights: of layers without bias, (out, in) each.
        inputs: (world, micro-batches, rows, in), of all ranks.
        steps: number of times that the gradients are computed, without an update.

    Returns:
        the gradients of the first step, then those of the next; and the log of the last step: that
        of `comm`, and ("gradient", i) when parameter i's gradient of the last micro-batch is there.
    """
    parameters = [weight.clone().requires_grad_() for weight in weights]
    local = inputs[comm.rank]
    last = False
    for i, p in enumerate(parameters):
        p.register_post_accumulate_grad_hook(
            lambda _, i=i: comm.log.append(("gradient", i)) if last else None
        )
    finish = attach(parameters, comm, lambda: last)
    gradients: list[Tensor] = []
    for _ in range(steps):
        comm.log.clear()
        for p in parameters:
            p.grad = None
        for number, x in enumerate(local):
            last = number == len(local) - 1
            for p in parameters:
                x = torch.tanh(x @ p.mT)
            (x.square().sum() / len(local)).backward()
        if finish is not None:
            finish()
        gradients += [p.grad for p in parameters if p.grad is not None]
    return gradients, list(comm.log)


Sharded = tuple[Tensor, Tensor, Tensor, tuple[int, int], list[tuple[str, int]]]


def layer_on_rank(layer: Any, comm: Comm, weight: Tensor, inputs: Tensor, douts: Tensor) -> Sharded:
    """Run a sharded layer forward and backward on this rank's inputs.

    Args:
        layer: an autograd function, `layer.apply(x, shard, comm)`.
        comm: of this rank.
        weight: (out, in), whole; the layer gets this rank's rows of it.
        inputs, douts: (world, rows, in) and (world, rows, out), of all ranks.

    Returns:
        y, dx, the shard's gradient, how many whole weights are alive after the forward and after
        the backward pass, and the log of `comm`.
    """
    x = inputs[comm.rank].clone().requires_grad_()
    shard = weight.chunk(comm.world)[comm.rank].clone().requires_grad_()

    def alive() -> int:
        return sum(whole() is not None for whole in comm.gathered)

    y = layer.apply(x, shard, comm)
    kept = alive()
    if y.shape != (right := douts[comm.rank].shape):
        raise ValueError(f"y must be {tuple(right)}, by the whole weight, not {tuple(y.shape)}")
    y.backward(douts[comm.rank])
    if x.grad is None or shard.grad is None:
        raise ValueError("backward must return a gradient for x and one for the shard")
    return y.detach(), x.grad, shard.grad, (kept, alive()), list(comm.log)


# --- real processes -------------------------------------------------------------------------------


def train_on_rank(
    attach: Attach | None, *, steps: int = 20, micro_batches: int = 2, cap: int = 2**15
) -> dict[str, Any]:
    """Train a small network on this rank's share of the data; the process group must exist.

    Args:
        attach: see `gradients_on_rank`; None lets PyTorch's DistributedDataParallel average.
        steps, micro_batches: AdamW's steps, and the backward passes before each.
        cap: bytes that fill a bucket of DistributedDataParallel.

    Returns:
        parameters (a list of tensors); all_reduces and bytes, of the last step.
    """
    comm, epochs = ProcessComm(), itertools.count()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16)
    )
    x = torch.randn(512, 64)
    data = TensorDataset(x, x[:, :16].sin())
    sampler: DistributedSampler[Any] = DistributedSampler(data, comm.world, comm.rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward: nn.Module = model
    last, finish, counter = False, None, AllReduces()
    if attach is None:
        forward, counter = wrap(model, bucket_cap_mb=cap / 2**20)
    else:
        finish = attach(list(model.parameters()), comm, lambda: last)

    def batches() -> Any:
        for epoch in epochs:
            sampler.set_epoch(epoch)  # another order, the same on all ranks
            yield from loader

    stream = batches()
    for _ in range(steps):
        comm.log.clear()
        counter.calls = counter.nbytes = 0
        optimizer.zero_grad()
        for number in range(micro_batches):
            last = number == micro_batches - 1
            quiet = isinstance(forward, DistributedDataParallel) and not last
            with forward.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
                inputs, targets = next(stream)
                loss = nn.functional.mse_loss(forward(inputs), targets)
                (loss / micro_batches).backward()
        if finish is not None:
            finish()
        optimizer.step()
    sent = [size for name, size in comm.log if name == "all_reduce"]
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "all_reduces": len(sent) + counter.calls,
        "bytes": sum(sent) + counter.nbytes,
    }


def layer_memory(layer: Any, *, width: int = 1024, layers: int = 4) -> list[dict[str, Any]]:
    """Compare whole and sharded linear layers on this rank; the process group must exist.

    Returns:
        a row each for whole and sharded: rank, weights, held_bytes (of weights and gradients, after
        a forward and backward pass), gathered_bytes (the most at a time during the passes).
    """
    rows = []
    for what in ("whole", "sharded"):
        comm = ProcessComm()
        height = width // (comm.world if what == "sharded" else 1)
        weights = [torch.randn(height, width).requires_grad_() for _ in range(layers)]
        y = torch.randn(8, width)
        for weight in weights:
            y = (y @ weight.mT if what == "whole" else layer.apply(y, weight, comm)) / width
        y.sum().backward()
        held = sum(w.nbytes + w.grad.nbytes for w in weights if w.grad is not None)
        row = {"rank": comm.rank, "weights": what, "held_bytes": held}
        rows.append(row | {"gathered_bytes": comm.most_gathered})
    return rows
