"""Ways to need less memory at a time, and a limit that makes sure of it.

The loss in chunks. For N tokens and a vocabulary of V the logits are the largest tensor of a
training step. The loss of a token needs that token's logits alone, and so does its gradient:

    z = W h + b                           (V,)    logits of one token with hidden state h (width,)
    loss = logsumexp(z) - z[label]
    d = d loss / d z = softmax(z) - onehot(label)

    d loss / d h = Wᵀ d                   (width,)
    d loss / d W = d hᵀ                   (V, width), a sum over the tokens
    d loss / d b = d                      (V,), a sum over the tokens

None of it waits for the rest of the network: what comes back into the loss is one number, by which
everything is multiplied. So the forward pass computes the gradients already, `chunk` tokens at a
time, and throws each chunk's logits away. What stays is as large as the hidden states and the
weight. Each logit is computed once; `labsupport.precision.compute_loss(head=..., chunk_size=...)`,
which takes any head, computes it twice. The idea is that of Liger Kernel (Hsu et al., arXiv
2410.10989, section 3.2, "FusedLinear CrossEntropy"). Wijmans et al., "Cut Your Losses in
Large-Vocabulary Language Models" (arXiv 2411.09009), go further: a kernel whose logits never leave
the chip.

The MLP in chunks. An MLP widens each token to four times its size or more, and keeps that for the
backward pass. No token's result needs another token's. So a part of the sequence can go through at
a time, and be computed again in the backward pass (Liu and Abbeel, "Blockwise Parallel Transformer
for Large Context Models", arXiv 2305.19370).

The limit. On a GPU PyTorch's allocator refuses to reserve more. On Linux the kernel refuses to give
the process more: RLIMIT_DATA counts, since Linux 4.7, what belongs to the process alone and can be
written (proc(5): VmData). Both become an exception, so that a notebook goes on; a container's limit
would kill the process.
"""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from labsupport.profiling.memory import cap_gpu_memory, format_bytes
from labsupport.profiling.timing import resolve_device
from labsupport.training.sizes import parse_bytes

CHUNK_BYTES = 2**28
_REMEDIES = (
    "What helps, the cheapest first: the loss in chunks (loss_chunk), activation checkpointing "
    "(checkpoint), the MLP in chunks (mlp_chunk), a shorter sequence."
)


def in_chunks(
    fn: Callable[[Tensor], Tensor], x: Tensor, size: int | None, *, dim: int = -2
) -> Tensor:
    """Return `fn(x)`, computed for `size` tokens at a time, forward and backward.

    Args:
        fn: makes y (..., tokens, any) from x (..., tokens, width), each token on its own: an MLP, a
            norm, a projection; not attention.
        x: (..., tokens, width), any dtype.
        size: tokens at a time, 1 or more. None, or as many as there are: `fn(x)`, nothing else.
        dim: the dimension of x, and of the result, that counts tokens.

    With gradients on, each chunk is checkpointed: x and the result are kept, and between the two
    only one chunk's tensors exist at a time, for one more forward pass of `fn`. Gradients of
    weights are added up over the chunks, in the weights' dtype.

    >>> in_chunks(torch.nn.Linear(8, 2), torch.zeros(1, 100, 8), 32).shape
    torch.Size([1, 100, 2])
    """
    if size is None or x.shape[dim] <= size:
        return fn(x)
    # split, and not slices: the backward of each slice would fill a tensor of the full size.
    parts = x.split(size, dim)
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(fn, part, use_reentrant=False) for part in parts], dim)
    return torch.cat([fn(part) for part in parts], dim)


# --- the loss in chunks ---------------------------------------------------------------------------


