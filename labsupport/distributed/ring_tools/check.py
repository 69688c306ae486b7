"""Does ring attention on these devices compute what one device computes?

Each rank makes the same whole sequence from a seed, and computes its attention alone: in float64
(the oracle), and by the textbook in the ring's dtype (the yardstick). Then the ring computes it
from shards, by each kernel that can. The output and the three gradients are judged by their
relative errors, and by flash-attn's rule (`labsupport.attention.accuracy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.accuracy import compare_with_oracle
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.reference import banded_attention, oracle_attention
from labsupport.distributed.data_parallel.process_group import Place
from labsupport.distributed.ring import kernels as table
from labsupport.distributed.ring.functions import (
    available_ring_kernels,
    ring_flash_attn_func,
    triton_ring_flash_attn_func,
    zigzag_ring_flash_attn_func,
)
from labsupport.distributed.ring.zigzag import gather_sequence, shard_sequence
from labsupport.distributed.ring_tools import cases, cluster
from labsupport.distributed.ring_tools.findings import Failure, Finding, NotRun
from labsupport.distributed.ring_tools.start import agree, attempt
from labsupport.distributed.ring_tools.trouble import advice

# Largest relative errors: of the output, and of a gradient.
MARKS = {
    "float32": (1e-5, 1e-5),
    "bfloat16": (1e-2, 5e-2),
    "float16": (1e-2, 5e-2),
}
RINGS: dict[str, Callable[..., Any]] = {
    "ring": ring_flash_attn_func,
    "triton ring": triton_ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
}
NAMES = ("out", "dq", "dk", "dv")


def check_options(
    kernels: Sequence[str] | None, dtype: str | None, heads: int, kv_heads: int
) -> None:
    """Refuse what does not exist, before any process is started.

    Raises:
        ValueError: an unknown kernel or dtype; heads that cannot be grouped.
    """
    cases.check_heads(heads, [kv_heads])
    known = [kernel.name for kernel in table.KERNELS]
    for name in kernels or ():
        if name not in known:
            raise ValueError(f"--kernel {name}: there are {', '.join(known)}")
    if dtype is not None and dtype not in MARKS:
        raise ValueError(f"--dtype {dtype}: it is {', '.join(MARKS)}")


def main(
    *,
    kernels: Sequence[str] | None = None,
    dtype: str | None = None,
    seqlen: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    speeds: bool = True,
) -> int:
    """All checks, on every rank of the default process group; rank 0 prints.

    Args:
        kernels: the ring's kernels; None: all that can run here.
        dtype: "bfloat16", "float16", "float32"; None: bfloat16 on GPUs, float32 on CPUs.
        seqlen: tokens of the whole sequence; None: 256 a rank on GPUs, 16 on CPUs.
        heads, kv_heads, head_dim: of the tensors.
        speeds: measure latency and bandwidth, too.

    Returns:
        0, or 1 if something failed: the same on all ranks.
    """
    place = Place.current()
    on_gpu = place.device.type == "cuda"
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    failed: list[Failure] = []

    def say(*lines: str) -> None:
        if place.rank == 0:
            print(*lines, sep="\n", flush=True)

    say(*cluster.members(place), *cluster.links(place))
    if place.world == 1:
        say("one rank: its ring has no neighbours, and nothing is sent")
    problem = agree(cluster.check_all_reduce(place))
    say(f"all-reduce: {problem or 'right'}")
    if problem is not None:
        failed.append((problem, advice(problem)))
    elif speeds and place.world > 1:
        for text in cluster.speeds(place):
            say(text)
    try:
        whole = Whole.make(
            place,
            seqlen or place.world * (256 if on_gpu else 16),
            (heads, kv_heads, head_dim or (64 if on_gpu else 16)),
            dtype,
        )
    except AttentionInputError as error:  # the same on all ranks
        say("", f"FAILED: {error}")
        return 1
    say("", f"{whole}: each ring against one device in float64")
    say(f"{'':24} {'':4} {'maximum':>9} {'RMSE':>9} {'relative':>9}")
    for found in whole.findings(kernels):
        say(str(found))
        failed += found.failures()
    if not failed:
        say("", "all is well")
        return 0
    say("", f"FAILED: {failed[0][0]}" + (f" (and {len(failed) - 1} more)" if failed[1:] else ""))
    for remedy in [remedy for _, remedy in failed if remedy is not None][:1]:
        say(remedy)
    return 1


@dataclass
class Whole:
    """The whole sequence, its attention on one device, and what a ring must find."""

    place: Place
    dtype: str
    inputs: tuple[Tensor, ...]  # q, k, v
    dout: Tensor
    oracle: list[Tensor]
    textbook: list[Tensor]

    @classmethod
    def make(cls, place: Place, seqlen: int, shape: tuple[int, int, int], dtype: str) -> Whole:
        """Draw it from a seed: alike on all ranks.

        Raises:
            AttentionInputError: the length cannot be cut into equal chunks for the ranks.
        """
        heads, kv_heads, head_dim = shape
        chunks = 2 * place.world
        if seqlen < chunks or seqlen % chunks:
            raise AttentionInputError(
                f"a sequence of {seqlen} tokens cannot be cut into {chunks} equal chunks, two for "
                f"each rank: --seqlen {max(-(-seqlen // chunks), 1) * chunks} can"
            )
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (
            torch.randn((1, seqlen, count, head_dim), generator=generator).to(
                place.device, getattr(torch, dtype)
            )
            for count in (heads, kv_heads, kv_heads, heads)
        )
        exact = _one_device(oracle_attention, [x.double() for x in (q, k, v)], dout)
        textbook = _one_device(banded_attention, [q, k, v], dout)
        return cls(place, dtype, (q, k, v), dout, exact, textbook)

    def __str__(self) -> str:
        q, k = self.inputs[:2]
        return (
            f"{q.shape[1]} tokens over {self.place.ranks}, causal, {q.shape[2]} heads "
            f"({k.shape[2]} of keys) of {q.shape[3]}, {self.dtype}"
        )

    def findings(self, kernels: Sequence[str] | None) -> Iterator[Finding | NotRun]:
        """Each ring by each kernel."""
        shards = self._shards(zigzag=True)
        able = available_ring_kernels(*shards[:3], causal=True)
        for kernel in table.KERNELS:
            if kernels is not None and kernel.name not in kernels:
                continue
            if able[kernel.name]:
                problem = kernels is not None  # it was asked for
                yield NotRun("", kernel.name, "; ".join(able[kernel.name]), problem)
                continue
            rings = ["ring", "zigzag"]
            if kernel.name == "flash_triton":
                rings[0] = "triton ring"
            for ring in rings:
                yield from self._judge(ring, kernel.name)

    def _judge(self, ring: str, kernel: str) -> Iterator[Finding | NotRun]:
        zigzag = ring == "zigzag"
        layout = "zigzag" if zigzag else "contiguous"
        *qkv, dout = self._shards(zigzag=zigzag)
        shape = qkv[0].shape[1], qkv[0].shape[2], qkv[1].shape[2], qkv[0].shape[3]
        case = cases.Case(layout, kernel, *shape, self.dtype, "forward+backward")
        # By itself first: what does not compile or fit must not leave the others waiting.
        silent = case.program(cases.rehearsed(case), [*qkv, dout])
        problem = agree(attempt(lambda: (silent(), _synchronize(self.place))))
        got: list[Tensor] = []
        if problem is None:
            problem = agree(attempt(lambda: got.extend(self._run(ring, kernel, qkv, dout))))
        if problem is not None:
            yield NotRun(ring, kernel, problem, True)
            return
        for name, *three in zip(NAMES, got, self.textbook, self.oracle, strict=True):
            yield self._finding(ring, kernel, name, *three)

    def _run(self, ring: str, kernel: str, qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
        """Whole out, dq, dk and dv of the ring, on every rank."""
        out = RINGS[ring](*qkv, causal=True, kernel=kernel)
        parts = [out, *torch.autograd.grad(out, qkv, dout)]
        whole = [gather_sequence(part, zigzag=ring == "zigzag") for part in parts]
        _synchronize(self.place)
        return whole

    def _shards(self, *, zigzag: bool) -> list[Tensor]:
        place = self.place
        *qkv, dout = (
            shard_sequence(x, place.rank, place.world, zigzag=zigzag)
            for x in (*self.inputs, self.dout)
        )
        return [*(x.requires_grad_() for x in qkv), dout]

    def _finding(
        self, ring: str, kernel: str, name: str, got: Tensor, textbook: Tensor, oracle: Tensor
    ) -> Finding:
        report = compare_with_oracle(got, textbook, oracle, gradient=name != "out")
        rmse = (got.double() - oracle).square().mean().sqrt().item()
        mark = MARKS[self.dtype][name != "out"]
        faults = []
        if not report.relative_error <= mark:
            faults.append(f"relative error {report.relative_error:.1e} is above {mark:g}")
        if not report.ok:
            faults.append(
                f"maximum error {report.max_error:.1e} is above {report.allowed:.1e}, which the "
                "textbook's errors allow"
            )
        return Finding(
            ring, kernel, name, report.max_error, rmse, report.relative_error, tuple(faults)
        )


def _one_device(attend: Callable[..., Any], qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in qkv]
    group = inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    out = attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), causal=True)
    out = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def _synchronize(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize()
