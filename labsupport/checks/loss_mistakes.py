"""What typical wrong solutions of exercise 3-2 compute, and what to say of each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.training.documents.packing import IGNORED

LOSS_MISTAKES = {
    "mean of means": (
        "It is the mean of the chunks' means. Chunks do not hold equally many tokens that count: "
        "add up the losses, and divide once, at the end."
    ),
    "all tokens": "It is divided by all tokens. Divide by those whose label is not -100.",
    "sum": "It is the sum; divide by the number of tokens that count.",
    "last chunk dropped": (
        "The last, shorter chunk is left out: loop to len(labels), not to "
        "len(labels) // chunk * chunk."
    ),
    "last chunk only": "It is the loss of the last chunk alone: add up (+=).",
    "first chunk only": "It is the loss of the first chunk alone.",
    "ignored counted": (
        "Ignored tokens count in the sum, as if their label were 0. Their loss must be 0."
    ),
    "last class": (
        "A label of -100 was used as an index, which counts from the end of the vocabulary. Hide "
        "these tokens first."
    ),
    "sign": "The sign is wrong: the loss is minus the log of a probability.",
    "no logsumexp": "It is minus the label's logit; the logsumexp over the vocabulary is missing.",
    "one exp too few": "It is minus the label's probability; take its logarithm first.",
}

GRADIENT_MISTAKES = {
    "incoming ignored": (
        "The incoming gradient is ignored: the loss was multiplied by 3 afterwards, so backward "
        "gets 3, and everything must be multiplied by it."
    ),
    "incoming twice": "The incoming gradient is multiplied in twice.",
    "no minus one": "The minus one at the label is missing: d = softmax - onehot(label).",
    "sign": "The sign is wrong: d = softmax - onehot(label), not the other way round.",
    "onehot only": "The softmax is missing: d = softmax - onehot(label).",
    "ignored get all": (
        "Ignored tokens get a gradient, as if their label were 0. Their d must be 0 throughout."
    ),
    "ignored get softmax": (
        "Ignored tokens get a gradient: their softmax, without a label. Their d must be 0 "
        "throughout, not at the label only."
    ),
    "sum": "It is not divided by the number of tokens that count; the loss is.",
    "all tokens": "It is divided by all tokens. Divide by those whose label is not -100.",
    "mean of means": (
        "Each chunk was divided by its own number of tokens. Divide by the number of all tokens "
        "that count."
    ),
    "last chunk dropped": "The last, shorter chunk is left out.",
    "last chunk only": (
        "Each chunk overwrites the contribution of the one before. Every token adds to the "
        "weight's gradient: +=."
    ),
    "zeros": "It is all zeros: is it ever written?",
}


def loss_with_mistake(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, mistake: str | None = None
) -> Tensor:
    """The mean loss in float64, with one mistake; NaN where nothing is left to divide."""
    logits = hidden.detach().double() @ weight.detach().double().T
    kept = labels != IGNORED
    target = labels.masked_fill(~kept, 0)
    if mistake == "last class":
        target = labels.masked_fill(~kept, IGNORED % len(weight))
    if mistake in ("ignored counted", "last class"):
        kept = torch.ones_like(kept)
    count = (labels != IGNORED).sum()
    label = logits.gather(1, target[:, None])[:, 0]
    losses = {
        "sign": label - logits.logsumexp(-1),
        "no logsumexp": -label,
        "one exp too few": -(label - logits.logsumexp(-1)).exp(),
    }.get(mistake or "", logits.logsumexp(-1) - label)
    losses = losses * kept
    if mistake == "mean of means":
        pairs = zip(losses.split(chunk), kept.split(chunk), strict=True)
        return torch.stack([part.sum() / k.sum() for part, k in pairs]).mean()
    begin, end = _span(len(labels), chunk, mistake)
    total = losses[begin:end].sum()
    if mistake == "sum":
        return total
    return total / (len(labels) if mistake == "all tokens" else count)


def gradients_with_mistake(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int,
    factor: float,
    mistake: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of factor * loss for hidden and weight in float64, with one mistake."""
    hidden, weight = hidden.detach().double(), weight.detach().double()
    kept = labels != IGNORED
    target = labels.masked_fill(~kept, 0)
    softmax = (hidden @ weight.T).softmax(-1)
    onehot = F.one_hot(target, len(weight)).double()
    d = {
        "no minus one": softmax,
        "sign": onehot - softmax,
        "onehot only": -onehot,
        "ignored get softmax": softmax - onehot * kept[:, None],
        "zeros": 0 * softmax,
    }.get(mistake or "", softmax - onehot)
    if mistake not in ("ignored get all", "ignored get softmax"):
        d = d * kept[:, None]
    begin, end = _span(len(labels), chunk, mistake)
    d[:begin], d[end:] = 0, 0
    count = kept.sum().double().expand(len(labels))
    if mistake == "all tokens":
        count = torch.full_like(count, len(labels))
    if mistake == "sum":
        count = torch.ones_like(count)
    if mistake == "mean of means":
        parts = kept.split(chunk)
        count = torch.cat([k.sum().clamp(min=1).expand(len(k)) for k in parts]) * len(parts)
    incoming = {"incoming ignored": 1.0, "incoming twice": factor**2}.get(mistake or "", factor)
    d = d / count[:, None] * incoming
    return d @ weight, d.T @ hidden


def _span(tokens: int, chunk: int, mistake: str | None) -> tuple[int, int]:
    """The tokens that are looked at."""
    if mistake == "last chunk dropped":
        return 0, tokens // chunk * chunk
    if mistake == "first chunk only":
        return 0, min(chunk, tokens)
    if mistake == "last chunk only":
        return (tokens - 1) // chunk * chunk, tokens
    return 0, tokens
