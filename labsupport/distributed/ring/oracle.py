"""A ring judged on whole sequences: its results, one device's in float64, and the errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.reference import oracle_attention
from labsupport.distributed.process_group import RankInfo
from labsupport.distributed.ring.attention import ring_attention
from labsupport.distributed.ring.zigzag import gather_sequence, shard_sequence


def whole_ring(
    info: RankInfo, whole: Sequence[Tensor], *, layout: str, **options: Any
) -> list[Tensor]:
    """Return the whole out, dq, dk and dv of a causal ring, on every rank.

    `whole` are q, k, v and dout; `options` as for `ring_attention`.
    """
    zigzag = layout == "zigzag"
    *qkv, dout = (shard_sequence(x, info.rank, info.world, zigzag=zigzag) for x in whole)
    qkv = [x.requires_grad_() for x in qkv]
    out = ring_attention(*qkv, causal=True, layout=layout, **options)
    results = [out, *torch.autograd.grad(out, qkv, dout)]
    return [gather_sequence(x, zigzag=zigzag) for x in results]


def one_device(whole: Sequence[Tensor]) -> list[Tensor]:
    """Return the same by the oracle, in float64."""
    *inputs, dout = (x.detach().double().requires_grad_() for x in whole)
    group = inputs[0].shape[2] // inputs[1].shape[2]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out = oracle_attention(q, k, v, causal=True)[0].transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def errors_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    """Yield tensor, max, rmse and relative (of norms) for out, dq, dk and dv."""
    for name, result, truth in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        wrong = result.double() - truth
        errors = wrong.abs().max(), wrong.square().mean().sqrt(), wrong.norm() / truth.norm()
        values = (error.item() for error in errors)
        yield {"tensor": name, **dict(zip(("max", "rmse", "relative"), values, strict=True))}
