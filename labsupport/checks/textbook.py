"""Checks of exercises 1-1 (textbook attention with a mask) and 1-2 (the memory of N x N)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labsupport.attention import compare_with_oracle, oracle_attention, standard_attention
from labsupport.checks.verdict import (
    CheckFailed,
    Mistake,
    a_few_steps,
    call,
    judge,
    passed,
    unpack,
)


def check_textbook_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-1: output and weights without a mask, with leading dimensions.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    q, k, v = _qkv(2, 3, n_q=5, n_k=7, d=16, seed=seed)
    d = q.shape[-1]
    output, weights = unpack(call(student, q, k, v), ("output", "weights"))
    scores = q.double() @ k.double().mT

    def with_weights(p: Tensor) -> tuple[Tensor, Tensor]:
        return p @ v.double(), p

    for name, value, index in (("weights", weights, 1), ("output", output, 0)):
        _judge_against_textbook(
            name,
            value,
            (q, k, v),
            None,
            index,
            [
                Mistake(
                    "The scores are not divided by sqrt(head_dim): "
                    "large head_dims then saturate the softmax.",
                    lambda index=index: with_weights(scores.softmax(-1))[index],
                ),
                Mistake(
                    "The scores are divided by head_dim; it must be its square root.",
                    lambda index=index: with_weights((scores / d).softmax(-1))[index],
                ),
                Mistake(
                    "The scores are multiplied by sqrt(head_dim); divide by it.",
                    lambda index=index: with_weights((scores * math.sqrt(d)).softmax(-1))[index],
                ),
                Mistake(
                    "The softmax runs over the queries (dim=-2); "
                    "each query's weights over the keys must sum to 1 (dim=-1).",
                    lambda index=index: with_weights((scores / math.sqrt(d)).softmax(-2))[index],
                ),
                Mistake(
                    "The softmax is missing: these are the bare scores.",
                    lambda index=index: with_weights(scores / math.sqrt(d))[index],
                ),
            ],
        )
    passed("output and weights agree with the float64 oracle", seed)


def check_textbook_mask(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-1: a boolean mask, True where a query may look, of shape (seqlen_q, seqlen_k).

    Raises:
        CheckFailed: naming the likely mistake.
    """
    q, k, v = _qkv(2, n_q=6, n_k=8, d=16, seed=seed)
    mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(seed + 1)) < 0.6
    mask[:, 2] = True  # every query sees something here
    output, weights = unpack(call(student, q, k, v, mask), ("output", "weights"))
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    wrong = {
        "The mask is ignored.": scores.softmax(-1),
        "The mask is inverted: True means that a query MAY look.": scores.masked_fill(
            mask, -torch.inf
        ).softmax(-1),
        (
            "The mask is applied after the softmax, so the weights no longer sum to 1: "
            "put -inf into the scores instead."
        ): scores.softmax(-1) * mask,
        "Hidden scores are set to 0, but exp(0) is 1: they must be -inf.": scores.masked_fill(
            ~mask, 0.0
        ).softmax(-1),
        "The mask is added to the scores as 0 and 1: turn it into 0 and -inf.": (
            scores + mask.double()
        ).softmax(-1),
    }
    mistakes = [Mistake(said, lambda p=p: p) for said, p in wrong.items()]
    _judge_against_textbook("weights", weights, (q, k, v), mask, 1, mistakes)
    mistakes = [Mistake(said, lambda p=p: p @ v.double()) for said, p in wrong.items()]
    _judge_against_textbook("output", output, (q, k, v), mask, 0, mistakes)
    passed("hidden keys get weight 0, and the others share 1", seed)


