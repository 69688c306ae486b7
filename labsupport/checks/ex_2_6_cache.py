"""Exercise 2-6: a key/value cache, decoding in parts, pages, and keys in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed, short
from labsupport.checks.row_watch import RowWatch, by_hand
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    equal,
    explain,
    judge,
    judge_call,
    mistakes,
    passed,
    results,
    tensor,
    unpack,
    within,
)

PAGE = 16
Pieces = list[tuple[Tensor, Tensor]]
History = list[tuple[Tensor, Tensor, int, bool, bool]]


### BEGIN SOLUTION
class KVCache:
    """Keys and values of one layer, in buffers that grow."""

    def __init__(self) -> None:
        self.k: Any = None
        self.v: Any = None
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; return all keys and all values so far."""
        if self.k is None:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        end, room = self.length + k.shape[2], self.k.shape[2]
        if end > room:
            larger = [x.new_zeros(*x.shape[:2], max(end, 2 * room), x.shape[3]) for x in (k, v)]
            for new, old in zip(larger, (self.k, self.v), strict=True):
                new[:, :, :room] = old
            self.k, self.v = larger
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


CACHE_MISTAKES = mistakes(r"""
When the buffers grow, the old tokens are lost: copy the filled part into the new buffers.
    new[:, :, :room] = old -> pass
When the buffers grow, the old values are lost: copy both, keys and values.
    new[:, :, :room] = old -> new[:, :, :room] = old if old is self.k else 0
When the buffers grow, the old keys are lost: copy both, keys and values.
    new[:, :, :room] = old -> new[:, :, :room] = old if old is self.v else 0
The whole buffers come back, empty slots included: return the first `length` tokens only.
    return self.k[:, :, : self.length], self.v[:, :, : self.length] -> return self.k, self.v
Each piece overwrites the first tokens: write it after those that are there.
    self.length : end] = -> : end - self.length] =
`length` grows by 1 for each piece: a prefill brings many tokens together.
    self.length = end -> self.length += 1
`length` does not grow: every piece is taken for the first one.
    self.length = end -> self.length = k.shape[2]
Keys and values are swapped.
    return self.k[:, :, : self.length], self.v -> return self.v[:, :, : self.length], self.k
The keys are stored as values, too.
    end] = v -> end] = k
Keys and values share one buffer, so that the values overwrite the keys: make two.
    self.k, self.v = larger -> self.k = self.v = larger[0]
New tokens stand before the old ones: append them at the end.
    return self.k[:, :, : self.length], -> return self.k[:, :, : self.length].roll(k.shape[2], 2),
    self.v[:, :, : self.length]\n -> self.v[:, :, : self.length].roll(k.shape[2], 2)\n
Only the newest piece comes back: return all tokens so far.
    : self.length], self.v[:, :, : self.length] -> -n:], self.v[:, :, end - n : end]
    return self.k[:, :, -n:] -> n = k.shape[2]\n        return self.k[:, :, end - n : end]
""")


def split_decode(q: Tensor, k: Tensor, v: Tensor, num_splits: int) -> Tensor:
    """Return attention of one query to all keys, computed in `num_splits` parts."""
    outs, lses = [], []
    for k_part, v_part in zip(
        k.tensor_split(num_splits, 1), v.tensor_split(num_splits, 1), strict=True
    ):
        if k_part.shape[1] == 0:
            continue
        scores = q @ k_part.mT / q.shape[-1] ** 0.5
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append((scores - lse).exp() @ v_part)
        lses.append(lse)
    lse = torch.stack(lses)
    weights = torch.softmax(lse, 0)
    return (weights * torch.stack(outs)).sum(0)


