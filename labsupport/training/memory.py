"""Ways to use less memory, and a limit to test them.

in_chunks               a function of single tokens, such as an MLP, for some of them at a time (Liu
                        and Abbeel, arXiv 2305.19370)
shared_gradient         a tensor whose uses' gradients are added up in float32
HostStore               stored activations wait in the host's memory (Rajbhandari et al., arXiv
                        2104.07857, section 5.1)
chunked_cross_entropy   a loss that never has all the logits: theory/07-long-context.md derives it.
                        With z = W h and d = softmax(z) - onehot(label), the gradients Wᵀ d and
                        d hᵀ wait for nothing but one factor. So the forward pass computes them,
                        and throws each chunk's logits away (as Liger Kernel: Hsu et al., arXiv
                        2410.10989, section 3.2)
memory_limit            a smaller device, really: PyTorch's allocator, or Linux's RLIMIT_DATA
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from labsupport.precision.dtypes import short
from labsupport.profiling.memory import cap_gpu_memory, format_bytes
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import parse_bytes
from labsupport.training.config import IGNORED

_REMEDIES = (
    "What helps, the cheapest first: the loss in chunks (loss_chunk), activation checkpointing "
    "(checkpoint), the MLP in chunks (mlp_chunk), a shorter sequence."
)


def in_chunks(fn: Callable[[Tensor], Tensor], x: Tensor, size: int | None) -> Tensor:
    """Return `fn(x)`, computed for `size` tokens at a time, forward and backward.

    Args:
        fn: makes y (..., tokens, any) from x (..., tokens, width), each token on its own: an MLP, a
            norm, a projection; not attention.
        x: (..., tokens, width), any dtype.
        size: tokens at a time, 1 or more. None, or as many as there are: `fn(x)`, nothing else.

    With gradients on, each chunk is checkpointed: between x and the result only one chunk's tensors
    exist at a time, for one more forward pass of `fn`.

    Raises:
        ValueError: size is below 1.

    >>> in_chunks(torch.nn.Linear(8, 2), torch.zeros(1, 100, 8), 32).shape
    torch.Size([1, 100, 2])
    """
    if size is not None and size < 1:
        raise ValueError(f"size is {size}: at least 1 token, or None for all of them.")
    if size is None or x.shape[-2] <= size:
        return fn(x)
    # split, and not slices: the backward of each slice would fill a tensor of the full size.
    parts = x.split(size, dim=-2)
    if torch.is_grad_enabled():
        kind = x.device.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        # From one cached copy of a weight, all chunks' gradients would be added up in 16 bits.
        with torch.autocast(kind, cache_enabled=False) if on else nullcontext():
            return torch.cat([checkpoint(fn, part, use_reentrant=False) for part in parts], dim=-2)
    return torch.cat([fn(part) for part in parts], dim=-2)


def shared_gradient(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns x, for one of several uses each time.

    Their gradients are added up in float32 and rounded to x's dtype once. Autograd adds them in x's
    dtype: in bfloat16 an addend below 1/512 of the sum is lost, from all tokens alike.

    >>> use = shared_gradient(torch.ones(2, dtype=torch.bfloat16))
    >>> use() + use()
    tensor([2., 2.], dtype=torch.bfloat16)
    """
    total: list[Tensor] = []
    root = _SharedGradient.apply(x, total, True)
    return lambda: _SharedGradient.apply(root, total, False)


class _SharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: list[Tensor], root: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.root, ctx.dtype = total, root, x.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None, None]:
        _refuse_second_derivative("shared_gradient", "the tensor itself")
        if ctx.root:  # after all of the uses
            return ctx.total.pop().to(ctx.dtype) if ctx.total else None, None, None
        if ctx.total:
            ctx.total[0] += grad
        else:
            wide = torch.promote_types(ctx.dtype, torch.float32)
            ctx.total.append(grad.to(wide, copy=True))
        return None, None, None