def check_textbook_empty_rows(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-1: a query that may look nowhere gives 0, in float16 too.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    for dtype in (torch.float32, torch.float16):
        q, k, v = (t.to(dtype) for t in _qkv(2, n_q=4, n_k=5, d=8, seed=seed))
        mask = torch.ones(4, 5, dtype=torch.bool)
        mask[1] = False
        output, weights = unpack(call(student, q, k, v, mask), ("output", "weights"))
        if output.isnan().any():
            raise CheckFailed(
                f"query 1 may look nowhere, and its output is NaN in {dtype}: a softmax over -inf "
                "alone is 0 / 0. Give such rows the weight 0."
            )
        if weights.isnan().any():
            raise CheckFailed(
                f"query 1 may look nowhere: its output is 0, but its weights are NaN in {dtype}. "
                "They must be 0 as well."
            )
        if weights[:, 1].abs().max() > 0:
            raise CheckFailed(
                "query 1 may look nowhere, but its weights are "
                f"{weights[0, 1].tolist()}: a large negative number instead of -inf turns an empty "
                "row into a uniform average over the hidden keys. Its weights must be 0."
            )
        if output.dtype != dtype:
            raise CheckFailed(f"the inputs are {dtype}, the output {output.dtype}: keep the dtype.")
        _judge_against_textbook("output", output, (q, k, v), mask, 0, [])
        _judge_against_textbook("weights", weights, (q, k, v), mask, 1, [])
    passed("a query without keys gives 0, in float32 and in float16", seed)


def check_score_bytes(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-2: bytes of the score matrices S and P.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    cases = [(1, 1, 1024, 4), (2, 12, 2048, 2), (1, 32, 65_536, 2)]
    draw = random.Random(seed)
    cases += [
        (draw.randint(2, 9), draw.randint(2, 40), draw.randint(100, 9999), 4) for _ in range(3)
    ]
    for batch, heads, n, itemsize in cases:
        given = call(student, batch, heads, n, itemsize)
        right = 2 * batch * heads * n * n * itemsize
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise CheckFailed(f"return a number of bytes, not {type(given).__name__}.")
        if given == right:
            continue
        wrong = {
            right // 2: "That is one matrix; S and P exist at the same time, so count both.",
            right // (2 * itemsize): (
                "That is the number of entries of one matrix, not bytes of two."
            ),
            right // itemsize: "That is the number of entries; multiply by the bytes of each.",
            right // heads: "Every head has its own matrices: multiply by heads.",
            right // batch: "Every sequence of the batch has its own: multiply by batch.",
            right // n: "S and P have seqlen x seqlen entries: the length counts twice.",
            right / 2**20: "That is in MiB; return bytes.",
        }
        said = wrong.get(given, f"It should be {right:,}.")
        raise CheckFailed(
            f"for batch {batch}, heads {heads}, seqlen {n}, {itemsize} bytes each you return "
            f"{given:,}. {said}"
        )
    passed("bytes of S and P", seed)


def check_largest_length(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-2: the longest sequence whose S and P fit into a memory.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    cases = [(8 * 2**30, 1, 12, 2), (2**34, 4, 32, 4), (1000, 1, 1, 4)]
    draw = random.Random(seed)
    cases += [(draw.randint(10**6, 10**12), 2, draw.randint(2, 40), 2) for _ in range(3)]
    for memory, batch, heads, itemsize in cases:
        given = call(student, memory, batch, heads, itemsize)
        right = math.isqrt(memory // (2 * batch * heads * itemsize))
        if given == right:
            continue
        said = f"{right:,} is the longest that fits."
        if given == math.isqrt(memory // (batch * heads * itemsize)):
            said = "That length fits S alone; S and P have to fit together."
        elif isinstance(given, float) and int(given) == right:
            said = "A length is a whole number: round down (math.isqrt does)."
        elif isinstance(given, int | float) and given > 10 * right:
            said += " The memory grows with the square of the length: take a square root."
        raise CheckFailed(
            f"in {memory:,} bytes with batch {batch}, heads {heads}, {itemsize} bytes each, "
            f"you return {given:,}. {said}"
        )
    passed("longest sequence that fits", seed)


def _judge_against_textbook(
    name: str,
    value: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    index: int,
    mistakes: list[Mistake],
) -> None:
    """Judge output (index 0) or weights (index 1) by the error rule."""
    exact = standard_attention(*(t.double() for t in inputs), mask=mask)[index]
    oracle = oracle_attention(*inputs, mask)[0] if index == 0 else exact
    textbook = standard_attention(*inputs, mask)[index]
    allowed = compare_with_oracle(textbook, textbook, oracle).allowed
    allowed = max(allowed, a_few_steps(oracle, inputs[0].dtype))
    judge(name, value, oracle, allowed=allowed, mistakes=mistakes)


def _qkv(*leading: int, n_q: int, n_k: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*leading, n_q, d, generator=generator),
        torch.randn(*leading, n_k, d, generator=generator),
        torch.randn(*leading, n_k, d, generator=generator),
    )