SPLIT_MISTAKES = mistakes(r"""
It is the plain average of the parts. A part with higher scores, or more keys, weighs more: its
weight is exp(lse), divided by the sum of all parts' exp(lse).
    torch.softmax(lse, 0) -> torch.full_like(lse, 1 / len(lse))
The weights add up to 1 over the heads: take the softmax over the parts, the first dimension.
    torch.softmax(lse, 0) -> torch.softmax(lse, 1)
The parts are added up without weights (or with a softmax over a dimension of size 1), but each is
an average over its own keys.
    torch.softmax(lse, 0) -> torch.ones_like(lse)
The weights do not add up to 1: divide exp(lse) by its sum over the parts.
    torch.softmax(lse, 0) -> lse.exp()
The weights are the log-sum-exps themselves, which are logarithms: take exp of them.
    torch.softmax(lse, 0) -> lse / lse.sum(0)
The weights follow each part's largest score alone; the part's sum of exponentials counts, too: its
log-sum-exp is m + log(l).
    lses.append(lse) -> lses.append(scores.amax(-1, keepdim=True))
The weights are the parts' sums l, without their maxima. Each sum was taken under its own maximum:
bring them to a common one, or use m + log(l).
    lses.append(lse) -> lses.append(lse - scores.amax(-1, keepdim=True))
exp(lse) overflows or vanishes with large scores: subtract the largest lse of all parts first.
    torch.softmax(lse, 0) -> lse.exp() / lse.exp().sum(0)
The scores are not scaled: divide them by sqrt(head_dim).
    / q.shape[-1] ** 0.5 ->
The last keys are missing where num_splits does not divide their number.
    outs, lses = -> n = len(k[0]) // num_splits * num_splits\n    outs, lses =
    outs, lses = -> k, v = k[:, :n], v[:, :n]\n    outs, lses =
Only the last part comes back.
    (weights * torch.stack(outs)).sum(0) -> outs[-1]
""")


