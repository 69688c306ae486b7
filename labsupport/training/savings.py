"""Ways to use less memory.

in_chunks         a function of single tokens, such as an MLP, for some of them at a time (Liu and
                  Abbeel, arXiv 2305.19370)
shared_gradient   a tensor whose uses' gradients are added up in float32
HostStore         stored activations wait in the host's memory (Rajbhandari et al., arXiv
                  2104.07857, section 5.1)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from labsupport.attention.inputs import first_derivative_only


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
    @partial(first_derivative_only, instead="the tensor itself")
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None, None]:
        if ctx.root:  # after all of the uses
            return ctx.total.pop().to(ctx.dtype) if ctx.total else None, None, None
        if ctx.total:
            ctx.total[0] += grad
        else:
            wide = torch.promote_types(ctx.dtype, torch.float32)
            ctx.total.append(grad.to(wide, copy=True))
        return None, None, None


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