def _refuse_second_derivative(name: str, other: str) -> None:
    """Raise in a backward pass whose result depends on its inputs in ways that no graph knows.

    Gradients are on only where they are to be differentiated again (create_graph=True).
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} cannot be differentiated twice (create_graph=True): {other} can."
        )


class HostStore:
    """Host memory for one forward pass: what autograd saves, and the results of attention.

    On a GPU that memory is pinned, and a separate stream copies while kernels run. `hooks` moves
    what is saved inside of it. `results` makes attention run once: each later call, by which a
    checkpoint recomputes it, takes the output and the log-sum-exp from here.

    Args:
        device: of the tensors. On a CPU they stay where they are.
        least: bytes; smaller tensors stay, too.
    """

    def __init__(self, device: torch.device, least: int = 2**20) -> None:
        self.device, self.least = device, least
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.parked: list[Tensor] = []
        self.coming: dict[int, tuple[Tensor, Any]] = {}
        self.leaving: Tensor | None = None
        self.found: dict[Any, list[Any]] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context: tensors saved in it wait here, and come back one ahead."""
        return torch.autograd.graph.saved_tensors_hooks(self.park, self.fetch)

    def results(self, key: Any) -> TorchDispatchMode:
        """Return a context: fused attention runs in the first one of a key only."""
        return _Results(self, self.found.setdefault(key, []))

    def park(self, x: Tensor) -> int:
        """Begin to copy x to the host's memory; return its place there."""
        self.parked.append(self.copy_out(x))
        return len(self.parked) - 1

    def fetch(self, place: int) -> Tensor:
        """Return the tensor of a place, and begin to copy the one before it, which is next."""
        found = self.coming.pop(place, None) or self.copy_in(self.parked[place])
        if place and not self.found:  # results of attention would wait for that copy
            self.coming[place - 1] = self.copy_in(self.parked[place - 1])
        return self.arrived(*found)

    def copy_out(self, x: Tensor) -> Tensor:
        """Begin to copy x to the host's memory, if that is worth it."""
        if self.stream is None or x.nbytes < self.least:
            return x.detach()
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self._wait()
        self.leaving = x.detach()  # until the stream has been waited for
        with torch.cuda.stream(self.stream):
            return host.copy_(x, non_blocking=True)

    def copy_in(self, host: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy a tensor to the device; return it, and the event of its arrival."""
        if self.stream is None or host.device == self.device:
            return host.detach(), None  # of a tensor that autograd has seen it would keep the graph
        x = torch.empty_like(host, device=self.device)
        self._wait()
        with torch.cuda.stream(self.stream):
            x.copy_(host, non_blocking=True)
        return x, self.stream.record_event()

    def arrived(self, x: Tensor, event: Any) -> Tensor:
        """Return x; kernels wait for its arrival."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return x

    def _wait(self) -> None:
        """Let kernels and copies wait for each other: memory is taken again after its last use."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        self.stream.wait_stream(current)
        self.leaving = None


class _Results(TorchDispatchMode):
    """Runs fused attention and stores what it returns, or returns what is stored, call by call."""

    def __init__(self, store: HostStore, found: list[Any]) -> None:
        super().__init__()
        self.store, self.found, self.calls = store, found, iter(found[:])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        if not any(name in str(func) for name in ("_scaled_dot_product_", "flash_triton_forward")):
            return func(*args, **(kwargs or {}))
        store = self.store
        if (stored := next(self.calls, None)) is not None:
            return tree_map_only(Tensor, lambda x: store.arrived(*store.copy_in(x)), stored)
        results = func(*args, **(kwargs or {}))
        self.found.append(tree_map_only(Tensor, store.copy_out, results))
        return results


# --- the loss in chunks ---------------------------------------------------------------------------


def default_chunk(vocabulary: int) -> int:
    """Return the tokens whose float32 logits take 256 MiB, in multiples of 64: 1,280 for GPT-2.

    Each chunk reads the weight and adds to its gradient, (V, width) both, however few its tokens
    are: so it should not be much smaller.
    """
    return max(2**28 // (4 * vocabulary) // 64, 1) * 64


# The loop's length, the check of the labels and the choice to work in place are Python's business.
# (torch.compiler.disable does the same, and imports torch._dynamo immediately: a second a process.)
@torch._disable_dynamo
def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Return the mean cross-entropy of `hidden @ weight.T`, with one chunk of logits at a time.

    Args:
        hidden: (..., width) floating.
        weight: (V, width) floating; may be tied to an embedding.
        labels: (...) integers in 0 ... V - 1, or -100: such tokens count neither in the sum nor in
            the mean. Not shifted here: labels[i] is what hidden[i] predicts.
        chunk: tokens at a time; None means `default_chunk(V)`.

    Returns:
        A scalar, float32 (float64 for float64 inputs); 0 if every token is ignored.

    Matmuls run in autocast's dtype where autocast is on, else in the wider dtype of hidden and
    weight; softmax, loss, and the sum of the weight's gradient over the chunks are in float32.
    Gradients come back in their tensor's dtype. Those kept by the forward pass are of the *sum* of
    the losses: the division by their number waits for the loss scale, so that float16 does not
    underflow. Memory: one chunk's logits, hidden's gradient in its dtype, the weight's in float32.

    Raises:
        ValueError: shapes that do not fit, a label out of range, chunk below 1.
        TypeError: labels that are not integers; hidden or weight that are not floating.
        RuntimeError: differentiated twice.

    >>> chunked_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(10, 4), torch.zeros(2, 3).long())
    tensor(2.3026)
    """
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if not (integers and hidden.is_floating_point() and weight.is_floating_point()):
        raise TypeError(
            f"labels must be integers, hidden and weight floating, but {short(labels.dtype)}, "
            f"{short(hidden.dtype)} and {short(weight.dtype)} were given."
        )
    vocabulary, width = weight.shape if weight.ndim == 2 else (1, -1)
    size = default_chunk(vocabulary) if chunk is None else chunk
    if hidden.shape != (*labels.shape, width) or size < 1:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, labels {tuple(labels.shape)}, weight "
            f"{tuple(weight.shape)}, chunk {size}: they must be (..., width), (...), (V, width) "
            "and 1 or more tokens."
        )
    targets = labels.reshape(-1).long()
    counted = targets.masked_fill(targets == IGNORED, 0)
    for label in torch.stack(torch.aminmax(counted)).tolist() if counted.numel() else ():
        if not 0 <= label < vocabulary:  # a GPU would only say "device-side assert"
            raise ValueError(
                f"label {label} is out of range: there are {vocabulary} tokens, "
                f"0 ... {vocabulary - 1}, and what is ignored carries {IGNORED}."
            )
    # In Function.forward gradients are off, so their state is passed on from here.
    return _ChunkedCrossEntropy.apply(
        hidden.reshape(-1, width), weight, targets, size, torch.is_grad_enabled()
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, size: int, training: bool
    ) -> Tensor:
        device = hidden.device.type
        compute = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(device) and compute != torch.float64:
            compute = torch.get_autocast_dtype(device)
        exact = torch.promote_types(compute, torch.float32)

        wanted = [training and needed for needed in ctx.needs_input_grad[:2]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None

        counted = targets != IGNORED
        count = counted.sum().clamp(min=1)
        losses = torch.zeros(len(targets), dtype=exact, device=hidden.device)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            for start in range(0, len(targets), size):
                part = slice(start, start + size)
                x, kept = hidden[part].to(compute), counted[part]
                labels = targets[part].masked_fill(~kept, 0).unsqueeze(1)

                # From here on one tensor of a chunk's logits, changed in place.
                scores = (x @ matrix.T).to(exact)
                largest = scores.amax(1, keepdim=True)
                right = scores.gather(1, labels)
                total = scores.sub_(largest).exp_().sum(1, keepdim=True)
                loss = total.log() + largest - right
                losses[part] = loss.squeeze(1).masked_fill_(~kept, 0)
                if not any(wanted):
                    continue

                # softmax - onehot; 0 for what is ignored.
                kept = kept.unsqueeze(1).to(exact)
                d = scores.mul_(kept / total).scatter_add_(1, labels, -kept).to(compute)
                del scores
                if grad_hidden is not None:
                    grad_hidden[part] = d @ matrix
                if grad_weight is not None:
                    _add_product(grad_weight, d.T, x)
                del d
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        ctx.size, ctx.dtypes = size, (hidden.dtype, weight.dtype)
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative("chunked_cross_entropy", "compute_loss")
        *gradients, count = ctx.saved_tensors
        factor = grad_loss / count
        # With retain_graph=True the stored gradients are needed again, and copies are scaled.
        owned = not torch._C._autograd._get_current_graph_task_keep_graph()
        grads = (
            None if gradient is None else _scaled(gradient, factor, dtype, ctx.size, owned)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *grads, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute `total += a @ b`, for 16-bit a and b too, without rounding the product to 16 bits."""
    if a.dtype != total.dtype and a.is_cuda and torch.version.hip is None:
        # Tensor cores multiply 16-bit numbers and add in float32; the sum can be had as it is.
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, size: int, owned: bool) -> Tensor:
    """Return `gradient * factor` in `dtype`; in place where the gradient is ours to change."""
    if not owned:
        gradient = gradient.clone()
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor).to(dtype)
    # One dimension, so that 16-bit gradients are multiplied in float32: as a scalar the factor
    # would be rounded to their dtype first, and a loss scale of 65,536 is inf in float16. In
    # parts, because a CPU makes float32 copies for that.
    for part in gradient.split(size):
        part.mul_(factor.reshape(1))
    return gradient.to(dtype)


# --- the limit ------------------------------------------------------------------------------------


@contextmanager
def memory_limit(limit: str | int, device: torch.device | str | None = None) -> Iterator[None]:
    """Let this process use at most `limit` bytes of a device, inside the `with` block.

    Args:
        limit: bytes, as `parse_bytes` takes them.
        device: by default the current GPU if there is one, else the CPU.

    On a GPU the limit counts what PyTorch's allocator reserves; CUDA's context and libraries, some
    hundred MiB, and other programs come on top. On a CPU (Linux) it counts the whole process: what
    Python, its libraries and its threads' stacks had before counts too. Limits may be nested: the
    smallest holds. An allocation that does not fit leaves the block as `torch.OutOfMemoryError`, on
    both devices, with the limit and what helps: a notebook goes on.

    Raises:
        RuntimeError: this system cannot limit a process (macOS, Windows).
        ValueError: the process uses more already; the GPU has less.

    >>> with memory_limit("4GiB", "cpu"):
    ...     ones = torch.ones(1000)
    """
    count, chosen = parse_bytes(limit), resolve_device(device)
    gpu = chosen.type == "cuda"
    try:
        with cap_gpu_memory(count / 2**30, chosen) if gpu else _limited_process(count):
            yield
    except (RuntimeError, MemoryError) as error:
        # Inside of another limit the inner one has explained it already. A GPU's limit does not
        # explain what the CPU's memory was too small for.
        foreign = gpu and not isinstance(error, torch.OutOfMemoryError)
        if foreign or not is_out_of_memory(error) or _REMEDIES in str(error):
            raise
        counted = f"PyTorch's allocator on {chosen}" if gpu else "the whole process"
        raise torch.OutOfMemoryError(
            f"out of memory: an allocation does not fit into the limit of {format_bytes(count)} "
            f"for {counted}. {_REMEDIES}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the process, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator raises a RuntimeError like any other: only its words tell. For a few bytes
    # it is C++ that fails.
    words = ("DefaultCPUAllocator", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


@contextmanager
def _limited_process(limit: int) -> Iterator[None]:
    """Limit what belongs to the process alone and can be written (proc(5): VmData)."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError("memory_limit can limit a CPU process on Linux only: use a container")
    import resource  # not on Windows

    # Start PyTorch's threads while there is memory for their stacks: OpenMP ends the process when
    # it cannot start one.
    with torch.enable_grad():
        x = torch.ones(512, 512, requires_grad=True)
        (x @ x).exp().sum().backward()
    if limit <= (used := private_bytes()):
        raise ValueError(
            f"the process takes {format_bytes(used)} already, Python and its libraries included: "
            f"a limit of {format_bytes(limit)} leaves it nothing."
        )
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lowest = min([limit, *(old for old in (before, hard) if old != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        try:  # some systems accept the limit and ignore it; this writes to no memory
            mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, MemoryError):
            pass
        else:
            raise RuntimeError("this system ignores the limit on a process's memory (RLIMIT_DATA)")
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def private_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024
