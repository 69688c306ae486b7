"""Exercises 1-1 (textbook attention with a mask) and 1-2 (the memory of N x N)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from operator import eq
from typing import Any

import torch
from torch import Tensor

from labsupport.attention import compare_with_oracle, oracle_attention, standard_attention
from labsupport.checks.verdict import (
    CheckFailed,
    Mistake,
    a_few_steps,
    call,
    explain,
    judge,
    passed,
    results,
    unpack,
)

NAMES = ("output", "weights")


def textbook_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and weights of attention with the whole score matrix in memory."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return weights @ v, weights


def score_bytes(batch: int, heads: int, seqlen: int, bytes_per_element: int) -> int:
    """Return the bytes of S and P together."""
    return 2 * batch * heads * seqlen**2 * bytes_per_element


MISTAKES = (
    Mistake(
        (" / math.sqrt(q.shape[-1])", ""),
        "The scores are not divided by sqrt(head_dim): large head_dims then saturate the softmax.",
    ),
    Mistake(
        ("math.sqrt(q.shape[-1])", "q.shape[-1]"),
        "The scores are divided by head_dim; it must be its square root.",
    ),
    Mistake(
        ("/ math.sqrt", "* math.sqrt"), "The scores are multiplied by sqrt(head_dim); divide by it."
    ),
    Mistake(
        ("softmax(scores, dim=-1)", "softmax(scores, dim=-2)"),
        "The softmax runs over the queries; a query's weights over the keys must sum to 1: dim=-1.",
    ),
    Mistake(
        ("torch.softmax(scores, dim=-1)", "scores"),
        "The softmax is missing: these are the bare scores.",
    ),
    Mistake(("if mask is not None", "if False"), "The mask is ignored."),
    Mistake(("(~mask, ", "(mask, "), "The mask is inverted: True means that a query MAY look."),
    Mistake(
        (
            "scores.masked_fill(~mask, -torch.inf)",
            "scores",
            "weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)",
            "weights * mask",
        ),
        "The mask is applied after the softmax: put -inf into the scores before it instead.",
    ),
    Mistake(
        ("(~mask, -torch.inf)", "(~mask, 0.0)"),
        "Hidden scores are set to 0, but exp(0) is 1: they must be -inf.",
    ),
    Mistake(
        ("scores.masked_fill(~mask, -torch.inf)", "scores + mask"),
        "The mask is added to the scores as 0 and 1: turn it into 0 and -inf.",
    ),
)
BYTE_MISTAKES = (
    Mistake(
        ("return 2 *", "return"),
        "That is one matrix; S and P exist at the same time, so count both.",
    ),
    Mistake(
        ("return 2 *", "return", " * bytes_per_element", ""),
        "That is the number of entries of one matrix, not bytes of two.",
    ),
    Mistake(
        (" * bytes_per_element", ""),
        "That is the number of entries; multiply by the bytes of each.",
    ),
    Mistake(("heads * ", ""), "Every head has its own matrices: multiply by heads."),
    Mistake(("batch * ", ""), "Every sequence of the batch has its own: multiply by batch."),
    Mistake(("**2 *", " *"), "S and P have seqlen x seqlen entries: the length counts twice."),
    Mistake(("element\n", "element / 2**20\n"), "That is in MiB; return bytes."),
)


def check_textbook_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-1: output and weights without a mask, with leading dimensions."""
    q, k, v = _qkv(2, 3, n_q=5, n_k=7, d=16, seed=seed)
    _judge(student, q, k, v)
    passed("output and weights agree with the float64 oracle", seed)


def check_textbook_mask(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-1: a boolean mask, True where a query may look, of shape (seqlen_q, seqlen_k)."""
    q, k, v = _qkv(2, n_q=6, n_k=8, d=16, seed=seed)
    mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(seed + 1)) < 0.6
    mask[:, 2] = True  # every query sees something here
    _judge(student, q, k, v, mask)
    passed("hidden keys get weight 0, and the others share 1", seed)


def check_textbook_empty_rows(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-1: a query that may look nowhere gives 0, in float16 too."""
    for dtype in (torch.float32, torch.float16):
        q, k, v = (t.to(dtype) for t in _qkv(2, n_q=4, n_k=5, d=8, seed=seed))
        mask = torch.ones(4, 5, dtype=torch.bool)
        mask[1] = False
        output, weights = unpack(call(student, q, k, v, mask), NAMES)
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
        _judge_against_textbook((output, weights), q, k, v, mask)
    passed("a query without keys gives 0, in float32 and in float16", seed)


def check_score_bytes(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-2: bytes of the score matrices S and P."""
    cases = [(1, 1, 1024, 4), (3, 12, 2048, 2), (1, 32, 65_536, 2)]
    draw = random.Random(seed)
    cases += [
        (draw.randint(2, 9), draw.randint(2, 40), draw.randint(100, 9999), 4) for _ in range(3)
    ]
    for batch, heads, n, itemsize in cases:
        given = call(student, batch, heads, n, itemsize)
        right = score_bytes(batch, heads, n, itemsize)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise CheckFailed(f"return a number of bytes, not {type(given).__name__}.")
        if given == right:
            continue
        said = explain(
            given, score_bytes, BYTE_MISTAKES, lambda f, c=(batch, heads, n, itemsize): f(*c), eq
        )
        raise CheckFailed(
            f"for batch {batch}, heads {heads}, seqlen {n}, {itemsize} bytes each you return "
            f"{given:,}. {said or f'It should be {right:,}.'}"
        )
    passed("bytes of S and P", seed)


def check_largest_length(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-2: the longest sequence whose S and P fit into a memory."""
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


def _judge(student: Callable[..., Any], *inputs: Tensor) -> None:
    _judge_against_textbook(unpack(call(student, *inputs), NAMES), *inputs)


def _judge_against_textbook(
    given: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> None:
    """Judge output and weights by the error rule."""
    exact = [x.double() for x in (q, k, v)]
    right = (oracle_attention(q, k, v, mask)[0], standard_attention(*exact, mask=mask)[1])
    textbook = standard_attention(q, k, v, mask)
    for index in (1, 0):  # with wrong weights the output is wrong, too
        allowed = compare_with_oracle(textbook[index], textbook[index], right[index]).allowed
        judge(
            NAMES[index],
            given[index],
            right[index],
            allowed=max(allowed, a_few_steps(right[index], q.dtype)),
            mistakes=results(textbook_attention, MISTAKES, lambda f, i=index: f(*exact, mask)[i]),
        )


def _qkv(*leading: int, n_q: int, n_k: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*leading, n_q, d, generator=generator),
        torch.randn(*leading, n_k, d, generator=generator),
        torch.randn(*leading, n_k, d, generator=generator),
    )
