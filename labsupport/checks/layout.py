"""Exercise 2-1: from the tensors of a model to flash-attn's layout, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.verdict import (
    CheckFailed,
    Mistake,
    call,
    equal,
    explain,
    judge,
    passed,
    unpack,
)

QKV = ("q", "k", "v")
OTHER_LAYOUT = (
    "This is (batch, heads, seqlen, head_dim), Transformers' layout; flash-attn's has seqlen "
    "before heads."
)
SCRAMBLED = (
    "The shape is right, but the numbers are in the wrong places: view and reshape keep the order "
    "in memory and only count anew, so heads and positions are mixed up. "
)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (batch, seqlen, heads * head_dim) as (batch, seqlen, heads, head_dim)."""
    return x.unflatten(-1, (heads, -1))


def to_flash_layout(x: Tensor) -> Tensor:
    """Return (batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim)."""
    return x.transpose(1, 2)


def split_qkv(qkv: Tensor, heads: int, kv_heads: int) -> Sequence[Tensor]:
    """Return the q, k and v of one projection, in flash-attn's layout."""
    head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv.split(widths, dim=-1))
    return q, k, v


HEAD_MISTAKES = (
    Mistake(
        ("unflatten(-1, (heads, -1))", "reshape(len(x), heads, x.shape[1], -1).transpose(1, 2)"),
        SCRAMBLED + "A token's numbers stand together, head after head: split the last dimension, "
        "and leave the first two alone.",
    ),
    Mistake(
        ("(heads, -1))", "(-1, heads)).mT"),
        "Each head got every heads-th number of a token. A head's numbers stand together: the last "
        "dimension counts as (heads, head_dim), not as (head_dim, heads).",
    ),
    Mistake(("(heads, -1))", "(heads, -1)).transpose(1, 2)"), OTHER_LAYOUT),
    Mistake(
        ("unflatten(-1, (heads, -1))", "reshape(len(x), heads, x.shape[1], -1)"),
        SCRAMBLED + "And this is Transformers' order of dimensions: seqlen comes before heads.",
    ),
    Mistake(
        ("(heads, -1)", "(-1, heads)"),
        "The last two dimensions are swapped: (heads, head_dim), in this order.",
    ),
)
FLASH_MISTAKES = (
    Mistake(
        ("transpose(1, 2)", "reshape(len(x), x.shape[2], x.shape[1], -1)"),
        SCRAMBLED + "Swap two dimensions: transpose.",
    ),
    Mistake((".transpose(1, 2)", ""), OTHER_LAYOUT),
    Mistake(("(1, 2)", "(2, 3)"), "The last two dimensions were swapped, not heads and seqlen."),
    Mistake(
        ("(1, 2)", "(0, 1)"),
        "batch and heads were swapped; swap heads and seqlen, dimensions 1 and 2.",
    ),
)
QKV_MISTAKES = (
    *(
        Mistake(
            ("return q, k, v", f"return {x}, {x}, {x}"),
            f"It has the numbers of {x}: the order is q, k, v.",
        )
        for x in QKV
    ),
    Mistake(("head_dim)) for", "head_dim)).transpose(1, 2) for"), OTHER_LAYOUT),
    Mistake(
        (
            "x.unflatten(-1, (-1, head_dim))",
            "x.reshape(len(x), -1, x.shape[1], head_dim).transpose(1, 2)",
        ),
        SCRAMBLED + "Split the last dimension only.",
    ),
    Mistake(
        (
            "return q, k, v",
            "parts = qkv.unflatten(-1, (kv_heads, -1, head_dim))\n"
            "    return [x.flatten(2, 3) for x in parts.split((heads // kv_heads, 1, 1), 3)]",
        ),
        "The projection was cut head by head, as (group, q and k and v): here all heads of q come "
        "first, then all of k, then all of v.",
    ),
    Mistake(
        ("return q, k, v", "return qkv.unflatten(-1, (heads, head_dim, 3)).unbind(-1)"),
        "It was cut as (heads, head_dim, 3): every third number. The parts follow one another.",
    ),
    Mistake(
        (
            "return q, k, v",
            "if heads > kv_heads:\n"
            "        k, v = (x.repeat_interleave(heads // kv_heads, 2) for x in (k, v))\n"
            "    return q, k, v",
        ),
        "K and V were repeated to q's heads, which copies them; flash-attn takes kv_heads heads.",
    ),
)


