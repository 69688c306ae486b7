"""What `ring bench` times: a ring, PyTorch's own context parallelism, and one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention import attention
from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.ring import kernels, last_ring_call
from labsupport.distributed.ring.algorithm import RingAttentionFunction, RingCall
from labsupport.distributed.ring.functions import ring_flash_attn_func, zigzag_ring_flash_attn_func
from labsupport.distributed.ring.kernel import BlockKernel
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import Ring

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

CONTEXT_PARALLEL = {
    "context_parallel[flash]": "native",
    "context_parallel[cudnn]": "cudnn",
    "context_parallel[efficient]": None,
}
RING_FUNCTIONS = {"contiguous": ring_flash_attn_func, "zigzag": zigzag_ring_flash_attn_func}


@dataclass(frozen=True)
class Case:
    """One causal attention over all ranks, batch 1; the names are the table's columns."""

    layout: str
    implementation: str
    seqlen_per_rank: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    direction: str

    def flops(self, world: int) -> float:
        """Of all ranks: two matrix products forward, five backward, over the visible pairs."""
        length = world * self.seqlen_per_rank
        forward = 4 * self.head_dim * self.heads * length * (length + 1) / 2
        return forward * (1.0 if self.direction == "forward" else 3.5)

    def inputs(self, place: Place) -> tuple[Tensor, ...]:
        """This rank's q, k, v (which want gradients, if those are timed) and dout."""
        generator = torch.Generator(place.device).manual_seed(place.rank)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        *qkv, dout = (
            torch.randn(
                (1, self.seqlen_per_rank, count, self.head_dim),
                generator=generator,
                device=place.device,
                dtype=getattr(torch, self.dtype),
            )
            for count in heads
        )
        return *(x.requires_grad_(self.direction != "forward") for x in qkv), dout

    @property
    def kernel(self) -> str | None:
        """The kernel that computes on each device, by the ring's names."""
        return CONTEXT_PARALLEL.get(self.implementation, self.implementation)

    def program(self, attend: Attend, inputs: Sequence[Tensor]) -> Callable[[], Any]:
        """What is timed: `attend` forward, or forward and backward."""
        *qkv, dout = inputs
        if self.direction == "forward":
            return lambda: attend(*qkv)
        return lambda: torch.autograd.grad(attend(*qkv), qkv, dout)


def check_heads(heads: int, kv_heads: Sequence[int]) -> None:
    """Raise ValueError, in the commands' words, for heads that cannot be grouped."""
    for count in kv_heads:
        if count < 1 or heads < 1 or heads % count:
            raise ValueError(
                f"--heads {heads} --kv-heads {count}: each key/value head serves equally many "
                f"query heads, so --heads is a multiple of --kv-heads (--kv-heads {max(heads, 1)} "
                "always fits)"
            )


def kernel_named(name: str) -> BlockKernel:
    """The ring's kernel of that name."""
    return next(kernel for kernel in kernels.KERNELS if kernel.name == name)


def on_one_device(kernel: str) -> Attend:
    """The same kernel without a ring, as `labsupport.attention` calls it."""
    backend = kernel_named(kernel).backend

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, causal=True, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return attend


def in_a_ring(case: Case) -> Attend:
    """The public function."""
    function = RING_FUNCTIONS[case.layout]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(
            q, k, v, causal=True, kernel=case.implementation, check_ranks=False, return_lse=False
        )
        assert isinstance(out, Tensor)
        return out

    return attend


class Silent(Ring):
    """A ring that sends nothing: a rank by itself does all that it does in the real one."""

    def post(self, sends: Any, receives: Any) -> Callable[[], None]:
        """Fill the buffers on a CPU, where leftover numbers cause warnings; a GPU takes any."""
        for tensor, _ in receives:
            if tensor.device.type == "cpu":
                tensor.zero_()
        return lambda: None


def rehearsed(case: Case) -> Attend:
    """The ring without messages: compiles, allocates and computes alike; the result is nonsense."""
    kernel = kernel_named(case.implementation)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring = Silent()
        plan = Plan.of(ring.size, q.shape[1], causal=True, zigzag=case.layout == "zigzag")
        scale = q.shape[-1] ** -0.5
        return RingAttentionFunction.apply(q, k, v, RingCall(ring, plan, kernel, scale))[0]

    return attend


def sent_bytes() -> int:
    """By this rank in the last ring, in both directions."""
    report = last_ring_call()
    assert report is not None
    return report.traffic.kv_bytes + report.traffic.gradient_bytes


# --- PyTorch's own --------------------------------------------------------------------------------


@contextmanager
def context_parallel(case: Case, place: Place) -> Iterator[Attend]:
    """PyTorch's context parallelism: `F.scaled_dot_product_attention` replaced for a while.

    It balances the load as zigzag does, and gathers all keys on every rank (its default,
    "allgather"; "alltoall" passes them around). Grouped key heads are repeated for it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as in_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "context_parallel[flash]": SDPBackend.FLASH_ATTENTION,
        "context_parallel[cudnn]": SDPBackend.CUDNN_ATTENTION,
        "context_parallel[efficient]": SDPBackend.EFFICIENT_ATTENTION,
    }[case.implementation]
    mesh = init_device_mesh(place.device.type, (place.world,))
    # It shards what a model would bring, and needs something to shard.
    tokens = torch.zeros(place.world * case.seqlen_per_rank, device=place.device)
    group = case.heads // case.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    with (
        in_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers={tokens}),
        sdpa_kernel(backend),
    ):
        yield attend
