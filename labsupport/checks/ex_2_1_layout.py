"""Exercise 2-1: from the tensors of a model to flash-attn's layout, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import (
    Mistake,
    Student,
    call,
    draw,
    judge,
    mistakes,
    passed,
    results,
    tensor,
    unpack,
    within,
)

QKV = ("q", "k", "v")


### BEGIN SOLUTION
def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (batch, seqlen, heads * head_dim) as (batch, seqlen, heads, head_dim)."""
    return x.unflatten(-1, (heads, -1))


HEAD_MISTAKES = mistakes("""
The shape is right, but heads and positions are mixed up: view and reshape keep the order in memory.
A token's numbers stand together, head after head: split the last dimension only.
    unflatten(-1, (heads, -1)) -> reshape(len(x), heads, x.shape[1], -1).transpose(1, 2)
Each head got every heads-th number of a token: the last dimension is (heads, head_dim), in order.
    (heads, -1)) -> (-1, heads)).mT
This is (batch, heads, seqlen, head_dim), Transformers' layout; flash-attn has seqlen before heads.
    (heads, -1)) -> (heads, -1)).transpose(1, 2)
The last two dimensions are swapped: (heads, head_dim), in this order.
    (heads, -1) -> (-1, heads)
""")


def to_flash_layout(x: Tensor) -> Tensor:
    """Return (batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim)."""
    return x.transpose(1, 2)


FLASH_MISTAKES = mistakes("""
The shape is right, but numbers are in the wrong places: view and reshape keep the order in memory,
so heads and positions are mixed up. Swap two dimensions: transpose.
    transpose(1, 2) -> reshape(len(x), x.shape[2], x.shape[1], -1)
This is (batch, heads, seqlen, head_dim), Transformers' layout; flash-attn has seqlen before heads.
    .transpose(1, 2) ->
The last two dimensions were swapped, not heads and seqlen.
    (1, 2) -> (2, 3)
""")


def split_qkv(qkv: Tensor, heads: int, kv_heads: int) -> Sequence[Tensor]:
    """Return the q, k and v of one projection, in flash-attn's layout."""
    head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv.split(widths, dim=-1))
    return q, k, v


QKV_MISTAKES = mistakes(r"""
It has the numbers of q: the order is q, k, v.
    return q, k, v -> return q, q, q
It has the numbers of k: the order is q, k, v.
    return q, k, v -> return k, k, k
It has the numbers of v: the order is q, k, v.
    return q, k, v -> return v, v, v
This is (batch, heads, seqlen, head_dim), Transformers' layout; flash-attn has seqlen before heads.
    head_dim)) for -> head_dim)).transpose(1, 2) for
The shape is right, but heads and positions are mixed up by reshape: split the last dimension only.
    x.unflatten(-1, (-1, head_dim)) -> x.reshape(len(x), -1, x.shape[1], head_dim).transpose(1, 2)
It was cut head by head, as (group, q and k and v): here all of q comes first, then k, then v.
    return q, k, v -> parts = qkv.unflatten(-1, (kv_heads, -1, head_dim))\n    return parts
    return parts -> return [x.flatten(2, 3) for x in parts.split((heads // kv_heads, 1, 1), 3)]
K and V were repeated to q's heads, which copies them; flash-attn takes kv_heads heads.
    return q, k, v -> return q, *(x.repeat_interleave(heads // kv_heads, 2) for x in (k, v))
    2) for x -> 2) if heads > kv_heads else x for x
""")
### END SOLUTION


def in_memory(function: Callable[..., Any], x: Tensor, *sizes: int) -> Any:
    """Return what a function gives, and of each part whether it lies in the memory of x."""
    result = function(x, *sizes)
    if result is None:
        return None
    place = x.untyped_storage().data_ptr()
    parts = [result] if isinstance(result, Tensor) else result
    tensors = [one for one in parts if isinstance(one, Tensor)]
    return result, [one.untyped_storage().data_ptr() == place for one in tensors]


def check_split_heads(student: Student, seed: int = 0) -> None:
    """Exercise 2-1: the last dimension as (heads, head_dim), a view."""
    wide = draw(2, 5, 3 * 12, seed=seed)
    # The last one is a part of a fused projection, and not contiguous.
    for x, heads in ((wide[..., :12], 3), (draw(2, 4, 32, seed=seed), 4), (wide[..., 12:24], 3)):
        result, shared = call(within(in_memory, student), x, heads)
        _judge(
            "the result",
            result,
            shared[0],
            split_heads,
            HEAD_MISTAKES,
            lambda f, a=(x, heads): f(*a),
        )
    passed("heads are split off, and nothing is copied", seed)


def check_flash_layout(student: Student, seed: int = 0) -> None:
    """Exercise 2-1: Transformers' layout as flash-attn's, a view."""
    made_by_a_model = draw(2, 6, 3, 4, seed=seed).transpose(1, 2)
    for x in (draw(2, 3, 5, 4, seed=seed), draw(2, 4, 4, 8, seed=seed), made_by_a_model):
        result, shared = call(within(in_memory, student), x)
        _judge(
            "the result", result, shared[0], to_flash_layout, FLASH_MISTAKES, lambda f, x=x: f(x)
        )
    passed("heads and positions are swapped, and nothing is copied", seed)


def check_split_qkv(student: Student, seed: int = 0) -> None:
    """Exercise 2-1: a fused projection cut into q, k, v, also with fewer heads for k and v."""
    for batch, seqlen, heads, kv_heads, head_dim in (
        *((2, 5, 3, 3, 4), (1, 4, 4, 4, 8)),
        *((2, 5, 4, 1, 6), (2, 3, 4, 2, 8)),  # the first one's thirds are heads, too
    ):
        qkv = draw(batch, seqlen, (heads + 2 * kv_heads) * head_dim, seed=seed)
        result, shared = call(within(in_memory, student), qkv, heads, kv_heads)
        given = unpack(result, QKV)
        where = f"heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}: "
        if kv_heads != heads and given[0].shape[-1] != head_dim:
            raise CheckFailed(
                f"{where}the three parts are not equally wide: q has heads * head_dim = "
                f"{heads * head_dim} columns, k and v have kv_heads * head_dim = "
                f"{kv_heads * head_dim} each."
            )
        arguments = qkv, heads, kv_heads
        for i, name in enumerate(QKV):
            one = lambda f, i=i, a=arguments: f(*a)[i]  # noqa: E731
            _judge(where + name, given[i], shared[i], split_qkv, QKV_MISTAKES, one)
    passed("q, k and v are views of one projection, grouped heads included", seed)


def _judge(
    name: str,
    result: Any,
    shared: bool,
    solution: Callable[..., Any],
    known: Sequence[Mistake],
    run: Callable[[Callable[..., Any]], Tensor],
) -> None:
    """Refuse anything but the expected numbers, in memory that is `shared` with the input."""
    expected, mistaken = run(solution), results(solution, known, run)
    judge(name, tensor(result, name), expected, allowed=0.0, mistakes=mistaken)
    if not shared:
        raise CheckFailed(
            f"{name} has the right numbers, but they were copied: .contiguous(), .clone(), "
            "torch.stack and torch.cat copy, and .reshape where no view is possible. Use view, "
            "unflatten, split, slices or transpose: the kernel takes strided inputs."
        )