def default_chunk(vocabulary: int) -> int:
    """Return the tokens whose float32 logits take 256 MiB, in multiples of 64: 1,280 for GPT-2.

    Each chunk reads the weight and adds to its gradient, (V, width) both, however few its tokens
    are. A chunk as large as the hidden states, 31 tokens of 2,048 at GPT-2's width, would do that
    66 times; 256 MiB do it twice, and are small beside what a training step takes.
    """
    return max(CHUNK_BYTES // (4 * vocabulary) // 64, 1) * 64


# The loop's length, the check of the labels and the choice to work in place are Python's business.
@torch.compiler.disable
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean cross-entropy of `hidden @ weight.T + bias`, with one chunk of logits.

    Args:
        hidden: (..., width) floating.
        weight: (V, width) floating; may be tied to an embedding.
        labels: (...) integers in 0 ... V - 1, or `ignore_index`. Not shifted here: labels[i] is
            what hidden[i] predicts.
        bias: (V,) floating.
        chunk: tokens at a time; None means `default_chunk(V)`.
        ignore_index: tokens with this label count neither in the sum nor in the mean.

    Returns:
        A scalar, float32 (float64 for float64 inputs). If every token is ignored it is 0, with
        gradients of 0.

    Matmuls run in autocast's dtype where autocast is on, else in the wider dtype of hidden and
    weight. Softmax and loss are in float32. Gradients come back in their tensor's dtype. The
    weight's is added up over the chunks in float32, and its 16-bit products are not rounded first
    (on a CPU that takes a float32 matmul).

    float16: the gradients kept by the forward pass are those of the *sum* of the losses. The
    division by the number of tokens waits for the backward pass, where it is one float32 number
    together with the loss scale. So nothing underflows before the scale arrives.

    Extra memory: forward, a chunk's logits in float32 (half as much again for 16-bit matmuls), and
    the gradients, which are kept: hidden's in its dtype, the weight's in float32. Backward scales
    them in place, or in copies where the graph is retained. `torch.compile` leaves this function
    out of its graph. On a GPU the check of the labels waits for the device, once.

    Raises:
        ValueError: shapes that do not fit, a label out of range, chunk below 1.
        RuntimeError: differentiated twice.

    >>> chunked_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(10, 4), torch.zeros(2, 3).long())
    tensor(2.3026)
    """
    size = default_chunk(len(weight)) if chunk is None else chunk
    wrong_bias = bias is not None and bias.shape != weight.shape[:1]
    if weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or wrong_bias or size < 1:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, bias "
            f"{None if bias is None else tuple(bias.shape)}, chunk {size}: they must be "
            "(..., width), (V, width), (V,) and 1 or more tokens. Logits go to compute_loss."
        )
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} "
            "without the last dimension: one label for each token."
        )
    targets = labels.reshape(-1).long()
    _check_range(targets, len(weight), ignore_index)
    rows = hidden.reshape(-1, hidden.shape[-1])
    # In Function.forward gradients are off, so their state is passed on from here.
    return _ChunkedCrossEntropy.apply(
        rows, weight, bias, targets, size, ignore_index, torch.is_grad_enabled()
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        size: int,
        ignore_index: int,
        training: bool,
    ) -> Tensor:
        device = hidden.device.type
        compute = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(device) and compute != torch.float64:
            compute = torch.get_autocast_dtype(device)
        exact = torch.promote_types(compute, torch.float32)

        wanted = [training and needed for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if wanted[2] and bias is not None else None

        counted = targets != ignore_index
        count = counted.sum().clamp(min=1)
        losses = torch.zeros(len(targets), dtype=exact, device=hidden.device)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            for start in range(0, len(targets), size):
                part = slice(start, start + size)
                x, kept = hidden[part].to(compute), counted[part]
                labels = targets[part].masked_fill(~kept, 0).unsqueeze(1)

                logits = x @ matrix.T
                if bias is not None:
                    logits += bias.to(compute)
                # From here on one tensor of a chunk's logits, changed in place.
                scores = logits.to(exact)
                del logits
                largest = scores.amax(1, keepdim=True)
                right = scores.gather(1, labels)
                total = scores.sub_(largest).exp_().sum(1, keepdim=True)
                loss = total.log() + largest - right
                losses[part] = loss.squeeze(1).masked_fill_(~kept, 0)
                if not any(wanted):
                    continue

                # softmax - onehot; 0 for what is ignored.
                kept = kept.unsqueeze(1).to(exact)
                d = scores.mul_(kept / total).scatter_add_(1, labels, -kept)
                del scores
                if grad_bias is not None:
                    grad_bias += d.sum(0)
                rounded = d.to(compute)
                del d
                if grad_hidden is not None:
                    grad_hidden[part] = rounded @ matrix
                if grad_weight is not None:
                    _add_product(grad_weight, rounded.T, x)
                del rounded
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, count)
        ctx.size = size
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients are on only where they are to be differentiated again (create_graph=True). What
        # we return depends on hidden and weight, and no graph knows how: to go on would be wrong.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy cannot be differentiated twice (create_graph=True): its "
                "gradients are computed in the forward pass. compute_loss can."
            )
        *gradients, count = ctx.saved_tensors
        factor = grad_loss / count
        # With retain_graph=True the stored gradients are needed again, and copies are scaled.
        owned = not torch._C._autograd._get_current_graph_task_keep_graph()
        grads = (
            None if gradient is None else _scaled(gradient, factor, dtype, ctx.size, owned)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *grads, None, None, None, None


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


def _check_range(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise ValueError for a label without a logit. Waits for the device once."""
    counted = targets.masked_fill(targets == ignore_index, 0)
    if counted.numel() == 0:
        return
    for label in torch.stack(torch.aminmax(counted)).tolist():
        if not 0 <= label < vocabulary:
            raise ValueError(
                f"label {label} is out of range: there are {vocabulary} tokens, "
                f"0 ... {vocabulary - 1}, and what is ignored carries {ignore_index}."
            )


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
    smallest holds.

    An allocation that does not fit leaves the block as `torch.OutOfMemoryError`, on both devices,
    with the limit, what was requested, and what helps.

    Raises:
        RuntimeError: this system cannot limit a process (macOS, Windows).
        ValueError: the process uses more already; the GPU has less.

    >>> with memory_limit("4GiB", "cpu"):  # doctest: +SKIP
    ...     torch.zeros(2**30)
    Traceback (most recent call last):
    OutOfMemoryError: ...
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
        # "you tried to allocate 4096 bytes", "Tried to allocate 2.00 GiB", NumPy's "Unable to ..."
        match = re.search(r"to allocate ([\d.]+) (bytes|[KMG]?i?B)\b", str(error))
        request = "an allocation"
        if match is not None:
            size = format_bytes(int(match[1])) if match[2] == "bytes" else f"{match[1]} {match[2]}"
            request = f"another {size}"
        counted = f"PyTorch's allocator on {chosen}" if gpu else "the whole process"
        raise torch.OutOfMemoryError(
            f"out of memory: {request} does not fit into the limit of {format_bytes(count)} for "
            f"{counted}. {_REMEDIES}"
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
    if not sys.platform.startswith("linux"):
        raise RuntimeError(
            "memory_limit can limit a CPU process on Linux only: run it in a Linux container or "
            "virtual machine."
        )
    import resource  # not on Windows

    # Start PyTorch's threads while there is memory for their stacks: OpenMP ends the process when
    # it cannot start one.
    with torch.enable_grad():
        x = torch.ones(512, 512, requires_grad=True)
        (x @ x).exp().sum().backward()
    used = private_bytes()
    if limit <= used:
        raise ValueError(
            f"the process takes {format_bytes(used)} already, Python and its libraries included: "
            f"a limit of {format_bytes(limit)} leaves it nothing."
        )
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lowest = min([limit, *(old for old in (before, hard) if old != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        _check_that_it_holds(limit)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _check_that_it_holds(limit: int) -> None:
    """Raise RuntimeError on systems that accept the limit and ignore it. Writes to no memory."""
    try:
        mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return
    raise RuntimeError("this system ignores the limit on a process's memory (RLIMIT_DATA)")


def private_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024
