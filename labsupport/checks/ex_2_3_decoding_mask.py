"""Exercise 2-3: which keys a query may see while text is generated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention import oracle_attention
from labsupport.checks.errors import CheckFailed, short
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    equal,
    explain,
    mistakes,
    passed,
    results,
    tensor,
)


### BEGIN SOLUTION
def visible(seqlen_q: int, seqlen_k: int, valid: Tensor | None = None) -> Tensor:
    """Return the mask of the last seqlen_q of seqlen_k tokens: True where a query may look."""
    device = None if valid is None else valid.device
    ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    mask = ones.tril(seqlen_k - seqlen_q)
    if valid is not None:
        mask = mask & valid[:, None, None, :]
    return mask


MISTAKES = mistakes("""
The diagonal starts at the top left: query 0 is taken for the first token of the text. The queries
are its last tokens, so query i is at position i + seqlen_k - seqlen_q.
    tril(seqlen_k - seqlen_q) -> tril()
A query does not see itself: key and query at the same position belong together.
    - seqlen_q -> - seqlen_q - 1
Each query sees one token of its future: the diagonal is one too far to the right.
    - seqlen_q -> - seqlen_q + 1
The past is hidden, and the future is visible: keep the lower triangle, tril.
    .tril( -> .triu(
The diagonal goes the wrong way: query i is at position i + seqlen_k - seqlen_q, not less.
    seqlen_k - seqlen_q -> seqlen_q - seqlen_k
It is inverted: True means that a query MAY look.
    return mask -> return ~mask
Nothing is hidden. Of several new tokens, the first must not see the last.
    - seqlen_q ->
Padding is not hidden: `valid` is ignored.
    mask & valid[:, None, None, :] -> mask.expand(len(valid), 1, -1, -1)
`valid` is inverted: it is True for text, and False for padding.
    mask & valid -> mask & ~valid
`valid` hides queries as well as keys. Nobody reads a padding query: hide keys only.
    None, :] -> None, :] & valid[:, None, -seqlen_q:, None]
`valid` hides queries, not keys: its positions are those of the keys, valid[:, None, None, :].
    valid[:, None, None, :] -> valid[:, None, -seqlen_q:, None]
Every text of the batch gets the padding of the first: valid[:, None, None, :] has a row for each.
    valid[:, None, None, :] -> valid[:1, None, None, :].expand(len(valid), -1, -1, -1)
Causal OR valid: a key must be both, in the past and text.
    mask & valid -> mask | valid
The rows of padding tokens, which see no key, were filled. Leave them False: kernels give 0 there.
    return mask -> return mask | ~mask.any(-1, keepdim=True)
""")
### END SOLUTION


def check_visible_positions(student: Student, seed: int = 0) -> None:
    """Exercise 2-3: prefill, one new token, several new tokens; no padding."""
    for seqlen_q, seqlen_k in ((5, 5), (1, 6), (3, 8 + seed % 5), (6, 7)):
        _judge(student, seqlen_q, seqlen_k)
    passed("each query sees what came before it, and itself", seed)


def check_visible_padding(student: Student, seed: int = 0) -> None:
    """Exercise 2-3: keys that are padding are hidden, on the left or on the right."""
    for seqlen_q, seqlen_k, lengths in (
        *((5, 5, (3, 5, 2)), (1, 6, (6, 4)), (3, 8, (8, 2 + seed % 5)), (3, 3, (3, 3, 1))),
    ):
        _judge(student, seqlen_q, seqlen_k, _left_padded(seqlen_k, lengths))
    _judge(student, 4, 4, _left_padded(4, (2, 4)).flip(1))
    passed("padding is hidden from every query, in the shape (batch, 1, seqlen_q, seqlen_k)", seed)


def check_visible_decoding(student: Student, seed: int = 0) -> None:
    """Exercise 2-3: a padded batch, in chunks and token by token, gives what each text gives alone.

    Raises:
        CheckFailed: the output of some token differs; says in which step.
    """
    lengths, n = (9, 6), 9
    q, k, v = draw(3, len(lengths), 2, n, 8, seed=seed, dtype=torch.float64)
    valid = _left_padded(n, lengths)
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
                f"{new} queries and {end} keys: {error}"
            ) from error
        for row, length in enumerate(lengths):
            padding = n - length
            text = [x[row, :, padding:end] for x in (q, k, v)]
            alone = oracle_attention(*text, causal=True)[0]
            real = max(start, padding)  # what padding computes, nobody reads
            wanted, given = alone[:, real - padding :], out[row, :, real - start :]
            if not torch.allclose(given, wanted, rtol=0.0, atol=1e-10):
                raise CheckFailed(
                    f"step {start} to {end - 1} ({name}; {new} queries, {end} keys): text {row} of "
                    f"the batch, with {padding} tokens of padding on its left, gets other outputs "
                    "than alone. Its real tokens must see its earlier real tokens, nothing else."
                )
    passed("a padded batch, in chunks and token by token, equals each text alone", seed)


def _judge(student: Student, seqlen_q: int, seqlen_k: int, valid: Tensor | None = None) -> None:
    arguments: Any = (seqlen_q, seqlen_k) if valid is None else (seqlen_q, seqlen_k, valid)
    where = f"visible({seqlen_q}, {seqlen_k}{', valid' if valid is not None else ''})"
    given, right = tensor(call(student, *arguments), where), visible(*arguments)
    # Two mistakes in a mask of few entries look like others by chance: no pairs.
    known = results(visible, MISTAKES, lambda f: f(*arguments), pairs=False)
    if given.dtype != torch.bool:
        raise CheckFailed(
            f"{where} is {short(given.dtype)}: return booleans. scaled_dot_product_attention adds "
            "a mask of numbers to the scores, and adding 1 hides nothing."
        )
    if given.shape != right.shape:
        shape = "(batch, 1, seqlen_q, seqlen_k)" if right.ndim == 4 else "(seqlen_q, seqlen_k)"
        hint = " Is `valid` ignored?" if given.shape == right.shape[-2:] else ""
        hint = " The 1 stands for the heads." if given.ndim == 3 else hint
        raise CheckFailed(
            f"{where} has shape {tuple(given.shape)}. It must be {tuple(right.shape)}, "
            f"{shape}.{hint}"
        )
    if equal(given, right):
        return
    if say := explain(given, known):
        raise CheckFailed(f"{where} is wrong. {say}")
    place = tuple((given != right).nonzero()[0].tolist())
    *_, query, key = place
    raise CheckFailed(
        f"{where} is wrong, first at {place}: query {query} is at position "
        f"{seqlen_k - seqlen_q + query}, and {'may' if right[place] else 'must not'} see key {key}."
    )


def _left_padded(seqlen: int, lengths: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.arange(seqlen) >= seqlen - length for length in lengths])