def check_split_heads(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-1: the last dimension as (heads, head_dim), a view."""
    wide = _draw(2, 5, 3 * 12, seed=seed)
    for x, heads in ((_draw(2, 5, 12, seed=seed), 3), (_draw(2, 4, 32, seed=seed), 4)):
        _judge_result(student, split_heads, HEAD_MISTAKES, x, heads)
    # A part of a fused projection is no contiguous tensor.
    _judge_result(student, split_heads, HEAD_MISTAKES, wide[..., 12:24], 3)
    passed("heads are split off, and nothing is copied", seed)


def check_flash_layout(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-1: Transformers' layout as flash-attn's, a view."""
    made_by_a_model = _draw(2, 6, 12, seed=seed).view(2, 6, 3, 4).transpose(1, 2)
    for x in (_draw(2, 3, 5, 4, seed=seed), _draw(2, 4, 4, 8, seed=seed), made_by_a_model):
        _judge_result(student, to_flash_layout, FLASH_MISTAKES, x)
    passed("heads and positions are swapped, and nothing is copied", seed)


def check_split_qkv(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-1: a fused projection cut into q, k, v, also with fewer heads for k and v."""
    for batch, seqlen, heads, kv_heads, head_dim in ((2, 5, 3, 3, 4), (1, 4, 4, 4, 8)):
        _judge_qkv(student, batch, seqlen, heads, kv_heads, head_dim, seed)
    for batch, seqlen, heads, kv_heads, head_dim in ((2, 5, 4, 2, 8), (2, 3, 4, 1, 8)):
        _judge_qkv(student, batch, seqlen, heads, kv_heads, head_dim, seed)
    passed("q, k and v are views of one projection, grouped heads included", seed)


def _judge_result(
    student: Callable[..., Any],
    solution: Callable[..., Tensor],
    mistakes: Sequence[Mistake],
    x: Tensor,
    *heads: int,
) -> None:
    result = call(student, x, *heads)
    said = partial(explain, result, solution, mistakes, lambda f: f(x, *heads))
    _judge("the result", result, solution(x, *heads), x, said)


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
    right = split_qkv(qkv, heads, kv_heads)
    thirds = (
        f"{where}the three parts are not equally wide: q has heads * head_dim = "
        f"{heads * head_dim} columns, k and v have kv_heads * head_dim = {kv_heads * head_dim} "
        "each. (Equal thirds are right for kv_heads == heads only.)"
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
        said = partial(
            explain,
            values[index],
            split_qkv,
            QKV_MISTAKES,
            lambda f, i=index: f(qkv, heads, kv_heads)[i],
        )
        _judge(where + name, values[index], right[index], qkv, said)


def _judge(
    name: str, result: Any, expected: Tensor, source: Tensor, explained: Callable[[], str]
) -> None:
    """Refuse anything but the expected numbers in the memory of `source`."""
    if not isinstance(result, Tensor):
        raise CheckFailed(f"{name} must be a tensor, not {type(result).__name__}.")
    if not equal(result, expected):
        if said := explained():
            raise CheckFailed(f"{name} is wrong. {said}")
        judge(name, result, expected, allowed=0.0)
    if result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        raise CheckFailed(
            f"{name} has the right numbers, but they were copied: .contiguous(), .clone(), "
            "torch.stack and torch.cat copy, and so does .reshape where no view is possible. view, "
            "unflatten, split, slices and transpose do not: the kernel takes strided inputs."
        )


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
