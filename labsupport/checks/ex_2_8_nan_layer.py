"""Exercise 2-8: a fault to find, in a model in float16 whose logits are NaN."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from labsupport.checks.causes import chosen_letter
from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    explain,
    judge_call,
    mistakes,
    number,
    passed,
    results,
    values,
)


### BEGIN SOLUTION
def nan_cause() -> tuple[int, str]:
    """Return the layer in which the first NaN appears, counted from 0, and the cause's letter."""
    return 7, "E"


CAUSE_MISTAKES = mistakes("""
All outputs of that layer are finite: the report names the first module with a NaN.
    7 -> 6
That layer got NaN already: look for the one that makes it out of finite numbers.
    7 -> 8
That is the last layer, and all after the first NaN hold it, too: the report names the first.
    7 -> 9
Layers are counted from 0, as in the names of the modules, and the outputs of this one are finite.
    7 -> 0
Look at `largest` and `nan` of q_proj, k_proj and v_proj of that layer: with NaN in the weights they
would not be finite.
    "E" -> "A"
The residual stream is the input of the layer's norm. How large is the largest number there?
    "E" -> "B"
All layers have the same mask, and each token sees itself. So why this layer?
    "E" -> "C"
Softmax subtracts the row's largest score first, so that exp gives at most 1. Are the scores finite
before it?
    "E" -> "D"
Compute the scores of that layer in float32: are they, divided, below 65,504?
    "E" -> "F"
""")


def careful_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention in the dtype of q without scores that overflow on their way.

    Args:
        q, k, v: (batch, heads, seqlen, head_dim).
    """
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q / q.shape[-1] ** 0.5) @ k.mT
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


CAREFUL_MISTAKES = mistakes("""
It is as before: the products leave the range of float16, and dividing infinity leaves infinity.
    (q / q.shape[-1] ** 0.5) @ k.mT -> _overflowing(q, k)
The NaN is hidden, not repaired: in its place stand numbers that nobody computed.
    (q / q.shape[-1] ** 0.5) @ k.mT -> _overflowing(q, k)
    hidden, -torch.inf).softmax(-1) @ v -> hidden, -torch.inf).softmax(-1).nan_to_num() @ v
Scores beyond the range are cut off at its end, so that the largest ones tie.
    (q / q.shape[-1] ** 0.5) @ k.mT -> _overflowing(q, k, cut=True)
The division happens twice, in q and in k or the scores: the scale is 1 / sqrt(head_dim), once.
    @ k.mT -> @ k.mT / q.shape[-1] ** 0.5
The scores are not divided by sqrt(head_dim) at all: then they don't fit anywhere.
    (q / q.shape[-1] ** 0.5) -> q
The softmax runs over the queries: each query's weights add up to 1 over the keys, softmax(-1).
    .softmax(-1) -> .softmax(-2)
A query must see itself: the diagonal stays visible, triu(1).
    .triu(1) -> .triu()
The future is not hidden.
    .masked_fill(hidden, -torch.inf) ->
""")


def _overflowing(q: Tensor, k: Tensor, cut: bool = False) -> Tensor:
    """Return scores as float16 has them where the product comes before the division."""
    products = (q.double() @ k.double().mT).to(q.dtype if cut else torch.float16)
    if not cut:
        return (products.double() / q.shape[-1] ** 0.5).to(q.dtype)
    return products.clamp(-65_504, 65_504) / q.shape[-1] ** 0.5


### END SOLUTION


_EVIDENCE = (
    "The tracker's report lists the modules in order: the first with a NaN is in that layer."
)


def check_nan_cause(student: Student) -> None:
    """Exercise 2-8: the layer in which the first NaN appears, and the cause, out of six."""
    layer, letter = values(call(student), ("the layer", "the letter"))
    given = number(layer, "the layer"), chosen_letter(letter)
    right = nan_cause()
    refuted = list(results(nan_cause, CAUSE_MISTAKES, lambda f: f(), pairs=False))
    for one, what, is_right in (
        ((given[0], right[1]), f"{given[0]} is not the layer.", given[0] == right[0]),
        ((right[0], given[1]), f"{given[1]} is not the cause.", given[1] == right[1]),
    ):
        if not is_right:
            raise CheckFailed(f"{what} {explain(one, refuted, operator.eq) or _EVIDENCE}")
    passed("that is the layer, and that is the cause")


def check_careful_attention(student: Student, seed: int = 0) -> None:
    """Exercise 2-8: causal attention in float16 whose scores fit, but not their products."""
    options: dict[str, Any] = {"dtype": torch.float16}
    q, k, v = (x.half() for x in draw(3, 1, 2, 7, 16, seed=seed))
    q[..., 0], k[..., 0] = 40 * q[..., 0], k[..., 0] / 40  # large inputs, ordinary scores
    judge_call(student, careful_attention, CAREFUL_MISTAKES, (q, k, v), ("out",), **options)
    # Products from 76,800 to 118,400, and scores of a quarter, far apart: a query takes one value.
    signs, sizes = draw(16, seed=seed).sign(), draw(1, 2, 7, 1, seed=seed).argsort(2)
    q, k = 80 * signs.half() * torch.ones_like(q), (60 + 5 * sizes) * signs.half()
    where = "(products up to 118,400) "
    known = CAREFUL_MISTAKES
    judge_call(student, careful_attention, known, (q, k, v), ("out",), where=where, **options)
    passed("causal attention in float16, without NaN where the scores fit", seed)
