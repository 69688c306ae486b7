"""What typical wrong solutions of exercise 3-4 compute, and what to say of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor]

OUT_MISTAKES = {
    "average": (
        "It is the plain average. A part with more keys, or higher scores, must weigh more: "
        "exp(its lse), divided by the sum of both."
    ),
    "sum": "The outputs are added up without weights: each one is an average over its own keys.",
    "weights by lse": (
        "The weights are the log-sum-exps themselves. They are logarithms: the weights are "
        "exp(lse) and exp(part_lse), divided by their sum."
    ),
    "not normalised": (
        "The weights do not add up to 1: divide by their sum, exp(lse) + exp(part_lse)."
    ),
    "not normalised, less the maximum": (
        "The weights do not add up to 1: exp(lse - m) and exp(part_lse - m) still have to be "
        "divided by their sum."
    ),
    "normalised twice": "It is divided by the sum of the weights twice.",
    "swapped": "The weights are swapped: exp(lse) belongs to out, exp(part_lse) to part.",
    "the larger": "Only the part with the larger log-sum-exp is kept. Both count.",
    "rescaled by the maximum only": (
        "out is scaled by exp(lse - m), but part by nothing: it needs exp(part_lse - m)."
    ),
    "unchanged": "out comes back as it was: part is not in it.",
    "part": "part comes back as it was: out is lost.",
    "base 2": "The weights are powers of 2. The log-sum-exp is a natural logarithm: use exp.",
}

LSE_MISTAKES = {
    "added": (
        "The two log-sum-exps are added. Their exponentials add up: "
        "log(exp(lse) + exp(part_lse)), which is torch.logaddexp."
    ),
    "maximum": (
        "It is the larger of the two. It is m + log(exp(lse - m) + exp(part_lse - m)), with m the "
        "larger one."
    ),
    "mean": "It is the mean of the two. It is log(exp(lse) + exp(part_lse)).",
    "without m": "The maximum is missing: m + log(exp(lse - m) + exp(part_lse - m)).",
    "no log": "The logarithm is missing: it is log(exp(lse) + exp(part_lse)).",
    "m plus the sum": "A logarithm is missing: m + log(sum of the weights), not m + their sum.",
    "base 2": "It is in base 2: use torch.log and torch.exp, the natural ones.",
    "unchanged": "The running lse comes back as it was: it has to grow with every part.",
    "part's": "The part's lse comes back: the running one is lost.",
    "weighted": (
        "The log-sum-exps are averaged with the weights of the outputs. Their exponentials add up: "
        "log(exp(lse) + exp(part_lse))."
    ),
}

ALL_MISTAKES = {
    "first lost": "The first part is lost: the running result starts with it, or with nothing.",
    "last lost": "The last part is lost.",
    "starts at 0": (
        "The running lse starts at 0, as if a key with the score 0 had been seen. Nothing seen is "
        "-inf: log(0)."
    ),
    "averaged": (
        "All parts weigh the same. Merge them one by one, each by its log-sum-exp: "
        "out, lse = merge(out, lse, part, part_lse)."
    ),
    "lse not kept": (
        "The running lse is not carried on: each step must use the lse that the last one returned."
    ),
    "only two": "Only the first two parts are merged.",
}


def merged(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, *, mistake: str | None = None
) -> Result:
    """One merge in float64, with one mistake; never NaN where the right result has none."""
    a, b, la, lb = (t.double() for t in (out, part, lse, part_lse))
    both = torch.logaddexp(la, lb)
    safe = both.masked_fill(both == -torch.inf, 0.0)
    m = torch.maximum(la, lb)
    m = m.masked_fill(m == -torch.inf, 0.0)
    x, y = (la - safe).exp(), (lb - safe).exp()
    lses = {
        "added": lambda: la + lb,
        "maximum": lambda: torch.maximum(la, lb),
        "mean": lambda: (la + lb) / 2,
        "without m": lambda: both - m,
        "no log": lambda: both.exp(),
        "m plus the sum": lambda: m + (both - m).exp(),
        "base 2": lambda: both / math.log(2),
        "unchanged": lambda: la,
        "part's": lambda: lb,
        "weighted": lambda: x * la + y * lb,
    }
    if (found := lses.get(mistake or "")) is not None:
        both = found()
    weights = {
        "average": lambda: (torch.full_like(x, 0.5), torch.full_like(y, 0.5)),
        "sum": lambda: (torch.ones_like(x), torch.ones_like(y)),
        "weights by lse": lambda: (la / (la + lb), lb / (la + lb)),
        "not normalised": lambda: (la.exp(), lb.exp()),
        "not normalised, less the maximum": lambda: ((la - m).exp(), (lb - m).exp()),
        "normalised twice": lambda: (
            x / ((la - m).exp() + (lb - m).exp()),
            y / ((la - m).exp() + (lb - m).exp()),
        ),
        "swapped": lambda: (y, x),
        "the larger": lambda: ((la >= lb).double(), (lb > la).double()),
        "rescaled by the maximum only": lambda: ((la - m).exp(), torch.ones_like(y)),
        "unchanged": lambda: (torch.ones_like(x), torch.zeros_like(y)),
        "part": lambda: (torch.zeros_like(x), torch.ones_like(y)),
        "base 2": lambda: tuple((d * math.log(2)).sigmoid() for d in (la - lb, lb - la)),
    }
    if (chosen := weights.get(mistake or "")) is not None:
        x, y = chosen()
    return x[..., None] * a + y[..., None] * b, both


def all_merged(parts: Sequence[Result], mistake: str | None = None) -> Result:
    """All parts merged in float64, with one mistake."""
    parts = list(parts)
    if mistake == "first lost":
        parts = parts[1:]
    elif mistake == "last lost":
        parts = parts[:-1]
    elif mistake == "only two":
        parts = parts[:2]
    elif mistake == "starts at 0":
        out, lse = parts[0]
        parts = [(torch.zeros_like(out), torch.zeros_like(lse)), *parts]
    if not parts:
        return torch.empty(0), torch.empty(0)
    out, lse = (t.double() for t in parts[0])
    first_lse = lse
    if mistake == "averaged":
        return torch.stack([part.double() for part, _ in parts]).mean(0), lse
    for part, part_lse in parts[1:]:
        out, lse = merged(out, first_lse if mistake == "lse not kept" else lse, part, part_lse)
    return out, lse
