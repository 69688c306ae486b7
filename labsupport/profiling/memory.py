"""Memory that a call needs beyond what was there before it.

`measure_peak_memory` counts every allocation that a call makes, views excluded and the scratch
space inside a kernel included: on a CPU by PyTorch's profiler (not what a BLAS takes from the
system itself, nor the release of what existed before), on a GPU by the caching allocator's
requested bytes.

`LargestTensor` tells whether an N x N matrix was ever written. `trace_tensors` counts the bytes
that operators must pass to one another through the large memory; what happens inside of one
operator is not seen.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The profiler of PyTorch 2.13 writes lines to stderr at every start unless switched off before the
# first one; in a notebook, or in a graded check, they would be noise at best.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes


@dataclass(frozen=True)
class MemoryUse:
    """Extra memory of one call, in bytes.

    peak_bytes: the most that existed at any moment of the call beyond what existed before it.
    kept_bytes: what still exists when it returns, its result included.  Negative when the
        call releases more of what existed before than it keeps; on a CPU such a release is not
        counted.
    """

    peak_bytes: int
    kept_bytes: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.peak_bytes)} extra at the peak, "
            f"{format_bytes(self.kept_bytes)} kept"
        )


def measure_peak_memory(
    fn: Callable[[], Any],
    *,
    device: torch.device | str | None = None,
    warmup: int | None = None,
) -> MemoryUse:
    """The extra memory of `fn()`, in bytes.

    Args:
        fn: the call.  Its result is kept alive until the measurement ends.
        device: where it allocates; by default the current GPU if there is one, else the CPU.
        warmup: calls before the measured one; by default 1 on a GPU, where the first call also
            takes workspaces that stay (cuBLAS), and 0 on a CPU.

    Raises:
        RuntimeError: another profiler is active on the CPU.  Errors of `fn` pass through
            (`torch.OutOfMemoryError` for one).

    Example:
        >>> measure_peak_memory(lambda: torch.empty(1000), device="cpu").peak_bytes
        4000
    """
    where = resolve_device(device)
    for _ in range((1 if where.type == "cuda" else 0) if warmup is None else warmup):
        fn()
    return _measure_cuda(fn, where) if where.type == "cuda" else _measure_cpu(fn)


def _measure_cpu(fn: Callable[[], Any]) -> MemoryUse:
    if torch.autograd._profiler_enabled():
        raise RuntimeError(
            "measure_peak_memory counts with torch.profiler on a CPU, and a profiler is already "
            "active here: measure outside of it"
        )
    with (
        without_allocator_warning(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
    ):
        result = fn()
    changes = [change for _, change in cpu_memory_changes(profiler)]
    del result
    extra = list(itertools.accumulate(changes, initial=0))
    return MemoryUse(max(extra), extra[-1])


def cpu_memory_changes(profiler: torch.profiler.profile) -> list[tuple[int, int]]:
    """The CPU allocator's work: (time in ns, bytes), releases negative, in order of time.

    Only releases of what was allocated under this profiler: PyTorch remembers sizes by address,
    and in between the address may have got a block of another size.

    Args:
        profiler: one that ran with profile_memory=True.
    """
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events, found = list(reversed(results.experimental_event_tree())), []
    while events:
        event = events.pop()
        events.extend(reversed(event.children))
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields))
    # Stable: events of the same nanosecond stay in the order in which they were recorded.
    found.sort(key=lambda one: one[0])
    alive: set[int] = set()
    changes = []
    for start, block in found:
        if block.alloc_size > 0:
            alive.add(block.ptr)
        elif block.ptr in alive:
            alive.remove(block.ptr)
        else:
            continue
        changes.append((start, block.alloc_size))
    return changes


@contextmanager
def without_allocator_warning() -> Iterator[None]:
    """Drop the allocator's harmless warning that a block from before the profile is released.

    C++ writes it straight to file descriptor 2. Everything else there is passed on.
    """
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            caught.seek(0)
            for line in caught:
                if b"allocated before the profiling started" not in line:
                    os.write(2, line)


def _measure_cuda(fn: Callable[[], Any], device: torch.device) -> MemoryUse:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    # A reference cycle that is collected during the call would look like memory given back by it.
    collects = gc.isenabled()
    gc.disable()
    try:
        result = fn()
    finally:
        if collects:
            gc.enable()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)
    del result

    # Other allocators (cudaMallocAsync) do not report what was requested.
    what = "requested_bytes" if after.get("requested_bytes.all.peak") else "allocated_bytes"
    peak, kept = (after[f"{what}.all.{when}"] for when in ("peak", "current"))
    start = before[f"{what}.all.current"]
    return MemoryUse(peak - start, kept - start)


class LargestTensor(TorchDispatchMode):
    """Watches a block of code, its backward pass included, for the largest tensor it creates.

    Tensors are distinguished by their storage: views, transposes and `expand` create nothing, and
    neither do tensors that existed before.  Space that a kernel takes internally is not seen; ask
    `measure_peak_memory` for it.

    Attributes:
        numel: elements that its storage holds.
        nbytes: bytes of its storage.
        shape: its shape when it was created.
        op: the operation that created it, for example 'aten.bmm.default'.

    All are zero or empty when nothing was created.

    >>> from labsupport.attention import standard_attention
    >>> q = k = v = torch.randn(4, 64, 8)
    >>> with LargestTensor() as largest:
    ...     out, weights = standard_attention(q, k, v)
    >>> largest.shape
    (4, 64, 64)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.nbytes = 0
        self.shape: tuple[int, ...] = ()
        self.op = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        # An in-place operation may also enlarge a storage that it was given (`resize_`).
        before = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in stored_tensors((args, kwargs or {}))
        }
        result = func(*args, **(kwargs or {}))
        for tensor in stored_tensors(result):
            storage = tensor.untyped_storage()
            if storage.nbytes() > max(before.get(storage._cdata, 0), self.nbytes):
                self.nbytes = storage.nbytes()
                self.numel = self.nbytes // tensor.element_size()
                self.shape = tuple(tensor.shape)
                self.op = str(func)
        return result

    def __str__(self) -> str:
        if not self.op:
            return "no tensor was created"
        return f"{self.shape} ({format_bytes(self.nbytes)}) from {self.op}"


