"""Likelihood of each part of a text, with other frequencies for its positions."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.training.config import IGNORED
from labsupport.training.decoder import Decoder

if TYPE_CHECKING:
    import pandas as pd


def with_frequencies(model: Decoder, frequencies: Tensor, attention_factor: float = 1.0) -> Decoder:
    """Return the decoder with other rotary frequencies; it shares all weights with the given one.

    Args:
        model: with rotary positions.
        frequencies: (head_dim / 2,), radians a token of each pair.
        attention_factor: multiplies cosines and sines, so that queries and keys grow by it, and
            scores by its square (YaRN's temperature t is 1 / attention_factor^2).

    Raises:
        ValueError: learned positions; frequencies of another shape.
    """
    pairs = model.config.head_dim // 2
    if model.config.positions != "rotary" or frequencies.shape != (pairs,):
        raise ValueError(
            f"a model with rotary positions needs {pairs} frequencies, one for each pair, but "
            f"{tuple(frequencies.shape)} were given for {model.config.positions} positions"
        )

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        # Apple's GPUs have no float64.
        turns = positions.cpu().unsqueeze(-1) * frequencies.detach().cpu().double()
        cos, sin = (
            (attention_factor * table).to(positions.device, torch.float32)
            for table in (turns.cos(), turns.sin())
        )
        return cos, sin

    other = copy.copy(model)
    other.angles = angles
    return other


@torch.no_grad()
def nll_by_position(
    model: Decoder, tokens: Tensor, labels: Tensor, *, bucket: int = 1024
) -> pd.DataFrame:
    """Measure the mean negative log-likelihood of a text's labels, by their position.

    Args:
        model: reads the whole text once.
        tokens, labels: (batch, seqlen) int64, as `Decoder` takes them; -100 does not count.
        bucket: positions that are averaged over; their logits exist together.

    Returns:
        One row a bucket: window, its last position, counted from 1; nll, in nats a label, NaN if
        there is none; labels, how many were scored.

    Raises:
        ValueError: bucket below 1; tokens and labels that do not fit to each other or the model.
    """
    if bucket < 1 or labels.shape != tokens.shape:
        raise ValueError(
            f"bucket {bucket}, tokens {tuple(tokens.shape)}, labels {tuple(labels.shape)}: at "
            "least 1, and of one shape"
        )
    import pandas as pd

    device = model.embedding.weight.device
    hidden, labels = model.hidden(tokens.to(device)), labels.to(device)
    rows = []
    for start in range(0, tokens.shape[1], bucket):
        part = labels[:, start : start + bucket]
        logits = model.head(hidden[:, start : start + bucket]).float()
        nll = F.cross_entropy(logits.flatten(0, 1), part.flatten(), ignore_index=IGNORED).item()
        rows.append((start + part.shape[1], nll, int((part != IGNORED).sum())))
    return pd.DataFrame(rows, columns=["window", "nll", "labels"])
