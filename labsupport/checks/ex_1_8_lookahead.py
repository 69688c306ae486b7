"""Exercise 1-8: a fault to find, in a program that reads tokens which it must not see."""

from __future__ import annotations

import operator

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
    judge_numbers,
    mistakes,
    passed,
    results,
)


### BEGIN SOLUTION
def rows_that_leak(seqlen: int, gap: int) -> int:
    """Return the number of tokens whose output depends on tokens that they must not see."""
    return min(gap, seqlen)


ROW_MISTAKES = mistakes("""
Change one token after another, not the last one alone, and count from row 0: row `gap` is the first
that has a key.
    min(gap, seqlen) -> min(gap + 1, seqlen)
Row gap - 1 is among them: its nearest allowed key would stand before the beginning.
    min(gap, seqlen) -> min(gap - 1, seqlen)
Try it with another gap: their number depends on it.
    min(gap, seqlen) -> 1
    1 -> min(1, seqlen)
The last row counts, too: it sees the last token, which is not in its past.
    min(gap, seqlen) -> min(gap, seqlen - 1)
The last token does change rows before it: compare the outputs row by row, and count.
    min(gap, seqlen) -> 0
There are not more rows than tokens: try a gap larger than seqlen.
    min(gap, seqlen) -> gap
These are the rows that are right.
    min(gap, seqlen) -> seqlen - min(gap, seqlen)
Not every row: compare the outputs before and after the change row by row.
    min(gap, seqlen) -> seqlen
""")


def leak_cause() -> str:
    """Return the letter of the cause."""
    return "D"


CAUSE_MISTAKES = mistakes("""
If a token saw one key too many, it would be a key of its past. Which rows changed? For those rows,
is the last token just one step too near?
    "D" -> "A"
Print weights.sum(dim=-1) and weights.sum(dim=0): which of the two is 1 everywhere?
    "D" -> "B"
Put -1e9 in the place of -10_000.0, and look again: does the change go away?
    "D" -> "C"
Run the program in float64, where these steps are 1e-12: does the change go away?
    "D" -> "E"
In a transposed mask most tokens would see their future. Which rows are right here?
    "D" -> "F"
""")


def recall(x: Tensor, gap: int) -> Tensor:
    """Return for each token what it finds in tokens at least `gap` before it, or zeros.

    Args:
        x: (seqlen, head_dim).
    """
    position = torch.arange(len(x), device=x.device)
    seen = position[:, None] - position >= gap
    scores = x @ x.mT / x.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.nan_to_num() @ x


RECALL_MISTAKES = mistakes("""
It is as before: the first rows see all tokens, the future included.
    scores.masked_fill(~seen, -torch.inf) -> (scores + ~seen * -10_000.0)
Now a row without a key takes the mean of all tokens, the future included: another finite number
gives all hidden keys the same weight, which is not 0.
    -torch.inf -> -1e9
A row without a key is 0 / 0 with -inf: its weights must become 0.
    .nan_to_num() ->
A visible score is NaN: 0 times -inf is NaN. Put -inf in its place by masked_fill or torch.where.
    scores.masked_fill(~seen, -torch.inf) -> (scores + ~seen * -torch.inf)
    .nan_to_num() ->
All weights are 0. (With -inf: 0 times -inf is NaN. Use masked_fill or torch.where.)
    scores.masked_fill(~seen, -torch.inf) -> (scores + ~seen * -torch.inf)
The mask is transposed: tokens see what comes after them.
    position[:, None] - position >= -> position - position[:, None] >=
The softmax runs over the queries: a token's weights over its keys must add up to 1.
    .softmax(-1) -> .softmax(-2)
The softmax is over all keys, hidden ones too, and the mask comes after it: weights of what is
visible no longer add up to 1.
    scores.masked_fill(~seen, -torch.inf).softmax(-1) -> (scores.softmax(-1) * seen)
A row without a key sees itself instead. It sees nothing: its output is 0.
    scores = x -> seen |= torch.eye(len(x)).bool() & ~seen.any(-1, True)\\n    scores = x
A row without a key sees the first token instead. It sees nothing: its output is 0.
    scores = x -> seen |= ~seen.any(-1, True) & (position == 0)\\n    scores = x
The mask is inverted: it hides what a token may see, and shows the rest.
    masked_fill(~seen -> masked_fill(seen
A token sees one key too many: the nearest is `gap` before it.
    >= gap -> >= gap - 1
The gap is ignored: the nearest key is `gap` before a token.
    >= gap -> >= 0
The scores are not divided by sqrt(head_dim), as they were in the program.
    x @ x.mT / x.shape[-1] ** 0.5 -> x @ x.mT
Row `gap` has one key, token 0: only the rows before it are 0.
    weights.nan_to_num() -> (weights.nan_to_num() * (position > gap)[:, None])
Scores below -10,000 or above 10,000 defeat a mask of -10,000: use -inf.
    scores.masked_fill(~seen, -torch.inf) -> (scores + ~seen * -10_000.0)
    weights.nan_to_num() -> (weights * seen.any(-1, True))
A token `gap` before is near enough to be seen: the comparison was right.
    >= gap -> > gap
The rows without a key are missing: their output is 0.
    return weights.nan_to_num() @ x -> return (weights.nan_to_num() @ x)[gap:]
""")
### END SOLUTION


def check_leaking_rows(student: Student, seed: int = 0) -> None:
    """Exercise 1-8: how many rows depend on tokens that they must not see."""
    cases = [(32, 4), (32, 1), (30 + seed % 13, 9 + seed % 17), (32, 0), (6, 9)]
    judge_numbers(student, cases, rows_that_leak, ROW_MISTAKES, ("the number of rows",))
    passed("the rows that depend on tokens which they must not see", seed)


def check_leak_cause(student: Student) -> None:
    """Exercise 1-8: the cause, out of six."""
    given, right = chosen_letter(call(student)), leak_cause()
    refuted = results(leak_cause, CAUSE_MISTAKES, lambda f: f(), pairs=False)
    if given != right:
        raise CheckFailed(f"{given} is not the cause. {explain(given, refuted, operator.eq)}")
    passed("that is the cause")


def check_recall(student: Student, seed: int = 0) -> None:
    """Exercise 1-8: the program after the repair."""
    for seqlen, gap, size in ((12, 4, 1), (9, 1 + seed % 4, 1), (7, 0, 1), (5, 8, 1), (12, 4, 100)):
        x = size * draw(seqlen, 16, seed=seed + gap)
        where = f"(seqlen {seqlen}, gap {gap}{', large scores' if size > 1 else ''}) "
        judge_call(student, recall, RECALL_MISTAKES, (x, gap), ("the output",), where=where)
    passed("each token sees the tokens at least `gap` before it, and no other", seed)
