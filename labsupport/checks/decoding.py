"""Exercise 2-3: which keys a query may see while text is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention import oracle_attention
from labsupport.checks.verdict import CheckFailed, Mistake, call, explain, passed


def visible(seqlen_q: int, seqlen_k: int, valid: Tensor | None = None) -> Tensor:
    """Return the mask of the last seqlen_q of seqlen_k tokens: True where a query may look."""
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    if valid is not None:
        mask = mask & valid[:, None, None, :]
    return mask


MISTAKES = (
    Mistake(
        ("tril(seqlen_k - seqlen_q)", "tril()"),
        "The diagonal starts at the top left: query 0 is taken for the first token of the text. "
        "The queries are its last tokens, so query i is at position i + seqlen_k - seqlen_q.",
    ),
    Mistake(
        ("- seqlen_q", "- seqlen_q - 1"),
        "A query does not see itself: key and query at the same position belong together.",
    ),
    Mistake(
        ("- seqlen_q", "- seqlen_q + 1"),
        "Each query sees one token of its future: the diagonal is one too far to the right.",
    ),
    Mistake(("return mask", "return ~mask"), "It is inverted: True means that a query MAY look."),
    Mistake(("tril", "triu"), "The triangle is inverted: it shows the future and hides the past."),
    Mistake(
        ("- seqlen_q", ""),
        "Nothing is hidden. Of several new tokens, the first must not see the last.",
    ),
    Mistake(
        ("mask & valid[:, None, None, :]", "mask.expand(len(valid), 1, -1, -1)"),
        "Padding is not hidden: `valid` is ignored.",
    ),
    Mistake(
        ("None, :]", "None, :] & valid[:, None, -seqlen_q:, None]"),
        "`valid` hides queries as well as keys. Nobody reads a padding query: hide keys only.",
    ),
    Mistake(
        ("None, :]", "-seqlen_q:, None]"),
        "`valid` hides queries, not keys: index it as valid[:, None, None, :].",
    ),
    Mistake(
        ("& valid", "& ~valid"), "Padding is shown and text is hidden: `valid` is True for text."
    ),
    Mistake(
        ("mask & valid", "mask | valid"),
        "Causal OR valid: a key must be both, in the past and text.",
    ),
    Mistake(
        ("return mask", "return mask | ~mask.any(-1, keepdim=True)"),
        "The rows of padding tokens, which see no key, were filled. Leave them False: the kernels "
        "define their output as 0.",
    ),
    Mistake(
        (
            "return mask",
            "own = torch.eye(seqlen_k, dtype=torch.bool)[-seqlen_q:]\n"
            "    return mask | ~mask.any(-1, keepdim=True) & own",
        ),
        "In the rows of padding tokens the query sees itself. Leave them False: the kernels define "
        "their output as 0.",
    ),
)


def check_visible_positions(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-3: prefill, one new token, several new tokens; no padding."""
    for seqlen_q, seqlen_k in ((5, 5), (1, 6), (3, 8 + seed % 5), (6, 7)):
        given = call(student, seqlen_q, seqlen_k)
        _judge(given, seqlen_q, seqlen_k, None)
    passed("each query sees what came before it, and itself", seed)


