"""Checks of exercise 2-1: from the tensors of a model to flash-attn's layout, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.verdict import CheckFailed, call, judge, passed, unpack

QKV = ("q", "k", "v")
OTHER_LAYOUT = (
    "This is (batch, heads, seqlen, head_dim), Transformers' layout; flash-attn's has seqlen "
    "before heads."
)
SCRAMBLED = (
    "The shape is right, and the numbers are in the wrong places: view and reshape keep the order "
    "in memory and only count it anew, so heads and positions are mixed up. "
)


def check_split_heads(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-1: the last dimension as (heads, head_dim), a view.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    wide = _draw(2, 5, 3 * 12, seed=seed)
    for x, heads in ((_draw(2, 5, 12, seed=seed), 3), (_draw(2, 4, 32, seed=seed), 4)):
        _judge_split(student, x, heads)
    _judge_split(student, wide[..., 12:24], 3)  # a part of a fused projection
    passed("heads are split off, and nothing is copied", seed)


def check_flash_layout(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-1: (batch, heads, seqlen, head_dim) to (batch, seqlen, heads, head_dim), a view.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    made_by_a_model = _draw(2, 6, 12, seed=seed).view(2, 6, 3, 4).transpose(1, 2)
    for x in (_draw(2, 3, 5, 4, seed=seed), _draw(2, 4, 4, 8, seed=seed), made_by_a_model):
        wanted = x.transpose(1, 2)
        _judge(
            "the result",
            call(student, x),
            wanted,
            x,
            {
                SCRAMBLED + "Swap two dimensions: transpose.": lambda x=x, wanted=wanted: x.reshape(
                    wanted.shape
                ),
                OTHER_LAYOUT: lambda x=x: x,
                "The last two dimensions were swapped, not heads and seqlen.": lambda x=x: x.mT,
                "batch and heads were swapped; swap heads and seqlen, dimensions 1 and 2.": (
                    lambda x=x: x.transpose(0, 1)
                ),
            },
        )
    passed("heads and positions are swapped, and nothing is copied", seed)


def check_split_qkv(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-1: a fused projection cut into q, k, v, also with fewer heads for k and v.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    for batch, seqlen, heads, kv_heads, head_dim in ((2, 5, 3, 3, 4), (1, 4, 4, 4, 8)):
        _judge_qkv(student, batch, seqlen, heads, kv_heads, head_dim, seed)
    for batch, seqlen, heads, kv_heads, head_dim in ((2, 5, 4, 2, 8), (2, 3, 4, 1, 8)):
        _judge_qkv(student, batch, seqlen, heads, kv_heads, head_dim, seed)
    passed("q, k and v are views of one projection, grouped heads included", seed)


def _judge_split(student: Callable[..., Any], x: Tensor, heads: int) -> None:
    batch, seqlen, hidden = x.shape
    head_dim = hidden // heads
    _judge(
        "the result",
        call(student, x, heads),
        x.unflatten(-1, (heads, head_dim)),
        x,
        {
            (
                SCRAMBLED + "A token's numbers stand together, head after head: split the last "
                "dimension, and leave the first two alone."
            ): lambda: x.reshape(batch, heads, seqlen, head_dim).transpose(1, 2),
            (
                "Each head got every heads-th number of a token. A head's numbers stand together: "
                "the last dimension counts as (heads, head_dim), not as (head_dim, heads)."
            ): lambda: x.unflatten(-1, (head_dim, heads)).mT,
            OTHER_LAYOUT: lambda: x.unflatten(-1, (heads, head_dim)).transpose(1, 2),
            (
                SCRAMBLED + "And this is Transformers' order of dimensions: seqlen comes before "
                "heads."
            ): lambda: x.reshape(batch, heads, seqlen, head_dim),
            "The last two dimensions are swapped: (heads, head_dim), in this order.": lambda: (
                x.unflatten(-1, (head_dim, heads))
            ),
        },
    )


def _judge_qkv(
    student: Callable[..., Any],
    batch: int,
    seqlen: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seed: int,
) -> None:
    grouped = kv_heads != heads
    qkv = _draw(batch, seqlen, (heads + 2 * kv_heads) * head_dim, seed=seed)
    where = f"heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}: "
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    parts = [x.unflatten(-1, (-1, head_dim)) for x in qkv.split(widths, dim=-1)]
    thirds = (
        f"{where}the three parts are not equally wide: q has heads * head_dim = {widths[0]} "
        f"columns, k and v have kv_heads * head_dim = {widths[1]} each. (Equal thirds are right "
        "for kv_heads == heads only.)"
    )
    try:
        values = unpack(call(student, qkv, heads, kv_heads), QKV)
    except CheckFailed as failure:
        if grouped and "raised RuntimeError" in str(failure):
            raise CheckFailed(f"{thirds}\nYour code said: {failure}") from None
        raise
    if grouped and values[0].shape[-1] != head_dim:
        raise CheckFailed(thirds)
    for index, name in enumerate(QKV):
        mistakes: dict[str, Callable[[], Tensor]] = {
            f"It holds the numbers of {QKV[j]}: the order is q, k, v.": lambda j=j: parts[j]
            for j in range(3)
            if j != index
        }
        right = parts[index]
        mistakes |= {
            OTHER_LAYOUT: lambda right=right: right.transpose(1, 2),
            SCRAMBLED + "Split the last dimension only.": lambda right=right: right.reshape(
                batch, -1, seqlen, head_dim
            ).transpose(1, 2),
            (
                "The projection was cut head by head, as (group, q and k and v): here all heads "
                "of q come first, then all of k, then all of v."
            ): lambda index=index: _interleaved(qkv, heads, kv_heads)[index],
            "It was cut as (heads, head_dim, 3): every third number. The parts stand one after "
            "the other.": lambda index=index: (
                qkv.unflatten(-1, (heads, head_dim, 3))[..., index] if not grouped else qkv
            ),
            (
                "K and V were repeated to q's number of heads. That copies them; flash-attn takes "
                f"{kv_heads} heads as they are."
            ): lambda right=right: right.repeat_interleave(heads // kv_heads, dim=2),
        }
        _judge(where + name, values[index], right, qkv, mistakes)


def _interleaved(qkv: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v of a projection ordered by group: its query heads, its key head, its value head."""
    group = heads // kv_heads
    by_group = qkv.unflatten(-1, (kv_heads, group + 2, -1))
    q, k, v = by_group.split((group, 1, 1), dim=3)
    return [x.flatten(2, 3) for x in (q, k, v)]


def _judge(
    name: str,
    result: Any,
    expected: Tensor,
    source: Tensor,
    mistakes: Mapping[str, Callable[[], Tensor]],
) -> None:
    """Exactly the expected numbers, in the memory of `source`; else name the mistake."""
    if not isinstance(result, Tensor):
        raise CheckFailed(f"{name} must be a tensor, not {type(result).__name__}.")
    if result.shape != expected.shape or not torch.equal(result, expected):
        for diagnosis, wrong in mistakes.items():
            made = wrong()
            if made.shape == result.shape and torch.equal(made, result):
                raise CheckFailed(f"{name} is wrong. {diagnosis}")
        judge(name, result, expected, allowed=0.0)
    if result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        raise CheckFailed(
            f"{name} has the right numbers, but they were copied: .contiguous(), .clone(), "
            "torch.stack and torch.cat copy, and so does .reshape where no view is possible. view, "
            "unflatten, split, slices and transpose do not: the kernel takes strided inputs."
        )


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