def largest_tensor(fn: Callable[[], Any]) -> LargestTensor:
    """Call `fn()` and return the `LargestTensor` that it created (its backward included).

    >>> largest_tensor(lambda: torch.ones(10) @ torch.ones(10, 3)).shape
    (10, 3)
    """
    with LargestTensor() as largest:
        fn()
    return largest


def stored_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts that have a storage."""
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [one for one in tensors if one.layout == torch.strided and not one.is_meta]


# They write their first argument.
_OVERWRITE = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_"}
# They make room and write nothing.
_RESERVE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class TensorTrace(LargestTensor):
    """Operators of a block of code, its backward included; also says what `LargestTensor` says.

    Attributes:
        operators: by name, for example "mm": [calls, bytes read, bytes written].

    Views cost nothing. An operator that works in place reads and writes.

    Example:
        >>> with TensorTrace() as trace:
        ...     torch.ones(4, 8) @ torch.ones(8, 2)
        >>> trace.operators["mm"]
        [1, 192, 32]
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, list[int]] = {}

    @property
    def read_bytes(self) -> int:
        """Bytes that all operators read."""
        return sum(read for _, read, _ in self.operators.values())

    @property
    def written_bytes(self) -> int:
        """Bytes that all operators wrote."""
        return sum(written for _, _, written in self.operators.values())

    @property
    def total_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # _unsafe_view and its like are views that their schema does not call so.
        after, before = (
            {tensor.untyped_storage()._cdata for tensor in stored_tensors(value)}
            for value in (result, (args, kwargs))
        )
        shared = after & before and not func._schema.is_mutable
        moves = isinstance(func, torch._ops.OpOverload) and not func.is_view and not shared
        if moves and func.namespace != "prim":  # prim::device asks, and moves nothing
            name = func._schema.name.split("::")[-1]
            inputs = {key: value for key, value in (kwargs or {}).items() if key != "out"}
            counts = self.operators.setdefault(name, [0, 0, 0])
            counts[0] += 1
            counts[1] += _nbytes((args[1:] if name in _OVERWRITE else args, inputs))
            counts[2] += 0 if name in _RESERVE else _nbytes(result)
        return result


def trace_tensors(fn: Callable[[], Any]) -> TensorTrace:
    """Call `fn()` and return what its operators created, read and wrote.

    >>> trace = trace_tensors(lambda: torch.ones(4, 8) @ torch.ones(8, 2))
    >>> trace.operators["mm"]  # calls, bytes read, bytes written
    [1, 192, 32]
    """
    with TensorTrace() as trace:
        fn()
    return trace


def _nbytes(value: Any) -> int:
    """Bytes of the tensors in a value; one passed twice, and what `expand` repeats, once."""
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    total = 0
    for tensor in {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values():
        sizes = tensor.shape
        if tensor.layout == torch.strided and tensor.numel():
            sizes = [n for n, step in zip(sizes, tensor.stride(), strict=True) if step != 0]
        total += math.prod(sizes) * tensor.element_size()
    return total


@contextmanager
def cap_gpu_memory(gib: float, device: torch.device | str | None = None) -> Iterator[None]:
    """Let PyTorch use at most `gib` GiB of a GPU in a `with` block, as if the GPU were smaller.

    It counts what PyTorch's allocator reserves, not the CUDA context of some hundred MiB.

    Raises:
        ValueError: there is no GPU, or `gib` is not positive, or the GPU has less.
    """
    gpu = resolve_device("cuda" if device is None else device)
    total = torch.cuda.get_device_properties(gpu).total_memory
    if not 0 < gib * 2**30 <= total:
        raise ValueError(f"cannot cap at {gib} GiB a GPU that has {format_bytes(total)}")
    torch.cuda.empty_cache()  # blocks that are cached but unused count against the cap
    before = torch.cuda.get_per_process_memory_fraction(gpu)
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, gpu)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, gpu)