def check_visible_padding(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-3: keys that are padding are hidden, on the left or on the right."""
    for seqlen_q, seqlen_k, lengths, side in (
        (5, 5, (5, 3, 2), "left"),
        (1, 6, (6, 4), "left"),
        (3, 8, (8, 2 + seed % 5), "left"),
        (4, 4, (2, 4), "right"),
        (3, 3, (3, 3, 1), "left"),
    ):
        valid = _valid(seqlen_k, lengths, side)
        given = call(student, seqlen_q, seqlen_k, valid)
        _judge(given, seqlen_q, seqlen_k, valid)
    passed("padding is hidden from every query, in the shape (batch, 1, seqlen_q, seqlen_k)", seed)


def check_visible_decoding(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-3: a padded batch, in chunks and token by token, gives what each text gives alone.

    Raises:
        CheckFailed: the output of some token differs; says in which step.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, heads, n, d = (9, 6), 2, 9, 8
    q, k, v = torch.randn(3, len(lengths), heads, n, d, generator=generator, dtype=torch.float64)
    valid = _valid(n, lengths, "left")
    end = 0
    for name, new in (("prefill", 4), ("a chunk", 3), ("a new token", 1), ("a new token", 1)):
        start, end = end, end + new
        mask = call(student, new, end, valid[:, :end])
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise CheckFailed("return a boolean tensor: True where a query may look.")
        try:
            out = F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, :end], v[:, :, :end], attn_mask=mask
            )
        except RuntimeError as error:
            raise CheckFailed(
                f"scaled_dot_product_attention refuses your mask of shape {tuple(mask.shape)} for "
                f"q {tuple(q[:, :, start:end].shape)} and k {tuple(k[:, :, :end].shape)}: {error}"
            ) from error
        for row, length in enumerate(lengths):
            first = n - length  # position of the first real token
            alone, _ = oracle_attention(
                *(x[row : row + 1, :, first:end] for x in (q, k, v)), causal=True
            )
            real = slice(max(start, first), end)
            wanted = alone[:, :, real.start - first :]
            given = out[row : row + 1, :, real.start - start :]
            if not torch.allclose(given, wanted, rtol=0.0, atol=1e-10):
                raise CheckFailed(
                    f"step {start} to {end - 1} ({name}; {new} queries, {end} keys): text {row} of "
                    f"the batch, which has {n - length} tokens of padding on its left, gets other "
                    "outputs than alone. Its real tokens must see its earlier real tokens, and "
                    "nothing else."
                )
    passed("a padded batch, in chunks and token by token, equals each text alone", seed)


def _judge(given: Any, seqlen_q: int, seqlen_k: int, valid: Tensor | None) -> None:
    right = visible(seqlen_q, seqlen_k, valid)
    where = f"visible({seqlen_q}, {seqlen_k}{', valid' if valid is not None else ''})"
    if not isinstance(given, Tensor):
        raise CheckFailed(f"{where} must return a tensor, not {type(given).__name__}.")
    if given.dtype != torch.bool:
        raise CheckFailed(
            f"{where} is {str(given.dtype).removeprefix('torch.')}: return booleans. "
            "scaled_dot_product_attention adds a mask of numbers to the scores, and adding 1 hides "
            "nothing."
        )
    if given.shape != right.shape:
        raise CheckFailed(f"{where} has shape {tuple(given.shape)}. {_of_shape(given, right)}")
    if torch.equal(given, right):
        return
    said = explain(given, visible, MISTAKES, lambda f: f(seqlen_q, seqlen_k, valid))
    if said:
        raise CheckFailed(f"{where} is wrong. {said}")
    place = tuple((given != right).nonzero()[0].tolist())
    *_, query, key = place
    raise CheckFailed(
        f"{where} is wrong, first at {place}: query {query} is at position "
        f"{seqlen_k - seqlen_q + query}, and {'may' if right[place] else 'must not'} see key {key}."
    )


def _of_shape(given: Tensor, right: Tensor) -> str:
    wanted = f"It must be {tuple(right.shape)}"
    if right.ndim == 2:
        return f"{wanted}, (seqlen_q, seqlen_k)."
    if given.shape == right.shape[-2:]:
        return f"{wanted}: the texts of the batch are padded differently. Is `valid` ignored?"
    return (
        f"{wanted}, (batch, 1, seqlen_q, seqlen_k): the 1 stands for the heads. Without it, "
        "broadcasting takes the batch for the heads."
    )


def _valid(seqlen: int, lengths: tuple[int, ...], side: str) -> Tensor:
    position = torch.arange(seqlen)
    rows = [
        position >= seqlen - length if side == "left" else position < length for length in lengths
    ]
    return torch.stack(rows)