def gather_pages(pool: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens of a text whose pages `table` lists in order."""
    return pool[table].flatten(0, 1)[:length]


PAGE_MISTAKES = mistakes("""
The table is ignored: page i of the text is pool[table[i]], not pool[i].
    pool[table] -> pool[: len(table)]
The pages stand in the pool's order: keep the table's.
    pool[table] -> pool[table.sort().values]
The unfilled end of the last page is returned, too: cut after `length` tokens.
    [:length] ->
The tokens that remain are the last ones: the first `length` are the text.
    [:length] -> [-length:]
""")


def quantise_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the scale of each head: k is about codes * scale."""
    scale = k.abs().amax((1, 2), keepdim=True) / 127
    return (k / scale).round().clamp(-127, 127).to(torch.int8), scale


QUANTISE_MISTAKES = mistakes("""
All heads share one scale, so the largest head sets the error of all: take the maximum over
tokens and head_dim, for each head.
    k.abs().amax((1, 2), keepdim=True) -> k.abs().amax().expand(len(k), 1, 1)
There is a scale for each token: return one for each head.
    amax((1, 2), -> amax(2,
The numbers are cut off, not rounded: `.to(torch.int8)` drops the decimals. Round first.
    .round() ->
The scale comes from the largest number instead of the largest absolute one: negative keys leave the
range.
    k.abs().amax -> k.amax
The scale comes from the largest number instead of the largest absolute one: negative keys leave the
range.
    k.abs().amax -> k.amax
    .clamp(-127, 127) ->
127 is the largest code, so it belongs to the largest absolute value: divide by 127, not by 128.
    / 127 -> / 128
The keys are multiplied by the scale: divide, so that codes * scale is about k.
    (k / scale) -> (k * scale)
The codes use half of the range or less: the largest absolute value must become 127.
    / 127 -> / 63
The scale comes back inverted: k is about codes * scale.
    to(torch.int8), scale -> to(torch.int8), 1 / scale
""")
### END SOLUTION


def replayed(cache: Any, pieces: Pieces) -> History:
    """Feed pieces to a new cache.

    Returns:
        after each piece: all keys and all values; the buffers' room; are they others than before;
        and do they hold what came back.
    """
    one, history, kept = cache(), [], [torch.empty(0)]
    for k, v in pieces:
        given = one.append(k, v)
        buffers = [
            x if isinstance(x, Tensor) and x.ndim == 4 else k[:, :, :0] for x in (one.k, one.v)
        ]
        room = min(x.shape[2] for x in buffers)
        if room > 1000 * given[0].shape[2]:  # it would fill the memory
            raise ValueError(f"there is room for {room} tokens, but only {given[0].shape[2]} came")
        new = buffers[0].untyped_storage().data_ptr() != kept[-1].untyped_storage().data_ptr()
        kept.append(buffers[0])  # or its memory could be the next one's
        held = all(equal(x[:, :, : y.shape[2]], y) for x, y in zip(buffers, given, strict=True))
        history.append((*(x.clone() for x in given), room, new, held))
    return history


def check_cache_values(student: Any, seed: int = 0) -> None:
    """Exercise 2-6, step 1: after each piece, all keys and values so far, in order.

    Args:
        student: a class as `KVCache`.
        seed: draws other inputs.
    """
    _history(student, _pieces((5, 1, 1, 3, 1), seed), "a prefill of 5 tokens, then 1, 1, 3 and 1")
    _history(student, _pieces((1,) * 9, seed + 1), "nine tokens, one by one")
    _history(student, _pieces((2, 9), seed + 2), "2 tokens, then 9 together")
    passed("after each piece the cache holds all tokens so far, in order", seed)


def check_cache_growth(student: Any, seed: int = 0) -> None:
    """Exercise 2-6, step 1: the buffers double, so that 100 tokens copy little."""
    history = _history(student, _pieces((3,) + (1,) * 97, seed), "3 tokens, then 97 one by one")
    rooms = [room for _, _, room, _, _ in history]
    lengths = list(range(3, 101))
    if any(room < length for room, length in zip(rooms, lengths, strict=True)):
        raise CheckFailed("the buffers `k` and `v` are too small for their tokens.")
    if not all(held for *_, held in history):
        raise CheckFailed("the buffers `k` and `v` do not hold the tokens that `append` returns.")
    if (grown := sum(new for _, _, _, new, _ in history[1:])) > 8:
        raise CheckFailed(
            f"The buffers were replaced {grown} times for 97 tokens. Each time copies all earlier "
            "tokens, N²/2 in all. Double a buffer when it is full: 7 times are enough."
        )
    if rooms[0] > 64:
        raise CheckFailed(f"There is room for {rooms[0]} tokens, but only {lengths[0]} came.")
    for before, room, length in zip(rooms, rooms[1:], lengths[1:], strict=False):
        if room > before and room > max(length, 2 * before):
            raise CheckFailed(
                f"For {length} tokens, the room grew from {before} to {room}: take twice the old "
                "room, or as much as all tokens need, if that is more."
            )
    passed("the buffers double: few copies, and at most half of them empty", seed)


def check_split_decode(student: Student, seed: int = 0) -> None:
    """Exercise 2-6, step 2: one query, keys in parts of unequal size, scores of any size."""
    for heads, keys, parts in ((3, 64, 4), (2, 50, 7), (2, 5, 8), (1, 40, 1)):
        q, k, v = _decode_inputs(heads, keys, seed)
        _split(student, (q, k, v, parts), f"({keys} keys in {parts} parts) ")
    q, k, v = _decode_inputs(2, 24, seed + 1)
    for size in (1000.0, -1000.0):  # keys of one direction: scores of that size
        shifted = k + size * 16**0.5 * q / (q * q).sum(-1, keepdim=True)
        _split(student, (q, shifted, v, 3), f"(scores around {size:.0f}) ", allowed=2e-3)
    q, k, v = _decode_inputs(1, 60, seed + 2)
    with RowWatch() as seen:
        call(student, q, k, v, 6)
    if seen.longest > max(16, 10):
        raise CheckFailed(
            f"{seen.operator} ran over {seen.longest} keys together, but a part has 10: attend to "
            "each part alone, and merge the results by their log-sum-exps."
        )
    passed("parts of any size merge to attention over all keys", seed)


def check_gather_pages(student: Student, seed: int = 0) -> None:
    """Exercise 2-6, step 3: pages in the table's order, the last one in part."""
    pool = draw(7, PAGE, 2, 4, seed=seed)
    for pages, length in (((4, 0, 6), 40), ((2,), 5), ((5, 1), 2 * PAGE)):
        arguments = (pool, torch.tensor(pages), length)
        given = tensor(call(student, *arguments))
        right = gather_pages(*arguments)
        known = results(gather_pages, PAGE_MISTAKES, lambda f, a=arguments: f(*a))
        where = f"(table {list(pages)}, length {length}) "
        if not equal(given, right) and (say := explain(given, known)):
            raise CheckFailed(where + say)
        judge(f"{where}the result", given, right, allowed=0.0)
    passed("the tokens of a text, from pages in any order", seed)


def check_quantise_keys(student: Student, seed: int = 0) -> None:
    """Exercise 2-6, step 3: int8 codes and one scale a head; the error is half a step at most."""
    k = draw(3, 20, 8, seed=seed) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    k[0, 3, 2] = -6.0  # the largest is negative
    codes, scale = unpack(call(student, k), ("codes", "scale"))
    right = quantise_keys(k)
    known = results(quantise_keys, QUANTISE_MISTAKES, lambda f: list(f(k)))
    if codes.dtype != torch.int8:
        raise CheckFailed(f"codes are {short(codes.dtype)}: use `.to(torch.int8)`.")
    if scale.numel() == 3 and scale.shape != right[1].shape and codes.shape == k.shape:
        raise CheckFailed(
            f"scale has shape {tuple(scale.shape)}: with keepdim=True it is (heads, 1, 1), and "
            "codes * scale works as it stands."
        )
    if not _agree((codes, scale), right) and (say := explain((codes, scale), known, _agree)):
        raise CheckFailed(say)
    judge("scale", scale, right[1], allowed=1e-6)
    judge("codes", codes, right[0], allowed=0.0)
    passed("int8 codes with one scale a head: off by half a step at most", seed)


def _history(student: Any, pieces: Pieces, what: str) -> History:
    given = call(within(replayed, student), pieces)
    right = replayed(KVCache, pieces)
    if not all(_same(a, b) for a, b in zip(given, right, strict=True)):
        for say, wrong in results(KVCache, CACHE_MISTAKES, lambda f: replayed(f, pieces)):
            if all(_same(a, b) for a, b in zip(given, wrong, strict=True)):
                raise CheckFailed(f"({what}) {say}")
    for i, (ours, theirs) in enumerate(zip(right, given, strict=True)):
        for name, a, b in zip(("keys", "values"), ours[:2], theirs[:2], strict=True):
            judge(f"({what}) after piece {i}, {name}", b, a, allowed=0.0)
    return given


def _same(a: Any, b: Any) -> bool:
    return all(equal(x, y) for x, y in zip(a[:2], b[:2], strict=True))


def _agree(given: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Compare codes and scales."""
    (codes, scale), (its_codes, its_scale) = given, other
    near = scale.shape == its_scale.shape and torch.allclose(scale, its_scale)
    return near and equal(codes, its_codes)


def _pieces(lengths: tuple[int, ...], seed: int) -> Pieces:
    """Return random k and v, (2, 2, length, 4) each, of one prefill and further steps."""
    k, v = draw(2, 2, 2, sum(lengths), 4, seed=seed)
    return list(zip(k.split(lengths, 2), v.split(lengths, 2), strict=True))


def _decode_inputs(heads: int, keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (draw(heads, n, 16, seed=seed + i) for i, n in enumerate((1, keys, keys)))
    rising = torch.linspace(0, 2, keys)[:, None] * q / q.norm(dim=-1, keepdim=True)
    return q, k + rising, v


def _split(student: Student, arguments: Any, where: str, allowed: float | None = None) -> None:
    options: Any = {"where": where, "allowed": allowed}
    judge_call(by_hand(student), split_decode, SPLIT_MISTAKES, arguments, ("out",), **options)
